"""What a profile is fitted to, measured on an idle engine: two revisions of one prompt, prefilled exactly and compared row by row.

```
old   [ P ][ M_old ][   S   ]   exact   ->  attention and 4-bit residual of each row, as a checkpoint has them
new   [ P ][  M_new  ][   S   ]   exact   ->  drift of S against old, exact next tokens
arms  [ P ][  M_new  ][ R, F ]   F restored from old, R recomputed: how far the next tokens are from the exact ones
store old, restored whole at some precision: how far the next tokens are from those after an exact restore
```

Everything is computed in pages that no request holds, as in `selfcheck`. The blocks that lie in P are shared by all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agentcache.engine.precision import Thresholds, block_risk, block_tags, normalised_attention, tagged_sources
from agentcache.engine.runtime import Runtime
from agentcache.engine.segments import Segment
from agentcache.engine.selfcheck import Scratch
from agentcache.episodes.diff import diff_tokens
from agentcache.kernels import BLOCK, Source, Tag
from agentcache.profiling.fit import EDGES, block_deviation
from agentcache.recovery import PolicyContext, get_policy, plan
from agentcache.recovery.rows import by_block, distances, suffix_rows
from agentcache.store.extents import LoadExtent
from agentcache.store.payloads import PayloadStore
from agentcache.store.scores import decode_scores, encode_scores
from agentcache.types import AlignedRun, PromptDiff, Run, clip_runs

__all__ = ["measure_pair"]

_FINE = 16  # tokens: the smallest block of recomputation that is tried
_DIGITS = 9  # decimals that are kept: far below what bfloat16 tells apart

Arm = tuple[str, Mapping[str, Any]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@torch.inference_mode()
def measure_pair(
    runtime: Runtime,
    model: Any,
    num_blocks: int,
    old_ids: Sequence[int],
    new_ids: Sequence[int],
    *,
    arms: Iterable[Arm] = (),
    precisions: Iterable[Mapping[str, Any]] = (),
    blocks: int = 0,
    reply_tokens: int = 0,
) -> dict[str, Any]:
    """Returns what one pair of revisions shows, as JSON has it; overwrites the last pages of the KV cache.

    Args:
        runtime: The rank's pages, rotation and segment forward.
        model: The engine's model, for logits.
        num_blocks: Pages of the KV cache.
        old_ids: The checkpoint's prompt.
        new_ids: The prompt after an edit that leaves something behind it.
        arms: Policies whose recovery is compared with the exact prefill, each with its options.
        precisions: Ways to store the old prompt: `{"tag": …}` for all rows, or the fields of `Thresholds`.
        blocks: Of the old prompt that are stored in 4 bits one by one, from the least to the most risky.
        reply_tokens: Next tokens after the first that are compared, along the exact greedy reply.

    Returns:
        `lengths`; `layers`: L_d; `last`: lengths and block deviations of the aligned run that ends the prompt; `curve`: drift by
        distance and layer; `stored`: each old block's attention and risk; `placed`: attention by block of the new prompt; `arms`,
        `precisions`, `blocks`: distances of the next tokens from the exact ones.

    Raises:
        ValueError: Nothing is aligned behind the edit, or the KV cache is too small.
        SelfCheckError: Attention cannot be measured on this engine.
    """
    diff = diff_tokens(old_ids, new_ids)
    if not diff.suffix:
        raise ValueError("nothing of the old prompt is aligned behind the edit: there is no drift to measure")
    pair = _Pair(runtime, model, num_blocks, diff, reply_tokens)
    precisions = list(precisions)
    new = pair.prefill(new_ids, reply_tokens)
    old = pair.prefill(old_ids, reply_tokens if precisions or blocks else 0, shared=new.table)
    value, key = pair.drift(old, new)
    attention, residual = pair.scores(old)
    out: dict[str, Any] = {
        "lengths": {"prefix": diff.prefix, "old": diff.old_len, "new": diff.new_len, "suffix": value.shape[1]},
        "layers": runtime.sampled,
        "last": _last_run(diff, value),
        "curve": _by_distance(diff, value, key),
        "stored": _by_block(attention, residual),
    }
    placed = _at_new_places(diff, decode_scores(encode_scores(attention)))
    out["placed"] = {"block": _FINE, "attention": _list(by_block(placed, _FINE, fill=0).max(axis=1))}
    context = PolicyContext(diff, np.asarray(new_ids, dtype=np.int32), attention=placed)
    out["arms"] = [pair.recover(old, new, context, arm) for arm in arms]
    out["precisions"] = [pair.store(old, how, attention, residual) for how in precisions]
    out["blocks"] = [pair.lower(old, at, attention, residual) for at in _spread(attention, residual, blocks)]
    return out


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that was prefilled exactly.

    Attributes:
        ids: The prompt and its greedy reply.
        tokens: Of the prompt.
        table: int64 block table.
        logprobs: float32 `[1 + reply, V]`, of the tokens after the prompt.
    """

    ids: list[int]
    tokens: int
    table: torch.Tensor
    logprobs: torch.Tensor


