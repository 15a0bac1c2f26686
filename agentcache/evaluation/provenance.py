"""What a result was made of: model, data, seeds, command, versions, machine, day."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentcache.environment import hardware, versions
from agentcache.errors import ConfigError
from agentcache.profiling.model import ModelFingerprint, model_fingerprint
from agentcache.profiling.profile import Profile
from agentcache.weights import BUILTIN_MODELS, resolve_model

__all__ = ["DataUse", "calibration", "check_disjoint", "fingerprint", "provenance", "spoken_command"]


@dataclass(frozen=True, slots=True)
class DataUse:
    """Data that a result was measured on.

    Attributes:
        name: Of the data set.
        hash: Of the bytes that were read, see `datasets.Dataset`.
        count: Items or tasks that were used.
        what: What it was used for.
    """

    name: str
    hash: str
    count: int
    what: str = "items"


def fingerprint(model: str) -> tuple[Path, ModelFingerprint]:
    """Returns a model's folder, fetched where it is not there, and which model that is.

    Args:
        model: A folder, a hub id, or the name of a built-in model.

    Raises:
        ConfigError: It is no model, or one of a form that cannot be told.
    """
    found = resolve_model(model)
    if isinstance(found, Path):
        return found, model_fingerprint(found, name=model if model in BUILTIN_MODELS else found.resolve().name)
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(found))
    return folder, model_fingerprint(folder, name=found)


def calibration(profile: Profile | None, data: Iterable[DataUse]) -> dict[str, Any]:
    """Returns which data set the policies' settings, and which files both those and the result used.

    Args:
        profile: That the cache took; None: policies ran with their defaults and the options that the result names.
        data: Of the result.
    """
    if profile is None:
        return {"profile": None, "data": [], "shared_files": []}
    known = {source.hash for source in profile.data}
    return {
        "profile": profile.model.name,
        "seed": profile.seed,
        "data": [source.model_dump() for source in profile.data],
        "shared_files": sorted({use.hash for use in data} & known),
    }


def check_disjoint(
    profile: Profile | None, data: Iterable[DataUse], requests: Iterable[tuple[str, Mapping[str, Any]]]
) -> None:
    """Refuses to report on data that a profile was fitted to where a policy takes settings from it.

    Args:
        profile: The model's.
        data: Of the result.
        requests: Policies, each with the options that it is given.

    Raises:
        ConfigError: They share a file.
    """
    if profile is None:
        return
    fitted = [name for name, given in requests if profile.options_for(name, given) != given]
    if not fitted:
        return
    shared = calibration(profile, data)["shared_files"]
    if shared:
        raise ConfigError(
            f"the profile of {profile.model.name} was fitted to data that is measured on ({', '.join(shared)}), and "
            f"{', '.join(dict.fromkeys(fitted))} would take settings from it; give other --data, or all of a policy's options"
        )


def provenance(
    model: ModelFingerprint,
    *,
    dtype: str,
    seeds: Mapping[str, int],
    data: Sequence[DataUse],
    profile: Profile | None = None,
    command: str | None = None,
    engine: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns what a result's JSON says about how it was made.

    Args:
        model: See `fingerprint`.
        dtype: That the engine computed in.
        seeds: By what they seed.
        data: That was measured on.
        profile: That the cache took its settings from.
        command: That makes it again; None: the one that runs.
        engine: Further facts, e.g. `AgentCache.stats()["engine"]`.
    """
    return {
        "model": {"name": model.name, "hash": model.hash, "architecture": model.architecture, "dtype": dtype},
        "data": [asdict(use) for use in data],
        "calibration": calibration(profile, data),
        "seeds": dict(seeds),
        "command": spoken_command(sys.argv) if command is None else command,
        "versions": versions(),
        "hardware": hardware(),
        "engine": dict(engine or {}),
        "date": datetime.now(tz=UTC).date().isoformat(),
    }


def spoken_command(argv: Sequence[str]) -> str:
    """Returns a command line as one can say it elsewhere: absolute paths lose their folders."""
    name, *rest = argv
    return shlex.join([Path(name).name, *(_spoken(word) for word in rest)])


def _spoken(word: str) -> str:
    option, equals, value = word.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={_spoken(value)}"
    return Path(word).name if word.startswith("/") else word
