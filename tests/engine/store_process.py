"""Another process on a store folder, which does what it is told: a JSON list of method and arguments a line.

    python store_process.py FOLDER BUDGET

With `storm` it saves versions until it is killed; what does not fit is refused or evicts others.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import count

from agentcache.store.tiers.conformance_kit import Material
from agentcache.store.tiers.disk import DiskStore


def storm(store: DiskStore) -> None:
    material = Material()
    for number in count():
        material.save(store, material.draft(f"storm{number}", new=(90_000, 100)))
        time.sleep(0.005)  # a folder's lock is not fair


def main() -> None:
    with DiskStore(sys.argv[1], int(sys.argv[2]), fsync=False) as store:
        for line in sys.stdin:
            method, *args = json.loads(line)
            if method == "storm":
                storm(store)
            sys.stdout.write(f"{getattr(store, method)(*args)!r}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
