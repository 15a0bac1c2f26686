"""Where a request's rows may come from: finds the versions that it names, or says why one is not there. No vLLM, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

import numpy as np

from agentcache.engine.wire import ResumeParams
from agentcache.episodes.diff import as_ids, common_prefix
from agentcache.store.compose import Composition, compose
from agentcache.store.version import Version

__all__ = ["Found", "Search", "complaint", "draw_on", "find_versions"]

_NAMED = 3  # so many names of one kind are said, the rest are counted

Found = dict[str, Version | str]
"""Each named version, or why it is not there, as the rest of a sentence that begins with its name."""


class Search(Protocol):
    """A search below memory, see `engine.durable.Seek`."""

    reason: str | None
    version: Version | None

    @property
    def done(self) -> bool:
        """Whether it is known if there is one."""


def find_versions(
    params: ResumeParams,
    lookup: Callable[[str, str], Version | None],
    running: Set[tuple[str, str]],
    seek: Callable[[str, str], Search] | None,
    searches: dict[str, Search],
) -> Found | None:
    """Returns what a request names, parent first; None while one of them is sought below memory.

    Args:
        params: The request's.
        lookup: Finds a version in memory.
        running: Versions that are being generated.
        seek: Begins a search below memory; None where there is nothing.
        searches: Those that this request has begun, by name; new ones are added.
    """
    found: Found = {}
    waits = False
    for name in params.names:
        key = (params.namespace, name)
        if key in running:
            found[name] = "is still generating"
            continue
        version = lookup(*key)
        if version is not None:
            found[name] = version
            continue
        if seek is not None and name not in searches:
            searches[name] = seek(*key)
        search = searches.get(name)
        waits |= search is not None and not search.done
        found[name] = (search.reason if search is not None else None) or "is unknown or was evicted"
    return None if waits else found


def complaint(params: ResumeParams, found: Mapping[str, Version | str]) -> str | None:
    """Returns what is not there of a request's parent and sources, and why; None when all of it is."""
    faults: dict[tuple[bool, str], list[str]] = {}
    for name, what in found.items():
        if isinstance(what, str):
            faults.setdefault((name == params.parent, what), []).append(repr(name))
    said = []
    for (is_parent, fault), names in faults.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        kind = "parent" if is_parent else "source" if len(names) == 1 else "each of the sources"
        said.append(f"{kind} {', '.join(names[:_NAMED])}{more} {fault}")
    return "; ".join(said) or None


def draw_on(prompt: Sequence[int], params: ResumeParams, found: Mapping[str, Version | str]) -> Composition | None:
    """Returns what is there of a request's parent and sources, or None when nothing is.

    Without its parent, the source that shares the longest prefix with the prompt comes first: those rows of it stand where they
    were computed, behind the same tokens.
    """
    here = [version for version in found.values() if not isinstance(version, str)]
    if not here:
        return None
    base = here[0]
    if base.version_id != params.parent:
        ids = as_ids(np.asarray(prompt, dtype=np.int32))
        base = max(here, key=lambda version: common_prefix(as_ids(version.token_ids), ids))
    return compose(base, here)
