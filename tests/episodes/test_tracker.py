import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from agentcache.episodes.tracker import EpisodeTracker
from agentcache.errors import ConfigError, UnknownVersionError
from agentcache.events import EventBus, PromptRevised
from agentcache.types import AlignedRun, RevisionKind

A, B, C, D = (list(range(1000 * i, 1000 * i + 50)) for i in range(1, 5))


@pytest.fixture
def tracker():
    numbers = itertools.count(1)
    return EpisodeTracker(new_id=lambda: f"v{next(numbers)}", clock=lambda: 7.0)


def test_the_first_prompt_of_an_episode_has_no_parent(tracker):
    revision = tracker.record("e", A)
    assert (revision.version, revision.parent, revision.kind) == ("v1", None, RevisionKind.FIRST)
    assert (revision.diff.old_len, revision.diff.new_len, revision.diff.aligned) == (0, 50, ())
    tracker.check_integrity()


def test_the_next_prompt_is_compared_with_the_head(tracker):
    tracker.record("e", A + B + C)
    revision = tracker.record("e", A + D + C)
    assert (revision.parent, revision.kind) == ("v1", RevisionKind.OTHER)
    assert revision.diff.aligned == (AlignedRun(0, 0, 50), AlignedRun(100, 100, 50))
    assert tracker.head("e").version_id == "v2"


def test_prompt_and_reply_are_the_old_side_of_the_next_diff(tracker):
    tracker.record("e", A)
    tracker.finish("v1", B)
    revision = tracker.record("e", A + B + C)
    assert revision.kind == RevisionKind.APPEND
    assert revision.diff.prefix == 100


def test_what_has_no_kv_is_not_on_the_old_side(tracker):
    tracker.record("e", A)
    tracker.finish("v1", B, computed=70)
    assert tracker.record("e", A + B).diff.aligned == (AlignedRun(0, 0, 70),)
    tracker.finish("v2", [], computed=10)
    assert tracker.record("e", A + B).diff.prefix == 10


def test_an_explicit_parent_is_compared_with_instead(tracker):
    tracker.record("e", A)
    tracker.record("e", B)
    revision = tracker.record("e", A + C, parent="v1")
    assert (revision.parent, revision.kind) == ("v1", RevisionKind.APPEND)
    assert [v.version_id for v in tracker.lineage("v3")] == ["v1", "v3"]
    assert [v.version_id for v in tracker.history("e")] == ["v1", "v2", "v3"]
    tracker.check_integrity()


def test_a_fork_goes_its_own_way(tracker):
    tracker.record("e", A)
    tracker.record("e", A + B)
    branch = tracker.fork("e", "v1", name="branch")
    assert branch == "branch"
    assert tracker.record("branch", A + C).parent == "v1"
    assert [v.version_id for v in tracker.history("branch")] == ["v1", "v3"]
    assert tracker.head("e").version_id == "v2"
    tracker.check_integrity()


def test_forks_get_names_of_their_own(tracker):
    tracker.record("e", A)
    assert len({tracker.fork("e", "v1"), tracker.fork("e", "v1"), "e"}) == 3


def test_a_fork_outlives_the_episode_that_it_came_from(tracker):
    for prompt in (A, A + B, A + B + C):
        tracker.record("e", prompt)
    tracker.fork("e", "v2", name="f")
    assert set(tracker.drop("e")) == {"v3"}
    assert [v.version_id for v in tracker.history("f")] == ["v1", "v2"]
    tracker.check_integrity()
    assert set(tracker.drop("f")) == {"v1", "v2"}
    tracker.check_integrity()
    assert tracker.episodes() == ()


def test_dropping_an_unknown_episode_is_no_error(tracker):
    assert tracker.drop("nobody") == ()


def test_replies_of_a_lineage_come_oldest_first(tracker):
    tracker.record("e", A)
    tracker.finish("v1", B)
    tracker.record("e", A + B + C)
    tracker.record("e", A + B + C + D)
    tracker.finish("v3", [1, 2])
    assert [r.tolist() for r in tracker.replies("v3")] == [B, [1, 2]]


def test_attributes_are_kept_and_cannot_be_changed(tracker):
    given = {"checkpoint_id": "c1"}
    tracker.record("e", A, attributes=given)
    given["checkpoint_id"] = "c2"
    version = tracker.version("v1")
    assert version.attributes == {"checkpoint_id": "c1"}
    assert version.created_s == 7.0
    with pytest.raises(TypeError):
        version.attributes["x"] = 1


