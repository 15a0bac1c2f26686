"""The episodes part of `agentcache bench store`: many paused episodes in one store, real ones among them.

An engine in float32 fills the store: for each of some real prompts one episode at the bulk precision with all its edits, and one
bit by bit with one edit. Then further episodes of the same shape are stored, made of the payloads that the engine left: real KV
rows, under keys of their own. A new process opens the store; a new engine resumes every real episode from it.

- Bit by bit, under the exact policy: the new turn's reply must be that of a full prefill, token by token, and the rows before
  the edit must have come from the store.
- At the bulk precision, under `direct_reuse`: every row but the last must have come from the store, none lost; how many replies
  begin with the full prefill's token is reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from agentcache.bench_resume import empty_prefix_cache
from agentcache.bench_store_child import run_child
from agentcache.bench_store_timing import KV_BYTES, wait_until_stored
from agentcache.cache import AgentCache
from agentcache.config import Precision
from agentcache.errors import AgentCacheError
from agentcache.kernels.formats import PackedFormat, Tag
from agentcache.store.tiers import Manifest
from agentcache.store.tiers.bench import EpisodeShape, disk_bytes, fill_store, pooled, read_back, stored_payloads
from agentcache.store.tiers.disk import DiskStore

__all__ = ["EpisodePlan", "RealEpisode", "measure_episodes", "token_bytes", "write_episodes"]

BULK_TAG: Final[Precision] = "k8v4"
_REPLY_TOKENS = 8
_TURN_TOKENS = 16

Stage = Callable[[str, int], Callable[[int], object]]
"""Begins a stage of the work, of so many items; returns what is told how many are done."""


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """How many episodes of what.

    Attributes:
        model: See `AgentCache`.
        folder: Of the store; must not exist.
        episodes: All paused episodes.
        real: Prompts that the engine serves, each as two of the episodes.
        shape: Of the episodes at the bulk precision.
        seed: Of the edits.
    """

    model: str
    folder: Path
    episodes: int = 1000
    real: int = 50
    shape: EpisodeShape = field(default_factory=EpisodeShape)
    seed: int = 0

    @property
    def made_up(self) -> int:
        """Episodes that are made of the real ones' payloads."""
        return self.episodes - 2 * self.real

    def distinct_bytes(self, bulk_token_bytes: float, exact_token_bytes: float) -> float:
        """Returns the bytes of the episodes' distinct tokens in the store."""
        exact = self.real * (self.shape.tokens + self.shape.changed) * exact_token_bytes
        return (self.episodes - self.real) * self.shape.distinct_tokens * bulk_token_bytes + exact


@dataclass(frozen=True, slots=True)
class RealEpisode:
    """A prompt, its edits one after the other, and a new turn.

    Attributes:
        prompts: All versions, the first one first; each differs from the one before in one span.
        turn: Tokens that are appended when it resumes.
    """

    prompts: list[list[int]]
    turn: list[int]


def token_bytes(tag: str, layers: int, kv_heads: int, head_dim: int, element_size: int) -> float:
    """Returns the bytes of a token's rows of all layers in long runs of a precision: nothing but codes and scales."""
    made = PackedFormat(Tag(tag), layers, kv_heads, head_dim, element_size)
    return float(made.run_bytes(made.group_tokens) / made.group_tokens)


def write_episodes(text: Sequence[int], count: int, shape: EpisodeShape, seed: int) -> list[RealEpisode]:
    """Returns `count` episodes of windows of a text; what an edit puts in is text from elsewhere.

    Raises:
        AgentCacheError: The text is too short for as many different windows.
    """
    span = shape.tokens + _TURN_TOKENS
    step = (len(text) - span) // max(count, 1)
    if step < 1:
        raise AgentCacheError(f"the text of {len(text)} tokens has no {count} windows of {span}")
    rng = np.random.default_rng(seed)
    out = []
    for at in range(0, count * step, step):
        window = list(text[at : at + span])
        prompt, turn = window[: shape.tokens], window[shape.tokens :]
        versions = [prompt]
        for _ in range(shape.edits):
            prompt = _edited(prompt, text, shape.changed, rng)
            versions.append(prompt)
        out.append(RealEpisode(versions, turn))
    return out


