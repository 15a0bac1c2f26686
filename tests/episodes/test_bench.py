from agentcache.episodes.bench import bench_diff


def test_bench_diff_times_both_promised_cases_and_aligns_them():
    result = bench_diff(tokens=16_384, repeats=1)
    rows = {row["case"]: row for row in result["rows"]}
    assert result["repeats"] == 7
    assert rows["3 edits, new turn"]["aligned_runs"] == 4
    assert rows["200 edits, new turn"]["aligned_runs"] > 100
    assert rows["unrelated"]["aligned_tokens"] == 0
    assert all(row["diff_ms"] > 0 for row in rows.values())
