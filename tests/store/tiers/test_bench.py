from __future__ import annotations

from pathlib import Path

import numpy as np

from agentcache.store.tiers import Refused
from agentcache.store.tiers.bench import bench_tiers
from agentcache.store.tiers.disk import DiskStore


def test_versions_take_little_more_than_their_distinct_tokens(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (3000, 5000), dtype=np.uint8)
    made = bench_tiers(rows, tmp_path / "store", episodes=6, tokens=300, edits=5, changed=32, fsync=False)
    memory, disk = made["tiers"]
    for row in (memory, disk):
        assert row["versions"] == 36
        assert row["distinct_bytes"] == 6 * (300 + 5 * 32) * 5000
        assert row["accounted_bytes"] <= 1.1 * row["distinct_bytes"]
    assert 1.0 <= disk["ratio"] <= 1.1
    assert disk["open_s"] is not None
    with DiskStore(tmp_path / "store", 1 << 40) as store:
        report = store.verify()
        assert not isinstance(report, Refused)
        assert (report.versions, report.faults) == (36, ())
        assert report.payload_bytes <= disk["distinct_bytes"]