def _edited(prompt: list[int], text: Sequence[int], changed: int, rng: np.random.Generator) -> list[int]:
    """Returns a prompt with one span replaced that differs at both its ends, so that it is not shorter than it seems."""
    while True:
        start = int(rng.integers(0, len(prompt) - changed + 1))
        source = int(rng.integers(0, len(text) - changed + 1))
        old, new = prompt[start : start + changed], list(text[source : source + changed])
        if old[0] != new[0] and old[-1] != new[-1]:
            return prompt[:start] + new + prompt[start + changed :]


def measure_episodes(plan: EpisodePlan, encode: Callable[[AgentCache], list[int]], stage: Stage) -> dict[str, Any]:
    """Returns what the episodes take on disk and in memory, how fast the store opens, and how the real ones resume.

    Args:
        plan: How many of what.
        encode: Returns the text's ids.
        stage: See `Stage`.

    Raises:
        AgentCacheError: An episode was not stored, or something that was read is not what was stored.
    """
    settings: dict[str, Any] = {
        "dtype": "float32",
        "store": f"disk://{plan.folder}?bytes=1TiB",
        "max_model_len": plan.shape.tokens + _TURN_TOKENS + _REPLY_TOKENS + 64,
        "kv_bytes": KV_BYTES,
    }
    with AgentCache(plan.model, **settings) as cache:
        episodes = write_episodes(encode(cache), plan.real, plan.shape, plan.seed)
        engine, namespace = cache.stats()["engine"], cache.config.namespace
        versions = _run_real(cache, episodes, stage("real episodes", plan.real))
    layout = (engine["layers"], engine["kv_heads"], engine["head_dim"], 4)
    bulk, exact = token_bytes(BULK_TAG, *layout), token_bytes("exact", *layout)
    memory = _in_memory(plan, namespace, versions, stage("episodes in memory", plan.episodes))
    filled = _fill_disk(plan, namespace, versions, stage("episodes on disk", plan.made_up))
    with DiskStore(plan.folder, 1 << 62) as store:
        stats = store.stats()[0]
    opened = run_child("open", {"folder": str(plan.folder), "namespace": namespace, **filled.pop("open")})
    with AgentCache(plan.model, **settings) as cache:
        resumed = _resume_real(cache, episodes, stage("resumes", plan.real))
    distinct = {
        "disk": plan.distinct_bytes(bulk, exact),
        "memory": plan.episodes * plan.shape.distinct_tokens * bulk,
    }
    taken = {"disk": disk_bytes(plan.folder), "memory": memory["bytes"]}
    return {
        "paused_episodes": plan.episodes,
        "real_episodes": 2 * plan.real,
        "versions": stats["versions"],
        "shape": asdict(plan.shape),
        "dtype": "float32",
        "precision": {"bulk": BULK_TAG, "real, one edit": "exact"},
        "token_bytes": {BULK_TAG: bulk, "exact": exact},
        "bytes": taken,
        "distinct_bytes": distinct,
        "bytes_ratio": {tier: round(taken[tier] / distinct[tier], 4) for tier in taken},
        "accounted_bytes": {"disk": stats["used_bytes"], "memory": memory["accounted_bytes"]},
        "save_ms": {"disk": filled["save_ms"], "memory": memory["save_ms"]},
        "fetch_gb_s": filled["fetch_gb_s"],
        "open_s": opened["open_s"],
        "open_process_s": opened["process_s"],
        "first_read_ms": opened["first_read_ms"],
        **resumed,
    }


def _run_real(cache: AgentCache, episodes: Sequence[RealEpisode], done: Callable[[int], object]) -> list[str]:
    """Serves the real episodes; returns their versions at the bulk precision."""
    versions: list[str] = []
    for number, real in enumerate(episodes):
        bulk, exact = cache.episode(f"bulk {number}"), cache.episode(f"exact {number}")
        for at, prompt in enumerate(real.prompts):
            reply = bulk.generate(prompt, max_tokens=1, policy="direct_reuse", precision=BULK_TAG)
            assert reply.version is not None
            versions.append(reply.version)
            if at < 2:
                exact.generate(prompt, max_tokens=1, policy="direct_reuse", precision="exact")
            wait_until_stored(cache)  # an agent's tool runs between two versions
        done(number + 1)
    return versions


