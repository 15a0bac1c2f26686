"""`agentcache eval frontier`: where the growing window stops, against where an oracle would, and what it is worth at equal cost.

Of each real edit the drift of every row is known from paired prefills, and with it the oracle boundary d* (PatchKV, formulas 7): from
there on nearly all blocks are clean. A policy's stop is what it recomputes behind that edit. Beside that, results of `paired-edit` and
`qa` in which `frontier` and windows of fixed lengths were arms are compared at the same mean share of recomputed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from agentcache.bench_resume import empty_prefix_cache
from agentcache.episodes.diff import diff_tokens
from agentcache.errors import AgentCacheError, ConfigError
from agentcache.evaluation.items import Row, item_key, rotated
from agentcache.evaluation.statistics import mean_ci, paired_ci
from agentcache.profiling.fit import oracle_boundary
from agentcache.profiling.measure import Pair
from agentcache.recovery.spec import parse_policy

__all__ = ["FrontierRun", "Stops", "matched", "one_edit", "stop_cells", "stop_key"]

_SCHEMA: Final = 2
_DIGITS: Final = 4
_FRONTIER: Final = "frontier"


@dataclass(frozen=True, slots=True)
class FrontierRun:
    """What is measured.

    Attributes:
        model: A folder, a hub id, or the name of a built-in model.
        out: The result's file.
        policies: Arms, `name:option=value:…`.
        data: Files or folders of tasks, see `profiling.datasets`.
        pairs: Edits.
        seed: Of the edits.
        max_tokens: Longest prompt.
        tau_v: Deviation up to which a block is clean; None: the profile's, or what `frontier` itself takes for agreement.
        gamma: Share of a tail's blocks that must be clean.
        profile: File of the model's profile; None: the one that ships, if there is one.
    """

    model: str
    out: Path
    policies: tuple[str, ...]
    data: tuple[str, ...]
    pairs: int
    seed: int
    max_tokens: int
    tau_v: float | None
    gamma: float
    profile: Path | None


def one_edit(pair: Pair) -> bool:
    """Whether all that is aligned behind the edit is one run, so that a policy's stop is a distance."""
    return len(diff_tokens(pair.old, pair.new).suffix) == 1


