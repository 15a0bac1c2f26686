"""Recovery policies and the planner: pure functions over small arrays.

| policy | exact | R | source |
|---|---|---|---|
| `prefix_cache` | yes | nothing after P is restored | prefix caching |
| `direct_reuse` | no | empty | the stale cache |
| `edit_local` | no | the first k tokens after each edit, or to the end of the unit it lies in | Contiguity/EditLocal |
| `edit_local_boundary` | no | to the end of the unit that each edit lies in | Contiguity/EditLocal |
| `structural` | no | delimiter tokens, nearest to the edit first | Contiguity/EditLocal, after Li 2026 |
| `random` | no | random blocks | the control arm of both |
| `epic` | no | the first k tokens of each reused run | EPIC |
| `patchkv` | no | blocks of a dirty window and of the most attended tokens beyond it | PatchKV |
| `attention_blocks` | no | small blocks by stored attention, and a short window after each edit | ours |
| `attended` | no | small blocks by the query's attention over the stale rows, and a short window after each edit | ours |
| `frontier` | no | a window that grows until its rows agree with the stale ones | ours |
| `prophetkv` | no | single tokens by the query's attention over the stale rows | ProphetKV |
| `cacheblend` | no | single tokens by their deviation at a check layer | CacheBlend |
| `mean_shift` | no | probes by their deviation; all other rows are shifted by the probes' mean | AgentKVShift |
| `carrier_window` | no | a given span | Contiguity/EditLocal, a diagnostic |
| `causal_oracle` | no | the blocks that matter most, from a full prefill | Contiguity/EditLocal, a diagnostic |
| `edit_to_carrier` | no | one run from the edit to the last highly attended block | ours |
| `auto` | where it pays | that of another policy, or prefix caching where the other saves too little time | ours |

`attended`, `frontier`, `prophetkv`, `cacheblend` and `mean_shift` choose in the worker, from what the stale rows show.
Every policy can be bounded: `max_tokens`, `max_share` (of S) and `max_generations` are options of all, see `Bounds`.

A policy is one file with one frozen dataclass under `@register`, and its line below. It returns its most important runs first.
"""

from agentcache.recovery.attended import Attended
from agentcache.recovery.attention_blocks import AttentionBlocks
from agentcache.recovery.auto import Auto
from agentcache.recovery.base import OnlinePolicy, PolicyContext, RecoveryPlan, RecoveryPolicy, Signal, Signals
from agentcache.recovery.bounds import Bounded, Bounds
from agentcache.recovery.cacheblend import CacheBlend
from agentcache.recovery.carrier_window import CarrierWindow
from agentcache.recovery.causal_oracle import CausalOracle
from agentcache.recovery.conformance import check_policy
from agentcache.recovery.direct_reuse import DirectReuse
from agentcache.recovery.edit_local import EditLocal
from agentcache.recovery.edit_local_boundary import EditLocalBoundary
from agentcache.recovery.edit_to_carrier import EditToCarrier
from agentcache.recovery.epic import Epic
from agentcache.recovery.frontier import Frontier
from agentcache.recovery.length_model import LengthModel
from agentcache.recovery.mean_shift import MeanShift
from agentcache.recovery.patchkv import PatchKV
from agentcache.recovery.planner import plan
from agentcache.recovery.prefix_cache import PrefixCache
from agentcache.recovery.prophetkv import ProphetKV
from agentcache.recovery.random_blocks import Random
from agentcache.recovery.registry import get_policy, policy_names, reads_attention, register
from agentcache.recovery.structural import Structural

__all__ = [
    "Attended",
    "AttentionBlocks",
    "Auto",
    "Bounded",
    "Bounds",
    "CacheBlend",
    "CarrierWindow",
    "CausalOracle",
    "DirectReuse",
    "EditLocal",
    "EditLocalBoundary",
    "EditToCarrier",
    "Epic",
    "Frontier",
    "LengthModel",
    "MeanShift",
    "OnlinePolicy",
    "PatchKV",
    "PolicyContext",
    "PrefixCache",
    "ProphetKV",
    "Random",
    "RecoveryPlan",
    "RecoveryPolicy",
    "Signal",
    "Signals",
    "Structural",
    "check_policy",
    "get_policy",
    "plan",
    "policy_names",
    "reads_attention",
    "register",
]
