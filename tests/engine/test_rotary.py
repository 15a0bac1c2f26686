"""Key rotation is proved on vLLM's own rotary modules."""

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from agentcache.engine.rotary import KeyRotation, build_rotation
from agentcache.errors import SelfCheckError

FORMS = {
    "default": ({"rope_type": "default", "rope_theta": 10_000.0}, True),
    "interleaved": ({"rope_type": "default", "rope_theta": 10_000.0}, False),
    "partial": ({"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}, False),
    "linear": ({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}, True),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        True,
    ),
    "yarn": (
        {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 1024},
        True,
    ),
}


def rope(form, dtype):
    parameters, neox = FORMS[form]
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        return get_rope(64, max_position=4096, is_neox_style=neox, rope_parameters=dict(parameters), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_moved_key_is_the_key_of_its_new_position(form, dtype):
    module = rope(form, dtype)
    rotation = build_rotation(module, 64, dtype)
    key = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)).to(dtype)

    def at(position):
        return module(torch.tensor([position]), key.clone(), key.clone())[1].view(1, 64)

    moved = rotation.rotate(at(100), 57)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(moved.float(), at(157).float(), atol=tolerance * 4, rtol=0)
    assert (at(100).float() - at(157).float()).abs().max() > 0.3, "the test can fail"


def test_moving_by_nothing_changes_no_bit():
    rotation = build_rotation(rope("default", torch.bfloat16), 64, torch.bfloat16)
    key = torch.randn(5, 2, 64).to(torch.bfloat16)
    assert torch.equal(rotation.rotate(key, 0), key)


def test_dims_outside_the_rotary_part_pass_through():
    rotation = build_rotation(rope("partial", torch.float32), 64, torch.float32)
    key = torch.randn(5, 2, 64)
    turned = rotation.rotate(key, 9)
    assert rotation.rotary_dim == 32
    assert torch.equal(turned[..., 32:], key[..., 32:])
    assert not torch.allclose(turned[..., :32], key[..., :32])


def test_yarn_keeps_the_magnitude():
    """YaRN's attention factor is in the stored key already; moving it must not apply it again."""
    rotation = build_rotation(rope("yarn", torch.float32), 64, torch.float32)
    key = torch.randn(7, 1, 64)
    torch.testing.assert_close(rotation.rotate(key, 300).norm(dim=-1), key.norm(dim=-1), rtol=1e-5, atol=1e-5)


def test_a_module_whose_planes_differ_is_refused():
    module = rope("default", torch.float32)
    module.is_neox_style = False  # the table says nothing of it: only the proof finds out
    original = module.forward

    def lying(positions, query, key=None):
        module.is_neox_style = True
        try:
            return module.forward_native(positions, query, key)
        finally:
            module.is_neox_style = False

    module.forward = lying
    with pytest.raises(SelfCheckError, match="cannot be moved"):
        build_rotation(module, 64, torch.float32)
    module.forward = original


def test_angles_not_proportional_to_the_position_are_refused():
    module = rope("default", torch.float32)
    table = module._compute_cos_sin_cache()
    module._compute_cos_sin_cache = lambda: torch.cat((table[:2000], table[:2096]))
    with pytest.raises(SelfCheckError, match="proportional"):
        build_rotation(module, 64, torch.float32)


def test_rotation_composes():
    rotation = KeyRotation(torch.tensor([1.0, 0.1], dtype=torch.float64), 4, False)
    key = torch.randn(3, 4)
    twice = rotation.rotate(rotation.rotate(key, 5), -2)
    torch.testing.assert_close(twice, rotation.rotate(key, 3), atol=1e-6, rtol=1e-5)
