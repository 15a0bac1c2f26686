"""Recovery policies by name: our own, registered ones, and those that installed packages offer as entry points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from agentcache.errors import ConfigError
from agentcache.recovery.base import RecoveryPolicy
from agentcache.recovery.bounds import Bounded, Bounds, bounded

__all__ = [
    "ENTRY_POINT_GROUP",
    "check_policy_reaches_engine",
    "declaration_fault",
    "get_policy",
    "policy_names",
    "reads_attention",
    "register",
]

ENTRY_POINT_GROUP = "agentcache.policies"
"""Each entry point is named as its policy and points at the class."""

Policy = TypeVar("Policy", bound=type[RecoveryPolicy])
_POLICIES: dict[str, type[RecoveryPolicy]] = {}


def register(policy: Policy) -> Policy:
    """Returns the policy class unchanged after adding it under its `name`; a decorator, outside of `@dataclass`.

    Raises:
        ConfigError: It is no frozen dataclass, does not say its name, exactness or source, or its name is taken.
    """
    fault = declaration_fault(policy)
    if fault is not None:
        raise ConfigError(f"policy class {_path(policy)} cannot be registered: {fault}")
    taken = _POLICIES.setdefault(policy.name, policy)
    if taken is not policy:
        raise ConfigError(f"{_path(policy)}: name {policy.name!r} is taken by {_path(taken)}; choose another")
    return policy


def declaration_fault(policy: type[RecoveryPolicy]) -> str | None:
    """Returns what a policy class fails to declare and the way out, or None."""
    if not is_dataclass(policy) or not policy.__dataclass_params__.frozen:
        return "it is not a frozen dataclass; put @dataclass(frozen=True) below @register"
    for attribute, kind in (("name", str), ("exact", bool), ("source", str)):
        value = getattr(policy, attribute, None)
        if not isinstance(value, kind) or value == "":
            return f"{attribute}={value!r}; it needs a class attribute {attribute}: ClassVar[{kind.__name__}]"
    for option in fields(policy):
        if option.name in Bounds.__dataclass_fields__:
            return f"its option {option.name} has the name of a bound that every policy takes; rename it"
    return None


def policy_names() -> tuple[str, ...]:
    """Returns the names that `get_policy` knows, sorted. Imports no installed package."""
    return tuple(sorted({*_POLICIES, *_plugins()}))


def reads_attention(name: str) -> bool:
    """Returns whether a policy ranks by the attention that its parent's save measured; False when nobody knows the policy."""
    policy = _POLICIES.get(name)
    return policy is not None and policy.reads_attention


def get_policy(name: str, options: Mapping[str, Any] | None = None) -> RecoveryPolicy:
    """Returns the policy of that name with these options, its own and those of `Bounds`.

    An exact policy keeps every bound as it is: it reuses no row after an edit.

    Raises:
        ConfigError: The name or an option is unknown, or an option's value is not allowed.
    """
    policy = _POLICIES.get(name) or _load_plugin(name)
    given = dict(options or {})
    own, common = _option_types(policy), _option_types(Bounds)
    for option, value in given.items():
        kind = own.get(option) or common.get(option)
        if kind is None:
            raise ConfigError(
                f"policy {name!r} has no option {option!r}; its options are: {', '.join(own) or 'none'}; "
                f"every policy takes: {', '.join(common)}"
            )
        try:
            kind.validate_python(value, strict=True)
        except ValidationError as error:
            reasons = "; ".join(e["msg"] for e in error.errors())
            raise ConfigError(f"policy {name!r}: {option}={value!r} is not allowed: {reasons}") from error
    bounds = Bounds(**{option: given.pop(option) for option in list(given) if option in common})
    return bounded(policy(**given), bounds)


def check_policy_reaches_engine(policy: RecoveryPolicy, modules: Sequence[str]) -> None:
    """Raises ConfigError when the engine's processes, which import no user script, will not know a policy.

    Args:
        policy: As this process knows it.
        modules: `ConnectorConfig.policy_modules`, which the engine imports.
    """
    module = type(policy.policy if isinstance(policy, Bounded) else policy).__module__
    if module.partition(".")[0] == "agentcache" or module in modules or policy.name in _plugins():
        return
    raise ConfigError(
        f"policy {policy.name!r} is defined in {module!r}, which the engine does not import: put it in an importable module and "
        f"name that in connector={{'policy_modules': [...]}}, or offer it under the entry point group {ENTRY_POINT_GROUP!r}"
    )


@cache
def _option_types(kind: type[Any]) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(kind)
    return {field.name: TypeAdapter(hints[field.name]) for field in fields(kind) if field.init}


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _load_plugin(name: str) -> type[RecoveryPolicy]:
    """Returns the policy class that an installed package offers under this name, and registers it."""
    point = _plugins().get(name)
    if point is None:
        raise ConfigError(
            f"unknown policy {name!r}; known: {', '.join(policy_names())}. "
            f"Add your own with @register or the entry point group {ENTRY_POINT_GROUP!r}"
        )
    policy = point.load()
    if not (isinstance(policy, type) and issubclass(policy, RecoveryPolicy) and getattr(policy, "name", None) == name):
        raise ConfigError(f"entry point {name!r} gives {policy!r}; it must give a RecoveryPolicy class of that name")
    return register(policy)


def _path(policy: type[RecoveryPolicy]) -> str:
    return f"{policy.__module__}.{policy.__qualname__}"
