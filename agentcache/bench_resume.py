"""`agentcache bench resume`: the time from the call to the first token after an edit, by policy, in one run.

Every arm starts from the same state: vLLM holds the prefix before the edit, the checkpoint holds the parent version. Arms
alternate, the caller's clock runs from rendered ids (diff, plan and selection are inside) to the first token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from agentcache.cache import AgentCache, Episode
from agentcache.environment import hardware, versions
from agentcache.errors import AgentCacheError, ConfigError
from agentcache.quality import kl_divergence, top1_agrees
from agentcache.recovery import get_policy
from agentcache.recovery.spec import parse_policy
from agentcache.reply import RecoveryReport, Reply
from agentcache.samples import load_hotpot_sample

__all__ = ["Edit", "empty_prefix_cache", "make_edit", "percentiles", "run", "sample_ids"]

OLD_SPAN, NEW_SPAN = 32, 40  # tokens: the edit changes the length, so all that follows moves
_DECODE_TOKENS = 8
_ATTENTION_REPS = 5


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of a real text: `old` and `new` differ in one span at `at`."""

    old: list[int]
    new: list[int]
    at: int


def sample_ids(encode: Callable[[str], list[int]]) -> list[int]:
    """Returns the ids of the shipped documents, one after the other."""
    text = "\n\n".join(f"{p.title}\n{p.text}" for item in load_hotpot_sample() for p in item.paragraphs)
    return encode(text)


def make_edit(ids: Sequence[int], context: int, edit_at: float) -> Edit:
    """Returns a `context`-token prompt whose 32-token span at `edit_at` becomes 40 other tokens of the same text.

    Raises:
        ConfigError: The text is too short.
    """
    needed = context + NEW_SPAN
    if len(ids) < needed:
        raise ConfigError(
            f"--context {context} is too long: the shipped text has {len(ids)} tokens, {needed} are needed"
        )
    at = int(context * edit_at)
    old = list(ids[:context])
    span = list(ids[context : context + NEW_SPAN])
    return Edit(old, old[:at] + span + old[at + OLD_SPAN :], at)


def empty_prefix_cache(cache: AgentCache) -> None:
    """Empties vLLM's prefix cache, waiting for saves that still hold blocks.

    Raises:
        AgentCacheError: Blocks are in use for more than 30 s.
    """
    deadline = time.monotonic() + 30
    while not cache.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise AgentCacheError("vLLM's prefix cache cannot be emptied: blocks were in use for 30 s")
        time.sleep(0.02)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Returns the 20th, 50th and 80th percentile."""
    low, middle, high = np.percentile(values, [20, 50, 80])
    return {"p20": round(float(low), 3), "p50": round(float(middle), 3), "p80": round(float(high), 3)}


@dataclass(slots=True)
class _Arm:
    """What was measured of one policy, `name:option=value:…`."""

    policy: str
    ttft_ms: list[float] = field(default_factory=list)
    reports: list[RecoveryReport] = field(default_factory=list)
    kl: float = 0.0
    top1: bool = True

    def row(self, baseline: float | None) -> dict[str, Any]:
        def median(name: str) -> float:
            return round(float(np.median([getattr(r, name) for r in self.reports])), 3)

        last, ttft = self.reports[-1], percentiles(self.ttft_ms)
        return {
            "policy": self.policy,
            "ttft_ms": ttft,
            "recomputed_tokens": last.recomputed_tokens,
            "restored_tokens": last.restored_tokens,
            "computed_by_engine_tokens": last.new_tokens,
            "planned_ratio": last.planned_ratio,
            "recompute_ratio": last.recompute_ratio,
            "diff_ms": median("diff_ms"),
            "plan_ms": median("plan_ms"),
            "restore_ms": median("restore_ms"),
            "select_ms": median("select_ms"),
            "recompute_ms": median("recompute_ms"),
            "speedup": round(baseline / ttft["p50"], 2) if baseline is not None else None,
            "kl_to_exact": round(self.kl, 6),
            "top1_agrees": self.top1,
            "reason": last.reason,
        }


class _Bench:
    def __init__(self, cache: AgentCache, edit: Edit) -> None:
        self.cache = cache
        self.edit = edit
        self.episode: Episode = cache.episode("bench")
        self.parent, prefill_ms = self._save("bench", edit.old)
        self.attention = self._attention_share(prefill_ms)

    def _save(self, name: str, ids: list[int]) -> tuple[str | None, float]:
        """Returns a version that is saved, and the time of its prefill."""
        empty_prefix_cache(self.cache)
        reply = self.cache.episode(name).generate(ids, max_tokens=1)
        if not self.cache.flush():
            raise AgentCacheError("the parent's save did not end")
        return reply.version, reply.ttft_ms

    def _attention_share(self, prefill_ms: float) -> dict[str, float]:
        """Returns what it costs to measure attention at a save: medians over five, and the share of the prefill."""
        measured, prefills = [], [prefill_ms]
        for number in range(_ATTENTION_REPS):
            before = self._attention_ms()
            prefills.append(self._save(f"attention {number}", self.edit.old)[1])
            measured.append(self._attention_ms() - before)
        attention, prefill = float(np.median(measured)), float(np.median(prefills[1:]))
        return {
            "attention_ms": round(attention, 3),
            "prefill_ms": round(prefill, 3),
            "share": round(attention / prefill, 4),
        }

    def _attention_ms(self) -> float:
        """Returns how long rank 0 has measured attention so far."""
        return float(self.cache.stats()["ranks"][0]["counts"]["attention_s"]) * 1e3

    def prime(self, tokens: int) -> None:
        """Leaves exactly the first `tokens` of the new prompt in vLLM's prefix cache."""
        empty_prefix_cache(self.cache)
        self.cache.generate(self.edit.new[:tokens], max_tokens=1)

    def resume(self, policy: str, *, salt: str, logprobs: int | None = None) -> Reply:
        name, options = parse_policy(policy)
        return self.episode.generate(
            self.edit.new,
            max_tokens=1,
            policy=name,
            policy_options=options or None,
            parent=self.parent,
            save=False,
            salt=salt,
            logprobs=logprobs,
        )

    def first_token(self, policy: str, salt: str) -> Reply:
        self.prime(self.edit.at)
        return self.resume(policy, salt=salt)

    def distribution(self, policy: str) -> Any:
        self.prime(self.edit.at)
        reply = self.resume(policy, salt="quality", logprobs=-1)
        assert reply.logprobs is not None
        return reply.logprobs[0]

    def floor(self, tokens: int) -> float:
        """Returns the TTFT of a plain prefill of `tokens` tokens where the recomputed run stands, its prefix cached."""
        start = self.edit.at // 32 * 32
        self.prime(start)
        return self.cache.generate(self.edit.new[: start + tokens], max_tokens=1).ttft_ms

    def decode(self) -> float:
        """Returns the median time of one decode step behind the whole prompt."""
        times = [time.perf_counter() for _ in self.cache.stream(self.edit.new, max_tokens=_DECODE_TOKENS + 1)]
        return float(np.median(np.diff(times))) * 1e3


