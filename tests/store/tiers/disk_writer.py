"""A process that saves, reads, hints and deletes in a shared store folder. Prints what it did as JSON.

python disk_writer.py FOLDER SEED VERSIONS BUDGET
"""

from __future__ import annotations

import json
import sys

from agentcache.store.tiers import Manifest, Refused
from agentcache.store.tiers.conformance_kit import Material
from agentcache.store.tiers.disk import DiskStore


def main() -> None:
    folder, seed, count, budget = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    material = Material(seed)
    done: dict[str, int] = {}
    with DiskStore(folder, budget, fsync=False, lock_timeout_s=60) as store:
        parent: Manifest | None = None
        for number in range(count):
            shared = parent.objects[:2] if parent is not None else ()
            draft = material.draft(f"{seed}-{number}", ranks=2, new=(2000, 900), shared=shared)
            made = material.save(store, draft)
            if isinstance(made, Refused):
                assert made.kind == "gone", made  # the other process has evicted its parent
                parent = None
            else:
                parent = made
                found = store.find("red", draft.version)
                if isinstance(found, Manifest):
                    material.check(store, found, evicted_ok=True)
            kind = made.kind if isinstance(made, Refused) else "saved"
            done[kind] = done.get(kind, 0) + 1
            sys.stdout.write("saved\n")
            sys.stdout.flush()
            if number % 7 == 6:
                store.delete("red", f"{seed}-{number - 1}")
            if number % 5 == 4:
                store.hint("red", draft.version, 0.005)
        report = store.verify()
        assert not isinstance(report, Refused), report
        assert report.faults == (), report
    sys.stdout.write(json.dumps(done) + "\n")


if __name__ == "__main__":
    main()
