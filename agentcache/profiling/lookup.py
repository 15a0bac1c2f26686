"""Which profile a cache takes: the one that it is given, or one that ships with agentcache."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from agentcache.errors import ConfigError
from agentcache.profiling.model import ModelFingerprint, model_fingerprint
from agentcache.profiling.profile import Profile
from agentcache.weights import BUILTIN_MODELS, cache_dir

__all__ = ["profile_for", "shipped_profiles"]


def shipped_profiles() -> Iterator[Profile]:
    """Yields the profiles that ship with agentcache, by name of their files."""
    folder = files("agentcache").joinpath("data", "profiles")
    if folder.is_dir():
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            if file.name.endswith(".json"):
                yield Profile.from_json(file.read_text(encoding="utf-8"), file.name)


def profile_for(model: str, path: Path | None) -> Profile | None:
    """Returns the profile of a model, or None when no path is given and none ships. Loads no weights and downloads nothing.

    A model that is no folder on this machine is known by its name alone.

    Args:
        model: A folder, a hub id, or the name of a built-in model.
        path: A profile's file.

    Raises:
        ConfigError: The file cannot be read, is no profile, or is one of another model.
    """
    if path is None:
        return next((profile for profile in shipped_profiles() if _ships_for(profile, model)), None)
    profile = Profile.load(path)
    found = _fingerprint(model)
    same = profile.model.name == model if found is None else profile.model.is_same_model(found)
    if not same:
        raise ConfigError(
            f"profile {str(path)!r} is of {profile.model}, and the model is {found or repr(model)}; "
            f"make one of this model with `agentcache profile`"
        )
    return profile


def _ships_for(profile: Profile, model: str) -> bool:
    if model in BUILTIN_MODELS:
        return profile.model.name == model
    try:
        found = _fingerprint(model)
    except ConfigError:
        return False  # a model of a form that cannot be told, so not one of ours
    return found is not None and profile.model.is_same_model(found)


def _fingerprint(model: str) -> ModelFingerprint | None:
    """Returns what a model is, or None when it is not on this machine."""
    folder = cache_dir() / "models" / model if model in BUILTIN_MODELS else Path(model).expanduser()
    return model_fingerprint(folder, name=model) if (folder / "config.json").is_file() else None
