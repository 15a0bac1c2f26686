"""`agentcache store`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentcache.errors import ConfigError, StoreError
from agentcache.store.cli import store_app
from agentcache.store.tiers.conformance_kit import Material
from agentcache.store.tiers.disk import DiskStore
from tests.store.tiers.backends import flip


@pytest.fixture
def url(tmp_path: Path) -> str:
    material = Material()
    with DiskStore(tmp_path / "store", 1 << 30, fsync=False) as store:
        first = material.must_save(store, material.draft("v1", new=(1000, 2000), tag="k8v4"))
        material.must_save(store, material.draft("v[red]", namespace="blue", new=(7,)))
        material.must_save(store, material.draft("v2", shared=first.objects, new=(30,)))
    return f"disk://{tmp_path}/store"


def run(*args: str) -> Result:
    return CliRunner().invoke(store_app, args, env={"COLUMNS": "200"})


def test_ls_lists_versions_and_what_they_take(url: str) -> None:
    made = run("ls", url)
    assert made.exit_code == 0, made.output
    assert "3 versions" in made.output
    assert "v[red]" in made.output
    assert "3,030" in made.output
    assert "k8v4 3,000, exact 37" in made.output or "exact 37, k8v4 3,000" in made.output
    only = json.loads(run("ls", url, "--namespace", "blue", "--json").stdout)
    assert [row["version"] for row in only["versions"]] == ["v[red]"]
    assert only["tiers"][0]["versions"] == 3


def test_verify_reads_everything_and_fails_when_something_is_damaged(url: str, tmp_path: Path) -> None:
    made = run("verify", url)
    assert (made.exit_code, made.stdout.splitlines()[-1]) == (0, "all checksums match")
    path = max((tmp_path / "store" / "payloads").iterdir(), key=lambda p: p.stat().st_size)
    flip(path, path.stat().st_size - 10)
    made = run("verify", url)
    assert made.exit_code == 1
    assert "its checksum does not match" in made.stdout
    assert made.stdout.splitlines()[-1] == "1 faults"
    report = json.loads(run("verify", url, "--json").stdout)
    assert (report["versions"], report["objects"], len(report["faults"])) == (3, 4, 1)


def test_gc_says_what_it_removed(url: str, tmp_path: Path) -> None:
    (tmp_path / "store" / "payloads" / f"{'0' * 32}.0.safetensors").write_bytes(bytes(1234))
    assert run("gc", url).stdout == ("removed 0 cut-off saves, 0 damaged manifests and 1 payloads; freed 1,234 bytes\n")
    assert json.loads(run("gc", url, "--json").stdout)["payloads"] == 0


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    for url in (f"disk://{tmp_path}/typo", f"tiered:memory+disk://{tmp_path}/typo"):
        assert isinstance(run("ls", url).exception, StoreError)
    assert [*tmp_path.iterdir()] == []


def test_a_wrong_url_and_a_dead_server_are_errors() -> None:
    assert isinstance(run("ls", "nowhere").exception, ConfigError)
    for command in ("ls", "verify", "gc"):
        error = run(command, "redis://127.0.0.1:1/0").exception
        assert isinstance(error, StoreError)
        assert "127.0.0.1:1 failed" in str(error)
