"""`agentcache profile`: measures a model pair by pair, in an order that an interruption does not change, and writes its profile.

Each measured pair is one line of a file beside the profile, `NAME.work.jsonl`, under a name that says all that it depends on. A
run that finds a pair there does not measure it again, so a run that was killed goes on where it was, and ends with the profile
that it would have ended with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Final, Protocol

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from agentcache.environment import hardware, versions
from agentcache.episodes.render import Renderer
from agentcache.errors import ConfigError
from agentcache.profiling.assemble import Measured, assemble, calibration_wanted, train, train_wanted
from agentcache.profiling.datasets import SAMPLE, Dataset, load_dataset
from agentcache.profiling.edits import Edit, Task, make_edits, split
from agentcache.profiling.measure import Found, Pair, Render, Wanted, pair_key, pairs_of
from agentcache.profiling.model import ModelFingerprint, model_fingerprint
from agentcache.profiling.profile import DataSource, Profile
from agentcache.weights import BUILTIN_MODELS, resolve_model
from agentcache.work_file import WorkFile

__all__ = ["Engine", "ProfileRun", "choose_pairs", "make_profile", "run"]

TRAIN_SHARE: Final = 0.6
"""Of the tasks, and of the pairs: seven coefficients are fitted to the training pairs."""

LEAST_PAIRS: Final = (8, 4)
"""Fewest pairs of the two splits that a profile is made of."""

_CHARACTERS_A_TOKEN = 3.5
_SPARE = 4  # edits made for each that is wanted: some are too long, and many leave too little behind them
_SHORTEST_SHARE = 0.25  # of the longest prompt
_DAY = datetime(2026, 1, 1, tzinfo=UTC)
_TOLD_PAIRS = 10  # where no bar can be shown
_ROOM = 64  # tokens beside the longest prompt: its reply, and what chat templates add


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """What a profile is made of.

    Attributes:
        model: A folder, a hub id, or the name of a built-in model.
        out: The profile's file.
        data: Files or folders of tasks, see `datasets`.
        pairs: Pairs to measure; three fifths of them train.
        seed: Of splits and edits.
        max_tokens: Longest prompt.
    """

    model: str
    out: Path
    data: tuple[str, ...] = (SAMPLE,)
    pairs: int = 90
    seed: int = 0
    max_tokens: int = 3072

    @property
    def work_file(self) -> Path:
        """Where measured pairs are kept."""
        return self.out.with_name(f"{self.out.name}.work.jsonl")


class Engine(Protocol):
    """What a run needs of an `AgentCache`."""

    def profile_pair(self, old_ids: Sequence[int], new_ids: Sequence[int], **wanted: Any) -> Found:
        """Returns what two revisions show."""


@dataclass(frozen=True, slots=True)
class Split:
    """The pairs of one split.

    Attributes:
        name: `train` or `calibration`.
        pairs: In the order in which they are measured.
        sources: The data that they are from.
    """

    name: str
    pairs: tuple[Pair, ...]
    sources: tuple[DataSource, ...]


def choose_pairs(datasets: Sequence[Dataset], render: Render, settings: ProfileRun) -> tuple[Split, Split]:
    """Returns the pairs to train and to calibrate on, of disjoint tasks; the data sets take turns.

    Raises:
        ConfigError: There are too few edits that can be measured.
    """
    train_pairs = math.ceil(TRAIN_SHARE * settings.pairs)
    wanted = (train_pairs, settings.pairs - train_pairs)
    halves = [split(dataset.tasks, seed=settings.seed, share=TRAIN_SHARE) for dataset in datasets]
    out = []
    for at, name in enumerate(("train", "calibration")):
        tasks = [half[at] for half in halves]
        found = [list(islice(_pairs(each, wanted[at], render, settings), wanted[at])) for each in tasks]
        turns = (pair for turn in zip_longest(*found) for pair in turn if pair is not None)
        pairs = tuple(islice(turns, wanted[at]))
        if len(pairs) < LEAST_PAIRS[at]:
            raise ConfigError(
                f"the data is too short: {len(pairs)} edits of it can be measured for {name}, {LEAST_PAIRS[at]} are "
                f"needed; give more --data, or another --max-tokens than {settings.max_tokens}"
            )
        sources = [_source(name, dataset, pairs, each) for dataset, each in zip(datasets, found, strict=True)]
        out.append(Split(name, pairs, tuple(source for source in sources if source.edits)))
    return out[0], out[1]


def _pairs(tasks: Sequence[Task], wanted: int, render: Render, settings: ProfileRun) -> Iterator[Pair]:
    """Yields the pairs of one data set's tasks, which take turns; few tasks are edited more often."""
    longest = int(settings.max_tokens * _CHARACTERS_A_TOKEN)
    chains: dict[str, list[Edit]] = {}
    for edit in make_edits(
        tasks,
        seed=settings.seed,
        per_task=max(2, math.ceil(_SPARE * wanted / max(1, len(tasks)))),
        characters=(int(longest * _SHORTEST_SHARE), longest),
    ):
        chains.setdefault(edit.task, []).append(edit)
    edits = (edit for turn in zip_longest(*chains.values()) for edit in turn if edit is not None)
    return pairs_of(edits, render, max_tokens=settings.max_tokens)


