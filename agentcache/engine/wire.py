"""What travels between the caller and the connector: the request's `kv_transfer_params` and the report that comes back.

Both are plain JSON values under one key, so any client of vLLM can send them. No torch, no vLLM.

```
SamplingParams.extra_args["kv_transfer_params"] = {"agentcache": ResumeParams}      caller -> scheduler half
RequestOutput.kv_transfer_params                = {"agentcache": Recovery}          scheduler half -> caller
```
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentcache.config import Precision
from agentcache.types import Boundary, BoundaryKind

__all__ = ["ENDED", "KEY", "MOST_SOURCES", "Name", "Recovery", "ResumeParams", "parse_params"]

KEY = "agentcache"
ENDED = "ended"
"""Under which the workers note the report of a request that has ended."""
MOST_SOURCES = 64
"""Most chunks and further versions that one request may name."""
Name = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, le=1 << 30)]


class ResumeParams(BaseModel):
    """One request's place in its episode and how it may be recovered.

    Attributes:
        version: Id of the version that this request creates; unique in its namespace.
        parent: Id of the version whose KV may be reused.
        sources: Further versions, and chunks, whose rows may be reused wherever their tokens stand in the prompt.
        namespace: Tenant; versions of other namespaces are never seen.
        episode: Group that is evicted together.
        policy: Registered name of the recovery policy.
        options: The policy's own settings.
        aligned: `[old_start, new_start, length]` spans of the diff to the parent; None lets the connector diff.
        boundaries: `[kind, start, stop]` of the new prompt.
        save: Whether the version is checkpointed when it ends.
        precision: How its new rows are stored, see `ConnectorConfig.precision`; None: as the connector is set.
        salt: Extra salt, e.g. of a benchmark's repetition.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Name
    parent: Name | None = None
    sources: list[Name] = Field(default_factory=list, max_length=MOST_SOURCES)
    namespace: Name = "default"
    episode: Name | None = None
    policy: Name = "prefix_cache"
    options: dict[str, int | float | str | bool | None] = Field(default_factory=dict, max_length=32)
    aligned: list[tuple[Count, Count, Count]] | None = Field(default=None, max_length=65_536)
    boundaries: list[tuple[BoundaryKind, Count, Count]] = Field(default_factory=list, max_length=65_536)
    save: bool = True
    precision: Precision | None = None
    salt: Annotated[str, Field(max_length=256)] = ""

    @property
    def group(self) -> str:
        """The eviction group: the episode, or the version itself."""
        return self.episode or self.version

    @property
    def names(self) -> tuple[str, ...]:
        """The parent, if there is one, and the sources, each once."""
        return tuple(dict.fromkeys((*filter(None, (self.parent,)), *self.sources)))

    def boundary_tuple(self) -> tuple[Boundary, ...]:
        """Returns the boundaries as values that policies read."""
        return tuple(Boundary(*b) for b in self.boundaries)

    def to_extra_args(self) -> dict[str, Any]:
        """Returns the value of `SamplingParams.extra_args` that carries these parameters."""
        return {"kv_transfer_params": {KEY: self.model_dump(mode="json", exclude_defaults=True)}}


