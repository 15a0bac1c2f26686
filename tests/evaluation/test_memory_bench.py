"""What a question asks of the engine: chunks once each, freed with their memory, every arm from the same state. No engine."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agentcache.errors import AgentCacheError, ConfigError
from agentcache.evaluation import memory as memory_module
from agentcache.evaluation.memory import MemoryRun, ask_all, select_units
from agentcache.evaluation.memory_arms import FULL, arms_of
from agentcache.evaluation.memory_data import MemorySet, choose, load_memories
from agentcache.profiling.model import ModelFingerprint
from agentcache.reply import RecoveryReport, Reply
from agentcache.work_file import WorkFile

MODEL = ModelFingerprint(
    name="tiny", architecture="T", layers=2, kv_heads=1, head_dim=8, dtype="float32", hash="ab" * 16
)
ARMS = tuple(arms_of(["cacheblend", "epic"], [0.1], ["exact", "k8v4"]))


class FakeEpisode:
    def __init__(self, cache: FakeCache, name: str) -> None:
        self.cache, self.name = cache, name

    def generate(self, messages: Any, **options: Any) -> Reply:
        self.cache.asked.append((self.name, options))
        if not options.get("save", True):
            assert self.cache.emptied, "an arm begins with what the arm before has left"
        self.cache.emptied = False
        recovery = RecoveryReport(saved="pending", lost_sources=self.cache.lost)
        if options.get("sources"):
            recovery = recovery.model_copy(update={"source_tokens": 90, "suffix_tokens": 100, "recompute_ratio": 0.1})
        self.cache.kept.add(self.name)
        return Reply(
            "yes", [7, 8], "stop", 120, 0, 5.0, version=self.name, recovery=recovery, logprobs=[{7: -0.1, 8: -3.0}]
        )

    def drop(self) -> None:
        self.cache.kept.discard(self.name)


class FakeCache:
    """Remembers what is asked of it; its tokenizer takes words for tokens."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.kept: set[str] = set()
        self.encoded: list[str] = []
        self.lost: list[str] = []
        self.emptied = False
        self.config = SimpleNamespace(connector=SimpleNamespace(precision="exact"))
        self.tokenizer = SimpleNamespace(encode=lambda text, **_: list(range(len(text.split()))))

    def __enter__(self) -> FakeCache:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def render(self, messages: Any) -> Any:
        words = " ".join(message["content"] for message in messages).split()
        return SimpleNamespace(token_ids=np.arange(len(words)))

    def episode(self, name: str) -> FakeEpisode:
        return FakeEpisode(self, name)

    def encode_chunk(self, ids: list[int]) -> str:
        name = f"chunk-{len(self.encoded)}"
        self.encoded.append(name)
        self.kept.add(name)
        return name

    def drop_chunk(self, name: str) -> None:
        self.kept.remove(name)

    def stats(self) -> dict[str, Any]:
        return {"engine": {"dtype": "float32"}}

    def flush(self) -> bool:
        return True

    def reset_prefix_cache(self) -> bool:
        self.emptied = True
        return True

    def probe(self, name: str, *args: Any) -> dict[str, Any]:
        prompt, chunks, how = args
        return {"asked": name, "chunks": len(chunks), "prompt": len(prompt), **how}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> FakeCache:
    made = FakeCache()
    monkeypatch.setattr(memory_module, "open_cache", lambda *_: made)
    return made


def asked_of(data: MemorySet, tmp_path: Path, count: int = 3, **changes: Any) -> tuple[Any, MemoryRun]:
    settings = MemoryRun("m", tmp_path / "m.json", ARMS, units=4, shift_items=1, **changes)
    return select_units(data, choose(data, count, 0), settings), settings


def run(asked: Any, settings: MemoryRun, data: MemorySet) -> Any:
    work = WorkFile(settings.out.with_suffix(".work.jsonl"))
    return ask_all(data, asked, settings, MODEL, Path("m"), work, Console(file=io.StringIO()))


