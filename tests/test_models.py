"""The tiny models that other tests stand on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models import make_tiny


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_equal_kind_scale_and_seed_give_equal_weights(tmp_path: Path) -> None:
    first, again = (_weights(make_tiny("qwen3", tmp_path / name)) for name in ("a", "b"))
    assert first.keys() == again.keys() and all(torch.equal(first[k], again[k]) for k in first)
    other = _weights(make_tiny("qwen3", tmp_path / "c", seed=1))
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_stale_values_behind_an_edit_miss_by_hundreds_of_tolerances(tmp_path: Path) -> None:
    """32 of 300 tokens differ; the values of the equal tokens behind them must too, from the second layer on."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_tiny("llama", tmp_path), dtype=torch.float32).eval()
    ids = torch.randint(10, 49_000, (1, 300), generator=torch.Generator().manual_seed(0))
    edited = ids.clone()
    edited[0, 90:122] = torch.arange(32) + 10
    with torch.no_grad():
        stale, fresh = (model(i, use_cache=True).past_key_values.layers for i in (ids, edited))
    misses = [
        float((a.values - b.values)[:, :, 122:].norm() / b.values[:, :, 122:].norm())
        for a, b in zip(stale, fresh, strict=True)
    ]
    assert misses[0] == 0 and min(misses[1:]) > 0.2


def test_int8_weights_are_those_of_the_float_model_rounded(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    exact, rounded = _weights(make_tiny("llama", tmp_path / "a")), _weights(make_tiny("llama_w8a8", tmp_path / "b"))
    assert rounded[name].dtype == torch.int8
    step = rounded[f"{name}_scale"]
    assert torch.all((rounded[name] * step - exact[name]).abs() <= step / 2 + 1e-6)


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tiny model 'gpt2'; there are llama"):
        make_tiny("gpt2", tmp_path)