def test_ids_are_copied_and_read_only(tracker):
    prompt = np.array(A, np.int32)
    tracker.record("e", prompt)
    prompt[:] = 0
    version = tracker.version("v1")
    assert version.token_ids.tolist() == A
    assert version.token_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        version.token_ids[0] = 1


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "a\x00b", "ü" * 500])
def test_any_text_names_an_episode(tracker, name):
    assert tracker.record(name, A).episode == name
    assert tracker.history(name)[0].token_ids.tolist() == A


def test_unknown_versions_and_episodes_are_named(tracker):
    tracker.record("e", A)
    with pytest.raises(UnknownVersionError, match="no version 'x'"):
        tracker.record("e", B, parent="x")
    with pytest.raises(UnknownVersionError, match="no version 'x'"):
        tracker.finish("x", [])
    with pytest.raises(UnknownVersionError, match="no episode 'x'"):
        tracker.history("x")
    with pytest.raises(UnknownVersionError, match="episode 'e' has no version 'x'"):
        tracker.fork("e", "x")
    assert tracker.head("x") is None
    assert [v.version_id for v in tracker.history("e")] == ["v1"]
    tracker.check_integrity()


def test_a_fork_of_a_name_that_is_taken_is_refused(tracker):
    tracker.record("e", A)
    with pytest.raises(ConfigError, match="'e' already"):
        tracker.fork("e", "v1", name="e")
    tracker.check_integrity()


@pytest.mark.parametrize("computed", [-1, 101])
def test_more_computed_than_there_is_is_refused(tracker, computed):
    tracker.record("e", A)
    with pytest.raises(ConfigError, match=f"computed={computed}"):
        tracker.finish("v1", B, computed=computed)


@pytest.mark.parametrize("ids", [[-1], [2**31], ["a"], [[1]]])
def test_what_is_no_token_id_is_refused(tracker, ids):
    with pytest.raises(ConfigError, match="token ids must"):
        tracker.record("e", ids)
    assert tracker.episodes() == ()


def test_version_ids_that_repeat_are_refused():
    tracker = EpisodeTracker(new_id=lambda: "same")
    tracker.record("e", A)
    with pytest.raises(ConfigError, match="twice"):
        tracker.record("e", B)
    tracker.check_integrity()


def test_version_ids_are_unique_by_default():
    tracker = EpisodeTracker()
    assert len({tracker.record(f"e{i % 3}", A).version for i in range(50)}) == 50


def test_an_append_only_chain_keeps_one_array(tracker):
    prompt = A * 20
    tracker.record("e", prompt)
    for i in range(2, 30):
        tracker.finish(f"v{i - 1}", B)
        prompt = prompt + B + C
        tracker.record("e", prompt)
    history = tracker.history("e")
    buffers = {id(array.base): array.base.nbytes for v in history for array in (v.token_ids, v.generated)}
    assert sum(buffers.values()) <= 3 * 1.5 * history[-1].token_ids.nbytes
    assert [v.generated.tolist() for v in history[:-1]] == [B] * 28
    assert [len(v.token_ids) for v in history] == [1000 + 100 * i for i in range(29)]


def test_messages_of_a_long_history_are_kept_once(tracker, renderer):
    chat = [{"role": "user", "content": f"hello {i}"} for i in range(20)]
    first, second = renderer("chatml").render(chat), renderer("chatml").render([*chat, chat[0]])
    tracker.record("e", first)
    revision = tracker.record("e", second)
    assert all(a is b for a, b in zip(first.spans, revision.spans, strict=False))


def test_dropped_versions_are_freed(tracker):
    tracker.record("e", A)
    gone = weakref.ref(tracker.version("v1").token_ids.base)
    tracker.drop("e")
    gc.collect()
    assert gone() is None


def test_a_rendered_edit_is_aligned_by_messages_and_classified(tracker, renderer):
    def chat(result, *more):
        return renderer("chatml").render(
            [
                {"role": "system", "content": "the capital of france is paris " * 5},
                {"role": "user", "content": "hello " * 12},
                {"role": "tool", "content": result, "tool_call_id": "c"},
                {"role": "user", "content": "said the tool result " * 5},
                *more,
            ]
        )

    tracker.record("e", chat("madrid " * 9))
    revision = tracker.record("e", chat("[cleared]", {"role": "user", "content": "world"}))
    assert revision.kind == RevisionKind.TOOL_RESULT
    assert revision.diff.aligned[0].new_stop > revision.spans[2].start
    assert revision.diff.aligned[1].new_start < revision.spans[3].start
    assert revision.diff.aligned[1].new_stop >= revision.spans[3].stop
    assert [s.message_id for s in revision.spans] == [None, None, "c", None, None]


