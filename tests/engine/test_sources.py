"""From what a request names to what it may draw on and a plan, without an engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.engine.planning import plan_request
from agentcache.engine.sources import complaint, draw_on, find_versions
from agentcache.engine.wire import MOST_SOURCES, ResumeParams, parse_params
from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.conformance import check_plan
from agentcache.recovery.planner import plan as make_plan
from agentcache.recovery.rows import QUERY_ROWS
from agentcache.store.compose import compose
from agentcache.store.extents import Extent
from agentcache.store.scores import encode_scores
from agentcache.store.version import Version
from agentcache.types import Run

PARENT = list(range(100, 400))
A, B = list(range(1000, 1100)), list(range(2000, 2120))
NEW = [*PARENT[:100], *B[1:], 7, *PARENT[120:], 8, 9, *A]


def version(
    name: str, ids: list[int], *, stored: list[tuple[int, int]] | None = None, attention: bool = False
) -> Version:
    """Returns a committed version whose rows `stored` are there, and whose last rows were attended to most."""
    extents = tuple(Extent(1, a, b - a, a, 2) for a, b in (stored or [(0, len(ids))]))
    made = Version(name, "n", name, None, np.asarray(ids, dtype=np.int32), len(ids), (), extents, state="committed")
    if attention:
        made.attention = encode_scores(np.linspace(0.1, 1, len(ids)))
    return made


def asked(**given: object) -> ResumeParams:
    return ResumeParams.model_validate({"version": "new", "namespace": "n", "policy": "direct_reuse"} | given)


@dataclass
class Search:
    """A search below memory that a test ends."""

    reason: str | None = None
    version: Version | None = None
    done: bool = False


# -- finding -----------------------------------------------------------------------------------------------------------


def test_a_request_names_its_parent_first_and_each_version_once():
    assert asked(parent="p", sources=["a", "p", "a", "b"]).names == ("p", "a", "b")
    assert asked(sources=["a"]).names == ("a",)
    assert asked().names == ()


@pytest.mark.parametrize("sources", [["c"] * (MOST_SOURCES + 1), [""], ["x" * 257], "c", [3]])
def test_names_that_are_none_are_malformed(sources):
    params, reason = parse_params({"agentcache": {"version": "v", "sources": sources}})
    assert params is None
    assert "sources" in reason


def test_all_that_is_named_is_found_in_its_namespace_or_said_to_be_missing():
    here = {("n", "p"): version("p", PARENT), ("n", "a"): version("a", A), ("other", "b"): version("b", B)}
    params = asked(parent="p", sources=["a", "b", "c", "d", "e", "now"])
    found = find_versions(params, lambda *key: here.get(key), {("n", "now")}, None, {})
    assert [name for name, what in found.items() if isinstance(what, Version)] == ["p", "a"]
    assert complaint(params, found) == (
        "each of the sources 'b', 'c', 'd' and 1 more is unknown or was evicted; source 'now' is still generating"
    )
    assert complaint(params, {"p": here["n", "p"]}) is None
    assert complaint(params, {"p": "is gone", "a": "is gone"}) == "parent 'p' is gone; source 'a' is gone"


def test_what_memory_lacks_is_sought_below_once_and_waited_for():
    begun: list[tuple[str, str]] = []
    searches: dict[str, Search] = {}
    here = {("n", "p"): version("p", PARENT)}

    def seek(*key: str) -> Search:
        begun.append(key)
        return Search()

    def find() -> dict[str, Version | str] | None:
        return find_versions(asked(parent="p", sources=["a", "b"]), lambda *key: here.get(key), set(), seek, searches)

    assert find() is None
    assert find() is None
    assert begun == [("n", "a"), ("n", "b")]
    searches["a"].done, searches["a"].reason = True, "cannot be restored: it is broken"
    assert find() is None
    here["n", "b"] = searches["b"].version = version("b", B)
    searches["b"].done = True
    del here["n", "p"]  # evicted while the others were sought
    assert find() is None
    searches["p"].done = True
    assert find() == {
        "p": "is unknown or was evicted",
        "a": "cannot be restored: it is broken",
        "b": here["n", "b"],
    }


def test_without_its_parent_the_source_with_the_longest_prefix_comes_first():
    a, b = version("a", A), version("b", [*B[:50], 1, 2])
    assert draw_on(NEW, asked(sources=["a"]), {"a": "is gone"}) is None
    assert draw_on([*B, *A], asked(sources=["a", "b"]), {"a": a, "b": b}).versions == (b, a)
    assert draw_on(NEW, asked(sources=["a", "b"]), {"a": a, "b": b}).versions == (a, b)
    assert draw_on([*B, *A], asked(parent="p", sources=["a", "b"]), {"p": "is gone", "a": a, "b": b}).base is b
    parent = version("p", PARENT)
    assert draw_on([*B, *A], asked(parent="p", sources=["b"]), {"p": parent, "b": b}).base is parent


# -- planning ----------------------------------------------------------------------------------------------------------


def test_the_sent_diff_to_the_parent_stays_and_what_is_left_comes_from_the_sources():
    composition = compose(version("p", PARENT), [version("a", A), version("b", B)])
    aligned = [(0, 0, 100), (120, 220, 180)]
    planned = plan_request(NEW, composition, asked(parent="p", sources=["a", "b"], aligned=aligned), 300)
    assert planned.reason is None
    assert planned.prefix == 100
    assert planned.plan.restore == ((0, 0, 100), (301 + 101 + 1, 100, 119), (120, 220, 180), (301, 402, 99))
    assert planned.plan.first_approximate == 100
    assert planned.plan.recompute == (Run(219, 220), Run(400, 402))
    own = plan_request(NEW, composition, asked(parent="p", sources=["a", "b"]), 300)
    assert own.plan.restore == planned.plan.restore


def test_the_sent_diff_counts_for_the_parent_alone():
    composition = compose(version("a", A), [version("b", B)])
    params = asked(parent="gone", sources=["a", "b"], aligned=[(0, 402, 100)])
    planned = plan_request(NEW, composition, params, 100)
    assert planned.prefix == 0
    assert planned.plan.restore == ((102, 100, 119), (0, 402, 99))


@pytest.mark.parametrize("policy", ["prefix_cache", "edit_local"])
def test_an_exact_policy_does_not_look_for_sources(policy, monkeypatch):
    from agentcache.engine import planning

    looked: list[int] = []
    monkeypatch.setattr(planning, "find_spans", lambda *_, **__: looked.append(1) or ())
    composition = compose(version("p", PARENT), [version("a", A)])
    planned = plan_request(NEW, composition, asked(parent="p", sources=["a"], policy=policy), 300)
    assert looked == ([] if policy == "prefix_cache" else [1])
    assert planned.plan.prefix_tokens == 100
    assert (planned.reason or "").startswith("policy 'prefix_cache' is exact") == (policy == "prefix_cache")


def shown(monkeypatch: pytest.MonkeyPatch, *sources: Version) -> PolicyContext:
    """Returns what a policy sees of NEW, with these versions and a measured parent."""
    from agentcache.engine import planning

    seen: list[PolicyContext] = []

    def watch(policy: RecoveryPolicy, context: PolicyContext, **given: object) -> object:
        seen.append(context)
        return make_plan(policy, context, **given)

    monkeypatch.setattr(planning, "plan", watch)
    composition = compose(version("p", PARENT, attention=True), sources)
    plan_request(NEW, composition, asked(parent="p", sources=[v.version_id for v in sources]), 300)
    return seen[0]


def test_policies_see_ages_and_attention_of_every_part_but_of_its_asking_rows(monkeypatch):
    context = shown(monkeypatch, version("a", A, attention=True), version("b", B, attention=True))
    assert set(context.generations[:219]) == {2}
    assert context.generations[219] == 0
    attention = context.attention
    assert attention[0] > 0.09
    assert (attention[100 : 219 - QUERY_ROWS] > 0).all()
    assert (attention[400 - QUERY_ROWS : 400] == 0).all(), (
        "the parent's last rows asked, and saw themselves most of all"
    )
    assert (attention[502 - QUERY_ROWS : 501] == 0).all(), "and so did the chunk's"
    assert (attention[402 : 502 - QUERY_ROWS] > 0).all()
    assert context.diff.old_len == 300 + 1 + 100 + 1 + 120


def test_policies_see_no_attention_when_a_part_was_not_measured(monkeypatch):
    assert shown(monkeypatch, version("a", A)).attention is None


@given(
    order=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 90), st.integers(0, 5)), max_size=5),
    head=st.integers(0, 120),
    with_parent=st.booleans(),
    hole=st.tuples(st.integers(0, 99), st.integers(1, 40)),
    policy=st.sampled_from(["direct_reuse", "edit_local", "epic", "prefix_cache"]),
    exact_end=st.integers(0, 300),
)
@settings(max_examples=200, deadline=None)
def test_every_plan_over_sources_keeps_the_planners_promises(order, head, with_parent, hole, policy, exact_end):
    parts = [PARENT, A, B]
    stored = [run for run in ((0, hole[0]), (min(sum(hole), 100), 100)) if run[1] > run[0]]
    versions = {"p": version("p", PARENT), "a": version("a", A, stored=stored), "b": version("b", B)}
    new = [*PARENT[:head]]
    for number, start, length, fresh in order:
        new += [*parts[number][start : start + length], *range(9000 + len(new), 9000 + len(new) + fresh)]
    new.append(5)
    params = asked(parent="p" if with_parent else None, sources=["a", "b"], policy=policy)
    found = {name: versions[name] for name in params.names}
    composition = draw_on(new, params, found)
    exact_end = min(exact_end, composition.base.exact_end)
    planned = plan_request(new, composition, params, exact_end)
    if planned.plan is None:
        assert planned.reason
        return
    check_plan(
        planned.plan,
        planned.context,
        composition.token_ids.tolist(),
        parent_exact_end=exact_end,
        missing=composition.view().missing(),
        limit=len(new) - 1,
    )
    diff = planned.context.diff
    base = composition.base.token_ids.tolist()
    common = next((i for i, (x, y) in enumerate(zip(base, new, strict=False)) if x != y), min(len(base), len(new)))
    assert diff.prefix == common == planned.prefix, "P is the base's, and all of it"
    if policy == "prefix_cache":
        assert planned.plan.restore == ((0, 0, planned.plan.load_end),)
        assert planned.plan.exact
    else:
        long_enough = [run for run in diff.fresh if run.stop - run.start >= 16]
        held = {tuple(ids[i : i + 16]) for ids in (A, B) for i in range(len(ids) - 15)}
        missed = [i for a, b in long_enough for i in range(a, b - 15) if tuple(new[i : i + 16]) in held]
        assert not missed, "no 16 tokens of a source are left"
