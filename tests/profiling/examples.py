"""A small profile with something in every part."""

from __future__ import annotations

from agentcache.profiling.model import ModelFingerprint
from agentcache.profiling.profile import (
    AttentionExample,
    BlockSensitivity,
    Candidate,
    DataSource,
    DriftCurves,
    LengthFit,
    Precision,
    PrecisionCandidate,
    Profile,
)

MODEL = ModelFingerprint(
    name="tiny", architecture="LlamaForCausalLM", layers=4, kv_heads=2, head_dim=32, dtype="bfloat16", hash="a" * 32
)


def example_profile(model: ModelFingerprint = MODEL) -> Profile:
    """Returns a profile whose numbers look like those of a real model."""
    edges = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    layers = (8, 15, 22, 29)
    value = tuple(tuple(0.04 * (1 + 0.3 * at) * 0.55**b + 0.0008 for at in range(4)) for b in range(8))
    blocks = 120
    attention = [min(1.0, 0.6 / (1 + abs(at - 112) / 3) + 0.05 * ((at * 37) % 11) / 11) for at in range(blocks)]
    return Profile(
        model=model,
        packages={"agentcache-kv": "0.1.0"},
        machine={"cpu": "a processor", "cores": 2},
        seed=7,
        data=(
            DataSource(dataset="hotpotqa", split="train", hash="0" * 32, tasks=40, edits=80),
            DataSource(dataset="musique", split="calibration", hash="1" * 32, tasks=12, edits=24),
        ),
        attention_layers=layers,
        drift=DriftCurves(
            edges=edges,
            layers=layers,
            rows=(900, 880, 1700, 3300, 6100, 9000, 12_000, 9000),
            value=value,
            key=tuple(tuple(0.4 * each for each in row) for row in value),
        ),
        length=LengthFit(
            coefficients=(1.2, 0.1, 0.2, 0.25, 0.01, 0.0, 0.02),
            quantile=0.9,
            tau_v=0.01,
            gamma=0.9,
            layers=layers,
            pairs=80,
            typical=(900, 140, 1800),
            coverage=0.88,
        ),
        kappa=0.015,
        block=32,
        candidates=tuple(
            Candidate(
                kappa=kappa,
                block=block,
                quality={"hotpotqa": 100 - 6 / (1 + 200 * kappa), "musique": 100 - 9 / (1 + 300 * kappa)},
                computed_tokens=80 + 4000 * kappa + 32 / block,
                recompute_ratio=min(1.0, 0.05 + 1.4 * kappa * block / 32),
            )
            for block in (16, 32)
            for kappa in (0.0, 0.005, 0.015, 0.03, 0.06)
        ),
        quality_unit="next tokens as in the exact arm, %",
        precision=Precision(
            tau_low=0.02,
            tau_high=0.03,
            alpha=0.5,
            low_bit_residual=0.15,
            candidates=(PrecisionCandidate(tau_low=0.02, tau_high=0.03, alpha=0.5, kl=0.0014, bytes_share=0.42),),
        ),
        sensitivity=tuple(
            BlockSensitivity(start=32 * at, risk=0.001 * 1.09**at, residual=0.1, kl=1e-6 * 1.16**at) for at in range(48)
        ),
        attention=AttentionExample(
            block=32,
            attention=tuple(attention),
            edit=(1000, 1140),
            dirty=(35, 36, 37, 38),
            nonlocal_blocks=(108, 112),
        ),
        options={"frontier": {"cosine": 0.998}},
    )
