"""`agentcache eval memory`: answers from memories whose KV was computed once and is reused in other prompts (AgentKVShift, 4).

```
once        each memory unit alone                                     -> a chunk
a question  [ instruction ][ unit 7 ][ unit 2 ][ unit 31 ] [ question ]   units in random order, at other places than they were encoded
```

All arms of a question run in one go, in an order that changes with the question, each with an empty prefix cache: the time to the
first token is that of the caller, with the instruction and the question computed in every arm. Answers are decoded greedily, end with
their first line, and are scored and forgotten: results hold ids, hashes and scores.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from agentcache.bench_resume import empty_prefix_cache
from agentcache.cache import AgentCache
from agentcache.errors import AgentCacheError, ConfigError
from agentcache.evaluation.items import Row, item_key, rotated, run_items
from agentcache.evaluation.memory_arms import FULL, MemoryArm
from agentcache.evaluation.memory_data import MemoryQuestion, MemorySet, Unit
from agentcache.evaluation.memory_retrieval import recall, retrieve
from agentcache.evaluation.scores import score_reply
from agentcache.evaluation.stored import rows_stored
from agentcache.guard import first_tokens, top_kl
from agentcache.kernels import Tag
from agentcache.profiling.datasets import SAMPLE
from agentcache.profiling.model import ModelFingerprint
from agentcache.reply import Reply
from agentcache.work_file import WorkFile

__all__ = ["Asked", "MemoryRun", "Retrieval", "ask_all", "chunk_bytes", "open_cache", "select_units"]

_SCHEMA: Final = 1  # of an item's row and of how it is measured
_TOP: Final = 20  # log-probabilities of the first token that are compared

Retrieval = str
"""`words`: the units nearest to the question. `evidence`: those that hold its evidence, then the nearest."""

RETRIEVALS: Final = ("words", "evidence")


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """What is measured.

    Attributes:
        model: A folder, a hub id, or the name of a built-in model.
        out: The result's file.
        arms: Full recompute first.
        data: Files or folders of memories, see `memory_data`.
        items: Questions of each data set.
        seed: Of questions, of the units' order, and of intervals.
        units: That a question is asked with.
        characters: Of a unit.
        retrieval: How they are chosen.
        max_tokens: Longest answer; None: what the data set needs.
        max_model_len: Longest prompt and answer.
        shift_items: Questions of each data set whose mean shift is looked into, layer by layer.
        shift_shares: Shares r that it is looked into at.
        host_bytes: Memory for chunks.
        warm: Whether an engine runs every arm of its first question once before it measures any.
    """

    model: str
    out: Path
    arms: tuple[MemoryArm, ...]
    data: tuple[str, ...] = (SAMPLE,)
    items: int = 100
    seed: int = 0
    units: int = 6
    characters: int = 800
    retrieval: Retrieval = "words"
    max_tokens: int | None = None
    max_model_len: int = 3072
    shift_items: int = 12
    shift_shares: tuple[float, ...] = (0.1, 0.3)
    host_bytes: int = 6 << 30
    warm: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """One question with its units.

    Attributes:
        number: Among those of its data set.
        question: Asked.
        units: In the order of the prompt.
        recall: Share of the evidence that lies in them; None where no evidence is known.
    """

    number: int
    question: MemoryQuestion
    units: tuple[Unit, ...]
    recall: float | None

    def messages(self, instruction: str) -> list[dict[str, str]]:
        """Returns the chat that asks it."""
        memories = "\n".join(unit.text for unit in self.units)
        asked = f"Memories:\n\n{memories}\nQuestion: {self.question.text}\nAnswer in one line."
        return [{"role": "system", "content": instruction}, {"role": "user", "content": asked}]


def select_units(data: MemorySet, questions: Sequence[MemoryQuestion], settings: MemoryRun) -> list[Asked]:
    """Returns each question with the units that it is asked with, in a random order of its own.

    Raises:
        ConfigError: This way to retrieve is not known.
    """
    if settings.retrieval not in RETRIEVALS:
        raise ConfigError(f"retrieval {settings.retrieval!r} is unknown; take one of {', '.join(RETRIEVALS)}")
    out = []
    for number, question in enumerate(questions):
        units = data.memories[question.memory]
        near = retrieve(question.text, units, len(units))
        if settings.retrieval == "evidence":
            needed = {at for at, unit in enumerate(units) if unit.holds & question.evidence}
            near = [*filter(needed.__contains__, near), *(at for at in near if at not in needed)]
        chosen = near[: settings.units]
        random.Random(f"{settings.seed}/order/{question.id}").shuffle(chosen)
        picked = tuple(units[at] for at in chosen)
        out.append(Asked(number, question, picked, recall(question, picked)))
    return out


def chunk_bytes(model: ModelFingerprint, tokens: int) -> int:
    """Returns the bytes of so many rows of a model's KV in the widest type that it may be computed in."""
    return tokens * 2 * model.layers * model.kv_heads * model.head_dim * 4


