"""What ships for SmolLM2 keeps what the project says of it."""

from __future__ import annotations

import numpy as np
import pytest

from agentcache.profiling.lookup import shipped_profiles
from agentcache.profiling.profile import Profile
from agentcache.recovery import PolicyContext, get_policy, plan
from agentcache.types import AlignedRun, PromptDiff


@pytest.fixture
def shipped() -> Profile:
    return next(profile for profile in shipped_profiles() if profile.model.name == "smollm2")


def test_it_is_whole(shipped: Profile) -> None:
    assert {source.dataset for source in shipped.data} == {"hotpotqa", "musique", "ama_bench", "tau_bench"}
    assert {source.split for source in shipped.data} == {"train", "calibration"}
    assert shipped.length.pairs >= 50 and len(shipped.candidates) >= 6 and len(shipped.precision.candidates) >= 6
    assert shipped.attention is not None and shipped.attention.nonlocal_blocks and shipped.sensitivity


def test_drift_falls_with_distance_in_every_layer(shipped: Profile) -> None:
    value = np.array(shipped.drift.value)
    assert shipped.drift.edges[-2] >= 1024
    assert (np.diff(value, axis=0) < 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_patchkv_recomputes_a_tenth_of_the_suffix_at_4096_tokens(shipped: Profile, seed: int) -> None:
    """The edit of `agentcache bench resume`: at 30 % of 4,096 tokens, 32 tokens become 40."""
    at, old, new = 1228, 4096, 4104
    diff = PromptDiff(old, new, (AlignedRun(0, 0, at), AlignedRun(at + 32, at + 40, old - at - 32)))
    attention = np.random.default_rng(seed).random(new).astype(np.float32)
    context = PolicyContext(diff, np.arange(new, dtype=np.int32), attention=attention)
    made = plan(get_policy("patchkv", shipped.options_for("patchkv")), context, parent_exact_end=old, limit=new - 1)
    suffix = old - at - 32
    assert 0.01 < (suffix - made.reused_tokens) / suffix <= 0.10
