"""Recovery policies and the planner: pure functions over small arrays.

| policy | exact | R | source |
|---|---|---|---|
| `prefix_cache` | yes | nothing after P is restored | prefix caching |
| `direct_reuse` | no | empty | the stale cache |
| `edit_local` | no | the first k tokens after each edit, or to the end of the unit it lies in | Contiguity/EditLocal |

A policy is one file with one frozen dataclass under `@register`, and its line below.
"""

from agentcache.recovery.base import PolicyContext, RecoveryPlan, RecoveryPolicy
from agentcache.recovery.conformance import check_policy
from agentcache.recovery.direct_reuse import DirectReuse
from agentcache.recovery.edit_local import EditLocal
from agentcache.recovery.planner import plan
from agentcache.recovery.prefix_cache import PrefixCache
from agentcache.recovery.registry import get_policy, policy_names, register

__all__ = [
    "DirectReuse",
    "EditLocal",
    "PolicyContext",
    "PrefixCache",
    "RecoveryPlan",
    "RecoveryPolicy",
    "check_policy",
    "get_policy",
    "plan",
    "policy_names",
    "register",
]
