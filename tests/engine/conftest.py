"""Engines that the tests of this folder share: one at a time in this process, closed when another is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.ending import ends_with


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts those tests of a module that share its engine before those that start another: each change costs seconds."""
    first: dict[Path, int] = {}
    for at, item in enumerate(items):
        first.setdefault(item.path, at)
    here = Path(__file__).parent
    items.sort(key=lambda item: (first[item.path], here in item.path.parents and "engine" not in item.fixturenames))


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


class Engines:
    """Starts engines, at most one at a time."""

    def __init__(self) -> None:
        self._key: Any = None
        self._engine: Any = None

    def __call__(self, model: Path, **args: Any) -> Any:
        """Returns the engine of these arguments, idle and empty; any other is stopped."""
        from tests.engine.harness import Engine

        key = (model, repr(sorted(args.items())))
        if self._engine is not None and self._key == key:
            self._engine.empty()
        else:
            self.stop()
            self._engine, self._key = Engine(model, **args), key
        return self._engine

    def stop(self) -> None:
        """Stops the engine that runs, if any."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


@pytest.fixture(scope="package")
def start_engine(request: pytest.FixtureRequest) -> Iterator[Engines]:
    """Returns what starts engines in this process."""
    from tests.engine.reference import engines_in_this_process

    engines = Engines()
    with ExitStack() as stack:
        stack.enter_context(engines_in_this_process())
        stack.callback(engines.stop)
        ends_with(request, Path(__file__).parent, stack.close)
        yield engines


@pytest.fixture(scope="package")
def reference(tiny: Callable[[str], Path], start_engine: Engines, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Returns the reference engine of the tiny llama; `start_engine` has prepared the environment."""
    from tests.engine.reference import Reference

    engine = Reference(tiny("llama"))
    with ExitStack() as stack:
        stack.callback(engine.close)
        ends_with(request, Path(__file__).parent, stack.close)
        yield engine


@pytest.fixture
def engine(tiny: Callable[[str], Path], start_engine: Engines) -> Iterator[Any]:
    """Returns a roomy engine of the tiny llama with nothing in it; afterwards it must hold nothing that it should not."""
    engine = start_engine(tiny("llama"))
    yield engine
    engine.drain()
    engine.check()
