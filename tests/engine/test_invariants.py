"""The promise, at random: whoever did not ask for approximate KV gets exactly what vLLM alone would give.

Episodes are edited, appended to, forked and re-asked; approximate, exact and plain requests meet in one engine step; the KV space
is so small that blocks are evicted and requests preempted, the checkpoint store so small that versions are evicted.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

pytest.importorskip("vllm")

from agentcache.engine.wire import ResumeParams
from tests.engine.harness import Answer, Engine, Reference, text

pytestmark = pytest.mark.engine

ONLINE = ("attended", "cacheblend", "frontier", "mean_shift")

LONGEST = 440
TIGHT = {
    "blocks": 44,
    "max_model_len": 512,
    "max_num_batched_tokens": 192,
    "max_num_seqs": 8,
    "extra": {"host_bytes": 6 << 20, "save_tokens_per_step": 128},
}


@dataclass
class Episode:
    """A document and the versions that were made of it."""

    name: str
    namespace: str
    texts: list[list[int]]
    versions: list[tuple[str, Answer]] = field(default_factory=list)


class Interleavings:
    """Random traffic on one engine; remembers every request."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.answers: list[Answer] = []
        self.made = 0
        self.restarts = 0
        system = text(70, seed=1000)
        self.episodes = [Episode(f"e{i}", "ab"[i % 2], [system + text(170 + 30 * i, seed=1001 + i)]) for i in range(5)]

    def one(self) -> None:
        """One interleaving: up to six requests that come, run and sometimes go while others are under way."""
        rng, engine = self.rng, self.engine
        batch = []
        burst = rng.choice(self.episodes) if rng.random() < 0.3 else None
        if burst:  # all of one episode, all at once, and vLLM's cache is cold
            engine.drain()
            engine.forget_local()
            batch.append(self._remember(engine.add(burst.texts[0][: rng.randint(64, 130)])))
        for _ in range(rng.randint(1, 6)):
            batch.append(self._add(burst or rng.choice(self.episodes)))
            if not burst and rng.random() < 0.3:
                for _ in range(rng.randint(1, 4)):
                    engine.step()
            if rng.random() < 0.05:
                self._abort(rng.choice(batch))
        if rng.random() < 0.1:
            engine.preempt()
        engine.run(*batch)
        if rng.random() < 0.5:  # otherwise the next interleaving meets open saves
            engine.drain()
            engine.check()
            if rng.random() < 0.1:
                engine.forget_local()
            if rng.random() < 0.03:
                engine.llm.reset_prefix_cache(reset_connector=True)

    def _abort(self, answer: Answer) -> None:
        if not answer.done:
            self.engine.abort(answer)

    def _add(self, episode: Episode) -> Answer:
        rng = self.rng
        kind = rng.choices(["lossy", "exact", "plain"], [5, 3, 4])[0]
        length = rng.choice([6, 7, 8, 8, 8, 8, 24])
        if kind == "plain" or not episode.versions:
            ids = rng.choice(self._known(episode)) if rng.random() < 0.8 else self._revised(episode.texts[0])
            params = None if kind == "plain" else self._params(episode, None, "exact")
            if params is None and rng.random() < 0.3:
                ids = ids[: rng.randint(30, 120)]
        else:
            stored = [v for v in episode.versions if self.engine.version(v[0], episode.namespace) is not None]
            name, parent = rng.choice(stored if stored and rng.random() < 0.8 else episode.versions[-4:])
            how = rng.random()
            if how < 0.15:
                ids = parent.prompt
            elif how < 0.3:
                ids = rng.choice(self._known(episode))
            elif how < 0.5:
                ids = parent.ids + self._words(rng.randint(1, 40))
            else:
                ids = self._revised(parent.ids)
            params = self._params(episode, name, kind)
        ids = ids[:LONGEST]
        answer = self._remember(self.engine.add(ids, params, length))
        if params is not None:
            episode.versions.append((params.version, answer))
        return answer

    def _remember(self, answer: Answer) -> Answer:
        self.answers.append(answer)
        return answer

    def _known(self, episode: Episode) -> list[list[int]]:
        """Returns texts that others have used: prompts, and prompts with their replies and a little more."""
        texts = [*episode.texts]
        for _, answer in episode.versions[-6:]:
            texts += [answer.prompt, answer.ids, [*answer.ids, 77, 78]]
        return texts

    def _words(self, count: int) -> list[int]:
        return [self.rng.randrange(100, 49_000) for _ in range(count)]

    def _revised(self, ids: list[int]) -> list[int]:
        """Returns ids after one to three replacements, insertions or deletions, and sometimes a new turn."""
        ids = list(ids)
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            at = self.rng.randrange(len(ids) - 20)
            remove, insert = self.rng.choice([(10, 10), (0, 25), (25, 0), (12, 31), (60, 20), (3, 90)])
            ids[at : at + remove] = self._words(insert)
        if self.rng.random() < 0.5:
            ids += self._words(self.rng.randint(1, 30))
        return ids if len(ids) > 60 else ids + self._words(60)

    def _params(self, episode: Episode, parent: str | None, kind: str) -> ResumeParams:
        self.made += 1
        policy, options = "prefix_cache", {}
        if kind == "lossy":
            policy = self.rng.choice(["edit_local", "edit_local", "direct_reuse", *ONLINE])
            if policy == "edit_local":
                options = {"k": self.rng.choice([0, 8, 13, 32, 48, 100])}
        return ResumeParams(
            version=f"v{self.made}",
            parent=parent,
            namespace=episode.namespace,
            episode=episode.name,
            policy=policy,
            options=options,
            save=self.rng.random() < 0.9,
        )

    # -- verdict -------------------------------------------------------------------------------------------------------

    def wrong(self, reference: Reference) -> tuple[list[Answer], Counter[str]]:
        """Returns the requests that had to be exact and are not, and what happened in numbers."""
        counts: Counter[str] = Counter()
        bad = []
        answers = [answer for answer in self.answers if answer.tokens]
        answers.sort(key=lambda answer: len(answer.tokens) <= 8)
        longer = sum(len(answer.tokens) > 8 for answer in answers)
        prompts = [answer.prompt for answer in answers]
        wanted = reference.answer(prompts[:longer], 24) + reference.answer(prompts[longer:], 8)
        for answer, (want, sure) in zip(answers, wanted, strict=True):
            same = answer.tokens[:sure] == want[: len(answer.tokens)][:sure]
            report = answer.recovery
            counts["requests"] += 1
            counts["ties"] += sure < len(answer.tokens)
            if report is not None:
                counts["local"] += report.local_tokens > 0
                counts["restored"] += report.restored_tokens > 0
                counts["background"] += report.asynchronous
                counts["reused"] += report.reused_tokens > 0
                counts["reused, differs"] += report.reused_tokens > 0 and not same
                for reason in ("unknown or was evicted", "still generating", "not fit", "lost"):
                    counts[reason] += reason in (report.reason or "")
            exact = (
                answer.params is None or answer.params.policy == "prefix_cache" or (report is not None and report.exact)
            )
            if exact:
                counts["plain" if answer.params is None else "exact"] += 1
                if not same:
                    bad.append(answer)
        return bad, counts


