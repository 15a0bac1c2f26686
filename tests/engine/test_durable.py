"""A durable tier below memory, on the engine: versions go down after their save, and come back when memory lacks them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from agentcache.engine.wire import ResumeParams
from agentcache.store.tiers import Manifest, open_store
from tests.engine.harness import NEW, OLD, assert_exact, first_version, lossy, text

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Returns the store of this module's tests, each of which finds it empty."""
    return f"disk://{tmp_path_factory.mktemp('durable') / 'store'}"


@pytest.fixture
def start(start_engine, tiny, url):
    """Returns what gives an engine over the store whose memory is empty, as after a start; `anew` really starts one."""

    def new(model: str = "llama", *, anew: bool = False, **extra):
        if anew:
            start_engine.stop()
        return start_engine(tiny(model), extra={"store": url, **extra})

    with open_store(url) as store:
        for info in store.versions():
            assert store.delete(info.namespace, info.version) is True
    return new


def stored(url: str, version: str) -> Manifest:
    with open_store(url) as store:
        found = store.find("default", version)
    assert isinstance(found, Manifest), found
    return found


def test_a_version_goes_down_after_its_save(start, url):
    engine = start()
    answer = first_version(engine)
    found = stored(url, "v1")
    version = engine.version("v1")
    assert found.token_ids.tolist() == version.token_ids.tolist() == [*OLD, *answer.tokens[:-1]]
    assert found.exact_end == version.exact_end == len(version.token_ids)
    assert [tuple(e)[1:] for e in found.extents] == [tuple(e)[1:] for e in version.extents]
    assert engine.half.tier.open_saves == 0
    engine.check()


def test_a_child_stores_only_its_own_rows_below(start, url):
    engine = start()
    first_version(engine)
    engine.ask(NEW, lossy("v2"))
    parent, child = stored(url, "v1"), stored(url, "v2")
    shared = {e.key: e.parts for e in parent.objects}
    assert any(e.key in shared for e in child.objects)
    assert all(e.parts == shared[e.key] for e in child.objects if e.key in shared)
    rows = sum(e.tokens for e in child.objects if e.key not in shared)
    assert rows == engine.version("v2").token_ids.size - sum(e.length for e in child.extents if e.key in shared)
    assert rows < len(NEW) // 2


@pytest.mark.parametrize("policy", ["prefix_cache", "edit_local"])
def test_a_new_engine_resumes_what_an_earlier_one_stored(start, url, policy, reference):
    engine = start()
    first_version(engine)
    want = engine.ask(NEW, ResumeParams(version="v2", parent="v1", policy=policy))
    engine = start(anew=policy == "prefix_cache")
    assert engine.version("v1") is None
    again = engine.ask(NEW, ResumeParams(version="v3", parent="v1", policy=policy))
    assert again.recovery.reason is None
    assert again.recovery.tier == "store"
    assert again.recovery.fetch_ms > 0
    for name in ("prefix_tokens", "fresh_tokens", "repair_tokens", "reused_tokens", "exact"):
        assert getattr(again.recovery, name) == getattr(want.recovery, name), name
    assert again.recovery.restored_tokens >= again.recovery.reused_tokens
    assert again.tokens == want.tokens
    if policy == "prefix_cache":
        assert_exact(reference, again)
    assert stored(url, "v3").parent == "v1"
    engine.check()


def test_a_version_that_memory_evicted_comes_back(start, reference):
    engine = start(host_bytes=1_200_000)
    first_version(engine)
    assert 310 * engine.half.index.bytes_per_token < 1_200_000 < 2 * 300 * engine.half.index.bytes_per_token
    first_version(engine, "other", text(300, seed=5))
    assert engine.version("v1") is None
    engine.forget_local()
    answer = engine.ask(NEW, ResumeParams(version="v2", parent="v1"))
    assert answer.recovery.reason is None
    assert answer.recovery.restored_tokens == 100
    assert_exact(reference, answer)
    engine.check()


def test_two_children_of_a_stored_version_share_one_fetch(start, reference):
    engine = start()
    first_version(engine)
    engine.ask(NEW, ResumeParams(version="v2", parent="v1", policy="edit_local"))
    engine = start()
    one = engine.add(NEW, lossy("a", parent="v1"))
    two = engine.add(NEW, lossy("b", parent="v2"))
    three = engine.add(NEW, ResumeParams(version="c", parent="v1"))
    engine.run()
    engine.drain()
    assert [a.recovery.reason for a in (one, two, three)] == [None] * 3
    assert one.tokens == two.tokens
    assert_exact(reference, three)
    engine.check()


def test_an_unknown_parent_is_sought_and_served_exactly(start, reference):
    engine = start()
    answer = engine.ask(NEW, lossy("v2", parent="never"))
    assert "unknown" in answer.recovery.reason
    assert answer.recovery.exact
    assert_exact(reference, answer)
    assert engine.version("v2").exact_end == len(answer.ids) - 1
    engine.check()


def test_a_request_that_ends_while_its_parent_is_sought_leaves_nothing(start):
    engine = start()
    first_version(engine)
    engine = start()
    gone = engine.add(NEW, lossy("v2"))
    engine.abort(gone)
    engine.drain()
    engine.check()


def test_another_model_is_refused_with_the_reason(start):
    first_version(start())
    other = start("qwen3")
    answer = other.ask(NEW, lossy("v2"))
    assert "another engine" in answer.recovery.reason
    assert answer.recovery.exact
    other.check()


def test_lossy_rows_from_below_stay_approximate(start, reference):
    engine = start(precision="k8v4")
    first_version(engine)
    engine = start(precision="k8v4")
    exact = engine.ask(NEW, ResumeParams(version="v2", parent="v1"))
    assert exact.recovery.exact
    assert exact.recovery.restored_tokens == 0
    assert_exact(reference, exact)
    engine.forget_local()
    reused = engine.ask(NEW, lossy("v3", parent="v1"))
    assert not reused.recovery.exact
    assert reused.recovery.restored_tokens > 100
    plain = engine.ask(NEW)
    assert_exact(reference, plain)
    engine.check()


def test_a_version_that_will_be_resumed_is_evicted_last(start_engine, tiny):
    engine = start_engine(tiny("llama"), extra={"host_bytes": 1_400_000})  # two versions of 307 rows, and no third
    for name, hinted in (("a", None), ("b", "a"), ("c", None)):
        if hinted is not None:
            engine.llm.collective_rpc("agentcache_hint", args=("default", hinted))
        first_version(engine, name, text(300, seed=len(name) + ord(name)))
    assert engine.version("a") is not None, "it was used least recently, but hinted at"
    assert engine.version("b") is None
    assert engine.version("c") is not None
    engine.check()


def test_a_hint_fetches_ahead(start, url):
    engine = start()
    first_version(engine)
    engine = start()
    engine.llm.collective_rpc("agentcache_hint", args=("default", "v1"))
    tier = engine.worker.tier
    tier._up.flush()
    assert len(tier._warm) == len(stored(url, "v1").objects)
    reads = tier.store.stats()[0]["lost"]
    answer = engine.ask(NEW, lossy("v2"))
    assert answer.recovery.reason is None
    assert not tier._warm
    assert tier.store.stats()[0]["lost"] == reads
    engine.check()
