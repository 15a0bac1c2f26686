"""The restore measurement: its shape, its mixed checkpoint, and what it refuses."""

import pytest
import torch

from agentcache.kernels import Source, Tag
from agentcache.kernels.bench.material import synthetic_kv
from agentcache.kernels.bench.measure import Setup
from agentcache.kernels.bench.restore import _arm, _mixed, restore_times

SHAPE = {"tokens": 70, "layers": 2, "kv_heads": 2, "head_dim": 64}
MIX = [("exact", 32), ("k8v4", 20)]


@pytest.fixture(scope="module")
def result():
    return restore_times(**SHAPE, device="cpu", mix=MIX, repeats=9)


def test_every_tag_has_both_arms(result):
    assert set(result["restore_ms"]) == {"exact", "k8v8", "k8v4", "mixed"}
    for arms in result["restore_ms"].values():
        assert set(arms) == {"aligned0", "shifted"}
        for ms in arms.values():
            assert 0 < ms["p20"] <= ms["p50"] <= ms["p80"]


def test_the_share_is_of_the_copy_of_the_same_bytes(result):
    assert result["size_bytes"] == 2 * 2 * 2 * 70 * 64 * 2
    for tag, arms in result["restore_ms"].items():
        for name, ms in arms.items():
            assert result["share"][tag][name] == pytest.approx(result["copy_ms"]["p50"] / ms["p50"])


def test_the_machine_is_named(result):
    assert result["isa"] in ("vec", "amx")
    assert (result["threads"], result["device"], result["implementation"]) == (torch.get_num_threads(), "cpu", "numba")
    assert {name: result[name] for name in SHAPE} == SHAPE


@pytest.mark.slow
def test_given_material_sets_the_shape():
    material = synthetic_kv(1, 2, 40, 32, torch.float16)
    result = restore_times(material=material, device="cpu", tags=["k8v4"], repeats=9)
    assert set(result["restore_ms"]) == {"k8v4"}
    assert (result["tokens"], result["layers"], result["head_dim"]) == (40, 1, 32)


def test_a_mix_tiles_all_tokens():
    assert _mixed(MIX, 70) == [(0, 32, Tag.EXACT), (32, 20, Tag.K8V4), (52, 18, Tag.EXACT)]


@pytest.mark.parametrize(("offset", "least", "most"), [(0, 1.0, 1.0), (5, 0.5, 0.8)])
def test_a_shifted_arm_turns_the_keys_and_keeps_the_values(offset, least, most):
    setup = Setup.build(synthetic_kv(2, 2, 70, 64, torch.bfloat16), torch.device("cpu"), 32, "numba")
    _arm(setup, _mixed([("exact", 33)], 70), offset)()
    (before,) = setup.kernels.quantize_gather(setup.pages, setup.table, [Source(0, 70, Tag.EXACT)])
    (after,) = setup.kernels.quantize_gather(setup.targets, setup.table, [Source(offset, 70, Tag.EXACT)])
    same = before.data.view(torch.int16) == after.data.view(torch.int16)
    assert least <= float(same.float().mean()) <= most  # slow planes round to what they were


def test_refuses_what_gives_no_median():
    with pytest.raises(ValueError, match="repeats=8: medians need at least 9"):
        restore_times(**SHAPE, repeats=8)


@pytest.mark.parametrize("mix", [[], [("exact", 0)]])
def test_refuses_a_mix_without_tokens(mix):
    with pytest.raises(ValueError, match="name a tag and at least one token"):
        restore_times(**SHAPE, device="cpu", mix=mix)


def test_refuses_an_unknown_tag():
    with pytest.raises(ValueError, match="k4v4"):
        restore_times(**SHAPE, device="cpu", tags=["k4v4"])