def stop_key(pair: Pair, model: str, policies: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what names a pair's measurement."""
    return item_key(part="frontier", schema=_SCHEMA, model=model, old=pair.old, new=pair.new, policies=dict(policies))


class Stops:
    """Measures pairs on one engine.

    Args:
        cache: Idle.
        policies: By the name of the arm, its policy's options; the name begins with the policy's.
    """

    def __init__(self, cache: Any, policies: Mapping[str, Mapping[str, Any]]) -> None:
        self._cache = cache
        self._policies = policies
        self._dtype: str = cache.stats()["engine"]["dtype"]

    def __call__(self, pair: Pair, number: int) -> Row:
        """Returns the drift behind an edit by block, and by arm how much it recomputed there.

        Raises:
            AgentCacheError: The engine did not do what a policy asked for.
        """
        drift = self._cache.probe("drift", pair.old, pair.new)
        empty_prefix_cache(self._cache)
        episode = self._cache.episode(f"frontier {pair.id}")
        try:
            parent = episode.generate(pair.old, max_tokens=1, policy="prefix_cache").version
            if not self._cache.flush():
                raise AgentCacheError(f"the prompt before the edit {pair.id!r} was not saved")
            most = drift["lengths"]["suffix"] - drift["block"]
            arms = {name: self._stop(episode, pair, name, parent, most) for name in rotated([*self._policies], number)}
        finally:
            episode.drop()
        value = np.array(drift["value"], dtype=np.float64)
        return {
            "pair": pair.id,
            "dataset": pair.dataset,
            "dtype": self._dtype,
            "suffix": drift["lengths"]["suffix"],
            "block": drift["block"],
            # The median over layers, as in PatchKV's block deviation; over all of them (**choice**), where that takes sampled ones.
            "deviation": [round(float(each), 6) for each in np.median(1 - value, axis=0)],
            "arms": {name: arms[name] for name in self._policies},
        }

    def _stop(self, episode: Any, pair: Pair, name: str, parent: str, most: int) -> Row:
        empty_prefix_cache(self._cache)
        policy, _ = parse_policy(name)
        options = dict(self._policies[name])
        if "most_tokens" in options:
            # A window that may become all of S is not planned: vLLM computes the prompt then.
            options["most_tokens"] = min(options["most_tokens"], most)
        reply = episode.generate(
            pair.new,
            max_tokens=1,
            policy=policy,
            policy_options=options or None,
            parent=parent,
            save=False,
            salt=name,
        )
        report = reply.recovery
        if report.reason is not None:
            raise AgentCacheError(f"{name} on the edit {pair.id!r}: {report.reason}")
        return {"stop": report.repair_tokens, "recompute_ratio": report.recompute_ratio}


def stop_cells(rows: Sequence[Row], model: str, *, tau_v: float, gamma: float) -> list[Row]:
    """Returns one cell an arm: how far it recomputes, and how that lies to the oracle boundary.

    `stop`, `boundary`: means, tokens. `past_median`, `past_iqr`: of stop less boundary. `covers`: share of the edits on which the stop is
    not before the boundary. `missed`: mean tokens between a stop and a boundary behind it; `spent`: behind a boundary before it.

    Args:
        rows: Of `Stops`, at least one.
        model: Its name.
        tau_v: Deviation up to which a block is clean.
        gamma: Share of a tail's blocks that must be clean.
    """
    boundaries = np.array(
        [oracle_boundary(r["deviation"], r["suffix"], tau_v=tau_v, gamma=gamma, block=r["block"]) for r in rows]
    )
    cells = []
    for arm in rows[0]["arms"]:
        stops = np.array([_stop_of(row, arm) for row in rows])
        past = stops - boundaries
        low, middle, high = np.percentile(past, [25, 50, 75])
        cells.append(
            {
                "model": model,
                "policy": arm,
                "n": len(rows),
                "stop": _rounded(stops.mean()),
                "stop_ci": [_rounded(bound) for bound in mean_ci(stops.astype(float).tolist())],
                "boundary": _rounded(boundaries.mean()),
                "past_median": _rounded(middle),
                "past_iqr": [_rounded(low), _rounded(high)],
                "covers": _rounded((past >= 0).mean()),
                "missed": _rounded(np.maximum(-past, 0).mean()),
                "spent": _rounded(np.maximum(past, 0).mean()),
                "suffix": _rounded(np.mean([row["suffix"] for row in rows])),
                "recompute_ratio": _rounded(np.mean([row["arms"][arm]["recompute_ratio"] for row in rows])),
            }
        )
    return cells


def _stop_of(row: Row, arm: str) -> int:
    """Returns where an arm stopped: at the end, where so much was planned that vLLM computed the prompt by itself."""
    found = row["arms"][arm]
    return int(row["suffix"] if found["recompute_ratio"] >= 1 else found["stop"])


def matched(
    items: Mapping[str, Sequence[float | None]],
    ratios: Mapping[str, Sequence[float | None]],
    is_window: Callable[[str], bool],
) -> list[Row]:
    """Returns, for each arm of `frontier`, its difference to fixed windows that recompute the same mean share.

    The windows' values are interpolated, item by item, between the two arms whose mean shares lie around the frontier's; outside of all
    shares the nearest arm is taken as it is, and `extrapolated` says so.

    Args:
        items: By arm, what each item showed (margin recovery, F1), None where the arm did not run.
        ratios: By arm, the share of S that was recomputed of each item.
        is_window: Whether an arm is a fixed window.

    Raises:
        ConfigError: No arm of `frontier`, or no window, is there.
    """
    fixed = [arm for arm in items if is_window(arm)]
    grown = [arm for arm in items if arm.split("@")[0].split(":")[0] == _FRONTIER]
    if not (fixed and grown):
        raise ConfigError(f"there are {len(grown)} arms of frontier and {len(fixed)} fixed windows; both are needed")
    found = []
    for arm in grown:
        common = [at for at in range(len(items[arm])) if all(items[each][at] is not None for each in (arm, *fixed))]
        if not common:
            continue

        def of(values: Mapping[str, Sequence[float | None]], name: str, at: Sequence[int] = tuple(common)) -> Any:
            return np.array([values[name][i] for i in at], dtype=np.float64)

        share = float(of(ratios, arm).mean())
        grid = sorted((float(of(ratios, each).mean()), each) for each in fixed)
        below = max((point for point in grid if point[0] <= share), default=grid[0])
        above = min((point for point in grid if point[0] >= share), default=grid[-1])
        weight = 0.0 if above[0] == below[0] else (share - below[0]) / (above[0] - below[0])
        window = (1 - weight) * of(items, below[1]) + weight * of(items, above[1])
        own = of(items, arm)
        found.append(
            {
                "policy": arm,
                "n": len(common),
                "recompute_ratio": _rounded(share),
                "value": _rounded(own.mean()),
                "between": [below[1], above[1]],
                "window_ratio": _rounded((1 - weight) * below[0] + weight * above[0]),
                "window_value": _rounded(window.mean()),
                "difference": _rounded((own - window).mean()),
                "difference_ci": [_rounded(bound) for bound in paired_ci(own.tolist(), window.tolist())],
                "extrapolated": not grid[0][0] <= share <= grid[-1][0],
            }
        )
    return found


def _rounded(value: Any) -> float:
    return round(float(value), _DIGITS)
