"""`agentcache bench store`: its parts without an engine, and one run of all of them on a tiny model. Numbers are not judged here."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from agentcache import bench_store
from agentcache.bench_store import PARTS, StoreBench, run
from agentcache.bench_store_child import run_child
from agentcache.bench_store_episodes import EpisodePlan, token_bytes, write_episodes
from agentcache.bench_store_payload import bootstrap_interval, prompts, read_checkpoint
from agentcache.bench_store_report import print_summary, summarise
from agentcache.bench_store_timing import Window, decode_figures
from agentcache.episodes import diff_tokens
from agentcache.errors import AgentCacheError, ConfigError
from agentcache.kernels import PackedRun
from agentcache.samples import load_hotpot_sample
from agentcache.store.payloads import Payload, encode_payload
from agentcache.store.tiers import Manifest, ObjectEntry, StoredExtent, new_key
from agentcache.store.tiers.bench import EpisodeShape, fill_store, rows_as_payloads
from agentcache.store.tiers.disk import DiskStore
from agentcache.store.tiers.memory import MemoryStore
from tests.models import make_tiny

FINGERPRINT = {"model": "m"}


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=100)


# -- payload -----------------------------------------------------------------------------------------------------------


def packed(tag: str, tokens: int, size: int) -> PackedRun:
    return PackedRun(tag, tokens, torch.zeros(size, dtype=torch.uint8))


@pytest.fixture
def saved() -> MemoryStore:
    """A store with version `v`: 40 rows in two objects, the later rows' object listed first."""
    store = MemoryStore(1 << 20, fingerprint=FINGERPRINT)
    payloads = {
        new_key(): (32, Payload((packed("exact", 8, 800), packed("k8v4", 24, 960)), 0, np.zeros(32, dtype=np.uint8))),
        new_key(): (8, Payload((packed("k8v4", 8, 320),), 0, None)),
    }
    first, second = payloads
    draft = Manifest.draft(
        fingerprint=FINGERPRINT,
        namespace="n",
        version="v",
        token_ids=np.arange(40, dtype=np.int32),
        extents=[StoredExtent(first, 0, 32, 0), StoredExtent(second, 0, 8, 32)],
        objects=[ObjectEntry(key, payloads[key][0], 0, True, "mixed") for key in (second, first)],
        attention=np.zeros(40, dtype=np.uint8),
    )
    ticket = store.prepare(draft, 1 << 16)
    assert isinstance(ticket, str)
    for key, (_, payload) in payloads.items():
        store.put(ticket, key, 0, encode_payload(payload))
    assert isinstance(store.complete(ticket), Manifest)
    return store


def test_a_checkpoint_is_weighed_byte_by_byte(saved: MemoryStore) -> None:
    made = read_checkpoint(saved, "n", "v")
    assert (made.tokens, made.row_bytes, made.residual_bytes, made.attention_bytes) == (40, 2080, 32, 40)
    [stats] = saved.stats()
    assert made.row_bytes + made.residual_bytes + made.head_bytes == sum(stats["bytes_by_tag"].values())
    found = saved.find("n", "v")
    assert isinstance(found, Manifest)
    assert made.manifest_bytes + made.attention_bytes == len(found.encode())
    assert made.bytes == sum(stats["bytes_by_tag"].values()) + len(found.encode())


def test_its_precisions_are_told_in_the_order_of_the_rows(saved: MemoryStore) -> None:
    made = read_checkpoint(saved, "n", "v")
    assert made.runs == [("exact", 8), ("k8v4", 32)]
    assert made.tag_mix() == {"exact": 0.2, "k8v4": 0.8}


def test_a_checkpoint_that_is_not_there_is_an_error(saved: MemoryStore) -> None:
    with pytest.raises(AgentCacheError, match="'w' was not stored"):
        read_checkpoint(saved, "n", "w")
    saved._blobs.clear()
    with pytest.raises(AgentCacheError, match="is lost"):
        read_checkpoint(saved, "n", "v")


def test_prompts_are_real_questions_and_all_different() -> None:
    items = load_hotpot_sample()
    chats = [*prompts(items, 50)]
    texts = [chat[0]["content"] for chat in chats]
    assert len({*texts}) == 50
    for number, text in enumerate(texts):
        item = items[number % len(items)]
        assert text.endswith(f"Question: {item.question}")
        assert all(paragraph.text in text for paragraph in item.paragraphs)


