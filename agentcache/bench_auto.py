"""`agentcache bench auto`: policy `auto` against prefix caching and against its own candidate, over many real edits.

Every arm starts from the same state: vLLM holds the prefix before the edit, the checkpoint holds the parent version. The arms
of an edit follow one another, in an order that changes every time.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from agentcache.bench_resume import empty_prefix_cache
from agentcache.cache import AgentCache
from agentcache.environment import hardware, versions
from agentcache.episodes.diff import as_ids, common_prefix
from agentcache.errors import ConfigError
from agentcache.profiling.datasets import load_dataset
from agentcache.profiling.edits import Task, make_edits
from agentcache.recovery import get_policy
from agentcache.recovery.spec import parse_policy
from agentcache.reply import RecoveryReport

__all__ = ["TokenEdit", "measured", "run", "short_suffix", "summary", "token_edits"]

_BASE: Final = "prefix_cache"
_CHARACTERS: Final = (1_000, 18_000)  # of a prompt's turns: about 250 to 4,500 tokens
_SHORT: Final = 256  # tokens: what a third of the edits keep at most of the text behind them
_WARM: Final = 3  # first edits, which are not counted
_BUCKETS: Final = (0, 64, 256, 1024, 1 << 30)


@dataclass(frozen=True, slots=True)
class TokenEdit:
    """One edit of a real prompt, in tokens.

    Attributes:
        id: Of the edit.
        kind: What the controller did.
        old: The prompt before.
        new: The prompt after.
    """

    id: str
    kind: str
    old: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def prefix(self) -> int:
        """Common leading tokens."""
        return common_prefix(as_ids(self.old), as_ids(self.new))

    @property
    def suffix(self) -> int:
        """Common trailing tokens behind the edit."""
        most = min(len(self.old), len(self.new)) - self.prefix
        return min(common_prefix(as_ids(self.old[::-1]), as_ids(self.new[::-1])), most)


def short_suffix(edit: TokenEdit, keep: int) -> TokenEdit:
    """Returns the edit with at most `keep` tokens behind it: it is what the agent has just read."""
    cut = max(edit.suffix - keep, 0)
    return TokenEdit(edit.id, edit.kind, edit.old[: len(edit.old) - cut], edit.new[: len(edit.new) - cut])


def token_edits(cache: AgentCache, tasks: Sequence[Task], count: int, seed: int) -> list[TokenEdit]:
    """Returns `count` edits of the tasks' prompts; of every third at most 256 tokens, evenly over the logarithm, follow the edit.

    Raises:
        ConfigError: The tasks give fewer.
    """
    rng = random.Random(f"{seed}/bench")
    longest = (cache.config.max_model_len or 1 << 30) - 2
    made: list[TokenEdit] = []
    for index, edit in enumerate(islice(_many(tasks, seed, count), 4 * count)):
        old, new = (tuple(cache.render(list(messages)).token_ids.tolist()) for messages in (edit.old, edit.new))
        tokens = TokenEdit(edit.id, edit.kind, old[:longest], new[:longest])
        if index % 3 == 2:
            tokens = short_suffix(tokens, round(_SHORT ** rng.random()))
        if tokens.prefix < len(tokens.new) and tokens.prefix < len(tokens.old):
            made.append(tokens)
        if len(made) == count:
            return made
    raise ConfigError(f"the data give {len(made)} edits, fewer than {count}; give more with --data or take fewer edits")


def _many(tasks: Sequence[Task], seed: int, count: int) -> Iterator[Any]:
    """Yields edits of all tasks, one chain of each task after the other, then with other choices again."""
    per_task = max(min(-(-count // len(tasks)), 4), 1)
    for turn in range(8 * count):
        edits = list(make_edits(tasks, seed=seed + 1000 * turn, per_task=per_task, characters=_CHARACTERS))
        random.Random(f"{seed}/{turn}").shuffle(edits)
        yield from edits


class _Bench:
    def __init__(self, cache: AgentCache, candidate: str, margin: float, reps: int) -> None:
        self.cache = cache
        self.reps = reps
        name, options = parse_policy(candidate)
        self.arms: dict[str, tuple[str, dict[str, Any]]] = {
            _BASE: (_BASE, {}),
            candidate: (name, options),
            "auto": ("auto", {"candidate": candidate, "margin": margin}),
        }

    def measure(self, edit: TokenEdit, number: int) -> dict[str, Any]:
        """Returns what one edit took by each arm, and what `auto` chose last."""
        empty_prefix_cache(self.cache)
        episode = self.cache.episode(f"{edit.id}/{number}")
        parent = episode.generate(edit.old, max_tokens=1).version
        arms, times = [*self.arms], dict[str, list[float]]()
        recovery: RecoveryReport | None = None
        for rep in range(self.reps):
            turn = (number + rep) % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                empty_prefix_cache(self.cache)
                # The prefix comes back from the checkpoint, exactly, and vLLM finds it as any other that it has computed.
                if edit.prefix:
                    episode.generate(edit.new[: edit.prefix], max_tokens=1, policy=_BASE, parent=parent, save=False)
                policy, options = self.arms[arm]
                reply = episode.generate(
                    edit.new,
                    max_tokens=1,
                    policy=policy,
                    policy_options=options,
                    parent=parent,
                    save=False,
                    salt=f"{number}/{rep}/{arm}",
                )
                times.setdefault(arm, []).append(reply.ttft_ms)
                if arm == "auto":
                    recovery = reply.recovery
        episode.drop()
        assert recovery is not None
        return {
            "id": edit.id,
            "kind": edit.kind,
            "tokens": len(edit.new),
            "prefix_tokens": edit.prefix,
            "suffix_tokens": edit.suffix,
            "ttft_ms": {arm: round(float(np.median(taken)), 3) for arm, taken in times.items()},
            "chosen": recovery.policy,
            "estimate": recovery.estimate,
            "reason": recovery.reason,
        }


def summary(edits: Sequence[dict[str, Any]], candidate: str) -> dict[str, Any]:
    """Returns how `auto` compares with prefix caching and with its candidate over measured edits.

    `median_ratio` and `saving_share` are the claims: the median over the edits of auto's time by prefix caching's, and the time
    that auto saves in all by what the better of the two fixed policies saves. The others show where they come from.
    """
    times = {arm: np.array([edit["ttft_ms"][arm] for edit in edits]) for arm in (_BASE, candidate, "auto")}
    ratio = times["auto"] / times[_BASE]
    exact = np.array([edit["chosen"] == _BASE for edit in edits])
    saved = {arm: float((times[_BASE] - times[arm]).sum()) for arm in (candidate, "auto")}
    best = max(saved[candidate], 0.0)
    return {
        "edits": len(edits),
        "chosen_exact": int(exact.sum()),
        "median_ms": {arm: round(float(np.median(values)), 3) for arm, values in times.items()},
        "ratio_of_medians": round(float(np.median(times["auto"]) / np.median(times[_BASE])), 4),
        "median_ratio": round(float(np.median(ratio)), 4),
        "median_ratio_where_exact": round(float(np.median(ratio[exact])), 4) if exact.any() else None,
        "candidate_median_ratio_where_exact": (
            round(float(np.median((times[candidate] / times[_BASE])[exact])), 4) if exact.any() else None
        ),
        "saved_ms": {arm: round(value, 1) for arm, value in saved.items()},
        "saving_share": round(saved["auto"] / best, 4) if best else None,
    }


def _buckets(edits: Sequence[dict[str, Any]], candidate: str) -> Iterator[dict[str, Any]]:
    """Yields the summary of the edits of each length of suffix."""
    for low, high in pairwise(_BUCKETS):
        inside = [edit for edit in edits if low <= edit["suffix_tokens"] < high]
        if inside:
            yield {"suffix_from": low, "suffix_to": max(edit["suffix_tokens"] for edit in inside)} | summary(
                inside, candidate
            )


def run(
    *,
    model: str,
    candidate: str,
    margin: float,
    edits: int,
    reps: int,
    data: str,
    seed: int,
    max_tokens: int,
    json_path: Path | None,
    resume: bool,
    console: Console,
) -> dict[str, Any]:
    """Measures, prints a table, writes JSON after each edit when a path is given; returns what the JSON holds.

    Args:
        model: A folder, a hub id, or the name of a built-in model.
        candidate: `auto`'s other policy, `name:option=value:…`.
        margin: Of `auto`.
        edits: How many.
        reps: Times that each arm resumes each edit; medians count.
        data: File or folder of `profiling.datasets`, or `sample`.
        seed: Another one makes other edits.
        max_tokens: Longest prompt; what is longer is cut.
        json_path: Where the result goes, or None.
        resume: Whether to go on with the edits that the file lacks.
        console: Prints.

    Raises:
        ConfigError: A setting is not allowed, or the file is that of another measurement.
    """
    get_policy("auto", {"candidate": candidate, "margin": margin})
    dataset = load_dataset(data)
    settings = {
        "model": Path(model).name,
        "candidate": candidate,
        "margin": margin,
        "edits": edits,
        "reps": reps,
        "data": dataset.name,
        "data_hash": dataset.hash,
        "seed": seed,
        "max_tokens": max_tokens,
    }
    done = measured(json_path, settings) if resume and json_path is not None else []
    engine = {"attention": True}  # of the parents, off the token path: for the candidates that rank by it
    with AgentCache(model, max_model_len=max_tokens + 64, connector=engine) as cache:
        chosen = token_edits(cache, dataset.tasks, edits + _WARM, seed)
        bench = _Bench(cache, candidate, margin, reps)
        for number, edit in enumerate(chosen[edits:]):
            bench.measure(edit, number)
        for number in track(range(len(done), edits), description="measuring", console=console, transient=True):
            done.append(bench.measure(chosen[number], number))
            if json_path is not None:
                _write(json_path, settings, done, candidate)
    result = _result(settings, done, candidate)
    _print(result, candidate, console)
    if json_path is not None:
        _write(json_path, settings, done, candidate)
        console.print(f"wrote {json_path}")
    return result


def _result(settings: dict[str, Any], done: list[dict[str, Any]], candidate: str) -> dict[str, Any]:
    return {
        **settings,
        "summary": summary(done, candidate),
        "by_suffix": [*_buckets(done, candidate)],
        "measured": done,
        "versions": versions(),
        "hardware": hardware(),
    }


def _write(path: Path, settings: dict[str, Any], done: list[dict[str, Any]], candidate: str) -> None:
    """Writes the result so far; an interrupt leaves the last one whole."""
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(json.dumps(_result(settings, done, candidate), indent=2) + "\n")
    draft.replace(path)


def measured(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the edits that a file of the same settings has already."""
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        other = [name for name, value in settings.items() if found.get(name) != value]
        done: list[dict[str, Any]] = found["measured"]
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is no file of bench auto; give another --json, or leave --resume out") from error
    if other:
        raise ConfigError(f"{path} was measured with another {', '.join(other)}; give another --json")
    return done


def _print(result: dict[str, Any], candidate: str, console: Console) -> None:
    title = f"first token after {result['edits']} real edits, {result['model']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("suffix", no_wrap=True)
    for name in ("edits", _BASE, candidate, "auto", "exact", "auto by exact"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in [*result["by_suffix"], {"suffix_from": None} | result["summary"]]:
        label = "all" if row["suffix_from"] is None else f"{row['suffix_from']}–{row['suffix_to']}"
        medians = [f"{row['median_ms'][arm]:.0f} ms" for arm in (_BASE, candidate, "auto")]
        table.add_row(label, f"{row['edits']}", *medians, f"{row['chosen_exact']}", f"{row['median_ratio']:.2f}")
    console.print(table)
    found = result["summary"]
    where = found["median_ratio_where_exact"]
    share = found["saving_share"]
    console.print(
        f"auto takes {found['median_ratio']:.2f} of prefix caching's time (median"
        + (f"; {where:.2f} where it chose that" if where is not None and math.isfinite(where) else "")
        + f"), and {'no part' if share is None else f'{share:.0%}'} of what {candidate} saves"
    )
