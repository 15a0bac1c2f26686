"""What the tests of saves with mixed precision share: calls of a runtime, and what was stored of a version."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from tests.engine.harness import Engine

__all__ = ["MIXED", "payloads", "row_tags", "spied"]

MIXED = {"precision": "mixed"}


@contextmanager
def spied(engine: Engine, *names: str, fail: str | None = None):
    """Records the calls of a runtime's methods as (step, name, rows) while it is open; one of them may raise."""
    calls: list[tuple[int, str, int]] = []
    steps = [0]
    runtime, advance = engine.runtime, engine.worker.saver.advance

    def counted(*args, **more):
        steps[0] += 1
        advance(*args, **more)

    def spy(name):
        plain = getattr(runtime, name)

        def call(*args):
            rows = args[2] - args[1] if name == "value_residual" else 0
            if name == "gather_runs":
                args = (args[0], list(args[1]))
                rows = sum(source.length for source in args[1])
            calls.append((steps[0], name, rows))
            if name == fail:
                raise RuntimeError("made to fail")
            return plain(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in (*names, *([fail] if fail and fail not in names else [])):
            patch.setattr(runtime, name, spy(name))
        patch.setattr(engine.worker.saver, "advance", counted)
        yield calls


def payloads(engine: Engine, name: str = "v1"):
    """Returns a version's extents with their payloads."""
    return [(e, engine.worker.store.get(e.object_id)) for e in engine.version(name).extents]


def row_tags(engine: Engine, name: str = "v1") -> list[str]:
    """Returns the precision of each row of a version that shares no object with another one."""
    return [str(run.tag) for _, payload in payloads(engine, name) for run in payload.runs for _ in range(run.tokens)]
