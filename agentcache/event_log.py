"""A log of events as JSON lines: a subscriber that writes it, and what reads it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Annotated, Any, Final, Self

from pydantic import Field, TypeAdapter, ValidationError

from agentcache.errors import ConfigError
from agentcache.events import Event

__all__ = ["SCHEMA_VERSION", "JsonlEventLog", "read_events"]

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1
_LINE_START: Final = b'{"schema":'
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


class JsonlEventLog:
    """Appends events to a file, one JSON object a line, flushed line by line. A subscriber. Thread-safe.

    Each line has `schema`, `event` and the event's fields. A last line that a crash cut short is removed when the file
    is opened again; only a line that begins like ours is.

    Args:
        path: The file; its folder is made.

    Raises:
        ConfigError: The file is there and is not an event log.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        self._file = self.path.open("a+b")
        try:
            self._mend()
        except BaseException:
            self._file.close()
            raise

    def __call__(self, event: Event) -> None:
        """Appends one event."""
        values = {"schema": SCHEMA_VERSION, **_EVENT.dump_python(event, mode="json")}
        line = json.dumps(values, ensure_ascii=False, separators=(",", ":")) + "\n"
        with self._lock:
            self._file.write(line.encode(errors="backslashreplace"))
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _mend(self) -> None:
        size = self._file.seek(0, os.SEEK_END)
        if size == 0:
            return
        self._file.seek(0)
        if self._file.read(len(_LINE_START)) != _LINE_START[:size]:
            raise ConfigError(f"{self.path} is not an event log; choose another file for `events`")
        end = _line_start(self._file, size)
        if end < size:
            logger.warning("%s: removed a last line that was cut short, %d bytes", self.path, size - end)
            self._file.truncate(end)


def read_events(path: str | os.PathLike[str]) -> Iterator[Event]:
    """Yields the events of a log, each validated. A last line that a crash cut short, or that is being written, is left out.

    Raises:
        ConfigError: A line is not an event of this schema; names the line.
    """
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line.decode())
                if not isinstance(values, dict) or values.pop("schema", None) != SCHEMA_VERSION:
                    raise ValueError(f"it needs schema {SCHEMA_VERSION}")
                event = _EVENT.validate_python(values)
            except (ValueError, ValidationError) as error:
                no_json = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
                if no_json and not line.endswith(b"\n") and line.startswith(_LINE_START[: len(line)]):
                    logger.warning("%s: left out a last line that is cut short, %d bytes", path, len(line))
                    return
                raise ConfigError(f"{path}, line {number} is not an event of agentcache: {error}") from error
            yield event


def _line_start(file: Any, size: int, chunk: int = 1 << 16) -> int:
    """Returns where the line begins that the end of a file lies in."""
    at = size
    while at > 0:
        begin = max(at - chunk, 0)
        file.seek(begin)
        newline = file.read(at - begin).rfind(b"\n")
        if newline >= 0:
            return int(begin + newline + 1)
        at = begin
    return 0
