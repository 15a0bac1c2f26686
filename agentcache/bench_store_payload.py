"""The payload part of `agentcache bench store`: what a checkpoint of real text takes, and what its precision costs.

A long prompt is saved by the engine and read back from the disk store, byte by byte. For the quality, each of a number of real
prompts is saved once for each precision while vLLM still holds its rows; then vLLM's prefix cache is emptied, the whole prompt
but its last token is restored from the checkpoint, and the next token's distribution is compared with that of the prefill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agentcache.bench_resume import empty_prefix_cache
from agentcache.bench_store_timing import wait_until_stored
from agentcache.cache import AgentCache
from agentcache.config import Precision
from agentcache.errors import AgentCacheError
from agentcache.quality import kl_divergence, top1_agrees
from agentcache.samples import HotpotItem
from agentcache.store.tiers import KVStore, Lost, Manifest

__all__ = ["Checkpoint", "bootstrap_interval", "measure_kl", "prompts", "read_checkpoint", "save_checkpoint"]

KL_ARMS: tuple[Precision, ...] = ("exact", "mixed", "k8v4", "k8v8")
_RESAMPLES = 10_000


class Checkpoint(NamedTuple):
    """What one stored version takes, in bytes, and the precision of its rows in their order.

    `row_bytes` are the packed rows, `residual_bytes` and `attention_bytes` the scores beside them (one byte a token each, where
    they were measured), `head_bytes` what frames the payloads, and `manifest_bytes` the whole manifest but the attention.
    """

    tokens: int
    row_bytes: int
    residual_bytes: int
    attention_bytes: int
    head_bytes: int
    manifest_bytes: int
    runs: list[tuple[str, int]]

    @property
    def bytes(self) -> int:
        """All of it."""
        parts = (self.row_bytes, self.residual_bytes, self.attention_bytes, self.head_bytes, self.manifest_bytes)
        return sum(parts)

    def tag_mix(self) -> dict[str, float]:
        """Returns each precision's share of the tokens."""
        tokens: Counter[str] = Counter()
        for tag, count in self.runs:
            tokens[tag] += count
        return {tag: round(count / self.tokens, 4) for tag, count in sorted(tokens.items())}


def save_checkpoint(
    cache: AgentCache, store: KVStore, name: str, ids: Sequence[int], precision: Precision | None
) -> Checkpoint:
    """Returns what the checkpoint of a prompt takes in the store below the cache.

    Args:
        cache: Its `store` is the same as `store`.
        store: Another handle of it.
        name: Of a new episode.
        ids: The prompt.
        precision: None takes the cache's.

    Raises:
        AgentCacheError: It was not stored.
    """
    reply = cache.episode(name).generate(ids, max_tokens=1, precision=precision)
    wait_until_stored(cache)
    assert reply.version is not None
    return read_checkpoint(store, cache.config.namespace, reply.version)


def read_checkpoint(store: KVStore, namespace: str, version: str) -> Checkpoint:
    """Returns what a stored version takes.

    Raises:
        AgentCacheError: It, or a payload of it, is not there.
    """
    from agentcache.store.payloads import decode_payload

    manifest = store.find(namespace, version)
    if not isinstance(manifest, Manifest):
        raise AgentCacheError(f"the checkpoint {version!r} was not stored: {manifest}")
    blobs = store.fetch([entry.key for entry in manifest.objects], 0)
    rows = residuals = size = 0
    runs: list[tuple[str, int]] = []
    first = {extent.key: extent.position for extent in reversed(manifest.extents)}
    for key in sorted(blobs, key=first.__getitem__):
        blob = blobs[key]
        if isinstance(blob, Lost):
            raise AgentCacheError(f"object {key} of checkpoint {version!r} is lost: {blob.reason}")
        payload = decode_payload(blob, verify=False)
        size += len(blob)
        rows += sum(int(run.data.numel()) for run in payload.runs)
        residuals += 0 if payload.residual is None else len(payload.residual)
        for run in payload.runs:
            if runs and runs[-1][0] == str(run.tag):
                runs[-1] = (runs[-1][0], runs[-1][1] + run.tokens)
            else:
                runs.append((str(run.tag), run.tokens))
    attention = len(manifest.attention_codes or b"")
    return Checkpoint(
        tokens=sum(entry.tokens for entry in manifest.objects),
        row_bytes=rows,
        residual_bytes=residuals,
        attention_bytes=attention,
        head_bytes=size - rows - residuals,
        manifest_bytes=len(manifest.encode()) - attention,
        runs=runs,
    )


def prompts(items: Sequence[HotpotItem], count: int) -> Iterator[list[dict[str, str]]]:
    """Yields `count` different chats: a question behind its documents, which begin with another one in each round."""
    for number in range(count):
        turn, at = divmod(number, len(items))
        item = items[at]
        order = (*item.paragraphs[turn:], *item.paragraphs[:turn])
        documents = "\n\n".join(f"{paragraph.title}\n{paragraph.text}" for paragraph in order)
        yield [{"role": "user", "content": f"{documents}\n\nQuestion: {item.question}"}]


def measure_kl(
    cache: AgentCache, chats: Sequence[Sequence[int]], tick: Callable[[], object] = lambda: None
) -> dict[str, dict[str, Any]]:
    """Returns each precision's divergence of the next token from the prefill's: `mean`, `interval`, `max`, `top1`, `tokens`.

    Args:
        cache: Any.
        chats: Prompts.
        tick: Is called after each prompt.

    Raises:
        AgentCacheError: A prompt was not restored as a whole.
    """
    kl: dict[str, list[float]] = {arm: [] for arm in KL_ARMS}
    agree: Counter[str] = Counter()
    for number, ids in enumerate(chats):
        empty_prefix_cache(cache)
        episodes = {arm: cache.episode(f"kl {number} {arm}") for arm in KL_ARMS}
        replies = {arm: e.generate(ids, max_tokens=1, logprobs=-1, precision=arm) for arm, e in episodes.items()}
        exact = _distribution(replies[KL_ARMS[0]].logprobs)  # the first one computed every row
        for arm, episode in episodes.items():
            empty_prefix_cache(cache)
            reply = episode.generate(
                ids, max_tokens=1, logprobs=-1, policy="direct_reuse", parent=replies[arm].version, save=False
            )
            recovery = reply.recovery
            if recovery is None or recovery.restored_tokens != len(ids) - 1:
                raise AgentCacheError(f"a prompt of {len(ids)} tokens was not restored from {arm}: {recovery}")
            got = _distribution(reply.logprobs)
            kl[arm].append(kl_divergence(exact, got))
            agree[arm] += top1_agrees(exact, got)
        tick()
    return {
        arm: {
            "mean": float(np.mean(values)),
            "interval": bootstrap_interval(values),
            "max": max(values),
            "top1": agree[arm] / len(values),
            "prompts": len(values),
        }
        for arm, values in kl.items()
    }


def _distribution(logprobs: list[Mapping[int, float]] | None) -> Mapping[int, float]:
    assert logprobs is not None
    return logprobs[0]


def bootstrap_interval(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> list[float]:
    """Returns the percentile bootstrap interval of a mean, `[low, high]`, of 10,000 resamples."""
    sample = np.asarray(values, dtype=np.float64)
    at = np.random.default_rng(seed).integers(0, len(sample), (_RESAMPLES, len(sample)))
    edges = np.quantile(sample[at].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return [float(edge) for edge in edges]
