"""Settings of a cache, validated once and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentcache.errors import ConfigError

if TYPE_CHECKING:
    from agentcache.profiling.profile import Profile

__all__ = ["PRECISIONS", "SHADOW_TOKENS", "CacheConfig", "ConnectorConfig", "GuardConfig", "Precision"]

Precision = Literal["exact", "k8v8", "k8v4", "mixed", "int8", "int4", "fp8_e4m3", "kivi4", "kivi2", "ott"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
"""How rows may be stored: the tags of a block, `mixed` (a tag for each by its risk), and whole-checkpoint formats to compare with."""

SHADOW_TOKENS: Final = 20
"""The most likely tokens that the quality guard compares: as many as vLLM gives by default."""


class ConnectorConfig(BaseModel):
    """Settings that the connector reads from vLLM's `kv_connector_extra_config`.

    Attributes:
        host_bytes: Budget of the in-memory checkpoint store, in bytes of all ranks' KV.
        recompute_tokens_per_step: Most tokens that recovery computes inside one engine step; longer repairs run in slices, one a
            step. None: the engine's own `max_num_batched_tokens`.
        save_tokens_per_step: Rows that are gathered in one engine step while other requests run and none of them waits for the
            save; as many as the step computes if that is more.
        verify_checksums: Whether each block's checksum is compared when it is restored.
        precision: How KV rows are stored: `exact` (bit by bit), `k8v8` or `k8v4` (quantised: what is restored from them is
            approximate, also in the prefix), `mixed` (each block by its risk), or a format for comparison, see
            `docs/checkpoint-format.md`.
        tau_low: τ_L of `mixed`: blocks of less risk may be stored as `k8v4`. None: as in `engine.precision`, also for the next.
        tau_high: τ_H: blocks of this risk and more are stored exactly.
        alpha: α: how much of a block's risk is that of its riskiest row.
        low_bit_residual: Most that 4 bits may lose of a row of a `k8v4` block, relative.
        attention: Whether each save measures how much its rows are attended to, for policies that rank by it; a segment forward of
            the last 32 rows. `mixed` precision measures it in any case.
        store: Where checkpoints outlive memory: `disk:///folder` or `redis://host:6379/0`, with options after `?`, or
            `tiered:memory?bytes=4GiB+disk:///folder` to give `host_bytes` in the same place; `memory:` or None: nowhere.
        policy_modules: Modules that register recovery policies; the engine's processes import them at start-up.
        time_at_start: Whether forwards and restores are timed when the engine starts, for a second, which policy `auto` needs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_bytes: int = Field(default=4 << 30, ge=0)
    recompute_tokens_per_step: int | None = Field(default=None, ge=1)
    save_tokens_per_step: int = Field(default=128, ge=1)
    verify_checksums: bool = True
    precision: Precision = "exact"
    attention: bool = False
    tau_low: float | None = Field(default=None, ge=0)
    tau_high: float | None = Field(default=None, ge=0)
    alpha: float | None = Field(default=None, ge=0, le=1)
    low_bit_residual: float | None = Field(default=None, ge=0)
    store: str | None = Field(default=None, max_length=4096)
    policy_modules: tuple[str, ...] = ()
    time_at_start: bool = True

    @model_validator(mode="after")
    def _store_is_known(self) -> Self:
        if self.store is not None:
            _split_store(self.store)
        return self

    @model_validator(mode="after")
    def _thresholds_ascend(self) -> Self:
        if (self.tau_low is None) != (self.tau_high is None):
            raise ValueError(
                f"give tau_low and tau_high together, got tau_low={self.tau_low}, tau_high={self.tau_high}"
            )
        if self.tau_low is not None and self.tau_high is not None and self.tau_low > self.tau_high:
            raise ValueError(f"tau_low={self.tau_low} lies above tau_high={self.tau_high}; exchange them")
        return self

    @property
    def thresholds(self) -> dict[str, float]:
        """The thresholds of `mixed` precision that are set, by name."""
        set_ = {name: getattr(self, name) for name in ("tau_low", "tau_high", "alpha", "low_bit_residual")}
        return {name: value for name, value in set_.items() if value is not None}

    @property
    def durable_url(self) -> str | None:
        """The store below memory, or None."""
        return None if self.store is None else _split_store(self.store)[1]

    @property
    def memory_bytes(self) -> int:
        """The budget of the store in memory: what the store's URL says, else `host_bytes`."""
        said = None if self.store is None else _split_store(self.store)[0]
        return self.host_bytes if said is None else said


