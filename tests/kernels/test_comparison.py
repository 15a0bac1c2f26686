"""The comparison formats: sizes as documented, errors in the order of their bits."""

import pytest
import torch

from agentcache.kernels import COMPARISON

L, H, N, D = 2, 2, 96, 64
BITS = {"int8": 8.25, "int4": 4.5, "fp8_e4m3": 8.25, "kivi4": 5.0, "kivi2": 3.0}


def rows(tokens=N):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(L, H, tokens, D, generator=generator) for _ in range(2))
    return (k * torch.rand(D, generator=generator) * 10).bfloat16(), v.bfloat16()


def errors(name, k, v):
    form = COMPARISON[name]
    back = form.unpack(form.pack(k, v), tuple(k.shape), k.dtype)
    return tuple(float((a - b.float()).norm() / b.float().norm()) for a, b in zip(back, (k, v), strict=True))


@pytest.mark.parametrize("name", BITS)
def test_bits_an_element(name):
    data = COMPARISON[name].pack(*rows())
    assert data.numel() * 8 / (2 * L * H * N * D) == BITS[name]


@pytest.mark.parametrize(
    ("name", "limit"), [("int8", 0.02), ("fp8_e4m3", 0.04), ("int4", 0.25), ("kivi4", 0.12), ("kivi2", 0.5)]
)
def test_relative_errors(name, limit):
    k, v = errors(name, *rows())
    assert 0 < k < limit
    assert 0 < v < limit


def test_channels_suit_keys_with_outlier_channels():
    k, v = rows()
    k[..., 7] *= 20

    def error_of_the_others(name):
        form = COMPARISON[name]
        back, _ = form.unpack(form.pack(k, v), tuple(k.shape), k.dtype)
        return float((back - k.float())[..., :7].norm() / k[..., :7].float().norm())

    assert error_of_the_others("kivi4") < 0.5 * error_of_the_others("int4")


def test_tokens_beyond_the_last_group_stay_exact():
    k, v = rows(70)
    back = COMPARISON["kivi2"].unpack(COMPARISON["kivi2"].pack(k, v), tuple(k.shape), k.dtype)
    for before, after in zip((k, v), back, strict=True):
        assert torch.equal(after[:, :, 64:], before[:, :, 64:].float())


def test_tracing_outlier_tokens_pays_where_there_are_some():
    k, v = rows()
    k[:, :, 5::32] /= 50  # OTT's outliers: keys far smaller than their neighbours'
    v[:, :, 5::32] *= 20
    plain, traced = errors("kivi2", k, v), errors("ott", k, v)
    assert traced[1] < 0.5 * plain[1]
    back = COMPARISON["ott"].unpack(COMPARISON["ott"].pack(k, v), tuple(k.shape), k.dtype)
    assert torch.equal(back[0][:, :, 5::32], k[:, :, 5::32].float())
    assert torch.equal(back[1][:, :, 5::32], v[:, :, 5::32].float())
