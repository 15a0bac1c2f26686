"""The run that a model call belongs to: LangChain tells `_generate` of it, and `_stream` only sometimes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, BaseCallbackManager, CallbackManager
from langchain_core.runnables import RunnableConfig, ensure_config
from langchain_core.utils.uuid import uuid7

__all__ = ["Run", "astream_in", "begin", "current_run", "run_of", "running", "stream_in"]

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """What is known of a model call's run.

    Attributes:
        run_id: Its id.
        metadata: Its metadata: LangGraph's thread and node, a middleware's `lc_source`, the caller's own.
        handlers: Callback handlers, LangSmith's tracer among them.
    """

    run_id: UUID = field(default_factory=uuid7)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    handlers: Sequence[BaseCallbackHandler] = ()


current_run: ContextVar[Run | None] = ContextVar("agentcache_run", default=None)
"""Set while `_stream` begins, to the run that it is not told of."""


def run_of(run_manager: Any) -> Run:
    """Returns the run of a callback manager; without one that of the stream that begins, else one of the config around it."""
    if run_manager is not None:
        return Run(run_manager.run_id, run_manager.metadata, run_manager.handlers)
    known = current_run.get()
    if known is not None:
        return known
    return Run(metadata=ensure_config().get("metadata") or {})


@contextlib.contextmanager
def running(run_manager: Any) -> Iterator[None]:
    """Tells the streams that begin inside of which run they are."""
    token = current_run.set(run_of(run_manager) if run_manager is not None else None)
    try:
        yield
    finally:
        current_run.reset(token)


def begin(
    config: RunnableConfig | None, own: Mapping[str, Any] | None, *, synchronous: bool
) -> tuple[RunnableConfig, Run]:
    """Returns a stream's config with an id and callbacks that are known beforehand, and its run.

    Args:
        config: The caller's.
        own: The model's own metadata.
        synchronous: Which kind of callback manager the stream takes.
    """
    config = ensure_config(config)
    kind: type[BaseCallbackManager] = CallbackManager if synchronous else AsyncCallbackManager
    callbacks = kind.configure(config.get("callbacks"))
    run_id = config.get("run_id") or uuid7()
    metadata = {**callbacks.metadata, **(own or {}), **(config.get("metadata") or {})}
    config = {**config, "callbacks": callbacks, "run_id": run_id}
    return config, Run(run_id, metadata, callbacks.handlers)


def stream_in(run: Run, chunks: Iterator[T]) -> Generator[T, None, None]:
    """Yields the chunks of a stream that begins in a run."""
    with contextlib.closing(chunks):  # type: ignore[type-var]
        token = current_run.set(run)
        try:
            first = next(chunks, None)
        finally:
            current_run.reset(token)
        if first is not None:
            yield first
            yield from chunks


async def astream_in(run: Run, chunks: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Yields the chunks of an asynchronous stream that begins in a run."""
    async with contextlib.aclosing(chunks):  # type: ignore[type-var]
        token = current_run.set(run)
        try:
            first = await anext(chunks, None)
        finally:
            current_run.reset(token)
        if first is not None:
            yield first
            async for chunk in chunks:
                yield chunk
