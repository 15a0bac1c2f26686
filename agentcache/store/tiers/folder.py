"""The folder of the disk tier: its layout, who may write, and how a reader notices that something changed.

```
agentcache-store.json                 the format; a folder without it is not touched
clock                                 its modification time counts uses, in seconds
generation                            8 bytes: even, and another number after every change; odd while one is under way
lock                                  held (flock) by the one writer
versions/<name>-<sequence>.json       one manifest a version; it is there whole or not at all
payloads/<save>.<rank>.safetensors    new objects of one save
staging/<owner>-<save>/               an open save: draft, then the ranks' files
owners/<owner>                        held (flock) while the process lives that owns open saves
```

No name is made of a user's text. Locks vanish with their process, so that a killed one blocks nobody.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentcache.errors import StoreError
from agentcache.store.tiers.files import Files

__all__ = ["Folder"]

logger = logging.getLogger(__name__)

_MARKER = "agentcache-store.json"
_FORMAT = 1
_TICKET = re.compile(r"([0-9a-f]{16})-([0-9a-f]{32})", re.ASCII)
_PAYLOAD = re.compile(r"([0-9a-f]{32})\.([0-9]{1,4})\.safetensors", re.ASCII)
_MANIFEST = re.compile(r"([0-9a-f]{40})-([0-9a-f]{16})\.json", re.ASCII)


class Folder:
    """Paths, lock and generation of one store folder; made when it is not there.

    Raises:
        StoreError: It cannot be made or read, is of another format, or holds something else.
    """

    def __init__(self, root: Path, files: Files) -> None:
        self.root = root
        self.files = files
        self.versions = root / "versions"
        self.payloads = root / "payloads"
        self.staging = root / "staging"
        self.owners = root / "owners"
        self._generation = root / "generation"
        self._clock = root / "clock"
        self._owner: tuple[str, int] | None = None
        try:
            self._open()
        except OSError as error:
            raise self.fault(error) from error

    def fault(self, error: OSError) -> StoreError:
        """Returns the error that says that the folder cannot be opened."""
        return StoreError(f"the store folder {self.root} cannot be opened: {error.strerror or error}")

    def _open(self) -> None:
        marker = self.root / _MARKER
        if not marker.exists():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            strange = [name for name in os.listdir(self.root) if not name.startswith(_MARKER)]
            if strange and not marker.exists():
                raise StoreError(
                    f"{self.root} is no store folder, and not empty ({strange[0]!r}); name a new or an empty folder"
                )
            fresh = marker.with_name(f"{_MARKER}.{secrets.token_hex(4)}")
            self.files.write_whole(fresh, json.dumps({"format": _FORMAT}).encode())
            self.files.rename(fresh, marker)
        try:
            found = json.loads(marker.read_bytes())["format"]
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{marker} is damaged; restore it, or delete the folder {self.root}") from error
        if found != _FORMAT:
            raise StoreError(
                f"{self.root} is of format {found!r}, this release reads {_FORMAT}; name another folder or upgrade"
            )
        for path in (self.versions, self.payloads, self.staging, self.owners):
            if not path.is_dir():
                self.files.make_folder(path)

    # -- names ---------------------------------------------------------------------------------------------------------

    def manifest_path(self, name: str, sequence: int) -> Path:
        """Returns where the manifest of a version lies."""
        return self.versions / f"{name}-{sequence:016x}.json"

    @staticmethod
    def manifest_name(file_name: str) -> tuple[str, int] | None:
        """Returns a version's name and sequence by its file's name, or None for a stray file."""
        found = _MANIFEST.fullmatch(file_name)
        return (found[1], int(found[2], 16)) if found else None

    def payload_path(self, save: str, rank: int) -> Path:
        """Returns where a rank's payloads of a completed save lie."""
        return self.payloads / f"{save}.{rank}.safetensors"

    @staticmethod
    def payload_save(file_name: str) -> str | None:
        """Returns the save that a payload file belongs to, or None for a stray file."""
        found = _PAYLOAD.fullmatch(file_name)
        return found[1] if found else None

    @staticmethod
    def ticket_save(ticket: str) -> str | None:
        """Returns the save of a ticket, or None when it is no ticket of this tier."""
        found = _TICKET.fullmatch(ticket)
        return found[2] if found else None

    # -- one writer ----------------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, timeout_s: float) -> Iterator[None]:
        """Holds the folder's write lock inside the block.

        Raises:
            TimeoutError: Another process held it for longer.
            OSError: There is no lock file and none can be made: the folder is read-only.
        """
        fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline, pause = time.monotonic() + timeout_s, 0.001
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise TimeoutError(
                            f"another process has been writing to {self.root} for {timeout_s} s"
                        ) from None
                    time.sleep(pause)
                    pause = min(2 * pause, 0.02)
            try:
                yield
            finally:
                # A forked child may hold the descriptor too; unlocking, unlike closing, frees the lock for good.
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def new_ticket(self) -> str:
        """Returns a fresh ticket of this process; to be called by the writer."""
        if self._owner is None:
            owner = secrets.token_hex(8)
            fd = self.files.create(self.owners / owner)
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._owner = owner, fd
        return f"{self._owner[0]}-{secrets.token_hex(16)}"

    def is_own(self, ticket: str) -> bool:
        """Whether this handle opened a save."""
        return self._owner is not None and ticket.startswith(f"{self._owner[0]}-")

    def is_abandoned(self, ticket: str) -> bool:
        """Whether the process that opened a save is gone; to be called by the writer."""
        if self.is_own(ticket):
            return False
        try:
            fd = os.open(self.owners / ticket.partition("-")[0], os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def close(self) -> None:
        """Gives up what this process owns."""
        if self._owner is not None:
            owner, fd = self._owner
            self._owner = None
            os.close(fd)
            try:
                self.files.unlink(self.owners / owner)
            except OSError:
                return  # the lock is gone, which is what counts; `gc` removes the file

    # -- changes -------------------------------------------------------------------------------------------------------

    def generation(self) -> int | None:
        """Returns a number that is another after every change, or None while that cannot be told."""
        number = self._number()
        return None if number % 2 else number

    def _number(self) -> int:
        try:
            raw = self._generation.read_bytes()
        except FileNotFoundError:
            return 1
        number = int.from_bytes(raw, "little") if len(raw) == 8 else 1
        return number if number < 1 << 62 else 1

    def next_sequence(self, latest_sequence: int) -> int:
        """Returns the sequence number that the next `change` gives; to be called by the writer."""
        return self._before(latest_sequence) // 2 + 1

    def clock(self) -> int:
        """Returns how many uses there have been, as far as this folder knows; raises OSError."""
        try:
            return max(0, self._clock.stat().st_mtime_ns // 10**9)
        except FileNotFoundError:
            return 0

    def set_clock(self, uses: int) -> None:
        """Tells other processes how many uses there have been; in a read-only folder they are not told."""
        try:
            if not self._clock.exists():
                os.close(self.files.create(self._clock))
            self.files.mark_use(self._clock, uses, 0)
        except OSError as error:
            logger.debug("a use is not recorded for other processes: %s", error)

    @contextmanager
    def change(self, latest_sequence: int) -> Iterator[None]:
        """Marks a change of `versions/` inside the block; to be used by the writer.

        Readers that look meanwhile, or after a writer was killed here, know that they may have seen half of it.

        Args:
            latest_sequence: The highest one in the folder, for the case that the file was lost.
        """
        number = self._before(latest_sequence)
        fd = os.open(self._generation, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self.files.write(fd, struct.pack("<Q", number + 1), 0)
            yield
            self.files.write(fd, struct.pack("<Q", number + 2), 0)
        finally:
            os.close(fd)

    def _before(self, latest_sequence: int) -> int:
        number = self._number()
        return max(number + number % 2, 2 * latest_sequence)
