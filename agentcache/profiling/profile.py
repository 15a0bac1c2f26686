"""`Profile`: what was measured on one model offline, as a small JSON file that policies and plots read."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentcache.errors import ConfigError
from agentcache.profiling.model import ModelFingerprint
from agentcache.recovery.length_model import LengthModel

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "AttentionExample",
    "BlockSensitivity",
    "Candidate",
    "DataSource",
    "DriftCurves",
    "LengthFit",
    "Precision",
    "PrecisionCandidate",
    "Profile",
]

FORMAT: Final = "agentcache-profile"
FORMAT_VERSION: Final = 1

Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
OptionValue = int | float | str | bool | None


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSource(_Part):
    """One file that was measured on.

    Attributes:
        dataset: Its name, e.g. `hotpotqa`.
        split: What it was used for.
        hash: xxh3-128 of the file's bytes, in hex.
        tasks: Tasks that were used; no task is in two splits.
        edits: Pairs of adjacent revisions of them.
    """

    dataset: str
    split: Literal["train", "calibration"]
    hash: str
    tasks: Count
    edits: Count


class DriftCurves(_Part):
    """Mean drift, 1 − cos, of stale rows by distance from the edit and layer (PatchKV, formulas 4 and 5).

    Attributes:
        edges: Distances in tokens: bin b is `[edges[b], edges[b + 1])`.
        layers: Those that were measured, `[L]`.
        rows: Rows measured in each bin, `[B]`.
        value: Drift of values, `[B, L]`.
        key: Drift of phase-corrected keys, `[B, L]`.
    """

    edges: tuple[Count, ...] = Field(min_length=2)
    layers: tuple[Count, ...] = Field(min_length=1)
    rows: tuple[Count, ...]
    value: tuple[tuple[float, ...], ...]
    key: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        bins = len(self.edges) - 1
        if any(b <= a for a, b in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError("edges must ascend")
        if not len(self.rows) == len(self.value) == len(self.key) == bins:
            raise ValueError(f"rows, value and key must have one entry for each of the {bins} bins")
        if {len(each) for each in (*self.value, *self.key)} != {len(self.layers)}:
            raise ValueError(
                f"value and key must have one number for each of the {len(self.layers)} layers in each bin"
            )
        return self


class LengthFit(_Part):
    """The fitted length model (PatchKV, formulas 7 and 8).

    Attributes:
        coefficients: Beta, in the order of `length_model.FEATURES`.
        quantile: That was fitted.
        tau_v: Block deviation up to which a block counts as clean.
        gamma: Share of a tail's blocks that must be clean.
        layers: L_d, the layers whose deviation was read.
        pairs: Training pairs.
        typical: Median |P|, |M_new| and |S| of them, in tokens.
        coverage: Share of disjoint calibration pairs whose boundary lies within the window; None: not measured.
    """

    coefficients: tuple[float, ...]
    quantile: Share
    tau_v: NotNegative
    gamma: Share
    layers: tuple[Count, ...]
    pairs: Count
    typical: tuple[Count, Count, Count]
    coverage: Share | None = None

    @model_validator(mode="after")
    def _is_a_model(self) -> Self:
        try:
            self.model  # noqa: B018
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def model(self) -> LengthModel:
        """The length model."""
        return LengthModel(self.coefficients)


class Candidate(_Part):
    """One κ and block size on the calibration data (PatchKV, formulas 15).

    Attributes:
        kappa: κ.
        block: Tokens a block.
        quality: By dataset, in points of 100, more is better.
        computed_tokens: Mean rows that are computed before the first token, which is what the time to it grows with (**choice**:
            no clock, so that the same data give the same profile, also when a run was interrupted).
        recompute_ratio: Mean share of the suffix that was recomputed, after block rounding.
    """

    kappa: Share
    block: Positive
    quality: dict[str, float] = Field(min_length=1)
    computed_tokens: NotNegative
    recompute_ratio: Share

    @property
    def mean_quality(self) -> float:
        """The mean over data sets, in points."""
        return sum(self.quality.values()) / len(self.quality)


class PrecisionCandidate(_Part):
    """One pair of risk thresholds on the calibration data.

    Attributes:
        tau_low: τ_L.
        tau_high: τ_H.
        alpha: α.
        kl: Mean KL of the next token to the exact cache's, in nats.
        bytes_share: Stored bytes over those of 16 bits a row.
    """

    tau_low: NotNegative
    tau_high: NotNegative
    alpha: Share
    kl: NotNegative
    bytes_share: NotNegative


class Precision(_Part):
    """Thresholds of mixed precision (PatchKV, formulas 13 and 14); see `engine.precision`.

    Attributes:
        tau_low: τ_L: below this risk a block may be stored as `k8v4`.
        tau_high: τ_H: from this risk on it is stored exactly.
        alpha: α, how much of a block's risk is that of its riskiest row.
        low_bit_residual: Most that 4 bits may lose of a row of a `k8v4` block, relative: the calibrated low-bit test.
        candidates: What they were chosen from.
    """

    tau_low: NotNegative
    tau_high: NotNegative
    alpha: Share
    low_bit_residual: NotNegative
    candidates: tuple[PrecisionCandidate, ...] = ()

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.tau_low > self.tau_high:
            raise ValueError(f"tau_low={self.tau_low} lies above tau_high={self.tau_high}")
        return self

    @property
    def thresholds(self) -> dict[str, float]:
        """The four numbers by name, as `ConnectorConfig` has them."""
        return self.model_dump(exclude={"candidates"})


class AttentionExample(_Part):
    """Stored attention over one resumed prompt and the blocks that were taken, for the plot (PatchKV, formulas 10 to 12).

    Attributes:
        block: Tokens a block.
        attention: Highest I of each block of the new prompt, `[N]`; 0 where nothing is aligned.
        edit: First token of the edit and the token after it, in the new prompt.
        dirty: Blocks of D.
        nonlocal_blocks: Blocks of H.
    """

    block: Positive
    attention: tuple[NotNegative, ...]
    edit: tuple[Count, Count]
    dirty: tuple[Count, ...]
    nonlocal_blocks: tuple[Count, ...]


class BlockSensitivity(_Part):
    """What it does to store one block, and no other, in 4 bits.

    Attributes:
        start: Its first token.
        risk: r_b, formulas 13.
        residual: Largest e^V of its rows.
        kl: KL of the next token to the exact cache's, in nats.
    """

    start: Count
    risk: NotNegative
    residual: NotNegative
    kl: NotNegative


class Profile(_Part):
    """What was measured on one model, and what policies take from it.

    Attributes:
        format: Marks the file.
        version: Of the format.
        model: That was measured.
        packages: Versions of what it was measured with.
        machine: Hardware that the times are from.
        seed: Of edits and splits.
        data: Files that were measured on.
        attention_layers: Layers whose attention is sampled.
        drift: Curves for the plot.
        length: The fitted length model.
        kappa: The chosen κ.
        block: The chosen block size of recomputation, in tokens.
        tolerance: Quality that a candidate may lack to the best one on each data set, in points.
        candidates: What κ and block were chosen from.
        quality_unit: What the points of their quality are, e.g. `next tokens as in the exact arm, %`.
        precision: Thresholds of mixed precision.
        sensitivity: Blocks stored in 4 bits one by one.
        attention: An example for the plot.
        options: Further options by policy, e.g. `{"frontier": {"cosine": 0.998}}`.
    """

    format: Literal["agentcache-profile"] = FORMAT
    version: Literal[1] = FORMAT_VERSION
    model: ModelFingerprint
    packages: dict[str, str]
    machine: dict[str, Any] = Field(default_factory=dict)
    seed: int = 0
    data: tuple[DataSource, ...] = ()
    attention_layers: tuple[Count, ...] = ()
    drift: DriftCurves
    length: LengthFit
    kappa: Share
    block: Positive
    tolerance: NotNegative = 0.25
    candidates: tuple[Candidate, ...] = ()
    quality_unit: str = "points"
    precision: Precision
    sensitivity: tuple[BlockSensitivity, ...] = ()
    attention: AttentionExample | None = None
    options: dict[str, dict[str, OptionValue]] = Field(default_factory=dict)

    def options_for(self, policy: str, given: Mapping[str, OptionValue] | None = None) -> dict[str, OptionValue]:
        """Returns a policy's options: those given, and the profile's where nothing is given; none for a policy it knows not.

        Args:
            policy: Registered name.
            given: What the user set, which is kept as it is.
        """
        given = given or {}
        known: dict[str, OptionValue] = dict(self.options.get(policy, {}))
        if policy == "patchkv":
            known = {"kappa": self.kappa, "block": self.block, **known}
            if given.get("window") is None:  # a fixed window stands in for the length model
                known["length_model"] = self.length.model.to_text()
        if policy == "frontier":  # rows agree where the length model would call them clean
            known = {"threshold": round(1 - self.length.tau_v, 6), **known}
            if given.get("first") is None:
                known["length_model"] = self.length.model.to_text()
        return {**known, **given}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Returns the profile of a file.

        Raises:
            ConfigError: It cannot be read, is no profile, or is one of another format version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"profile {str(path)!r} cannot be read: {error}; make one with `agentcache profile`"
            ) from error
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, name: str = "profile") -> Profile:
        """Returns the profile of a JSON text; errors call it by `name`.

        Raises:
            ConfigError: It is no profile, or one of another format version.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{name!r} is no profile: it is not JSON ({error})") from error
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ConfigError(
                f'{name!r} is no profile: it lacks "format": "{FORMAT}"; make one with `agentcache profile`'
            )
        if values.get("version") != FORMAT_VERSION:
            raise ConfigError(
                f"profile {name!r} has format version {values.get('version')!r}, this release reads {FORMAT_VERSION}; "
                f"make it again with `agentcache profile`"
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "value"
            raise ConfigError(f"profile {name!r} is damaged: {where}: {first['msg']}") from error

    def to_json(self) -> str:
        """Returns the file's text; equal profiles have equal texts."""
        return self.model_dump_json(indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file; a reader sees the old one or the new one, whole."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