def test_the_interval_of_a_mean_holds_it_and_narrows_with_the_sample() -> None:
    rng = np.random.default_rng(1)
    few, many = (bootstrap_interval(rng.exponential(size=n)) for n in (10, 1000))
    assert few[0] < few[1]
    assert many[0] < 1 < many[1]
    assert many[1] - many[0] < few[1] - few[0]
    assert bootstrap_interval([2.0, 2.0]) == [2.0, 2.0]


# -- decode ------------------------------------------------------------------------------------------------------------


def window(gaps: list[float], *, saw_save: bool = True) -> Window:
    return Window(len(gaps), gaps, 0.1, saw_save)


def test_decode_steps_are_compared_at_their_95th_percentile() -> None:
    idle, save = [10.0] * 99 + [20.0], [10.0] * 90 + [30.0] * 10
    made = decode_figures({"save": [[window(save)], [window(save)]], "idle": [[window(idle)], [window(idle)]]})
    assert made["p95_ratio"] == 3.0
    assert made["p95_ratio_by_rep"] == [3.0, 3.0]
    assert made["steps"] == {"save": 200, "idle": 200}
    assert made["step_p50_ms"] == {"save": 10.0, "idle": 10.0}
    assert (made["saves"], made["saves_seen_open"]) == (2, 2)


def test_a_bench_that_saw_no_save_says_so() -> None:
    none = [[window([1.0], saw_save=False)]]
    with pytest.raises(AgentCacheError, match="no save was open"):
        decode_figures({"save": none, "idle": none})


# -- episodes ----------------------------------------------------------------------------------------------------------


def test_each_version_of_an_episode_changes_one_span() -> None:
    text = np.random.default_rng(0).integers(0, 5000, 3000).tolist()
    shape = EpisodeShape(200, 3, 16)
    episodes = write_episodes(text, 4, shape, seed=0)
    assert len({tuple(e.prompts[0]) for e in episodes}) == 4
    for episode in episodes:
        assert [len(prompt) for prompt in episode.prompts] == [200] * 4
        for old, new in zip(episode.prompts, episode.prompts[1:], strict=False):
            differing = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
            assert differing[-1] - differing[0] == 15
            assert diff_tokens(old, new).prefix == differing[0]
        at = next(i for i in range(len(text)) if text[i : i + 200] == episode.prompts[0])
        assert episode.turn == text[at + 200 : at + 200 + len(episode.turn)]


def test_a_text_that_is_too_short_for_the_episodes_is_an_error() -> None:
    with pytest.raises(AgentCacheError, match="has no 50 windows"):
        write_episodes(list(range(300)), 50, EpisodeShape(256, 1, 8), seed=0)


def test_distinct_tokens_are_counted_without_what_frames_them() -> None:
    assert token_bytes("exact", 30, 3, 64, 2) == 23_040
    assert token_bytes("k8v4", 30, 3, 64, 2) == 9000 == token_bytes("k8v4", 30, 3, 64, 4)
    plan = EpisodePlan("m", Path("f"), episodes=10, real=2, shape=EpisodeShape(100, 5, 10))
    assert plan.made_up == 6
    assert plan.distinct_bytes(1.0, 1000.0) == 8 * 150 + 2 * 110 * 1000


def test_a_store_is_opened_and_memory_is_filled_in_other_processes(tmp_path: Path) -> None:
    shape = EpisodeShape(64, 2, 32)
    rows = np.random.default_rng(0).integers(0, 256, (500, 100), dtype=np.uint8)
    folder = tmp_path / "store"
    with DiskStore(folder, 1 << 30, fsync=False, fingerprint=FINGERPRINT) as store:
        fill_store(store, rows_as_payloads(rows), shape, 3, fingerprint=FINGERPRINT, tag="k8v4")
    at = {"folder": str(folder), "namespace": "bench"}
    opened = run_child("open", {**at, "version": "0.0.2", "fingerprint": FINGERPRINT})
    assert opened["versions"] == 9
    assert 0 < opened["open_s"] < opened["process_s"]
    seen: list[int] = []
    wanted = {"versions": ["0.0.0", "0.0.1"], "shape": {"tokens": 64, "edits": 2, "changed": 32}, "tag": "k8v4"}
    memory = run_child("memory", {**at, **wanted, "episodes": 4}, seen.append)
    assert memory["versions"] == 12
    assert memory["accounted_bytes"] > 4 * shape.distinct_tokens * 100
    assert seen == [1, 2, 3, 4]


