"""Which model a profile is of, told from its folder without loading it."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agentcache.errors import ConfigError
from agentcache.weights_digest import weights_digest

__all__ = ["ModelFingerprint", "model_fingerprint"]


class ModelFingerprint(BaseModel):
    """One model.

    Attributes:
        name: As the user named it, or its folder's name; for people.
        architecture: Of `config.json`.
        layers: Decoder layers.
        kv_heads: KV heads, of all ranks.
        head_dim: Dimensions of a head.
        dtype: Of the KV that was measured; for people: drift hardly depends on it.
        hash: `weights_digest`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    architecture: str
    layers: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    dtype: str
    hash: str

    def is_same_model(self, other: ModelFingerprint) -> bool:
        """Returns whether both are the same weights; neither name nor dtype counts."""
        return self._identity() == other._identity()

    def _identity(self) -> tuple[str, int, int, int, str]:
        return self.architecture, self.layers, self.kv_heads, self.head_dim, self.hash

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.architecture}, {self.layers} layers, {self.kv_heads} KV heads of {self.head_dim}, "
            f"{self.dtype}, {self.hash[:8]})"
        )


def model_fingerprint(folder: str | Path, *, name: str | None = None, dtype: str = "auto") -> ModelFingerprint:
    """Returns the fingerprint of a model's folder; reads a few stretches of its weights.

    Args:
        folder: Has `config.json` and weights.
        name: For people; None: the folder's name.
        dtype: Of its KV; `auto`: what its configuration says.

    Raises:
        ConfigError: It is no such folder.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        shape = {
            "layers": config["num_hidden_layers"],
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{str(folder)!r} is no folder of a model whose profile can be told: {type(error).__name__}: {error}"
        ) from error
    stated = config.get("dtype") or config.get("torch_dtype") or "unknown"
    return ModelFingerprint(
        name=name or folder.resolve().name,
        architecture=",".join(config.get("architectures") or [str(config.get("model_type"))]),
        dtype=stated if dtype == "auto" else dtype,
        hash=weights_digest(folder),
        **shape,
    )
