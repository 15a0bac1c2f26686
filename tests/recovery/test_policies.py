from __future__ import annotations

import pytest

from agentcache.errors import ConfigError
from agentcache.recovery import DirectReuse, EditLocal, PolicyContext, PrefixCache
from agentcache.types import AlignedRun, Boundary, BoundaryKind, PromptDiff

MESSAGE, TOOL, DOCUMENT = BoundaryKind.MESSAGE, BoundaryKind.TOOL_RESULT, BoundaryKind.DOCUMENT


def context(*aligned: tuple[int, int, int], new_len: int = 200, units: tuple[Boundary, ...] = ()) -> PolicyContext:
    diff = PromptDiff(1000, new_len, tuple(AlignedRun(*run) for run in aligned))
    return PolicyContext(diff, range(new_len), units)


def selected(policy: EditLocal, given: PolicyContext) -> list[tuple[int, int]]:
    return [(start, stop) for start, stop in policy.select(given) if stop > start]


@pytest.mark.parametrize("policy", [PrefixCache(), DirectReuse()])
def test_policies_without_repair_select_nothing(policy: PrefixCache | DirectReuse) -> None:
    assert list(policy.select(context((0, 0, 50), (60, 70, 100)))) == []


def test_only_the_prefix_policy_is_exact() -> None:
    assert (PrefixCache.exact, DirectReuse.exact, EditLocal.exact) == (True, False, False)


@pytest.mark.parametrize("policy", [DirectReuse, EditLocal])
def test_a_lossy_policy_says_so_in_its_first_line(policy: type) -> None:
    assert policy.__doc__.splitlines()[0].startswith("Lossy")


def test_edit_local_takes_the_first_k_tokens_after_each_edit() -> None:
    given = context((0, 0, 50), (60, 70, 40), (120, 115, 85))
    assert selected(EditLocal(k=16), given) == [(70, 86), (115, 131)]


def test_edit_local_stops_at_the_end_of_a_short_run() -> None:
    assert selected(EditLocal(k=16), context((0, 0, 50), (60, 70, 5), (120, 115, 85))) == [(70, 75), (115, 131)]


def test_edit_local_repairs_behind_an_edit_at_the_very_start() -> None:
    assert selected(EditLocal(k=8), context((10, 20, 100))) == [(20, 28)]
    assert selected(EditLocal(k=8), context((10, 0, 100))) == [(0, 8)]


@pytest.mark.parametrize("policy", [EditLocal(k=8), EditLocal(to="boundary")])
def test_edit_local_selects_nothing_when_nothing_follows_an_edit(policy: EditLocal) -> None:
    for given in (context(), context((0, 0, 200)), context((0, 0, 50))):
        assert selected(policy, given) == []


def test_the_default_window_is_that_of_the_paper() -> None:
    assert EditLocal() == EditLocal(k=32)
    assert EditLocal(to="boundary").k is None


def test_edit_local_refuses_two_windows_and_a_negative_one() -> None:
    with pytest.raises(ConfigError, match=r"k=8 or to='boundary', not both"):
        EditLocal(k=8, to="boundary")
    with pytest.raises(ConfigError, match=r"k=-1 is not allowed; take a number of tokens, 0 or more"):
        EditLocal(k=-1)


REPLACED = ((0, 0, 50), (60, 70, 130))  # tokens [50, 70) are new


@pytest.mark.parametrize(
    ("units", "stop"),
    [
        pytest.param((Boundary(MESSAGE, 0, 150),), 150, id="the message"),
        pytest.param((Boundary(MESSAGE, 0, 150), Boundary(DOCUMENT, 40, 90)), 90, id="the innermost of nested units"),
        pytest.param((Boundary(DOCUMENT, 40, 90), Boundary(MESSAGE, 0, 150)), 90, id="in any order"),
        pytest.param((Boundary(MESSAGE, 0, 150), Boundary(DOCUMENT, 60, 90)), 150, id="the one that holds all of it"),
        pytest.param(
            (Boundary(MESSAGE, 0, 150), Boundary(DOCUMENT, 50, 90)), 90, id="a unit that begins with the edit"
        ),
        pytest.param((Boundary(TOOL, 20, 55), Boundary(TOOL, 55, 120)), 120, id="else the one at its end"),
        pytest.param((Boundary(MESSAGE, 50, 70), Boundary(MESSAGE, 70, 99)), 70, id="ends with the edit"),
        pytest.param((Boundary(MESSAGE, 0, 20), Boundary(MESSAGE, 90, 150)), 70, id="no unit there"),
        pytest.param((), 70, id="no units"),
    ],
)
def test_to_boundary_ends_with_the_unit_that_the_edit_lies_in(units: tuple[Boundary, ...], stop: int) -> None:
    expected = [(70, stop)] if stop > 70 else []
    assert selected(EditLocal(to="boundary"), context(*REPLACED, units=units)) == expected


def test_to_boundary_places_a_deletion_at_the_token_after_it() -> None:
    units = (Boundary(MESSAGE, 0, 50), Boundary(MESSAGE, 50, 80), Boundary(MESSAGE, 80, 200))
    assert selected(EditLocal(to="boundary"), context((0, 0, 50), (90, 50, 150), units=units)) == [(50, 80)]


def test_to_boundary_serves_each_edit_by_its_own_unit() -> None:
    units = (Boundary(MESSAGE, 0, 100), Boundary(DOCUMENT, 10, 40), Boundary(MESSAGE, 100, 200))
    given = context((0, 0, 20), (25, 25, 70), (110, 110, 90), units=units)
    assert selected(EditLocal(to="boundary"), given) == [(25, 40), (110, 200)]
