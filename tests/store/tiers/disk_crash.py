"""A process that is killed before or after each of its changes to a store folder, in turn. Prints one JSON line a death.

    python disk_crash.py FOLDER

Each death happens in a fork, in a fresh folder below FOLDER that holds versions `old` and `parent`. The save of `child`, which
shares an object of `parent`, evicts `old`; then `parent` is deleted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from agentcache.store.tiers import Manifest, Miss, Part, Refused, payload_checksum
from agentcache.store.tiers.conformance_kit import Material
from agentcache.store.tiers.disk import DiskStore
from agentcache.store.tiers.files import Files


class DeadlyFiles(Files):
    """Kills its process at one change."""

    def __init__(self) -> None:
        super().__init__(fsync=False)
        self.left = -1
        self.after = False

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name.startswith("_") or not callable(method):
            return method

        def change(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.after:
                die()
            result = method(*args, **options)
            if self.left == 0:
                die()
            return result

        return change


class HalfFiles(DeadlyFiles):
    """Dies in the middle of a write."""

    def write(self, fd: int, data: Any, offset: int) -> None:
        view = memoryview(data)
        if self.left == 0 and self.after:
            super().write(fd, view[: len(view) // 2], offset)
            die()
        super().write(fd, view, offset)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Plan:
    """Three versions, made before the fork, so that the survivor knows what they must read."""

    def __init__(self) -> None:
        self.material = Material()
        self.old, self.parent = (self.material.draft(name, ranks=2) for name in ("old", "parent"))
        first = self.parent.objects[0]
        blobs = [self.material.blobs[first.key, rank] for rank in (0, 1)]
        parts = tuple(Part(len(blob), payload_checksum(first.key, rank, blob)) for rank, blob in enumerate(blobs))
        self.child = self.material.draft("child", ranks=2, shared=[first._replace(parts=parts)], new=(60, 50))

    def act(self, folder: Path, files: DeadlyFiles, number: int, after: bool) -> None:
        store = DiskStore(folder, 2 * (self.old.cost_bytes + 1000) + 1100, files=files)
        self.material.must_save(store, self.old)
        self.material.must_save(store, self.parent)
        files.left, files.after = number, after
        self.material.must_save(store, self.child)
        assert store.delete("red", "parent") is True
        files.left = -1
        store.close()


def look(folder: Path, material: Material) -> dict[str, Any]:
    """Returns what a fresh process finds, after it has checked that nothing is half there."""
    with DiskStore(folder, 1 << 30, fsync=False) as store:
        found = {}
        for name in ("old", "parent", "child"):
            manifest = store.find("red", name)
            assert not isinstance(manifest, Refused), manifest
            found[name] = not isinstance(manifest, Miss)
            if isinstance(manifest, Manifest):
                material.check(store, manifest)
        report = store.verify()
        assert not isinstance(report, Refused), report
        assert report.faults == (), report
        used = store.stats()[0]["used_bytes"]
        cleared = store.gc()
        assert not isinstance(cleared, Refused), cleared
        assert store.stats()[0]["used_bytes"] <= used
        assert [*(folder / "staging").iterdir()] == []
        again = store.gc()
        assert not isinstance(again, Refused)
        assert (again.saves, again.manifests, again.payloads) == (0, 0, 0), again
        if not found["child"]:
            material.must_save(store, material.draft("child", ranks=2))
        material.must_save(store, material.draft("next", ranks=2))
        store.check_integrity()
        return {"found": found, "cleared": cleared.saves + cleared.payloads}


def main() -> None:
    root = Path(sys.argv[1])
    number, killed = 0, True
    while killed:
        number += 1
        killed = False
        for kind, after in ((DeadlyFiles, False), (HalfFiles, True)):
            folder = root / f"{number}-{kind.__name__}-{after}"
            plan = Plan()
            pid = os.fork()
            if pid == 0:
                plan.act(folder, kind(), number, after)
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
            killed |= os.WIFSIGNALED(status)
            row = {"number": number, "after": after, "killed": os.WIFSIGNALED(status)}
            sys.stdout.write(json.dumps(row | look(folder, plan.material)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
