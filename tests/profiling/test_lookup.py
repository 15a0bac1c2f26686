from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import agentcache.profiling.lookup as lookup
from agentcache.config import CacheConfig, ConnectorConfig
from agentcache.engine.episode import AsyncEpisode
from agentcache.engine.session import Session
from agentcache.errors import ConfigError
from agentcache.profiling.lookup import profile_for, shipped_profiles
from agentcache.profiling.model import model_fingerprint
from agentcache.request import RequestOptions
from tests.profiling.examples import example_profile

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "dtype": "bfloat16",
}


def make_model(folder: Path, seed: int = 0, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    weights = np.random.default_rng(seed).standard_normal((300, 1000), dtype=np.float32)
    save_file({"w": weights}, folder / "model.safetensors")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def path(model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    example_profile(model_fingerprint(model)).save(path)
    return path


def test_a_fingerprint_says_what_the_model_is(model: Path, tmp_path: Path) -> None:
    found = model_fingerprint(model)
    assert (found.name, found.layers, found.kv_heads, found.head_dim, found.dtype) == ("model", 2, 4, 16, "bfloat16")
    assert model_fingerprint(model, dtype="float32", name="mine").is_same_model(found)
    moved = make_model(tmp_path / "moved", transformers_version="9.9")
    assert model_fingerprint(moved).is_same_model(found)


@pytest.mark.parametrize(
    "config", [{"num_key_value_heads": 2}, {"num_hidden_layers": 3}, {"head_dim": 32}, {"seed": 1}]
)
def test_another_model_has_another_fingerprint(config: dict[str, Any], model: Path, tmp_path: Path) -> None:
    assert not model_fingerprint(make_model(tmp_path / "other", **config)).is_same_model(model_fingerprint(model))


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder of a model"):
        model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {}}')
    with pytest.raises(ConfigError, match="KeyError: 'num_attention_heads'"):
        model_fingerprint(tmp_path)


def test_the_given_profile_is_taken_for_its_model(model: Path, path: Path) -> None:
    assert CacheConfig.build(model=str(model), profile=path).measured == example_profile(model_fingerprint(model))


def test_a_profile_of_another_model_names_both(path: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(ConfigError) as error:
        CacheConfig.build(model=str(other), profile=path)
    assert "is of model (LlamaForCausalLM, 2 layers, 4 KV heads of 16, bfloat16, " in str(error.value)
    assert f"the model is {other} (LlamaForCausalLM, 3 layers, 4 KV heads of 16, bfloat16, " in str(error.value)


def test_a_model_that_is_not_here_is_known_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    example_profile(example_profile().model.model_copy(update={"name": "owner/name"})).save(path)
    assert profile_for("owner/name", path) is not None
    with pytest.raises(ConfigError, match="the model is 'owner/other'"):
        profile_for("owner/other", path)


def test_every_shipped_profile_can_be_read_and_is_of_the_model_in_its_file_name() -> None:
    names = [profile.model.name for profile in shipped_profiles()]
    assert names == sorted(set(names))


def test_a_shipped_profile_is_taken_by_name_or_by_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = example_profile(model_fingerprint(model, name="smollm2"))
    monkeypatch.setattr(lookup, "shipped_profiles", lambda: iter([shipped]))
    assert profile_for("smollm2", None) == shipped
    assert profile_for(str(model), None) == shipped
    assert profile_for("owner/name", None) is None
    assert profile_for(str(make_model(tmp_path / "other", seed=1)), None) is None
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text("{}")
    assert profile_for(str(unknown), None) is None


def test_policies_take_what_is_not_given_from_the_profile(model: Path, path: Path) -> None:
    config = CacheConfig.build(model=str(model), policy="patchkv", policy_options={"kappa": 0.5}, profile=path)
    episode = AsyncEpisode(Session(config), "e")
    profile = config.measured
    assert profile is not None
    length = profile.length.model.to_text()
    assert episode._policy(RequestOptions()) == ("patchkv", {"length_model": length, "kappa": 0.5, "block": 32})
    given = RequestOptions(policy="patchkv", policy_options={"window": 8, "block": 16})
    assert episode._policy(given) == ("patchkv", {"window": 8, "kappa": 0.015, "block": 16})
    assert episode._policy(RequestOptions(policy="edit_local")) == ("edit_local", {})


def test_a_policy_that_needs_a_profile_and_has_none_says_so(model: Path) -> None:
    episode = AsyncEpisode(Session(CacheConfig.build(model=str(model))), "e")
    with pytest.raises(ConfigError, match="Make a profile with `agentcache profile` and give it as profile=FILE"):
        episode._policy(RequestOptions(policy="patchkv"))


def test_the_connector_takes_thresholds_from_the_profile_where_none_is_given(model: Path, path: Path) -> None:
    measured = {"tau_low": 0.02, "tau_high": 0.03, "alpha": 0.5, "low_bit_residual": 0.15}
    assert CacheConfig.build(model=str(model), profile=path).to_connector().thresholds == measured
    given = CacheConfig.build(model=str(model), profile=path, connector={"alpha": 0.9})
    assert given.to_connector().thresholds == measured | {"alpha": 0.9}
    assert CacheConfig.build(model=str(model)).to_connector().thresholds == {}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tau_low": 0.1}, "give tau_low and tau_high together"),
        ({"tau_low": 0.2, "tau_high": 0.1}, "lies above tau_high=0.1"),
    ],
)
def test_thresholds_that_do_not_fit_together_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ConnectorConfig(**settings)  # type: ignore[arg-type]
