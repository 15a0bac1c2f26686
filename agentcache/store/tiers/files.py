"""Every change that the disk tier makes to a file system, one method each, so that tests can make any of them fail."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import Any

__all__ = ["Files"]

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


class Files:
    """The real thing.

    Args:
        fsync: Whether data reach the disk before a rename makes them visible. Without it a killed process loses
            nothing still, but a power cut may lose the latest saves (their checksums tell).
    """

    def __init__(self, fsync: bool = True) -> None:
        self.fsync = fsync

    def create(self, path: Path) -> int:
        """Returns a descriptor of a new, empty file."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, data: Any, offset: int) -> None:
        """Writes all bytes of a buffer at an offset."""
        view = memoryview(data)
        while len(view):
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def sync(self, fd: int) -> None:
        """Returns when a file's bytes are on the disk."""
        if self.fsync:
            os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Returns when a folder's names are on the disk."""
        if self.fsync:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Moves a file, replacing what is there."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Removes a file; one that is not there is ignored."""
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        """Makes a folder; one that is there is fine."""
        path.mkdir(exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Removes a folder and everything in it; one that is not there is ignored."""
        if path.exists():
            shutil.rmtree(path)

    def mark_use(self, path: Path, last_use: int, bonus: int) -> None:
        """Records a version's last use as its file's modification time: a logical clock, no wall clock is asked."""
        os.utime(path, ns=(0, last_use * 10**9 + min(bonus, 10**9 - 1)))

    def give_back(self, path: Path, offset: int, length: int) -> bool:
        """Frees the blocks under a stretch of a file, which reads as zeros then; returns False where that is not possible."""
        if not sys.platform.startswith("linux"):
            return False
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            done = libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(offset), ctypes.c_long(length))
            return bool(done == 0)
        finally:
            os.close(fd)

    def write_whole(self, path: Path, data: bytes, sync: bool = True) -> None:
        """Makes a file that holds these bytes, on the disk with `sync`; its name is not yet safe there."""
        fd = self.create(path)
        try:
            self.write(fd, data, 0)
            if sync:
                self.sync(fd)
        finally:
            os.close(fd)
