"""What the tests of a folder share ends behind the last of them: a package-scoped fixture would live until the session ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["end_passed", "ends_with"]

_OPEN = pytest.StashKey[list[tuple[Path, Callable[[], object]]]]()


def ends_with(request: pytest.FixtureRequest, folder: Path, close: Callable[[], object]) -> None:
    """Has something closed behind the last test of a folder; its fixture may close it again when the session ends."""
    request.config.stash.setdefault(_OPEN, []).append((folder, close))


def end_passed(config: pytest.Config, nextitem: pytest.Item | None) -> None:
    """Closes what no later test of its folder needs, the newest first."""
    known = config.stash.get(_OPEN, [])
    for entry in known[::-1]:
        folder, close = entry
        if nextitem is None or folder not in nextitem.path.parents:
            known.remove(entry)
            close()