def test_each_version_is_told_to_the_bus():
    bus, seen = EventBus(), []
    bus.subscribe(seen.append)
    numbers = itertools.count(1)
    tracker = EpisodeTracker(bus, new_id=lambda: f"v{next(numbers)}", clock=lambda: 7.0)
    tracker.record("e", A)
    tracker.record("e", A + B)
    assert [(e.version, e.parent, e.kind, e.prefix, e.old_len, e.new_len) for e in seen] == [
        ("v1", None, "first", 0, 0, 50),
        ("v2", "v1", "append", 50, 50, 100),
    ]
    assert isinstance(seen[1], PromptRevised)
    assert (seen[1].aligned, seen[1].time_s) == ((AlignedRun(0, 0, 50),), 7.0)


def test_dropping_an_episode_ends_its_pauses():
    from agentcache.events import KVPaused

    bus = EventBus()
    tracker = EpisodeTracker(bus)
    tracker.record("e", A)
    bus.emit(KVPaused(episode="e", key="k"))
    tracker.drop("e")
    assert not bus.is_paused("e", "k")


def test_threads_record_fork_and_drop_at_once():
    tracker = EpisodeTracker()

    def work(n):
        name = f"e{n % 4}"
        revision = tracker.record(name, A * (n % 5 + 1))
        tracker.finish(revision.version, B)
        branch = tracker.fork(name, revision.version)
        tracker.record(branch, A + B + [n])
        tracker.drop(branch)
        return revision.version

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(work, range(200)))
    tracker.check_integrity()
    assert len(set(versions)) == 200
    assert sorted(v.version_id for n in range(4) for v in tracker.history(f"e{n}")) == sorted(versions)


class TrackerMachine(RuleBasedStateMachine):
    """Compares the tracker with a plain model of it: episodes as lists, versions kept while something reaches them."""

    episodes = Bundle("episodes")
    prompts = st.lists(st.integers(0, 3), max_size=60)

    def __init__(self):
        super().__init__()
        numbers = itertools.count()
        self.tracker = EpisodeTracker(new_id=lambda: f"id{next(numbers)}")
        self.own = {}
        self.base = {}
        self.parents = {}
        self.contexts = {}

    def reachable(self):
        found = set()
        for name, own in self.own.items():
            for version in [*own, self.base[name]]:
                while version is not None and version not in found:
                    found.add(version)
                    version = self.parents[version]
        return found

    @rule(target=episodes, name=st.sampled_from("abc"), prompt=prompts, data=st.data())
    def record(self, name, prompt, data):
        parent = data.draw(st.sampled_from([None, *sorted(self.reachable())]))
        own = self.own.setdefault(name, [])
        self.base.setdefault(name, None)
        expected = parent or (own[-1] if own else self.base[name])
        revision = self.tracker.record(name, prompt, parent=parent)
        assert revision.parent == expected
        fresh = [prompt[a:b] for a, b in revision.diff.fresh]
        assert revision.diff.apply(self.contexts.get(expected, []), fresh) == prompt
        own.append(revision.version)
        self.parents[revision.version] = expected
        self.contexts[revision.version] = prompt
        return name

    @rule(name=episodes, reply=prompts, data=st.data())
    def finish(self, name, reply, data):
        if not self.own.get(name):
            return
        version = data.draw(st.sampled_from(self.own[name]))
        whole = [*self.tracker.version(version).token_ids.tolist(), *reply]
        computed = data.draw(st.none() | st.integers(0, len(whole)))
        self.tracker.finish(version, reply, computed=computed)
        self.contexts[version] = whole[:computed]

    @rule(target=episodes, name=episodes, data=st.data())
    def fork(self, name, data):
        if name not in self.own:
            return name
        version = data.draw(st.sampled_from([v.version_id for v in self.tracker.history(name)]))
        branch = self.tracker.fork(name, version)
        self.own[branch], self.base[branch] = [], version
        return branch

    @rule(name=consumes(episodes))
    def drop(self, name):
        before = self.reachable()
        self.own.pop(name, None)
        self.base.pop(name, None)
        assert set(self.tracker.drop(name)) == before - self.reachable()

    @invariant()
    def everything_reachable_is_there_and_nothing_else(self):
        self.tracker.check_integrity()
        assert set(self.tracker.episodes()) == set(self.own)
        for version in self.reachable():
            assert self.tracker.version(version).context_ids.tolist() == self.contexts[version]
        for name, own in self.own.items():
            assert [v.version_id for v in self.tracker.history(name)][
                len(self.tracker.history(name)) - len(own) :
            ] == own


TestTrackerMachine = TrackerMachine.TestCase
TestTrackerMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
