"""Sizes and places of packed bytes."""

import pytest

from agentcache.kernels import BLOCK, PackedFormat, Tag


@pytest.mark.parametrize("tag", Tag)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65, 200])
def test_blocks_tile_a_run_without_gap_or_overlap(tag, dim, tokens):
    form = PackedFormat(tag, layers=2, kv_heads=3, head_dim=dim, element_size=2)
    spans = []
    for layer in range(2):
        for head in range(3):
            for block in range(-(-tokens // BLOCK)):
                scales, start, n = form.block_span(tokens, layer, head, block)
                if start == scales + form.scale_bytes:
                    spans.append((scales, start))
                spans.append((start, start + n * form.token_bytes))
    at = 0
    for start, stop in sorted(spans):
        assert start == at
        at = stop
    assert at == form.run_bytes(tokens)


@pytest.mark.parametrize(
    ("tag", "dim", "share"),
    [
        ("exact", 64, 1.0),
        ("k8v8", 64, 0.515625),
        ("k8v4", 64, 0.390625),
        ("k8v4", 128, 0.390625),
        ("k8v8", 128, 0.515625),
    ],
)
def test_share_of_a_long_runs_bytes(tag, dim, share):
    form = PackedFormat(Tag(tag), layers=30, kv_heads=3, head_dim=dim, element_size=2)
    assert form.run_bytes(4096) / (30 * 3 * 4096 * dim * 2 * 2) == share


def test_a_default_mix_stays_below_the_papers_payload():
    def share(dim: int, mix: dict[str, float]) -> float:
        forms = {tag: PackedFormat(Tag(tag), 1, 1, dim, 2) for tag in mix}
        return sum(part * forms[tag].run_bytes(8192) for tag, part in mix.items()) / (8192 * dim * 4)

    assert share(64, {"exact": 0.05, "k8v8": 0.15, "k8v4": 0.80}) <= 0.45
    assert share(128, {"exact": 0.01, "k8v8": 0.02, "k8v4": 0.97}) <= 0.40


@pytest.mark.parametrize("dim", [0, 8, 24, 72, 100, 528])
def test_refuses_a_head_dim_that_does_not_pack(dim):
    with pytest.raises(ValueError, match="head_dim"):
        PackedFormat(Tag.K8V4, layers=1, kv_heads=1, head_dim=dim, element_size=2)


def test_refuses_a_cache_without_layers():
    with pytest.raises(ValueError, match="describes no KV cache"):
        PackedFormat(Tag.EXACT, layers=0, kv_heads=1, head_dim=64, element_size=2)
