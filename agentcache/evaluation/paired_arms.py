"""Which policies repair an item, each at the same budget: K aligned tokens beside the edit, as EditLocal counts them. Pure.

A policy's own options are set so that it recomputes K tokens of S at most, whatever it counts itself: `NOTES` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentcache.errors import ConfigError
from agentcache.evaluation.paired_transplant import Transplanted
from agentcache.profiling.derived import DerivedItem
from agentcache.recovery import get_policy
from agentcache.recovery.frontier import Frontier
from agentcache.recovery.spec import format_policy, parse_policy

__all__ = [
    "BASELINE",
    "BUDGETS",
    "DIAGNOSTICS",
    "NOTES",
    "OURS",
    "PAPER",
    "REFERENCE",
    "TRANSPLANT",
    "Arm",
    "Situation",
    "arms_of",
    "delimiters",
    "options_of",
]

REFERENCE: Final = "edit_local"
"""The policy that the others are compared with."""

BASELINE: Final = "prefix_cache"
"""The exact policy, whose time the others' are compared with."""

PAPER: Final = ("edit_local", "edit_local_boundary", "structural", "prophetkv", "cacheblend", "random")
"""The paper's policies, whose fifteen pairs are one family of tests; its Attention is `prophetkv`."""

OURS: Final = (
    "attended",
    "patchkv",
    "frontier",
    "edit_to_carrier",
    "attention_blocks",
    "epic",
    "auto",
    "mean_shift",
    "carrier_window",
    "direct_reuse",
)
"""Beside them: what else can be deployed, the true location, and the edit alone."""

DIAGNOSTICS: Final = ("carrier_window", "causal_oracle")
"""They know what no deployed policy does."""

TRANSPLANT: Final = "transplanted/"
"""Begins the name of an arm whose rows are copied from a full prefill."""

_BLOCK: Final = 8  # tokens: PatchKV's blocks of 32 would not fit a budget of 32

Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Situation:
    """What a budget depends on: an item, the aligned tokens behind its first edit, and the tokens that delimit its text."""

    item: DerivedItem
    suffix: int
    delimiters: Sequence[int]