class Recovery(BaseModel):
    """How one request's KV came to be; counts are tokens of its prompt.

    Attributes:
        version: The version that the request created.
        parent: The version it was recovered from, if any.
        sources: The chunks and further versions that rows were recovered from.
        lost_sources: Those that were asked for and are not there.
        tier: Where the KV was: `memory`, or `store` when some of it had to be fetched from the tier below.
        policy: The policy that was used.
        requested_policy: The policy that was asked for.
        exact: Whether every row is that of a full prefill.
        reason: Why less was recovered than was asked for, or why `auto` chose to recover nothing; None when nothing was lost.
        prompt_tokens: Length of the prompt.
        prefix_tokens: |P| that was not computed again.
        fresh_tokens: |X|: new tokens before the last reused one.
        repair_tokens: |R|: aligned tokens that were computed again.
        reused_tokens: |F|: aligned tokens after the edit that were restored.
        source_tokens: Of F, those of sources.
        suffix_tokens: |S|: aligned tokens after the edit, wherever they were computed.
        planned_ratio: Share of S that the policy set out to recompute, before it was rounded to blocks.
        recompute_ratio: Share of S that was computed again, by us or by vLLM.
        new_tokens: |N|: what vLLM itself computed.
        local_tokens: Of P, X, R and F, those found in vLLM's own prefix cache.
        restored_tokens: Rows copied from the checkpoint.
        restored_bytes: Their bytes on this rank.
        recomputed_tokens: Rows that the segment forward computed.
        lost_tokens: Rows that could not be restored and were recomputed instead.
        asynchronous: Whether the recomputation ran in slices between steps.
        diff_ms: Time of the diff in the caller.
        plan_ms: Time of policy and planning in the scheduler.
        fetch_ms: Time from the request's arrival until its parent had come up from the store; 0 when it was in memory.
        restore_ms: Time of the copy.
        select_ms: Time of measuring and choosing in the worker.
        recompute_ms: Time of the segment forward.
        ttft_ms: From the call to the first token in the caller.
        estimate: What `auto` compared, from when the request is scheduled to its first token: `exact_ms`, and the other policy's by
            its name, e.g. `edit_local_ms`. None when there was nothing to choose.
        saved: What becomes of this version's checkpoint.
        rows: Which rows of the prompt were P, X, R, F and N, see `agentcache.labels`: `P*42 X*7 R*32 F*3192 N*1`. Empty until the
            request has ended.
        precisions: How the rows that were restored had been stored, see `labels` and `ConnectorConfig.precision`: `-*49 exact*3224
            -*1`; `mixed` where the blocks of one object differ.
    """

    model_config = ConfigDict(extra="ignore")

    version: str = ""
    parent: str | None = None
    sources: list[str] = Field(default_factory=list)
    lost_sources: list[str] = Field(default_factory=list)
    tier: Literal["memory", "store"] = "memory"
    policy: str = "prefix_cache"
    requested_policy: str = "prefix_cache"
    exact: bool = True
    reason: str | None = None
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    fresh_tokens: int = 0
    repair_tokens: int = 0
    reused_tokens: int = 0
    source_tokens: int = 0
    suffix_tokens: int = 0
    planned_ratio: float = 0.0
    recompute_ratio: float = 0.0
    new_tokens: int = 0
    local_tokens: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    recomputed_tokens: int = 0
    lost_tokens: int = 0
    asynchronous: bool = False
    diff_ms: float = 0.0
    plan_ms: float = 0.0
    fetch_ms: float = 0.0
    restore_ms: float = 0.0
    select_ms: float = 0.0
    recompute_ms: float = 0.0
    ttft_ms: float | None = None
    estimate: dict[str, float] | None = None
    saved: Literal["pending", "no", "refused"] = "no"
    rows: str = ""
    precisions: str = ""

    def count_reuse(self) -> None:
        """Sets `recompute_ratio` from the counts of S, F and lost rows."""
        if self.suffix_tokens:
            reused = max(self.reused_tokens - self.lost_tokens, 0)
            self.recompute_ratio = round(1 - reused / self.suffix_tokens, 6)


def parse_params(raw: Any) -> tuple[ResumeParams | None, str | None]:
    """Returns a request's parameters, or None and the reason when they are malformed; (None, None) when it did not opt in.

    Args:
        raw: `Request.kv_transfer_params` as it came from the client.
    """
    if not isinstance(raw, dict) or KEY not in raw:
        return None, None
    try:
        return ResumeParams.model_validate(raw[KEY]), None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "value"
        return None, f"malformed kv_transfer_params: {where}: {first['msg']}"