class _Pair:
    """The pages of one measurement, and what is done in them.

    Args:
        runtime: The rank's.
        model: For logits.
        num_blocks: Pages of the KV cache.
        diff: Of the pair.
        reply_tokens: Room for a reply.
    """

    def __init__(self, runtime: Runtime, model: Any, num_blocks: int, diff: PromptDiff, reply_tokens: int) -> None:
        self.runtime = runtime
        self.model = model
        self.diff = diff
        self.room = reply_tokens
        self.pages = Scratch(runtime, num_blocks)
        self.shared = diff.prefix // runtime.block_size  # blocks
        self.first = self.shared * runtime.block_size  # the first row that is not shared
        self._spare: torch.Tensor | None = None
        self._old = PayloadStore()
        self._reference: torch.Tensor | None = None

    def prefill(self, ids: Sequence[int], reply_tokens: int, shared: torch.Tensor | None = None) -> _Prompt:
        """Returns an exact prefill with its greedy reply; with a `shared` table, the rows of its shared blocks are there."""
        start = 0 if shared is None else self.first
        own = self.pages.table(len(ids) + self.room - start)
        table = own if shared is None else torch.cat((shared[: self.shared], own))
        known = list(ids)
        hidden = self._compute(known, table, [Run(start, len(known))])
        logprobs = [self._logprobs(hidden[-1:])]
        for _ in range(reply_tokens):
            known.append(int(logprobs[-1].argmax()))
            hidden = self._compute(known, table, [Run(len(known) - 1, len(known))])
            logprobs.append(self._logprobs(hidden[-1:]))
        return _Prompt(known, len(ids), table, torch.cat(logprobs))

    def _compute(self, ids: Sequence[int], table: torch.Tensor, runs: Iterable[Run]) -> torch.Tensor:
        """Computes runs of rows, ascending, and returns the hidden states of the last batch."""
        hidden = None
        for batch in self.runtime.segments.batches(Segment(ids, table, *run) for run in runs):
            hidden = self.runtime.segments.forward(batch)
        assert hidden is not None
        return hidden

    def _logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden).float().log_softmax(-1)

    def drift(self, old: _Prompt, new: _Prompt) -> tuple[Floats, Floats]:
        """Returns `1 - cos` of stale and exact values and phase-corrected keys (PatchKV, formulas 3 and 5), each `[L_d, |S|]`."""
        runtime = self.runtime
        values, keys = [], []
        for layer in runtime.sampled:
            for run in self.diff.suffix:
                stale_key, stale_value = self._rows(layer, old, run.old_start, run.length)
                key, value = self._rows(layer, new, run.new_start, run.length)
                values.append(_one_minus_cosine(stale_value, value))
                keys.append(_one_minus_cosine(runtime.rotation.rotate(stale_key, run.shift), key))
        shape = (len(runtime.sampled), -1)
        return self._agreed(torch.cat(values)).reshape(shape), self._agreed(torch.cat(keys)).reshape(shape)

    def _rows(self, layer: int, prompt: _Prompt, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.runtime.pages[layer].read(prompt.table.to(self.runtime.device), start, start + length)

    def _agreed(self, rows: torch.Tensor) -> Floats:
        """Returns what the tensor-parallel ranks measured in the mean: all of them plan with the same numbers."""
        mean = self.runtime.mean_over_ranks(rows.float().cpu(), len(rows))
        assert mean is not None
        agreed: Floats = mean.numpy()
        return agreed

    def scores(self, old: _Prompt) -> tuple[Floats, Floats]:
        """Returns I and e^V of each old row, as its checkpoint would have them (PatchKV, formulas 10 and 13), each `[T]`."""
        runtime, tokens = self.runtime, old.tokens
        queries = runtime.queries(old.ids[:tokens], old.table, tokens)
        mass = torch.zeros(tokens)
        for index in range(len(runtime.sampled)):
            mass += runtime.attention_mass(queries, index, old.table, tokens)
        return normalised_attention(self._agreed(mass)), self._agreed(runtime.value_residual(old.table, 0, tokens))

    def recover(self, old: _Prompt, new: _Prompt, context: PolicyContext, arm: Arm) -> dict[str, Any]:
        """Returns what a policy's recovery of the new prompt costs, and how far its next tokens are from the exact ones."""
        name, options = arm
        policy = get_policy(name, options)
        store = self._checkpoint(old)
        table = torch.cat((new.table[: self.shared], self._scratch()))
        started = time.perf_counter()
        made = plan(policy, context, parent_exact_end=old.tokens, limit=new.tokens - 1)
        extents = list(self._extents(made.restore))
        self.runtime.restore(store, extents, table)
        rows = [*clip_runs(made.recompute, self.first, made.load_end), Run(made.load_end, new.tokens)]
        logprobs = [self._logprobs(self._compute(new.ids, table, rows)[-1:])]
        first_ms = (time.perf_counter() - started) * 1e3
        logprobs += self._forced(new, table)
        suffix = sum(run.length for run in self.diff.suffix)
        return {
            "policy": name,
            "options": dict(options),
            "recompute": [list(run) for run in made.recompute],
            "repaired": made.repair_tokens,
            "reused": made.reused_tokens,
            "computed": sum(stop - start for start, stop in rows),
            "ratio": _rounded(1 - made.reused_tokens / suffix),
            "first_token_ms": round(first_ms, 3),
            **_distance(new.logprobs, torch.cat(logprobs)),
        }

    def _checkpoint(self, old: _Prompt) -> PayloadStore:
        """Returns the old rows that are not shared, as object 0."""
        if not len(self._old):
            self._old.put(0, self.runtime.gather(old.table, self.first, old.tokens))
        return self._old

    def _extents(self, runs: Iterable[AlignedRun]) -> Iterable[LoadExtent]:
        """Yields the rows of object 0 to copy, but those of shared blocks."""
        for run in runs:
            skip = max(0, self.first - run.new_start)
            if run.length > skip:
                offset = run.old_start + skip - self.first
                yield LoadExtent(0, offset, run.length - skip, run.new_start + skip, run.shift)

    def store(self, old: _Prompt, how: Mapping[str, Any], attention: Floats, residual: Floats) -> dict[str, Any]:
        """Returns the bytes of the old prompt at a precision, and how far its next tokens are then from the exact ones."""
        rows = old.tokens - 1  # the engine computes the last one
        if "tag" in how:
            sources = [Source(0, rows, Tag(how["tag"]))]
        else:
            tags = block_tags(attention[:rows], residual[:rows], Thresholds(**how))
            sources = list(tagged_sources(0, rows, tags))
        logprobs, size = self._stored(old, sources)
        share = size / (rows * self.runtime.row_bytes)
        return {**how, "bytes": _rounded(share), **_distance(self._restored(old), logprobs)}

    def lower(self, old: _Prompt, at: int, attention: Floats, residual: Floats) -> dict[str, Any]:
        """Returns what it does to store the block from row `at` on, and no other, in 4 bits."""
        stop, rows = at + BLOCK, old.tokens - 1
        sources = [Source(0, at, Tag.EXACT), Source(at, BLOCK, Tag.K8V4), Source(stop, rows - stop, Tag.EXACT)]
        logprobs, _ = self._stored(old, [source for source in sources if source.length])
        worst = residual[at:stop].max()
        risk = block_risk(attention[at:stop], residual[at:stop])[0]
        found = {"start": at, "risk": _rounded(risk), "residual": _rounded(worst)}
        return {**found, **_distance(self._restored(old), logprobs)}

    def _restored(self, old: _Prompt) -> torch.Tensor:
        """Returns the next tokens after an exact restore.

        Other precisions are compared with it, since a prefill rounds otherwise than a step of one token.
        """
        if self._reference is None:
            self._reference = self._stored(old, [Source(0, old.tokens - 1, Tag.EXACT)])[0]
        return self._reference

    def _stored(self, old: _Prompt, sources: Sequence[Source]) -> tuple[torch.Tensor, int]:
        """Returns the next tokens after all rows but the last were stored and restored, and the stored bytes."""
        rows = old.tokens - 1
        runs = self.runtime.gather_runs(old.table, sources)
        store = PayloadStore()
        store.put(0, runs)
        table = self._scratch()
        self.runtime.restore(store, [LoadExtent(0, 0, rows, 0, 0)], table)
        logprobs = [self._logprobs(self._compute(old.ids, table, [Run(rows, old.tokens)])[-1:])]
        logprobs += self._forced(old, table)
        return torch.cat(logprobs), sum(int(run.data.numel()) for run in runs)

    def _forced(self, prompt: _Prompt, table: torch.Tensor) -> list[torch.Tensor]:
        """Returns the log-probabilities along the exact reply, on the rows that stand in `table`."""
        if len(prompt.ids) == prompt.tokens:
            return []
        return [self._logprobs(self._compute(prompt.ids, table, [Run(prompt.tokens, len(prompt.ids))]))]

    def _scratch(self) -> torch.Tensor:
        """Returns the one table that every recovery and restore overwrites."""
        if self._spare is None:
            self._spare = self.pages.table(max(self.diff.old_len, self.diff.new_len) + self.room)
        return self._spare


def _one_minus_cosine(stale: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Returns `1 - cos` of two sets of rows `[T, H, D]` over heads and dims, float64 `[T]`."""
    a, b = stale.flatten(1).double(), exact.flatten(1).double()
    return (1 - torch.cosine_similarity(a, b, dim=1)).clamp_min(0)


def _distance(exact: torch.Tensor, got: torch.Tensor) -> dict[str, float]:
    """Returns how far next-token distributions `[1 + R, V]` are from the exact ones, given as log-probabilities.

    `kl` in nats and `gap`, the probability that the exact best token loses, are means over the positions; `top1` is the share of
    them with the same best token; `kl_first` is the first one's.
    """
    kl = (exact.exp() * (exact - got)).sum(-1).clamp_min(0)
    best = exact.argmax(-1, keepdim=True)
    gap = exact.gather(-1, best).exp() - got.gather(-1, best).exp()
    return {
        "kl": _rounded(float(kl.mean())),
        "kl_first": _rounded(float(kl[0])),
        "top1": _rounded(float((got.argmax(-1, keepdim=True) == best).float().mean())),
        "gap": _rounded(float(gap.mean())),
    }


def _last_run(diff: PromptDiff, value: Floats) -> dict[str, Any]:
    """Returns |P|, |M_new|, |S| and the block deviations of the aligned run that ends the prompt.

    Several edits have several windows, and only behind the last one is |S| what its window can reach (formulas 8).

    Args:
        diff: Of the pair.
        value: Drift of values in the layers L_d, `[L_d, |S|]`.
    """
    run = diff.suffix[-1]
    before = diff.suffix[-2].new_stop if len(diff.suffix) > 1 else diff.prefix
    return {
        "prefix": before,
        "middle": run.new_start - before,
        "suffix": run.length,
        "deviation": _list(block_deviation(value[:, -run.length :])),
    }


def _by_distance(diff: PromptDiff, value: Floats, key: Floats) -> dict[str, Any]:
    """Returns the mean drift by distance, in bins from `EDGES` on that have a row, and by layer."""
    which = np.digitize(distances(diff)[suffix_rows(diff)], EDGES) - 1
    bins = np.unique(which).tolist()
    return {
        "from": [EDGES[b] for b in bins],
        "tokens": [int((which == b).sum()) for b in bins],
        "value": [_list(value[:, which == b].mean(axis=1)) for b in bins],
        "key": [_list(key[:, which == b].mean(axis=1)) for b in bins],
    }


def _by_block(attention: Floats, residual: Floats) -> dict[str, list[float]]:
    """Returns the largest attention, the largest residual, and the largest and mean risk of each block of the old prompt."""
    risk = attention * residual
    starts = np.arange(0, len(risk), BLOCK)
    counts = np.minimum(BLOCK, len(risk) - starts)
    parts = {
        "attention": np.maximum.reduceat(attention, starts),
        "residual": np.maximum.reduceat(residual, starts),
        "risk_max": np.maximum.reduceat(risk, starts),
        "risk_mean": np.add.reduceat(risk, starts) / counts,
    }
    return {name: _list(blocks) for name, blocks in parts.items()}


def _spread(attention: Floats, residual: Floats, count: int) -> list[int]:
    """Returns the first rows of `count` whole blocks, evenly spread over their ranks by risk."""
    risk = block_risk(attention, residual)[: (len(attention) - 1) // BLOCK]
    ranks = np.linspace(0, len(risk) - 1, min(count, len(risk))).round().astype(int)
    return [int(at) * BLOCK for at in np.argsort(risk, kind="stable")[ranks]]


def _at_new_places(diff: PromptDiff, scores: Floats) -> Floats:
    """Returns scores of old rows at their places in the new prompt, 0 elsewhere."""
    out = np.zeros(diff.new_len, dtype=np.float32)
    for run in diff.aligned:
        out[run.new_start : run.new_stop] = scores[run.old_start : run.old_stop]
    return out


def _list(values: Iterable[Any]) -> list[float]:
    return [_rounded(value) for value in values]


def _rounded(value: Any) -> float:
    return round(float(value), _DIGITS)
