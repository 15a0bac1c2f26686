"""The README says what the repository does: its code is the example, its numbers are those of the committed result."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentcache.evaluation.policy_table import policy_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_code_is_the_example():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert code == (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")


def test_the_table_is_the_committed_result():
    result = json.loads((ROOT / "docs" / "results" / "resume.json").read_text())
    for row in result["rows"]:
        line = (
            f"| `{row['policy']}` | {row['ttft_ms']['p50']:.0f} ms | {row['speedup']:.1f}× "
            f"| {row['recomputed_tokens']} tokens | {row['recompute_ratio']:.1%} | {row['kl_to_exact']:.3f} |"
        )
        assert line in README
    flat = " ".join(README.split())
    assert f"takes {result['floor_ms']:.0f} ms and a decode step {result['decode_ms']:.0f} ms" in flat
    assert f"SmolLM2-135M, {result['context']} tokens" in flat
    assert f"--policies {','.join(row['policy'] for row in result['rows'])} " in flat
    assert f"measuring attention at a save takes {result['attention']['share']:.1%} of its prefill" in flat
    assert result["model"] == "smollm2" and result["reps"] == 9


def test_what_policies_recover_is_the_committed_result():
    (files,) = re.findall(r"`agentcache eval table (docs/results/[^`]*)`", " ".join(README.split()))
    results = [json.loads((ROOT / file).read_text()) for file in files.split()]
    assert policy_table(results) in README
    cells = [cell for result in results for cell in result["cells"]]
    flat = " ".join(README.split())
    for cell in (cell for cell in cells if cell["policy"] == "edit_local"):
        assert f"{cell['n_kept']} kept items of {cell['n_drawn']} drawn" in flat
        assert f"{cell['prompt_tokens']:,} tokens, TTFT of" in flat
    for cell in (cell for cell in cells if cell["policy"] == "prefix_cache"):
        assert f"TTFT of {cell['n_kept']} of them" in flat
    (far,) = (cell for cell in cells if (cell["policy"], cell["k"], cell["distance"]) == ("attended", 64, 1500))
    assert f"`attended` all of it**, at 1,500 in {100 / far['speedup']:.0f} % of prefix caching's time" in flat


def test_what_memories_keep_is_the_committed_result():
    cells = json.loads((ROOT / "docs" / "results" / "memory-smollm2.json").read_text())["cells"]
    full, blend, shift, none = (
        next(c for c in cells if (c["dataset"], c["policy"], c["r"]) == ("ama_bench_recall", policy, r))
        for policy, r in (("full_recompute", 1.0), ("cacheblend", 0.1), ("mean_shift", 0.1), ("direct_reuse", 0.0))
    )
    assert {cell["n"] for cell in (full, blend, shift, none)} == {100}
    said = (
        f"keep an F1 of {100 * blend['f1']:.1f} and {100 * shift['f1']:.1f} points where a full prefill has {100 * full['f1']:.1f}, "
        f"in {100 / blend['speedup']:.0f} and {100 / shift['speedup']:.0f} % of its time; `direct_reuse` has {100 * none['f1']:.1f}"
    )
    assert said in " ".join(README.split())


def test_the_checkpoints_are_the_committed_result():
    result = json.loads((ROOT / "docs" / "results" / "store.json").read_text())
    payload, restore = result["parts"]["payload"], result["parts"]["restore"]["restore_ms"]
    for tag in ("exact", "mixed", "k8v8", "k8v4"):
        assert f"| `{tag}` | {payload['kl'][tag]['mean']:.4f} | {restore[tag]['shifted']['p50']:.1f} ms |" in README
    flat = " ".join(README.split())
    assert f"as many bytes takes {result['copy_ms']:.1f} ms" in flat
    assert f"takes {result['payload_ratio']:.3f} of the bytes of {payload['tokens']:,} tokens" in flat
    ratio, opened = result["bytes_ratio"]["disk"], result["open_s"]
    assert f"take {ratio:.2f} times the bytes of their distinct tokens on disk, and open in {opened:.1f} s" in flat


def test_what_auto_takes_is_the_committed_result():
    found = json.loads((ROOT / "docs" / "results" / "auto.json").read_text())["summary"]
    assert found["edits"] == 100
    flat = " ".join(README.split())
    where = f"{found['median_ratio_where_exact']:.2f} on the {found['chosen_exact']} that it left exact"
    assert f"it took {found['median_ratio']:.2f} of prefix caching's time (median; {where})" in flat
    assert f"{found['saving_share']:.0%}".replace("%", " %") + " of the time that `edit_local` saves" in flat


def test_what_middlewares_leave_is_the_committed_result():
    result = json.loads((ROOT / "docs" / "results" / "replay.json").read_text())
    cells = {(cell["rule"], cell["kind"]): cell for cell in result["cells"]}
    rules = result["rules"]
    for rule, kind, name in (
        ("clearing", "tool_result", f"`ContextEditingMiddleware` ({rules['clear_trigger']:,} tokens, keep {rules['clear_keep']})"),
        ("summarisation", "summarisation", f"`SummarizationMiddleware` ({rules['summary_trigger']:,} tokens, keep {rules['summary_keep']})"),
    ):  # fmt: skip
        cell = cells[rule, kind]
        assert (
            f"| {name} | {cell['calls']} `{kind}` | {cell['tokens']:,} | {cell['cached']:,} "
            f"| {cell['saved_share']:.1%} | {cells[rule, 'all']['saved_share']:.1%} |"
        ) in README
    assert result["policy"] == "edit_local" and result["provenance"]["data"][0]["count"] == 100
    assert " ".join(result["provenance"]["command"].replace("../shared/data/tau_bench/", "").split()) in " ".join(
        README.split()
    )


def test_what_a_call_costs_beside_the_engine_is_the_committed_result():
    result = json.loads((ROOT / "docs" / "results" / "prompt.json").read_text())
    flat = " ".join(README.split())
    said = f"a model call of {result['messages']} messages and {result['tokens']:,} tokens takes {result['overhead_ms']:.0f} ms more"
    assert said in flat and f"`{result['command']}`" in flat
    assert result["model"] == "smollm2" and result["messages"] == 200 and result["tokens"] > 32_000
    assert result["overhead_ms"] <= 15


def test_links_lead_to_files():
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.engine
def test_the_example_runs_and_prints_what_the_readme_shows(smollm2_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table = re.search(r"```\n( episode .*?)```", README, re.DOTALL)
    assert table is not None
    assert shape(done.stdout) == shape(table[1])


def shape(table: str) -> list[str]:
    """Returns the lines of a table of resumes without what depends on the machine: its times, and blanks."""
    lines = (re.sub(r"\d+ ms", "… ms", line) for line in table.splitlines() if line.strip(" ─"))
    return [" ".join(line.split()) for line in lines]