def test_each_unit_is_encoded_once_a_precision_and_freed_with_its_memory(cache: FakeCache, tmp_path: Path) -> None:
    data = load_memories()  # each question has its own memory
    rows, _ = run(*(asked_of(data, tmp_path)), data)
    assert len(cache.encoded) == 3 * 4
    stored = [options for _, options in cache.asked if options.get("precision") == "k8v4"]
    assert len(stored) == 3 * 4 and all(options["max_tokens"] == 1 for options in stored)
    assert len(cache.kept) == 2 * 4, "the last question's, in both precisions"
    assert [row["units"] for row in rows] == [4] * 3


def test_every_arm_starts_from_an_empty_prefix_cache_and_another_one_begins_each_time(
    cache: FakeCache, tmp_path: Path
) -> None:
    data = load_memories()
    rows, _ = run(*(asked_of(data, tmp_path)), data)
    arms = [(name.rsplit("/", 1)[1], options) for name, options in cache.asked if not options.get("save", True)]
    warm, arms = arms[: len(ARMS)], arms[len(ARMS) :]
    assert [(name, options["max_tokens"]) for name, options in warm] == [(arm.name, 1) for arm in ARMS]
    first = [arms[at * len(ARMS)][0] for at in range(3)]
    assert first == [arm.name for arm in ARMS[:3]]
    for name, options in arms:
        assert len(options["sources"]) == (0 if name == FULL else 4)
        assert options["policy"] == {"f": "prefix_cache", "c": "cacheblend", "e": "epic"}[name[0]]
        assert options["stop"] == ["\n"] and options["salt"] == name
    by_name = rows[0]["arms"]
    assert (by_name[FULL]["recompute_ratio"], by_name["epic r=0.1"]["recompute_ratio"]) == (1.0, 0.1)
    assert by_name["epic r=0.1"]["kl"] == 0, "all arms say the same"


def test_rows_hold_no_text(cache: FakeCache, tmp_path: Path) -> None:
    data = load_memories()
    asked, settings = asked_of(data, tmp_path)
    run(asked, settings, data)
    text = settings.out.with_suffix(".work.jsonl").read_text()
    for each in asked:
        assert each.question.id in text
        assert not any(part in text for part in (each.question.text, *(unit.text[:40] for unit in each.units)))
        assert all(len(answer) < 5 or answer not in text for answer in each.question.answers)


def test_the_shift_is_probed_for_some_questions_at_each_share_and_block_precision(
    cache: FakeCache, tmp_path: Path
) -> None:
    data = load_memories()
    _, shifts = run(*(asked_of(data, tmp_path)), data)
    assert [(s["share"], s["precision"]) for s in shifts] == [(r, p) for r in (0.1, 0.3) for p in ("exact", "k8v4")]
    assert {(s["asked"], s["chunks"], s["tag"]) for s in shifts} == {("shift", 4, "exact"), ("shift", 4, "k8v4")}
    assert [s["options"] for s in shifts[:2]] == [{"share": 0.1}] * 2


def test_what_was_measured_is_not_measured_again_and_more_questions_go_on(cache: FakeCache, tmp_path: Path) -> None:
    data = load_memories()
    first = run(*(asked_of(data, tmp_path)), data)
    calls = len(cache.asked)
    assert run(*(asked_of(data, tmp_path)), data) == first and len(cache.asked) == calls
    more, _ = run(*(asked_of(data, tmp_path, count=5)), data)
    ids = {row["id"] for row in first[0]}
    assert len(more) == 5 and ids < {row["id"] for row in more}
    full = [options["max_tokens"] for name, options in cache.asked if name.endswith(FULL)]
    assert full.count(16) == 5 and full.count(1) == 2, "each engine warms up once"


def test_a_lost_chunk_and_a_prompt_that_is_too_long_are_errors(cache: FakeCache, tmp_path: Path) -> None:
    data = load_memories()
    asked, settings = asked_of(data, tmp_path, max_model_len=100)
    with pytest.raises(ConfigError, match=r"tokens, 84 fit; take fewer --units"):
        run(asked, settings, data)
    cache.lost = ["chunk-0"]
    asked, settings = asked_of(data, tmp_path)
    with pytest.raises(AgentCacheError, match=r"1 chunks of .* are gone: .*--host-gib"):
        run(asked, settings, data)