def _patchkv(k: int, at: Situation) -> Options:
    blocks = max(at.suffix - k // 2, 1) / _BLOCK
    return {"window": k // 2, "block": _BLOCK, "kappa": min(k / 2 / _BLOCK / blocks, 1.0), "max_tokens": k}


def _carrier(k: int, at: Situation) -> Options:
    return {"start": at.item.carrier.start, "stop": at.item.carrier.start + k}


def _auto(k: int, at: Situation) -> Options:
    return {"candidate": format_policy("attended", BUDGETS["attended"](k, at))}


Budget = Callable[[int, Situation], Options]

BUDGETS: Final[dict[str, Budget]] = {
    "edit_local": lambda k, at: {"k": k // len(at.item.edits)},
    "structural": lambda k, at: {"k": k, "ids": ", ".join(map(str, at.delimiters))},
    "prophetkv": lambda k, _: {"k": k},
    "cacheblend": lambda k, at: {"share": min(k / at.suffix, 1.0)},
    "random": lambda k, _: {"k": k, "block": 1},
    "attended": lambda k, _: {"k": k, "window": 0},
    "patchkv": _patchkv,
    "frontier": lambda k, _: {
        "first": min(16, k),
        "threshold": Frontier.threshold,
        "most_tokens": k,
        "max_tokens": k,
    },
    "edit_to_carrier": lambda k, _: {"k": k, "window": 0, "max_tokens": k},
    "attention_blocks": lambda k, _: {"k": k, "window": 0},
    "epic": lambda k, at: {"k": k // len(at.item.edits)},
    "auto": _auto,
    "mean_shift": lambda k, at: {"share": max(k // 2 - len(at.item.edits) + 1, 0) / at.suffix},
    "carrier_window": _carrier,
    "causal_oracle": lambda k, _: {"k": k, "max_tokens": k},
}
"""Options of each policy that has a budget, by K."""

NOTES: Final = {
    "edit_local, epic": "a window of K behind the edit; two edits share it",
    "cacheblend": "share = K/|S|",
    "mean_shift": "share = K/2|S|: K/2 probes of keys and as many of values; all other rows are shifted",
    "patchkv": "half a dirty window, half blocks of 8 by stored attention, max_tokens = K",
    "frontier": "a window that begins with 16 tokens and stops at K; its default threshold, not a profile's",
    "edit_to_carrier": "max_tokens = K",
    "auto": "attended at K, or exact prefix caching",
    "attended, attention_blocks": "k = K, no window beside it",
    "carrier_window": "K tokens from the carrier's first",
    "structural": "the K nearest tokens that are white space or marks alone",
    "random": "K single tokens",
    "edit_local_boundary, direct_reuse, prefix_cache": "no budget; the boundary is the end of the edit's document",
    "attended, prophetkv, causal_oracle": "the prompt's last 32 rows are the query: where the question is shorter, the rows before "
    "it are recomputed beyond K; repair_tokens holds what was recomputed",
}
"""What K means to each policy; part of every result."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to repair an item.

    Attributes:
        policy: The registered name, with the options that were asked for beside the budget's.
        k: The budget; None: the policy has none.
        transplant: Whether the rows that it chooses are copied from a full prefill instead of computed.
    """

    policy: str
    k: int | None = None
    transplant: bool = False

    @property
    def name(self) -> str:
        """The policy as results name it."""
        return f"{TRANSPLANT}{self.policy}" if self.transplant else self.policy

    @property
    def label(self) -> str:
        """Name and budget as one word."""
        return self.name if self.k is None else f"{self.name}@{self.k}"


def named_policies(names: Sequence[str]) -> tuple[str, ...]:
    """Returns policies with `paper` and `ours` written out, each once."""
    groups = {"paper": PAPER, "ours": OURS}
    return tuple(dict.fromkeys(policy for name in names for policy in groups.get(name, (name,))))


def arms_of(policies: Sequence[str], budgets: Sequence[int], transplants: Sequence[str] = ()) -> list[Arm]:
    """Returns the arms of a run: the exact policy first, then each policy at each budget.

    Args:
        policies: Each `name:option=value:…`; `k=…` among the options stands for `budgets`.
        budgets: K.
        transplants: Policies whose rows are also transplanted.

    Raises:
        ConfigError: A policy or an option is not known, or a budget is not positive.
    """
    if not all(k > 0 for k in budgets):
        raise ConfigError(f"--k {', '.join(map(str, budgets))}: a budget is 1 token or more")
    arms = [Arm(BASELINE)]
    for specs, transplant in ((policies, False), (transplants, True)):
        for spec in specs:
            name, options = parse_policy(spec)
            own = options.pop("k", None) if name in BUDGETS else None
            plain = format_policy(name, options)
            if name in BUDGETS:
                arms += [Arm(plain, int(k), transplant) for k in ([own] if own is not None else budgets)]
            else:
                arms.append(Arm(plain, None, transplant))
    for arm in arms:
        _checked(arm)
    return list(dict.fromkeys(arms))


def _checked(arm: Arm) -> None:
    """Raises ConfigError before anything is measured when an arm cannot run."""
    name, options = parse_policy(arm.policy)
    needed = {"window": 0} if name == "patchkv" else {}
    get_policy(name, needed | options)
    if arm.transplant:
        Transplanted(of=format_policy(name, needed | options))


def options_of(arm: Arm, at: Situation) -> tuple[str, Options]:
    """Returns the policy and the options that repair an item.

    The end of the document is known to the item alone, whose prompt is given as token ids: `edit_local_boundary` runs as the
    window to it.
    """
    name, options = parse_policy(arm.policy)
    if name == "edit_local_boundary":
        name, options = "edit_local", {"k": at.item.boundary} | options
    elif arm.k is not None:
        options = BUDGETS[name](arm.k, at) | options
    if not arm.transplant:
        return name, options
    return Transplanted.name, {"of": format_policy(name, options)}


def delimiters(decode: Callable[[list[int]], str], ids: Sequence[int]) -> Iterator[int]:
    """Yields the ids among these that are white space or marks alone, ascending: what Structural takes for delimiters."""
    for token in sorted(set(ids)):
        text = decode([token])
        if text and not any(character.isalnum() for character in text):
            yield token