def open_cache(folder: Path, model: ModelFingerprint, settings: MemoryRun) -> AgentCache:
    """Returns an engine that computes a whole prompt in one step, and has room for what the probe of the shift compares."""
    longest = settings.max_model_len
    return AgentCache(
        folder,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        kv_bytes=max(chunk_bytes(model, 4 * longest), 1 << 20),
        host_bytes=settings.host_bytes,
    )


def ask_all(
    data: MemorySet,
    asked: Sequence[Asked],
    settings: MemoryRun,
    model: ModelFingerprint,
    folder: Path,
    work: WorkFile,
    console: Console,
) -> tuple[list[Row], list[Row]]:
    """Returns what each question shows, and what the mean shift explains in some of them; starts an engine when it must."""
    with ExitStack() as stack:

        @functools.cache
        def bench() -> _Bench:
            return _Bench(stack.enter_context(open_cache(folder, model, settings)), data, settings)

        common = {
            "model": model.hash,
            "dtype": model.dtype,
            "data": data.hash,
            "instruction": data.instruction,
            "schema": _SCHEMA,
        }
        texts = {each.number: [unit.text for unit in each.units] for each in asked}
        tokens = settings.max_tokens or data.max_tokens

        def key(each: Asked, **more: Any) -> str:
            return item_key(**common, id=each.question.id, units=texts[each.number], **more)

        arms = [asdict(arm) for arm in settings.arms]
        items = [(key(each, part="memory", arms=arms, max_tokens=tokens), each) for each in asked]
        rows = run_items(
            items, lambda each: bench().ask(each), work=work, label=f"{data.name}, {model.name}", console=console
        )
        step = max(1, len(asked) // settings.shift_items) if settings.shift_items else len(asked) + 1
        wanted: list[tuple[dict[str, Any], Asked]] = [
            ({"share": share, "tag": tag}, each)
            for each in asked[::step][: settings.shift_items]
            for share in settings.shift_shares
            for tag in _tags(settings.arms)
        ]
        probes = [(key(each, part="shift", **how), (how, each)) for how, each in wanted]
        shifts = run_items(
            probes,
            lambda pair: bench().shift(pair[1], **pair[0]),
            work=work,
            label=f"{data.name}, {model.name}: mean shift by layer",
            console=console,
        )
    return rows, shifts


def _tags(arms: Sequence[MemoryArm]) -> list[str]:
    """Returns the precisions of the arms that one block may have by itself."""
    known = {str(tag) for tag in Tag}
    return [precision for precision in dict.fromkeys(arm.precision for arm in arms) if precision in known]


class _Bench:
    """One engine that answers questions of one data set.

    Args:
        cache: Its engine is idle.
        data: Of the questions.
        settings: Of the run.
    """

    def __init__(self, cache: AgentCache, data: MemorySet, settings: MemoryRun) -> None:
        self._cache = cache
        self._data = data
        self._settings = settings
        self._dtype: str = cache.stats()["engine"]["dtype"]
        self._warm = not settings.warm
        self._memory: str | None = None
        self._chunks: dict[tuple[str, str], str] = {}  # by text and precision: ids of the memory that is asked about
        self._ids: dict[str, list[int]] = {}

    def ask(self, each: Asked) -> Row:
        """Returns what every arm answered to one question, as scores."""
        started = time.perf_counter()
        messages = each.messages(self._data.instruction)
        prompt = self._cache.render(messages).token_ids.tolist()
        tokens = self._settings.max_tokens or self._data.max_tokens
        if len(prompt) + tokens > self._settings.max_model_len:
            raise ConfigError(
                f"question {each.question.id!r} has {len(prompt)} tokens, {self._settings.max_model_len - tokens} fit; "
                "take fewer --units or a longer --max-model-len"
            )
        sources = self._encode(each)
        reused = sum(len(self._tokens(unit.text)) for unit in each.units)
        if not self._warm:  # an engine's first forwards of a size take longer; no time is measured with them
            self._warm = True
            for arm in self._settings.arms:
                self._answer(arm, each, messages, sources, reused, 1)
        arms: dict[str, Any] = {}
        first: dict[str, dict[int, float]] = {}
        for arm in rotated(self._settings.arms, each.number):
            reply = self._answer(arm, each, messages, sources, reused, tokens)
            arms[arm.name] = _found(arm, reply, each.question)
            assert reply.logprobs is not None
            first[arm.name] = first_tokens(reply.logprobs[0], _TOP)
        for name, found in arms.items():
            found["kl"] = round(top_kl(first[FULL], first[name]), 6)
        return {
            "id": each.question.id,
            "dataset": self._data.name,
            "dtype": self._dtype,
            "category": each.question.category,
            "recall": each.recall,
            "units": len(each.units),
            "prompt_tokens": len(prompt),
            "chunk_tokens": reused,
            "arms": {arm.name: arms[arm.name] for arm in self._settings.arms},
            "seconds": round(time.perf_counter() - started, 3),
        }

    def shift(self, each: Asked, share: float, tag: str) -> Row:
        """Returns what the mean shift explains of the reused rows' error in one question's prompt."""
        prompt = self._cache.render(each.messages(self._data.instruction)).token_ids.tolist()
        chunks = [self._tokens(unit.text) for unit in each.units]
        found = self._cache.probe("shift", prompt, chunks, {"options": {"share": share}, "tag": tag})
        return {"id": each.question.id, "dataset": self._data.name, "share": share, "precision": tag, **found}

    def _tokens(self, text: str) -> list[int]:
        if text not in self._ids:
            self._ids[text] = list(map(int, self._cache.tokenizer.encode(text, add_special_tokens=False)))
        return self._ids[text]

    def _encode(self, each: Asked) -> dict[str, list[str]]:
        """Returns the ids of the units' chunks by precision, once all are kept."""
        if each.question.memory != self._memory:
            self._forget()
            self._memory = each.question.memory
        precisions = list(dict.fromkeys(arm.precision for arm in self._settings.arms))
        fresh = False
        for unit in each.units:
            for precision in precisions:
                if (unit.text, precision) not in self._chunks:
                    self._chunks[unit.text, precision] = self._chunk(unit.text, precision)
                    fresh = True
        if fresh and not self._cache.flush():
            raise AgentCacheError(f"the chunks of {each.question.id!r} were not kept: their saves did not end")
        return {p: [self._chunks[unit.text, p] for unit in each.units] for p in precisions}

    def _chunk(self, text: str, precision: str) -> str:
        """Returns the id of a chunk; one of another precision than the cache's own is a version of the same tokens."""
        ids = self._tokens(text)
        if precision == self._cache.config.connector.precision:
            return self._cache.encode_chunk(ids)
        episode = self._cache.episode(f"{precision}/{len(self._chunks)}")
        reply = episode.generate(ids, max_tokens=1, policy="prefix_cache", precision=precision)
        if reply.version is None or reply.recovery is None or reply.recovery.saved != "pending":
            raise AgentCacheError(f"a chunk of {len(ids)} tokens could not be kept as {precision}: {reply.recovery}")
        return reply.version

    def _forget(self) -> None:
        """Frees the chunks of the memory before."""
        for (_, precision), chunk in self._chunks.items():
            if precision == self._cache.config.connector.precision:
                self._cache.drop_chunk(chunk)
        for number, (_, precision) in enumerate(self._chunks):
            if precision != self._cache.config.connector.precision:
                self._cache.episode(f"{precision}/{number}").drop()
        self._chunks.clear()

    def _answer(
        self,
        arm: MemoryArm,
        each: Asked,
        messages: Sequence[dict[str, str]],
        sources: dict[str, list[str]],
        reused: int,
        tokens: int,
    ) -> Reply:
        """Returns one arm's reply, with nothing in vLLM's prefix cache before."""
        policy, options = arm.request(reused, len(each.units))
        empty_prefix_cache(self._cache)
        episode = self._cache.episode(f"{each.question.id}/{arm.name}")
        reply = episode.generate(
            messages,
            max_tokens=tokens,
            policy=policy,
            policy_options=options or None,
            sources=[] if arm.policy == FULL else sources[arm.precision],
            stop=["\n"],
            save=False,
            salt=arm.name,
            logprobs=_TOP,
        )
        episode.drop()
        return reply


def _found(arm: MemoryArm, reply: Reply, question: MemoryQuestion) -> dict[str, Any]:
    """Returns what one arm's answer is worth and took."""
    recovery = reply.recovery
    assert recovery is not None
    if recovery.lost_sources:
        raise AgentCacheError(
            f"{len(recovery.lost_sources)} chunks of {question.id!r} are gone: {recovery.reason}; give more --host-gib"
        )
    ratio = 1.0 if arm.policy == FULL else recovery.recompute_ratio
    return {
        **score_reply(reply.text.strip(), question.answers),
        "ttft_ms": round(reply.ttft_ms, 3),
        "recompute_ratio": ratio,
        "source_tokens": recovery.source_tokens,
        "aligned_tokens": recovery.suffix_tokens,
        "stored": rows_stored(recovery),
        "answer_tokens": len(reply.token_ids),
        "reason": recovery.reason,
    }
