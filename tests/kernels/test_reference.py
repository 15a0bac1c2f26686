"""The twins are right: against what the formats promise and what rotations and attention are."""

import pytest
import torch

from agentcache.kernels import PackedFormat, TableRotation, Tag, reference

L, H, D = 2, 2, 64


def rows(tokens, dtype=torch.bfloat16, dim=D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(L, H, tokens, dim, generator=generator) for _ in range(2))
    return (k * torch.rand(dim, generator=generator) * 10).to(dtype), v.to(dtype)


def restored(k, v, tag):
    form = PackedFormat(tag, *k.shape[:2], k.shape[3], k.element_size())
    return reference.unpack(reference.pack(k, v, tag), form, k.shape[2], k.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_exact_is_bit_identical_also_for_nan_and_infinity(dtype):
    k, v = rows(70, dtype)
    k[0, 0, 3, 5], v[1, 1, 69, 0] = float("nan"), float("-inf")
    for before, after in zip((k, v), restored(k, v, Tag.EXACT), strict=True):
        assert torch.equal(before.view(torch.uint8), after.contiguous().view(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 32, 45, 64, 130])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
def test_keys_are_off_by_half_a_step_of_their_channel(tokens, dim):
    k, v = rows(tokens, dim=dim)
    after, _ = restored(k, v, Tag.K8V8)
    for start in range(0, tokens, 64):
        group, back = k[:, :, start : start + 64].float(), after[:, :, start : start + 64]
        step = group.abs().amax(2, keepdim=True) / 127 * (1 + 2**-7)  # the scale is rounded up to 8 bits
        assert bool(((group - back).abs() <= step * 0.51).all())


@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
def test_values_are_off_by_a_step_of_their_group(dim):
    k, v = rows(40, dim=dim)
    groups = PackedFormat(Tag.K8V4, L, H, dim, 2).value_groups
    for tag, levels, allowed in ((Tag.K8V8, 127, 0.51), (Tag.K8V4, 15, 1.01)):
        _, after = restored(k, v, tag)
        before, back = (x.float().unflatten(-1, (groups, -1)) for x in (v, after))
        low, high = before.amin(-1, keepdim=True).clamp_max(0), before.amax(-1, keepdim=True).clamp_min(0)
        span = high - low if tag is Tag.K8V4 else before.abs().amax(-1, keepdim=True)
        assert bool(((before - back).abs() <= span / levels * (1 + 2**-4) * allowed).all())


def test_zero_rows_stay_zero():
    zero = torch.zeros(L, H, 33, D, dtype=torch.bfloat16)
    for tag in Tag:
        for after in restored(zero, zero, tag):
            assert not after.any()


def test_one_sided_values_keep_their_zero():
    k, v = rows(32)
    v = v.abs()
    v[..., ::7] = 0
    _, after = restored(k, v, Tag.K8V4)
    assert not after[v == 0].any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rotations_add_up(interleaved, rotary_dim):
    rotation = TableRotation.from_theta(rotary_dim, 512, interleaved=interleaved)
    key = torch.randn(3, D, generator=torch.Generator().manual_seed(1))
    for position, shift in ((0, 7), (100, -33), (400, -400), (5, 300)):
        moved = reference.rotate(reference.rotate(key, rotation, position), rotation, shift)
        assert torch.allclose(moved, reference.rotate(key, rotation, position + shift), atol=1e-5)
    assert torch.equal(reference.rotate(key, rotation, 9)[:, rotary_dim:], key[:, rotary_dim:])
    assert not torch.allclose(reference.rotate(key, rotation, 9), key, atol=0.1)


def test_half_split_and_interleaved_turn_other_planes():
    key = torch.zeros(1, 4)
    key[0, 0] = 1
    half = reference.rotate(key, TableRotation.from_theta(4, 8), 1)
    pairs = reference.rotate(key, TableRotation.from_theta(4, 8, interleaved=True), 1)
    assert half[0, 2] == pytest.approx(0.841471, abs=1e-5)
    assert pairs[0, 1] == pytest.approx(0.841471, abs=1e-5)


def test_a_table_refuses_a_shift_beyond_its_end():
    with pytest.raises(ValueError, match="beyond the rotary table of 8"):
        TableRotation.from_theta(4, 8).angles(-8)


def test_attention_is_a_causal_mean():
    generator = torch.Generator().manual_seed(2)
    queries, keys = torch.randn(3, 4, D, generator=generator), torch.randn(2, 20, D, generator=generator)
    mass = reference.attention_mass(queries, torch.tensor([19, 10, 4]), keys, D**-0.5)
    assert float(mass.sum()) == pytest.approx(1, abs=1e-5)
    early = reference.attention_mass(queries[2:], torch.tensor([4]), keys, D**-0.5)
    assert not early[5:].any()
    by_hand = (queries[2, 3] @ keys[1, :5].T * D**-0.5).softmax(-1)
    alone = torch.stack([(queries[2, h] @ keys[h // 2, :5].T * D**-0.5).softmax(-1) for h in range(4)])
    assert torch.allclose(alone[3], by_hand)
    assert torch.allclose(early[:5], alone.mean(0), atol=1e-6)


def test_value_residual_is_the_error_of_packed_values():
    k, v = rows(50)
    _, after = restored(k, v, Tag.K8V4)
    expected = ((after - v.float()) ** 2).sum((0, 1, 3)).sqrt() / (v.float() ** 2).sum((0, 1, 3)).sqrt()
    assert torch.allclose(reference.value_residual(v), expected, rtol=1e-5)
    assert not reference.value_residual(torch.zeros_like(v)).any()
