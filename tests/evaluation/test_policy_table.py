"""One line a policy, of the results of two commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache import ConfigError
from agentcache.cli import app
from agentcache.evaluation.policy_table import policy_lines, policy_table


def pair(policy: str, distance: int, mr: float, k: int | None = 32, **more: Any) -> dict[str, Any]:
    cell = {
        "model": "m",
        "condition": "derived",
        "form": "table",
        "tokens": 600,
        "policy": policy,
        "k": k,
        "distance": distance,
    }
    return cell | {"mr": mr, "recompute_ratio": 0.1 + distance, "speedup": 4.0} | more


def asked(policy: str, diff: float, **more: Any) -> dict[str, Any]:
    cell = {"model": "m", "dataset": "all", "edit": "all", "policy": policy}
    measured = {"f1_diff": diff, "f1_diff_ci": [diff - 0.01, diff + 0.02], "recompute_ratio": 0.2, "speedup": 5.0}
    return cell | measured | more


PAIRED = {
    "cells": [
        pair("attended", 250, 0.9),
        pair("attended", 0, 1.0),
        pair("attended", 250, 0.98, 64),
        pair("prefix_cache", 0, 1.0, None, recompute_ratio=1.0, speedup=1.0),
        pair("patchkv", 0, 0.99, speedup=None),
        pair("attended", 0, 0.5, form="chain"),
        pair("attended", 0, 0.6, condition="direct"),
        pair("transplanted/attended", 0, 0.7),
    ]
}
QA = {
    "cells": [
        asked("attended", -0.01),
        asked("epic@k8v8", 0.0),
        asked("exact_again", 0.0),
        asked("attended", 9, edit="x"),
    ]
}


@pytest.mark.parametrize("order", [1, -1])
def test_a_line_holds_what_both_commands_found(order: int) -> None:
    lines, distances = policy_lines([PAIRED, QA][::order])
    assert distances == [0, 250]
    assert [(line["policy"], line["k"], line["mr"]) for line in lines] == [
        ("prefix_cache", None, {0: 1.0}),
        ("attended", None, {}),
        ("attended", 32, {250: 0.9, 0: 1.0}),
        ("attended", 64, {250: 0.98}),
        ("epic@k8v8", None, {}),
        ("patchkv", 32, {0: 0.99}),
    ]
    assert [line["exact"] for line in lines] == ["yes", "no", "no", "no", "no", "no"]
    assert [line.get("f1_diff") for line in lines] == [None, -0.01, None, None, 0.0, None]
    assert [line["source"] for line in lines] == ["prefix caching", "ours", "ours", "ours", "EPIC", "PatchKV"]
    assert lines[2]["recompute_ratio"] == 0.1 and lines[2]["ttft_ratio"] == 0.25


def test_the_table_has_a_dash_where_nothing_was_measured() -> None:
    rows = {line.split("|")[1].strip(): line for line in policy_table([PAIRED, QA]).splitlines()}
    assert rows["`attended` K=32"].endswith("| 10 % | 25 % | 1.00 | 0.90 | – | – | – |")
    assert rows["`attended`"].endswith("| – | – | – | – | -1.0 [-2.0, +1.0] | 20 % | 20 % |")
    assert rows["`epic@k8v8`"].endswith("| – | – | – | – | +0.0 [-1.0, +2.0] | 20 % | 20 % |")
    assert rows["`patchkv` K=32"].endswith("| 10 % | – | 0.99 | – | – | – | – |")
    assert "F1" not in policy_table([PAIRED])


def test_what_cannot_be_one_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="paired-edit are of m and other"):
        policy_table([PAIRED, {"cells": [pair("epic", 0, 1.0, model="other")]}])
    with pytest.raises(
        ConfigError, match=r"two results measure attended at distance 0 \(in contexts from 600 tokens\)"
    ):
        policy_table([PAIRED, {"cells": [pair("attended", 0, 1.0)]}])
    with pytest.raises(ConfigError, match="two results ask attended questions"):
        policy_table([QA, {"cells": [asked("attended", 0.0)]}])
    with pytest.raises(ConfigError, match="no derived items and no questions"):
        policy_table([{"cells": []}])


def test_the_command_prints_it_and_says_what_is_no_result(tmp_path: Path) -> None:
    good, bad, other = (tmp_path / name for name in ("good.json", "bad.json", "other.json"))
    good.write_text(json.dumps(PAIRED))
    bad.write_text("{")
    other.write_text("[1]")
    done = CliRunner().invoke(app, ["eval", "table", str(good)])
    assert done.exit_code == 0 and done.output == policy_table([PAIRED])
    for path, text in ((bad, "is no result"), (other, "has no cells"), (tmp_path / "none.json", "is no result")):
        with pytest.raises(ConfigError, match=text):
            CliRunner().invoke(app, ["eval", "table", str(path)], catch_exceptions=False)