def test_a_process_that_fails_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(AgentCacheError, match="nowhere"):
        run_child("open", {"folder": str(tmp_path / "nowhere"), "namespace": "n", "version": "v", "fingerprint": {}})


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that are measured, in place of their measuring."""
    measured: list[str] = []

    def part(self: Any, name: str) -> dict[str, Any]:
        measured.append(name)
        return MEASURED[name]

    monkeypatch.setattr(bench_store._Bench, "part", part)
    return measured


def _times(ms: float) -> dict[str, Any]:
    return {"aligned0": {"p50": ms}, "shifted": {"p50": 2 * ms}}


MEASURED: dict[str, dict[str, Any]] = {
    "payload": {
        "payload_ratio": 0.42,
        "tokens": 8000,
        "tag_mix": {"exact": 0.1, "k8v4": 0.9},
        "kl": {"mixed": {"mean": 0.003, "interval": [0.002, 0.005]}},
    },
    "decode": {"p95_ratio": 1.1},
    "resume": {"rows": {"k8v4": {"ratio_to_exact": 1.02}}},
    "restore": {
        "tokens": 4096,
        "restore_ms": {tag: _times(3.0) for tag in ("exact", "k8v4", "mixed")},
        "share": {tag: {"aligned0": 0.8, "shifted": 0.4} for tag in ("exact", "k8v4", "mixed")},
        "copy_ms": {"p50": 2.5},
        "isa": "vec",
    },
    "episodes": {
        "paused_episodes": 1000,
        "bytes": {"disk": 105, "memory": 103},
        "distinct_bytes": {"disk": 100, "memory": 100},
        "bytes_ratio": {"disk": 1.05, "memory": 1.03},
        "open_s": 1.5,
        "resumed_episodes": 50,
        "resumed_correct": 50,
    },
}
SMALL = StoreBench("m", episodes=8, real=2)


def test_the_json_has_the_fields_that_are_promised(parts: list[str], console: Console, tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    run(SMALL, json_path=path, folder=tmp_path, console=console)
    made = json.loads(path.read_text())
    assert parts == [*PARTS]
    assert made["restore_ms"] == {"exact": 6.0, "k8v4": 6.0, "mixed": 6.0}
    promised = {
        "payload_ratio": 0.42,
        "kl_mean": 0.003,
        "kl_interval": [0.002, 0.005],
        "copy_ms": 2.5,
        "decode_p95_ratio": 1.1,
        "resume_ttft_ratio": 1.02,
        "paused_episodes": 1000,
        "bytes": {"disk": 105, "memory": 103},
        "distinct_bytes": {"disk": 100, "memory": 100},
        "open_s": 1.5,
        "resumed_episodes": 50,
        "resumed_correct": 50,
    }
    assert promised.items() <= made.items()
    assert {"model", "data", "settings", "versions", "hardware", "parts", "tag_mix"} <= made.keys()
    assert [*tmp_path.iterdir()] == [path]


def test_parts_that_were_not_measured_are_none(parts: list[str], console: Console, tmp_path: Path) -> None:
    made = run(SMALL, parts=["decode"], folder=tmp_path, console=console)
    assert parts == ["decode"]
    assert made["decode_p95_ratio"] == 1.1
    assert made["payload_ratio"] is made["restore_ms"] is made["resume_ttft_ratio"] is made["bytes"] is None


def test_a_run_that_was_cut_off_goes_on_where_it_was(
    parts: list[str], console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.json"
    whole = MEASURED["resume"]
    monkeypatch.delitem(MEASURED, "resume")
    with pytest.raises(KeyError):
        run(SMALL, json_path=path, folder=tmp_path, console=console)
    assert {*json.loads(path.read_text())["parts"]} == {"payload", "decode"}
    monkeypatch.setitem(MEASURED, "resume", whole)
    del parts[:]
    made = run(SMALL, json_path=path, resume=True, folder=tmp_path, console=console)
    assert parts == ["resume", "restore", "episodes"]
    assert made["decode_p95_ratio"] == 1.1
    assert made == json.loads(path.read_text())


def test_without_resume_everything_is_measured_anew(parts: list[str], console: Console, tmp_path: Path) -> None:
    for _ in range(2):
        run(SMALL, parts=["decode"], json_path=tmp_path / "store.json", folder=tmp_path, console=console)
    assert parts == ["decode", "decode"]


@pytest.mark.parametrize("text", ["no json", "[]", '{"parts": 3}'])
def test_a_file_of_something_else_is_not_gone_on_with(
    text: str, parts: list[str], console: Console, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not what this command has written"):
        run(SMALL, json_path=path, resume=True, folder=tmp_path, console=console)
    assert parts == []
    assert path.read_text() == text


def test_a_file_of_other_settings_is_not_gone_on_with(parts: list[str], console: Console, tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    run(SMALL, parts=["decode"], json_path=path, folder=tmp_path, console=console)
    with pytest.raises(ConfigError, match="has other settings than this run"):
        run(StoreBench("m", episodes=9, real=2), json_path=path, resume=True, folder=tmp_path, console=console)


@pytest.mark.parametrize(
    ("settings", "chosen", "why"),
    [
        (SMALL, ["payload", "speed"], "give some of payload, decode"),
        (SMALL, [], "give some of"),
        (StoreBench("m", episodes=3, real=2), ["episodes"], "give at least 4"),
        (StoreBench("m", episodes=10_000_000, real=2), ["episodes"], "GB of disk"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_starts(
    settings: StoreBench, chosen: list[str], why: str, parts: list[str], console: Console, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        run(settings, parts=chosen, folder=tmp_path, console=console)
    assert parts == []


def test_too_little_memory_is_known_before_it_starts(
    parts: list[str], console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_store, "_available_bytes", lambda: 1 << 30)
    with pytest.raises(ConfigError, match="GB of memory"):
        run(SMALL, folder=tmp_path, console=console)
    run(SMALL, parts=["payload"], folder=tmp_path, console=console)
    assert parts == ["payload"]


def test_the_table_puts_what_was_measured_beside_the_goal(console: Console) -> None:
    print_summary(summarise({"model": "m", "parts": MEASURED}), console)
    out = console.file.getvalue()
    for text in (
        "0.420",
        "≤ 0.45",
        "0.0030",
        "1.10×",
        "1.02×",
        "1.25×",
        "40%",
        "6.0 ms",
        "1.050",
        "1.50 s",
        "50 of 50",
    ):
        assert text in out
    assert "in memory" in out


@pytest.mark.engine
def test_the_payload_part_runs_on_a_tiny_model(
    tmp_path: Path, console: Console, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = str(make_tiny("llama", tmp_path_factory.mktemp("bench") / "llama"))
    settings = StoreBench(model, tokens=300, prompts=1, context=256, steps=4, reps=1)
    made = run(settings, parts=["payload"], folder=tmp_path, console=console)
    assert made["parts"]["payload"]["tokens"] == 300
    assert made["kl_mean"] >= 0
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == []


@pytest.mark.slow
@pytest.mark.engine
def test_every_part_runs_on_a_tiny_model(
    tmp_path: Path, console: Console, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_store, "_available_bytes", lambda: 1 << 40)
    model = str(make_tiny("llama", tmp_path_factory.mktemp("bench") / "llama"))
    settings = StoreBench(model, tokens=300, prompts=1, context=256, steps=4, reps=1, episodes=5, real=1)
    path = tmp_path / "store.json"
    run(settings, json_path=path, folder=tmp_path, console=console)
    made = json.loads(path.read_text())
    payload, decode, resume, restore, episodes = (made["parts"][p] for p in PARTS)
    assert payload["tokens"] == 300
    assert sum(payload["tag_mix"].values()) == pytest.approx(1, abs=1e-3)
    assert payload["kl"]["exact"]["mean"] < 1e-3
    assert payload["bytes"] > payload["row_bytes"] + payload["attention_bytes"] >= payload["row_bytes"] + 300
    assert min(decode["steps"].values()) >= 4
    assert decode["saves_seen_open"] > 0
    assert {arm: row["recomputed_tokens"] for arm, row in resume["rows"].items()} == dict.fromkeys(resume["rows"], 72)
    assert restore["tokens"] == 256
    assert set(made["restore_ms"]) == {"exact", "k8v4", "mixed"}
    assert episodes["versions"] == 4 * 11 + 2
    assert (made["resumed_episodes"], made["resumed_correct"]) == (1, 1)
    assert (episodes["resumed_bulk_whole"], episodes["not_correct"]) == (1, [])
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == []
