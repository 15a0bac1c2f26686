"""The fingerprint tells engines apart whose KV must not be mixed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from agentcache.engine.fingerprint import fingerprint


class HfConfig:
    """As much of a transformers configuration as is read."""

    architectures = ("LlamaForCausalLM",)

    def __init__(self, **values: Any) -> None:
        self.values = {"rope_theta": 1e4, "transformers_version": "5"} | values

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def engine(
    model: str | Path, *, ranks: int = 1, device: str = "cpu", config: Any = None, **spec: Any
) -> dict[str, str]:
    """Returns the fingerprint of a made-up engine."""
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model), revision=None, hf_config=config or HfConfig(), dtype=torch.bfloat16, quantization=None
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        device_config=SimpleNamespace(device_type=device),
    )
    shape = {"num_kv_heads": 3, "head_size": 64, "dtype": torch.bfloat16} | spec
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(**shape), layer_names=["a", "b"])
    return fingerprint(vllm_config, SimpleNamespace(kv_cache_groups=[group]))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return tmp_path


def test_the_same_model_in_another_place_is_the_same(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "copy"
    other.mkdir()
    (other / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert engine(folder) == engine(other)
    assert engine(folder, config=HfConfig(transformers_version="6")) == engine(folder)
    assert engine(folder / "model.safetensors")["weights"] == engine(folder)["weights"]


@pytest.mark.parametrize("at", [0, 100_000, 523_000, -1])
def test_other_weights_are_another_model(folder: Path, at: int) -> None:
    before = engine(folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    # Stretches are read, so a fine-tune, which changes every tensor, is found; a lone byte between them need not be.
    for start in range(0, len(data), 60_000):
        data[start] ^= 1
    file.write_bytes(data)
    assert engine(folder)["weights"] != before["weights"]
    file.write_bytes(data + b"\0")
    assert engine(folder)["weights"] != before["weights"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config", {"config": HfConfig(rope_theta=5e5)}),
        ("ranks", {"ranks": 2}),
        ("device", {"device": "cuda"}),
        ("kv_heads", {"num_kv_heads": 4}),
        ("head_dim", {"head_size": 128}),
        ("kv_dtype", {"dtype": torch.float32}),
    ],
)
def test_another_engine_differs_by_name(folder: Path, name: str, change: dict[str, Any]) -> None:
    one, other = engine(folder), engine(folder, **change)
    assert {key for key in one if one[key] != other[key]} == {name}


def test_a_model_that_is_no_folder_goes_by_its_name() -> None:
    assert engine("org/model")["weights"] == "org/model@main"