def _source(name: Any, dataset: Dataset, taken: Sequence[Pair], made: Sequence[Pair]) -> DataSource:
    ids = {pair.id for pair in made}
    used = [pair for pair in taken if pair.id in ids]
    tasks = len({pair.task for pair in used})
    return DataSource(dataset=dataset.name, split=name, hash=dataset.hash, tasks=tasks, edits=len(used))


def make_profile(
    settings: ProfileRun,
    datasets: Sequence[Dataset],
    model: ModelFingerprint,
    render: Render,
    open_engine: Callable[[], AbstractContextManager[Engine]],
    console: Console,
) -> Profile:
    """Returns the profile after measuring what the work file has not.

    Args:
        settings: What it is made of.
        datasets: Their tasks.
        model: That is measured.
        render: Returns the ids of chat messages.
        open_engine: Is called when something must be measured.
        console: Where the progress is shown.

    Raises:
        ConfigError: The data is too short.
        AgentCacheError: The engine is busy, or a measurement failed.
    """
    first, second = choose_pairs(datasets, render, settings)
    work = WorkFile(settings.work_file)
    with ExitStack() as stack, _progress(console) as progress:
        engine = functools.cache(lambda: stack.enter_context(open_engine()))

        def measured(part: Split, wanted: Wanted) -> Measured:
            task = progress.add_task(part.name, total=len(part.pairs))
            found = []
            for pair in part.pairs:
                key = pair_key(model.hash, pair, wanted)
                known = work.get(key)
                if known is None:
                    known = work.put(key, engine().profile_pair(pair.old, pair.new, **wanted.options()), name=pair.id)
                found.append((pair, known))
                progress.advance(task)
                if not console.is_terminal and (len(found) % _TOLD_PAIRS == 0 or len(found) == len(part.pairs)):
                    console.print(f"{part.name}: {len(found)} of {len(part.pairs)} edits")
            return found

        trained_on = measured(first, train_wanted())
        trained = train(trained_on)
        calibration = measured(second, calibration_wanted(trained))
    return Profile(
        model=model,
        packages=versions(),
        machine=hardware(),
        seed=settings.seed,
        data=(*first.sources, *second.sources),
        **assemble(trained_on, calibration, trained),
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def run(settings: ProfileRun, console: Console) -> Profile:
    """Returns the profile after measuring and writing it, and prints what was fitted.

    Raises:
        ConfigError: The data cannot be read or is too short, or it cannot be told what model it is.
        RenderError: The model's chat template does not render a chat.
    """
    datasets = _load(settings.data)
    folder, name = _folder(settings.model)
    model = model_fingerprint(folder, name=name)
    profile = make_profile(settings, datasets, model, _renderer(folder), lambda: _engine(settings, model), console)
    profile.save(settings.out)
    _print(profile, settings, console)
    return profile


def _load(sources: Sequence[str]) -> list[Dataset]:
    """Returns the data of each source, without tasks that an earlier one has too."""
    known: set[str] = set()
    datasets = []
    for source in sources:
        dataset = load_dataset(source)
        tasks = tuple(task for task in dataset.tasks if task.id not in known)
        known |= {task.id for task in tasks}
        datasets.append(replace(dataset, tasks=tasks))
    return datasets


def _folder(model: str) -> tuple[Path, str | None]:
    """Returns the folder of a model, fetched from the hub when it is one of there, and its name unless the folder gives it."""
    found = resolve_model(model)
    if isinstance(found, Path):
        return found, model if model in BUILTIN_MODELS else None
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(found)), found


def _renderer(folder: Path) -> Render:
    """Returns what renders chats by the model's template, without an engine and on a day that does not change."""
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(folder))
    return lambda messages: renderer.render(messages, now=_DAY).token_ids.tolist()


def _engine(settings: ProfileRun, model: ModelFingerprint) -> AbstractContextManager[Engine]:
    """Returns an engine whose KV cache holds the two revisions of a pair and a recovery."""
    from agentcache.cache import AgentCache

    row_bytes = 2 * model.layers * model.kv_heads * model.head_dim * 4  # of float32, where the machine computes in that
    longest = settings.max_tokens + _ROOM
    return AgentCache(settings.model, max_model_len=longest, kv_bytes=4 * longest * row_bytes)


def _print(profile: Profile, settings: ProfileRun, console: Console) -> None:
    fit, precision = profile.length, profile.precision
    window = int(fit.model.windows(*fit.typical))
    chosen = next(each for each in profile.candidates if (each.kappa, each.block) == (profile.kappa, profile.block))
    table = Table(title=f"profile of {profile.model}", box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    prefix, middle, suffix = fit.typical
    share = f", covers {fit.coverage:.0%} of the calibration edits" if fit.coverage is not None else ""
    table.add_row("dirty window", f"{window:,} tokens where |P| {prefix:,}, |M| {middle:,}, |S| {suffix:,}{share}")
    table.add_row("τ_V, γ", f"{fit.tau_v:g}, {fit.gamma:g} ({fit.pairs} training edits)")
    table.add_row(
        "κ, block", f"{profile.kappa:.1%} in blocks of {profile.block}: recomputes {chosen.recompute_ratio:.1%}"
    )
    quality = ", ".join(f"{name} {value:.2f}" for name, value in chosen.quality.items())
    table.add_row("quality", f"{quality} ({profile.quality_unit})")
    table.add_row("mixed precision", ", ".join(f"{name} {value:g}" for name, value in precision.thresholds.items()))
    console.print(table)
    console.print(f"wrote {settings.out}; its measurements are in {settings.work_file}")