@pytest.mark.parametrize(
    ("precision", "count"),
    [
        ("exact", 200),
        ("k8v4", 60),
        pytest.param("exact", 3000, marks=pytest.mark.slow),
        pytest.param("k8v8", 1000, marks=pytest.mark.slow),
        pytest.param("k8v4", 1001, marks=pytest.mark.slow),
    ],
)
def test_random_interleavings_leave_plain_and_exact_requests_exact(start_engine, tiny, reference, precision, count):
    engine = start_engine(tiny("llama"), **TIGHT | {"extra": TIGHT["extra"] | {"precision": precision}})
    traffic = Interleavings(engine, seed=count)
    for turn in range(count):
        traffic.one()
        if turn % 20 == 19:
            engine.drain()
            engine.check()
            for ids in {tuple(a.prompt) for a in traffic.answers[-12:]}:
                blocks, error = engine.audit(ids)
                assert error < 1e-3, f"a public block of {blocks} is not that of a full prefill: {ids}"
            engine.forget_local()
    engine.drain()
    engine.check()
    for version in list(engine.half.index._versions.values()):
        assert engine.stored_error(version, engine.half.index.trusted_end(version)) < 1e-3, version
    bad, counts = traffic.wrong(reference)
    counts["preemptions"] = engine.preemptions
    counts["evictions"] = engine.half.index.stats()["evictions"]
    assert not bad, (bad[0], counts)
    assert counts["ties"] <= counts["requests"] / 100
    for kind in (
        "plain",
        "exact",
        "local",
        "restored",
        "background",
        "preemptions",
        "evictions",
        "unknown or was evicted",
    ):
        assert counts[kind] >= count / 40, (kind, counts)
    assert counts["reused, differs"] >= counts["reused"] / 4, counts
    assert counts["reused"] >= count / 4, counts


def test_without_salted_hashes_the_same_traffic_does_harm(start_engine, tiny, reference, monkeypatch):
    """The test above can fail."""
    engine = start_engine(tiny("llama"), **TIGHT)
    monkeypatch.setattr("agentcache.engine.resumes.salt_request", lambda *_: None)
    traffic = Interleavings(engine, seed=200)
    for _ in range(10):
        for _ in range(6):
            traffic.one()
        if traffic.wrong(reference)[0]:
            return
    pytest.fail("60 interleavings harmed nobody")
