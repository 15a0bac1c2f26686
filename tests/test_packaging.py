from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {"agentcache": "agentcache", "kernels": "agentcache/kernels", "integrations": "agentcache/integrations"}


def python(code: str, cwd: Path) -> str:
    """Runs code in a fresh interpreter; returns what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The wheel of this checkout, built from a copy."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy / name)
    python("from setuptools import build_meta; build_meta.build_wheel('.')", cwd=copy)
    return zipfile.Path(next(copy.glob("*.whl")))


def test_the_wheel_installs_one_top_level_package(wheel: zipfile.Path) -> None:
    names = {entry.name for entry in wheel.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"agentcache"}


def test_the_wheel_holds_every_module_of_the_checkout(wheel: zipfile.Path) -> None:
    modules = {
        f"{target}/{file.relative_to(ROOT / source).as_posix()}"
        for source, target in SOURCES.items()
        for file in (ROOT / source).rglob("*.py")
    }
    assert modules == {name for name in wheel.root.namelist() if name.endswith(".py")}


@pytest.mark.parametrize("file", ["py.typed", "data/hotpot_sample.jsonl", "data/README.md"])
def test_the_wheel_holds_what_is_no_code(file: str, wheel: zipfile.Path) -> None:
    assert (wheel / "agentcache" / file).is_file()


def test_the_wheel_holds_licence_and_notice(wheel: zipfile.Path) -> None:
    names = {name.rpartition("/")[2] for name in wheel.root.namelist() if ".dist-info/licenses/" in name} - {""}
    assert names == {"LICENSE", "NOTICE"}


def test_the_installed_distribution_has_no_other_top_level_package() -> None:
    files = distribution("agentcache-kv").files
    assert files is not None
    finders = [file.stem for file in files if file.name.startswith("__editable__") and file.suffix == ".py"]
    top_level = {file.parts[0] for file in files if file.suffix == ".py"} - {f"{finder}.py" for finder in finders}
    for finder in finders:
        top_level |= {name.partition(".")[0] for name in importlib.import_module(finder).MAPPING}
    assert top_level == {"agentcache"}


def test_kernels_and_integrations_are_found_below_agentcache_only() -> None:
    for name in ("kernels", "integrations"):
        assert importlib.util.find_spec(f"agentcache.{name}") is not None
        spec = importlib.util.find_spec(name)
        assert spec is None or not Path(str(spec.origin)).is_relative_to(ROOT)


def test_transformers_imports(tmp_path: Path) -> None:
    python("import agentcache, transformers; from transformers import AutoModelForCausalLM", cwd=tmp_path)


# Left of the connector: a framework's process that only tracks edits must not pay for torch.
LIGHT = (
    "agentcache",
    "agentcache.cli",
    "agentcache.config",
    "agentcache.environment",
    "agentcache.errors",
    "agentcache.events",
    "agentcache.quality",
    "agentcache.reply",
    "agentcache.request",
    "agentcache.samples",
    "agentcache.store.index",
    "agentcache.types",
    "agentcache.weights",
    "agentcache.episodes.*",
    "agentcache.recovery.*",
)


@pytest.mark.parametrize("name", LIGHT)
def test_importing_it_loads_no_torch(name: str, tmp_path: Path) -> None:
    code = f"""
import importlib, pkgutil, sys
name = {name!r}
package = importlib.import_module(name.removesuffix(".*"))
if name.endswith(".*"):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(*sorted({{"torch", "vllm", "transformers"}} & set(sys.modules)))
"""
    assert python(code, cwd=tmp_path).split() == []


def test_python_m_agentcache_keeps_the_working_directory_off_the_path(tmp_path: Path) -> None:
    # There, a folder `kernels` would shadow the library of that name in this process and in the engine's.
    code = f"""
import runpy, sys
sys.path.insert(0, {str(tmp_path)!r})
sys.argv = ["agentcache", "version"]
try:
    runpy.run_module("agentcache", run_name="__main__", alter_sys=True)
except SystemExit as end:
    print(end.code, {str(tmp_path)!r} in sys.path)
"""
    *versions, end = python(code, cwd=tmp_path).splitlines()
    assert any(line.startswith("agentcache-kv ") for line in versions)
    assert end == "0 False"
