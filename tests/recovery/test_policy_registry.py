from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from agentcache.errors import ConfigError
from agentcache.recovery import EditLocal, PolicyContext, RecoveryPolicy, get_policy, policy_names, register
from agentcache.recovery import registry as registry_module


@pytest.fixture
def scratch_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test register policies that are gone afterwards."""
    monkeypatch.setattr(registry_module, "_POLICIES", dict(registry_module._POLICIES))


def offer(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Lets an installed package offer `value` under `name` in our entry point group."""
    point = EntryPoint(name, value, registry_module.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry_module, "entry_points", lambda group: [point] if group == point.group else [])


@dataclass(frozen=True)
class Third(RecoveryPolicy):
    """Lossy: a policy of somebody else."""

    name: ClassVar[str] = "third"
    source: ClassVar[str] = "a test"
    share: float = 0.5

    def select(self, context: PolicyContext) -> Iterator[tuple[int, int]]:
        yield from ()


class Broken:
    """No policy at all."""


def test_names_are_sorted_and_hold_the_policies_of_this_release() -> None:
    names = policy_names()
    assert list(names) == sorted(names)
    assert {"prefix_cache", "direct_reuse", "edit_local"} <= set(names)


def test_a_policy_is_built_with_its_options() -> None:
    assert get_policy("edit_local", {"k": 5}) == EditLocal(k=5)
    assert get_policy("edit_local", {"to": "boundary"}) == EditLocal(to="boundary")
    assert get_policy("edit_local") == EditLocal(k=32)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'edit-local'; known: .*edit_local.*prefix_cache"):
        get_policy("edit-local")


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'edit_local' has no option 'kk'; its options are: k, to"):
        get_policy("edit_local", {"kk": 3})
    with pytest.raises(ConfigError, match=r"'prefix_cache' has no option 'k'; its options are: none"):
        get_policy("prefix_cache", {"k": 3})


@pytest.mark.parametrize("value", ["32", 3.5, True, [1]])
def test_an_option_of_the_wrong_type_is_refused_by_name_and_value(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'edit_local': k=.* is not allowed: .*integer"):
        get_policy("edit_local", {"k": value})


def test_an_option_value_that_is_no_choice_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"to='end' is not allowed: .*'boundary'"):
        get_policy("edit_local", {"to": "end"})


@pytest.mark.usefixtures("scratch_registry")
def test_a_registered_policy_is_found_by_name() -> None:
    assert register(Third) is Third
    assert "third" in policy_names()
    assert get_policy("third", {"share": 1}) == Third(share=1)


@pytest.mark.usefixtures("scratch_registry")
def test_registering_a_class_twice_changes_nothing_but_a_second_class_is_refused() -> None:
    register(Third)
    register(Third)

    @dataclass(frozen=True)
    class Other(Third):
        """Lossy: takes a name that is in use."""

    with pytest.raises(ConfigError, match=r"Other: name 'third' is taken by .*Third; choose another"):
        register(Other)
    assert get_policy("third") == Third()


@pytest.mark.usefixtures("scratch_registry")
@pytest.mark.parametrize(("attribute", "value"), [("name", ""), ("source", None), ("exact", "no")])
def test_a_policy_that_does_not_declare_itself_is_refused(attribute: str, value: object) -> None:
    bad = dataclass(frozen=True)(type("Bad", (Third,), {attribute: value, "__doc__": "Lossy: declares nonsense."}))
    with pytest.raises(ConfigError, match=rf"Bad cannot be registered: {attribute}=.*ClassVar"):
        register(bad)


@pytest.mark.usefixtures("scratch_registry")
def test_a_policy_that_can_change_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a frozen dataclass; put"):
        register(type("Loose", (RecoveryPolicy,), {"name": "loose", "source": "a test"}))


@pytest.mark.usefixtures("scratch_registry")
def test_an_installed_package_offers_a_policy_as_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "third", f"{__name__}:Third")
    assert "third" in policy_names()
    assert get_policy("third", {"share": 0.25}) == Third(share=0.25)


@pytest.mark.usefixtures("scratch_registry")
@pytest.mark.parametrize(("name", "value"), [("broken", "Broken"), ("other_name", "Third")])
def test_an_entry_point_that_is_no_policy_of_its_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    offer(monkeypatch, name, f"{__name__}:{value}")
    with pytest.raises(ConfigError, match=f"entry point '{name}' gives .*{value}"):
        get_policy(name)


def test_a_policy_that_the_engine_cannot_import_is_refused():
    from agentcache.recovery.registry import check_policy_reaches_engine

    built_in = get_policy("edit_local")
    check_policy_reaches_engine(built_in, ())
    script = type("Scripted", (type(built_in),), {"__module__": "my_script"})()
    with pytest.raises(ConfigError, match="policy_modules"):
        check_policy_reaches_engine(script, ("another",))
    check_policy_reaches_engine(script, ("my_script",))
