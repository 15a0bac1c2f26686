"""Engines that the tests of this folder share: one at a time in this process, closed when another is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MakeEngine = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a tiny random model, made once."""
    from tests.models import make_tiny

    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_tiny(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def start_engine() -> Iterator[MakeEngine]:
    """Returns a function that gives the engine of these arguments, idle and empty; the one before it is closed."""
    from tests.engine.harness import Engine, engine_environment

    current: list[tuple[Any, Engine]] = []

    def start(model: Path, **args: Any) -> Engine:
        key = (model, repr(sorted(args.items())))
        if current and current[0][0] == key:
            current[0][1].empty()
            return current[0][1]
        if current:
            current.pop()[1].close()
        current.append((key, Engine(model, **args)))
        return current[0][1]

    with engine_environment():
        yield start
        if current:
            current.pop()[1].close()


@pytest.fixture(scope="session")
def reference(tiny: Callable[[str], Path], start_engine: MakeEngine) -> Iterator[Any]:
    """Returns the reference engine of the tiny llama; `start_engine` has prepared the environment."""
    from tests.engine.harness import Reference

    engine = Reference(tiny("llama"))
    yield engine
    engine.close()


@pytest.fixture
def engine(tiny: Callable[[str], Path], start_engine: MakeEngine) -> Iterator[Any]:
    """Returns a roomy engine of the tiny llama with nothing in it; afterwards it must hold nothing that it should not."""
    engine = start_engine(tiny("llama"))
    yield engine
    engine.drain()
    engine.check()
