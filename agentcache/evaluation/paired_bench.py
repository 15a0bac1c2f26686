"""Measures one item of the paired-edit benchmark: the stale and the exact answer once, then every arm from the same state.

```
parent   old context, saved; it ends before the question, which is a new turn and never cached
oracle   full prefill of the new prompt       stale   full prefill of the old one: old rows under a fresh question
arm      vLLM holds the rows before the edit, the checkpoint the parent: a resume under one policy
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from agentcache.bench_resume import empty_prefix_cache
from agentcache.cache import AgentCache, Episode
from agentcache.errors import AgentCacheError
from agentcache.evaluation.paired_arms import BASELINE, Arm, Situation, delimiters, options_of
from agentcache.profiling.derived import DerivedItem, is_kept, margin
from agentcache.reply import Reply

__all__ = ["PairedBench", "coarse_kl"]

Row = dict[str, Any]

_MOST_TOKENS: Final = 128
"""Log-probabilities that vLLM gives of chosen tokens (`SamplingParams.logprob_token_ids`)."""


def coarse_kl(exact: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Returns KL(exact ‖ other) in nats with all tokens but the given ones taken as one: a lower bound of the whole one.

    Args:
        exact: Log-probabilities of the tokens that matter.
        other: Of the same tokens.

    Raises:
        ValueError: They are over different tokens.
    """
    if exact.keys() != other.keys():
        raise ValueError(f"the distributions are over {len(exact)} and {len(other)} tokens")
    p, q = (np.exp(np.array([d[token] for token in sorted(exact)], dtype=np.float64)) for d in (exact, other))
    tiny = np.finfo(np.float64).tiny
    p, q = (np.maximum(np.append(d, max(1.0 - d.sum(), 0.0)), tiny) for d in (p, q))
    return max(0.0, float(np.sum(p * np.log(p / q))))


class PairedBench:
    """An engine with the state that the arms of one item start from.

    Args:
        cache: With `connector={"attention": True, "policy_modules": [paired_transplant]}`.
    """

    def __init__(self, cache: AgentCache) -> None:
        self.cache = cache
        self._dtype: str = cache.stats()["engine"]["dtype"]
        self._item: DerivedItem | None = None
        self._episode: Episode | None = None
        self._parent: str | None = None
        self._exact: dict[int, float] = {}

    def reference(self, item: DerivedItem, *, kept: bool = False) -> Row:
        """Returns what the item shows after a full prefill and without a repair, and whether it is kept.

        The model must answer the new prompt with the new value, and the edit must move the margin by 0.5 nats: retention
        filters of EditLocal. Where it does not answer, what it shows without a repair is not measured.

        Args:
            item: The arms of `repair` then start from it.
            kept: Whether an earlier run has kept it: arms can be measured then whatever rounding makes of a close answer.
        """
        self._close()
        empty_prefix_cache(self.cache)
        self._item, self._episode = item, self.cache.episode(f"paired {item.form} {item.distance} {item.draw}")
        oracle = self.cache.generate(list(item.new), max_tokens=_reply_tokens(item), logprobs=-1)
        assert oracle.logprobs is not None
        right = oracle.token_ids[0] == item.new_answer
        row = {
            "dtype": self._dtype,
            "tokens": len(item.new),
            "suffix": _suffix(item),
            "oracle_margin": margin(oracle.logprobs[0], item),
            "oracle_right": right,
            "oracle_answer": self.cache.tokenizer.decode(oracle.token_ids),
        }
        if not (right or kept):
            return row | {"kept": False}
        best = sorted(oracle.logprobs[0], key=oracle.logprobs[0].__getitem__, reverse=True)
        watched = list(dict.fromkeys([item.old_answer, item.new_answer, *best]))[:_MOST_TOKENS]
        self._exact = {token: oracle.logprobs[0][token] for token in watched}
        self._parent = self._episode.generate(list(item.old[: item.old_query_start]), max_tokens=1).version
        if not self.cache.flush():
            raise AgentCacheError("the parent's save did not end")
        stale = self.cache.generate(list(item.old), max_tokens=_reply_tokens(item), **self._watch())
        seen = self._seen(stale)
        return row | {
            "stale_margin": seen["margin"],
            "stale_kl": seen["kl"],
            "stale_answer": self.cache.tokenizer.decode(stale.token_ids),
            "kept": is_kept(seen["margin"], row["oracle_margin"]),
        }

    def repair(self, item: DerivedItem, arm: Arm) -> Row:
        """Returns what an arm shows on the item that `reference` measured last.

        Raises:
            AgentCacheError: The engine recovered less than the policy asked for.
        """
        assert self._item is item and self._episode is not None
        empty_prefix_cache(self.cache)
        prefix = item.edits[0].start
        if prefix:  # comes back from the checkpoint, exactly, and vLLM finds it as any other that it has computed
            self._episode.generate(
                list(item.new[:prefix]), max_tokens=1, policy=BASELINE, parent=self._parent, save=False
            )
        policy, options = options_of(arm, self._situation(item))
        reply = self._episode.generate(
            list(item.new),
            max_tokens=_reply_tokens(item),
            policy=policy,
            policy_options=options or None,
            parent=self._parent,
            save=False,
            salt=arm.label,
            **self._watch(),
        )
        report = reply.recovery
        assert report is not None
        if report.reason is not None and policy not in ("auto", BASELINE):  # those may choose to recover nothing
            raise AgentCacheError(f"{arm.label} on item {item.draw} of {item.form}: {report.reason}")
        return self._seen(reply) | {
            "used": report.policy,
            "suffix": report.suffix_tokens,
            "repair_tokens": report.repair_tokens,
            "recompute_ratio": report.recompute_ratio,
            "ttft_ms": round(reply.ttft_ms, 3),
            "select_ms": report.select_ms,
            "recompute_ms": report.recompute_ms,
            "restore_ms": report.restore_ms,
        }

    def _watch(self) -> dict[str, Any]:
        """Returns the options that ask for the watched tokens' log-probabilities: few, so that they cost no time."""
        return {"logprobs": len(self._exact), "extra": {"logprob_token_ids": list(self._exact)}}

    def _seen(self, reply: Reply) -> Row:
        """Returns the margin, the distance from the exact distribution, and whether the answer is the new value."""
        assert self._item is not None and reply.logprobs is not None
        found = {token: reply.logprobs[0][token] for token in self._exact}
        if not all(map(math.isfinite, found.values())):
            raise AgentCacheError(f"the engine gave no finite log-probabilities: {found}")
        value = list(self._item.new_value)
        return {
            "margin": margin(found, self._item),
            "kl": coarse_kl(self._exact, found),
            "flip": reply.token_ids[: len(value)] == value,
            "first_token": reply.token_ids[0] == value[0],
        }

    def _situation(self, item: DerivedItem) -> Situation:
        behind = item.new[item.edits[0].stop : item.query_start]
        return Situation(item, _suffix(item), [*delimiters(self.cache.tokenizer.decode, behind)])

    def _close(self) -> None:
        """Forgets the last item."""
        if self._episode is not None:
            self._episode.drop()
        self._item = self._episode = self._parent = None


def _suffix(item: DerivedItem) -> int:
    """Returns |S|: the rows behind the first edit that no edit holds, up to the question."""
    edited = sum(run.stop - run.start for run in item.edits)
    return item.query_start - item.edits[0].start - edited


def _reply_tokens(item: DerivedItem) -> int:
    return max(len(item.old_value), len(item.new_value))
