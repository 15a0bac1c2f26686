"""The parts of `agentcache bench store` that need no engine: what is weighed, compared and written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentcache.bench_store_child import run_child
from agentcache.bench_store_episodes import EpisodePlan, token_bytes, write_episodes
from agentcache.bench_store_payload import bootstrap_interval, prompts, read_checkpoint
from agentcache.bench_store_timing import Window, decode_figures
from agentcache.episodes import diff_tokens
from agentcache.errors import AgentCacheError
from agentcache.kernels import PackedRun
from agentcache.samples import load_hotpot_sample
from agentcache.store.payloads import Payload, encode_payload
from agentcache.store.tiers import Manifest, ObjectEntry, StoredExtent, new_key
from agentcache.store.tiers.bench import EpisodeShape, fill_store, rows_as_payloads
from agentcache.store.tiers.disk import DiskStore
from agentcache.store.tiers.memory import MemoryStore

FINGERPRINT = {"model": "m"}


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