def _in_memory(
    plan: EpisodePlan, namespace: str, versions: Sequence[str], done: Callable[[int], object]
) -> dict[str, Any]:
    arguments = {
        "folder": str(plan.folder),
        "namespace": namespace,
        "versions": versions,
        "shape": asdict(plan.shape),
        "tag": BULK_TAG,
        "episodes": plan.episodes,
    }
    return run_child("memory", arguments, done)


def _fill_disk(
    plan: EpisodePlan, namespace: str, versions: Sequence[str], done: Callable[[int], object]
) -> dict[str, Any]:
    """Stores the episodes that are made of the real ones' payloads, for the engine that those are from."""
    with DiskStore(plan.folder, 1 << 62) as store:
        found = store.find(namespace, versions[0])
        assert isinstance(found, Manifest)
        payloads = pooled(stored_payloads(store, namespace, versions, plan.shape, BULK_TAG))
        made = fill_store(
            store, payloads, plan.shape, plan.made_up, fingerprint=found.fingerprint, tag=BULK_TAG, progress=done
        )
        read = read_back(store, made.sample)
    return {
        "save_ms": statistics.median(made.save_ms) if made.save_ms else 0.0,
        "fetch_gb_s": read["fetch_gb_s"],
        "open": {"fingerprint": found.fingerprint, "version": versions[-1]},
    }


def _resume_real(cache: AgentCache, episodes: Sequence[RealEpisode], done: Callable[[int], object]) -> dict[str, Any]:
    """Resumes every real episode in an engine that has never seen it, with a new turn, beside a full prefill of the same."""
    correct = whole = same_first = 0
    restored: list[int] = []
    wrong: list[str] = []
    for number, real in enumerate(episodes):
        exact_prompt, bulk_prompt = real.prompts[:2][-1] + real.turn, real.prompts[-1] + real.turn
        want = _prefill(cache, exact_prompt)
        empty_prefix_cache(cache)
        reply = cache.reopen(f"exact {number}").generate(
            exact_prompt, max_tokens=_REPLY_TOKENS, policy="prefix_cache", save=False, extra={"ignore_eos": True}
        )
        recovery = reply.recovery
        if recovery is not None and recovery.restored_tokens > 0 and recovery.exact and reply.token_ids == want:
            correct += 1
            restored.append(recovery.restored_tokens)
        else:
            wrong.append(f"exact {number}: {recovery}")
        want = _prefill(cache, bulk_prompt)
        empty_prefix_cache(cache)
        reply = cache.reopen(f"bulk {number}").generate(
            bulk_prompt, max_tokens=_REPLY_TOKENS, policy="direct_reuse", save=False, extra={"ignore_eos": True}
        )
        recovery = reply.recovery
        if recovery is not None and not recovery.lost_tokens and recovery.restored_tokens >= len(real.prompts[-1]) - 1:
            whole += 1
            same_first += reply.token_ids[0] == want[0]
        else:
            wrong.append(f"bulk {number}: {recovery}")
        done(number + 1)
    return {
        "resumed_episodes": len(episodes),
        "resumed_correct": correct,
        "resumed_reply_tokens": _REPLY_TOKENS,
        "restored_tokens": {"min": min(restored, default=0), "median": statistics.median(restored or [0])},
        "resumed_bulk": len(episodes),
        "resumed_bulk_whole": whole,
        "resumed_bulk_same_first_token": same_first,
        "not_correct": wrong,
    }


def _prefill(cache: AgentCache, ids: list[int]) -> list[int]:
    """Returns the reply that a full prefill gives."""
    empty_prefix_cache(cache)
    return cache.generate(ids, max_tokens=_REPLY_TOKENS, extra={"ignore_eos": True}).token_ids