def _split_store(url: str) -> tuple[int | None, str | None]:
    """Returns the bytes of memory that a store's URL asks for, if it does, and the URL of the tier below, if there is one.

    Raises:
        ValueError: It is no such URL.
    """
    from agentcache.store.tiers.registry import parse_size, parse_store_url  # only who has a store pays for it

    try:
        spec = parse_store_url(url)
        if spec.scheme not in ("memory", "tiered"):
            return None, url
        options = spec.take({"bytes": parse_size})
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return options.get("bytes"), url.partition("+")[2] or None


class GuardConfig(BaseModel):
    """Settings of the quality guard, which compares the first token of resumes with that of an exact run; see `guard`.

    A shadowed resume is a *strike* when its KL exceeds `max_kl`, or when its most likely token is another one and the policy's
    last `window` results agreed less often than `min_top1`.

    Attributes:
        share: Of the resumes with an approximate policy, how many are shadowed; 0: none, the guard is off.
        max_kl: Most KL(exact ‖ resumed) of the first token, in nats. Batch noise gives 0.001.
        min_top1: Least share of results whose most likely token is that of the exact run.
        window: Results that are looked back on, of a policy (`min_top1`) and of an episode (`episode_strikes`).
        episode_strikes: So many strikes among an episode's last `window` results make it run exactly from then on.
        policy_episodes: So many such episodes of one policy make all requests run exactly that ask for it.
        patience_s: How long a shadow waits for an engine without requests; then it runs beside them.
        seed: Another one shadows other resumes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(default=0.0, ge=0, le=1)
    max_kl: float = Field(default=0.25, gt=0)
    min_top1: float = Field(default=0.9, ge=0, le=1)
    window: int = Field(default=20, ge=1)
    episode_strikes: int = Field(default=3, ge=1)
    policy_episodes: int = Field(default=3, ge=1)
    patience_s: float = Field(default=30.0, ge=0)
    seed: int = 0

    @model_validator(mode="after")
    def _can_strike(self) -> Self:
        if self.episode_strikes > self.window:
            raise ValueError(
                f"episode_strikes={self.episode_strikes} never fit in window={self.window}; make that larger"
            )
        return self


class CacheConfig(BaseModel):
    """Settings of an `AgentCache`.

    Attributes:
        model: A folder, a hub id, or the name of a built-in model (`smollm2`).
        policy: Default recovery policy of every request.
        policy_options: The policy's own settings, e.g. `{"k": 32}`; those that are not given come from the profile.
        profile: File of `agentcache profile`, which policies and mixed precision take their settings from. None: the one that ships
            for the model, if one does, for policies alone.
        dtype: Of weights and KV. `auto`: the model's own; float32 on a CPU that multiplies 16-bit numbers in software.
        max_model_len: Longest prompt plus reply in tokens; None takes the model's.
        block_size: Tokens a KV block.
        kv_bytes: KV memory of the engine; None takes a quarter of the free memory on CPU, vLLM's default on GPU.
        host_bytes: Budget of the checkpoint store in memory.
        store: Where checkpoints outlive memory, e.g. `disk:///var/lib/agentcache` or `redis://host:6379/0`; see
            `ConnectorConfig.store`.
        max_num_seqs: Most requests in one engine step.
        max_num_batched_tokens: Most tokens in one engine step.
        namespace: Tenant of this handle; checkpoints of other namespaces are never seen. vLLM's own exact prefix cache is shared,
            as it is without agentcache.
        events: File that every event is appended to as a JSON line.
        events_text: Whether events hold the text of prompts and replies, which `agentcache report` then shows. Off: what people wrote
            is private, and the file keeps it as long as it is kept.
        seed: Sampling seed of the engine.
        start_timeout_s: How long the engine may take to start.
        engine_args: Further `AsyncEngineArgs`, passed on as they are.
        guard: Settings of the quality guard; off unless its `share` is set.
        connector: Settings of the connector.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(default="smollm2", min_length=1)
    policy: str = "prefix_cache"
    policy_options: dict[str, int | float | str | bool | None] = Field(default_factory=dict)
    profile: Path | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = Field(default=None, ge=16)
    block_size: int = Field(default=32, ge=16)
    kv_bytes: int | None = Field(default=None, ge=1 << 20)
    host_bytes: int = Field(default=4 << 30, ge=0)
    store: str | None = Field(default=None, max_length=4096)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=16)
    namespace: str = Field(default="default", min_length=1, max_length=256)
    events: Path | None = None
    events_text: bool = False
    seed: int = 0
    start_timeout_s: float = Field(default=600.0, gt=0)
    engine_args: dict[str, Any] = Field(default_factory=dict)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    connector: ConnectorConfig = Field(default_factory=ConnectorConfig)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        for name in ("host_bytes", "store"):
            if name in self.connector.model_fields_set:
                raise ValueError(f"give {name} to the cache itself, not in connector")
        self.to_connector()  # a store that is none is known before the engine starts
        return self

    @model_validator(mode="after")
    def _guard_can_compare(self) -> Self:
        mode, most = (self.engine_args.get(name) for name in ("logprobs_mode", "max_logprobs"))
        if self.guard.share and mode not in (None, "raw_logprobs"):
            raise ValueError(
                f"the guard compares raw_logprobs, but engine_args has logprobs_mode={mode!r}; leave it out"
            )
        if self.guard.share and isinstance(most, int) and 0 <= most < SHADOW_TOKENS:
            raise ValueError(f"the guard needs max_logprobs={SHADOW_TOKENS}, but engine_args has {most}; leave it out")
        return self

    def to_connector(self) -> ConnectorConfig:
        """Returns the connector's settings with what is set here, and the profile's thresholds where none is given."""
        # What ships was fitted to prompts of 3k tokens; the thresholds of the code were measured at 8k, and save more there.
        measured = {} if self.profile is None or self.measured is None else self.measured.precision.thresholds
        given = self.connector.model_dump() | {"host_bytes": self.host_bytes, "store": self.store}
        if "attention" not in self.connector.model_fields_set:
            from agentcache.recovery import reads_attention  # it imports the errors beside this module
            from agentcache.recovery.auto import auto_candidate

            acts = auto_candidate(self.policy_options)[0] if self.policy == "auto" else self.policy
            given["attention"] = reads_attention(acts)
        return ConnectorConfig.model_validate(given | measured | self.connector.thresholds)

    @cached_property
    def measured(self) -> Profile | None:
        """The model's profile, or None when none is given and none ships."""
        from agentcache.profiling.lookup import profile_for

        return profile_for(self.model, self.profile)

    def options_for(self, policy: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a policy's options: those given, and the profile's where nothing is given; for `auto`, those of its candidate."""
        if self.measured is None:
            return dict(given)
        if policy == "auto":
            from agentcache.recovery.auto import auto_candidate
            from agentcache.recovery.spec import format_policy

            name, own = auto_candidate(given)
            return {**given, "candidate": format_policy(name, self.measured.options_for(name, own))}
        return self.measured.options_for(policy, given)

    @classmethod
    def build(cls, **settings: Any) -> CacheConfig:
        """Returns validated settings.

        Raises:
            ConfigError: A setting is unknown or out of range; names it, its value and what is allowed.
        """
        try:
            return cls(**settings)
        except ValidationError as error:
            lines = [
                f"{'.'.join(str(p) for p in e['loc']) or 'settings'}={e.get('input')!r}: {e['msg']}"
                for e in error.errors()
            ]
            raise ConfigError("these settings are not allowed:\n  " + "\n  ".join(lines)) from error
