from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console

from agentcache.errors import ConfigError
from agentcache.profiling.assemble import BLOCKS, KAPPAS, TAU_SHARES
from agentcache.profiling.datasets import load_dataset
from agentcache.profiling.measure import Wanted, pair_key
from agentcache.profiling.model import ModelFingerprint
from agentcache.profiling.profile import Profile
from agentcache.profiling.runner import ProfileRun, choose_pairs, make_profile
from tests.profiling.examples import MODEL
from tests.profiling.fake_engine import FakeEngine

PAIRS = 24
TRAIN = 15


@pytest.fixture
def settings(tmp_path: Path) -> ProfileRun:
    return ProfileRun("tiny", tmp_path / "profile.json", pairs=PAIRS, max_tokens=2048)


def profile(
    settings: ProfileRun,
    engine: FakeEngine,
    *,
    console: Console | None = None,
    data: str | Path = "sample",
    model: ModelFingerprint = MODEL,
) -> Profile:
    out = console or Console(file=io.StringIO())
    return make_profile(settings, [load_dataset(data)], model, render, lambda: nullcontext(engine), out)


def render(messages: Any) -> list[int]:
    words = [word for message in messages for word in (f"<{message['role']}>", *message["content"].split())]
    pieces = [piece for word in words for piece in (word[:4], word[4:]) if piece]
    return [zlib.crc32(piece.encode()) % 50_000 for piece in pieces]


def interrupt_at(count: int) -> Callable[[int], None]:
    def before(done: int) -> None:
        if done == count:
            raise KeyboardInterrupt

    return before


def test_a_profile_is_made_of_every_pair_once(settings: ProfileRun) -> None:
    engine = FakeEngine()
    made = profile(settings, engine)
    assert len(engine.measured) == PAIRS
    assert [len(wanted["arms"]) for wanted in engine.measured] == [0] * TRAIN + [
        len(TAU_SHARES) * len(KAPPAS) * len(BLOCKS)
    ] * 9
    assert [(s.dataset, s.split, s.edits) for s in made.data] == [
        ("hotpotqa", "train", TRAIN),
        ("hotpotqa", "calibration", 9),
    ]
    assert made.model == MODEL and made.length.pairs == TRAIN and made.length.coverage is not None
    assert {(c.kappa, c.block) for c in made.candidates} == {(k, b) for k in KAPPAS for b in BLOCKS}
    assert made.kappa in KAPPAS and made.block in BLOCKS
    assert made.precision.tau_low <= made.precision.tau_high and made.precision.candidates
    assert made.attention is not None and made.attention.dirty
    assert Profile.from_json(made.to_json()) == made


@pytest.mark.parametrize("count", [0, 7, TRAIN, 20])
def test_a_run_that_was_interrupted_goes_on_and_ends_with_the_same_profile(
    settings: ProfileRun, tmp_path: Path, count: int
) -> None:
    whole = profile(ProfileRun("tiny", tmp_path / "whole.json", pairs=PAIRS, max_tokens=2048), FakeEngine()).to_json()
    with pytest.raises(KeyboardInterrupt):
        profile(settings, FakeEngine(interrupt_at(count)))
    rest = FakeEngine()
    assert profile(settings, rest).to_json() == whole
    assert len(rest.measured) == PAIRS - count


def test_a_line_that_was_cut_off_is_measured_again(settings: ProfileRun) -> None:
    whole = profile(settings, FakeEngine()).to_json()
    data = settings.work_file.read_bytes()
    lines = data.splitlines(keepends=True)
    for cut, again in ((1, 1), (len(lines[-1]) // 2, 1), (len(lines[-1]) - 2, 1), (len(lines[-1]) - 1, 0)):
        settings.work_file.write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
        engine = FakeEngine()
        assert profile(settings, engine).to_json() == whole
        assert len(engine.measured) == again


def test_a_finished_run_starts_no_engine(settings: ProfileRun) -> None:
    made = profile(settings, FakeEngine())

    def refuse() -> NoReturn:
        pytest.fail("nothing is to be measured")

    assert make_profile(settings, [load_dataset()], MODEL, render, refuse, Console(file=io.StringIO())) == made


def test_more_pairs_measure_only_the_rest(settings: ProfileRun) -> None:
    profile(settings, FakeEngine())
    more = FakeEngine()
    profile(ProfileRun("tiny", settings.out, pairs=PAIRS + 4, max_tokens=2048), more)
    # Two or three more train, which changes the fit, hence what calibration measures.
    assert [bool(wanted["arms"]) for wanted in more.measured].count(False) < TRAIN


def test_another_model_or_seed_does_not_take_these_measurements(settings: ProfileRun) -> None:
    profile(settings, FakeEngine())
    other = FakeEngine()
    profile(settings, other, model=MODEL.model_copy(update={"hash": "b" * 32}))
    assert len(other.measured) == PAIRS


def test_splits_share_no_task_and_data_sets_take_turns(settings: ProfileRun, tmp_path: Path) -> None:
    rows = [
        {
            "task": at,
            "question": f"which {at}?",
            "documents": [f"{at} {word} " + "text of its own " * 60 for word in "abcdef"],
        }
        for at in range(20)
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    first, second = choose_pairs([load_dataset(), load_dataset(file)], render, settings)
    assert not {pair.task for pair in first.pairs} & {pair.task for pair in second.pairs}
    assert [pair.dataset for pair in first.pairs[:4]] == ["hotpotqa", "own", "hotpotqa", "own"]
    assert sum(source.edits for source in first.sources) == len(first.pairs) == TRAIN
    assert all(max(len(pair.old), len(pair.new)) <= 2048 for pair in first.pairs + second.pairs)


def test_data_that_is_too_short_is_refused_before_anything_is_measured(settings: ProfileRun, tmp_path: Path) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text("\n".join(json.dumps({"task": at, "documents": [f"text {at}", "more"]}) for at in range(6)))
    engine = FakeEngine()
    with pytest.raises(
        ConfigError, match="the data is too short: 0 edits of it can be measured for train, 8 are needed"
    ):
        profile(settings, engine, data=file)
    assert engine.measured == []


def test_the_profile_holds_no_clock(settings: ProfileRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the engine times differs, and it does not come through."""
    plain = profile(settings, FakeEngine())
    settings.work_file.unlink()
    slow = FakeEngine()
    measure = slow.profile_pair

    def timed(*args: Any, **wanted: Any) -> dict[str, Any]:
        found = measure(*args, **wanted)
        for arm in found["arms"]:
            arm["first_token_ms"] *= 1000
        return found

    monkeypatch.setattr(slow, "profile_pair", timed)
    assert profile(settings, slow) == plain


def test_without_a_terminal_the_progress_is_lines(settings: ProfileRun) -> None:
    out = io.StringIO()
    profile(settings, FakeEngine(), console=Console(file=out, width=120))
    lines = [line.strip() for line in out.getvalue().splitlines() if " of " in line]
    assert lines == ["train: 10 of 15 edits", "train: 15 of 15 edits", "calibration: 9 of 9 edits"]


def test_a_pair_is_measured_for_each_model_and_each_thing_wanted(settings: ProfileRun) -> None:
    (pair, *_), _ = (part.pairs for part in choose_pairs([load_dataset()], render, settings))
    keys = {pair_key("m", pair, Wanted()), pair_key("m", pair, Wanted(blocks=1)), pair_key("n", pair, Wanted())}
    assert len(keys) == 3 and pair_key("m", pair, Wanted()) in keys
