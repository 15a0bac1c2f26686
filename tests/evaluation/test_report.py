from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentcache.errors import ConfigError
from agentcache.evaluation.provenance import DataUse, calibration, check_disjoint, provenance, spoken_command
from agentcache.evaluation.report import (
    Column,
    Section,
    interval,
    markdown_table,
    new_figure,
    number,
    save_figure,
    write_report,
)
from agentcache.profiling.lookup import shipped_profiles
from agentcache.profiling.model import ModelFingerprint

MODEL = ModelFingerprint(
    name="tiny", architecture="TinyForCausalLM", layers=2, kv_heads=1, head_dim=8, dtype="float32", hash="ab" * 16
)
COLUMNS = [
    Column("policy", lambda row: row["policy"], left=True),
    Column("MR", interval("mr", "mr_ci")),
    Column("flip", number("flip", 0, percent=True)),
]
ROWS = [
    {"policy": "edit_local", "mr": 0.94, "mr_ci": [0.9, 0.971], "flip": 1.0},
    {"policy": "a|b", "mr": 0.5, "mr_ci": None, "flip": None},
]


def test_a_table_has_a_line_a_row_and_a_dash_where_nothing_is_known() -> None:
    assert markdown_table(ROWS, COLUMNS).splitlines() == [
        "| policy | MR | flip |",
        "| :--- | ---: | ---: |",
        "| edit_local | 0.94 [0.90, 0.97] | 100 % |",
        "| a\\|b | 0.50 | – |",
    ]


def test_what_rounds_to_nothing_has_no_sign() -> None:
    row = {"mr": -0.004, "mr_ci": [-0.2, -0.001]}
    assert number("mr")(row) == number("none", 2)({"none": -0.0}) == "0.00"
    assert number("mr", 0, percent=True)(row) == "0 %"
    assert interval("mr", "mr_ci")(row) == "0.00 [-0.20, 0.00]"


def test_a_report_is_json_and_markdown_that_say_how_they_were_made(tmp_path: Path) -> None:
    use = DataUse("sample", "cd" * 16, 12, "background texts")
    made = provenance(MODEL, dtype="bfloat16", seeds={"items": 7}, data=[use], command="agentcache eval x --out r.json")
    out = tmp_path / "r.json"
    written = write_report(out, {"provenance": made, "cells": ROWS}, "Edits", [Section("All", ROWS, COLUMNS, "Seen.")])
    assert written == [out, tmp_path / "r.md"] == sorted(tmp_path.iterdir())
    found = json.loads(out.read_text())
    assert found["cells"] == ROWS
    assert found["provenance"]["model"] == {
        "name": "tiny",
        "hash": "ab" * 16,
        "architecture": "TinyForCausalLM",
        "dtype": "bfloat16",
    }
    assert {"data", "seeds", "command", "versions", "hardware", "date", "calibration"} <= found["provenance"].keys()
    text = (tmp_path / "r.md").read_text()
    assert text.startswith(
        "# Edits\n\n`agentcache eval x --out r.json`\n\ntiny (abababab, bfloat16); data: sample (12 background"
    )
    assert "seeds: items 7" in text and "## All\n\nSeen.\n\n| policy" in text


def test_a_result_that_is_no_json_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a result is a \.json file"):
        write_report(tmp_path / "r.txt", {}, "x", [])


def test_a_number_that_json_does_not_know_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report(tmp_path / "r.json", {"mr": float("nan")}, "x", [])
    assert not list(tmp_path.iterdir())


def test_a_command_is_told_without_the_folders_of_this_machine() -> None:
    words = ["/opt/bin/agentcache", "eval", "--model", "/models/small", "--out=/tmp/r.json", "--policies", "a:k=1,b"]
    assert spoken_command(words) == "agentcache eval --model small --out=r.json --policies a:k=1,b"


def test_data_that_set_the_policies_is_named_beside_the_data_of_the_result() -> None:
    profile = next(shipped_profiles())
    shared = profile.data[0].hash
    found = calibration(profile, [DataUse("a", shared, 3), DataUse("b", "00", 3)])
    assert found["shared_files"] == [shared] and found["data"] == [source.model_dump() for source in profile.data]
    assert calibration(None, [])["profile"] is None


def test_a_policy_with_settings_of_a_profile_is_not_reported_on_the_data_they_were_fitted_to() -> None:
    profile = next(shipped_profiles())
    own, other = DataUse("a", profile.data[0].hash, 3), DataUse("b", "00", 3)
    with pytest.raises(ConfigError, match=f"was fitted to data that is measured on \\({own.hash}\\)"):
        check_disjoint(profile, [other, own], [("edit_local", {}), ("patchkv", {"kappa": 0})])
    check_disjoint(profile, [other], [("patchkv", {})])
    check_disjoint(profile, [own], [("edit_local", {}), ("cacheblend", {"share": 0.1})])  # they take nothing from it
    check_disjoint(profile, [own], [("patchkv", {"window": 8, "kappa": 0, "block": 8})])  # all is given
    check_disjoint(None, [own], [("patchkv", {})])


def test_a_plot_is_saved_in_two_formats(tmp_path: Path) -> None:
    figure, axes = new_figure(2)
    axes[0].plot([0, 1], [1, 0])
    paths = save_figure(figure, tmp_path / "r.json", "k")
    assert [path.name for path in paths] == ["r-k.svg", "r-k.png"] and all(path.stat().st_size > 1000 for path in paths)