def _rotated(items: list[str], by: int) -> Iterator[str]:
    yield from items[by % len(items) :]
    yield from items[: by % len(items)]


def run(
    *,
    model: str,
    context: int,
    edit_at: float,
    policies: list[str],
    reps: int,
    profile: Path | None = None,
    json_path: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Measures, prints a table, writes JSON when a path is given; returns what the JSON holds."""
    for policy in policies:
        name, options = parse_policy(policy)
        if options:
            get_policy(name, options)  # an unknown one is known before the engine starts
    measure = {"attention": True}  # of the parent, off the token path: for the policies that rank by it
    with AgentCache(model, max_model_len=context + 256, connector=measure, profile=profile) as cache:
        edit = make_edit(sample_ids(cache.tokenizer.encode), context, edit_at)
        bench = _Bench(cache, edit)
        arms = {policy: _Arm(policy) for policy in policies}
        exact = bench.distribution("prefix_cache")
        for arm in arms.values():
            got = bench.distribution(arm.policy)
            arm.kl, arm.top1 = kl_divergence(exact, got), top1_agrees(exact, got)
        repaired = max((_recomputed(bench, policy) for policy in policies), default=0) or OLD_SPAN + NEW_SPAN
        floors: list[float] = []
        decodes: list[float] = []
        for rep in track(range(-1, reps), description="measuring", console=console, transient=True):
            for policy in _rotated(policies, rep):
                reply = bench.first_token(policy, salt=f"rep {rep}")
                assert reply.recovery is not None
                if rep >= 0:  # the first round warms up
                    arms[policy].ttft_ms.append(reply.ttft_ms)
                    arms[policy].reports.append(reply.recovery)
            floor = bench.floor(repaired)
            bench.prime(len(edit.new))
            decode = bench.decode()
            if rep >= 0:
                floors.append(floor)
                decodes.append(decode)
        stats = cache.stats()
    baseline = percentiles(arms["prefix_cache"].ttft_ms)["p50"] if "prefix_cache" in arms else None
    result = {
        "model": model,
        "context": context,
        "edit_at": edit_at,
        "edit": {"position": edit.at, "old_tokens": OLD_SPAN, "new_tokens": NEW_SPAN},
        "reps": reps,
        "floor_tokens": repaired,
        "floor_ms": percentiles(floors)["p50"],
        "decode_ms": percentiles(decodes)["p50"],
        "attention": bench.attention,
        "rows": [arm.row(baseline) for arm in arms.values()],
        "engine": stats.get("engine", {}),
        "versions": versions(),
        "hardware": hardware(),
    }
    _print(result, console)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"wrote {json_path}")
    return result


def _recomputed(bench: _Bench, policy: str) -> int:
    """Returns how many tokens a policy recomputes: the size of the floor's prefill."""
    recovery = bench.first_token(policy, salt="floor").recovery
    assert recovery is not None
    return recovery.recomputed_tokens


def _print(result: dict[str, Any], console: Console) -> None:
    title = f"resume of {result['context']} tokens edited at {result['edit_at']:.0%}, {result['model']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for name in ("TTFT", "speedup", "restored", "recomputed", "of S", "KL", "top-1"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["policy"],
            f"{row['ttft_ms']['p50']:.0f} ms",
            f"{row['speedup']:.1f}×" if row["speedup"] is not None else "–",
            f"{row['restored_tokens']}, {row['restore_ms']:.0f} ms",
            f"{row['recomputed_tokens']}, {row['select_ms'] + row['recompute_ms']:.0f} ms",
            f"{row['recompute_ratio']:.1%}",
            f"{row['kl_to_exact']:.4f}",
            "=" if row["top1_agrees"] else "≠",
        )
    console.print(table)
    console.print(
        f"floor: a plain prefill of {result['floor_tokens']} tokens there takes {result['floor_ms']:.1f} ms, "
        f"a decode step {result['decode_ms']:.1f} ms; measuring attention at a save takes {result['attention']['attention_ms']:.0f} "
        f"ms, {result['attention']['share']:.1%} of the prefill"
    )
