from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentcache.errors import ConfigError
from agentcache.profiling.profile import FORMAT_VERSION, Profile
from agentcache.recovery import LengthModel, get_policy
from tests.profiling.examples import example_profile


def altered(**values: Any) -> str:
    return json.dumps(json.loads(example_profile().to_json()) | values)


def test_a_file_gives_the_same_profile_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    example_profile().save(path)
    assert Profile.load(path) == example_profile()
    assert path.read_text() == example_profile().to_json()
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_saving_replaces_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    example_profile().save(path)
    other = example_profile().model_copy(update={"kappa": 0.5})
    other.save(path)
    assert Profile.load(path) == other


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "is no profile: it is not JSON"),
        ("[1, 2]", 'it lacks "format": "agentcache-profile"'),
        ('{"version": 1}', 'it lacks "format": "agentcache-profile"'),
        (altered(version=FORMAT_VERSION + 1), f"has format version {FORMAT_VERSION + 1}, this release reads"),
        (altered(kappa=2), "is damaged: kappa: Input should be less than or equal to 1"),
        (altered(unknown=2), "is damaged: unknown: Extra inputs are not permitted"),
        (altered(length={}), "is damaged: length.coefficients: Field required"),
    ],
)
def test_what_is_no_profile_is_named_with_the_reason(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        Profile.load(path)
    assert said in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("write", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_named(write: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    if write is not None:
        path.write_bytes(write)
    with pytest.raises(ConfigError, match=r"cannot be read: .*agentcache profile"):
        Profile.load(path)


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    example_profile().save(path)

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        example_profile().model_copy(update={"kappa": 0.5}).save(path)
    assert Profile.load(path) == example_profile()
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        ("drift", {"edges": [0, 32, 32]}, "edges must ascend"),
        ("drift", {"rows": [1]}, "one entry for each of the 8 bins"),
        ("drift", {"layers": [3]}, "one number for each of the 1 layers"),
        ("length", {"coefficients": [1.0]}, "7 finite coefficients"),
        ("length", {"coefficients": [float("nan")] * 7}, "finite number"),
        ("precision", {"tau_low": 0.5}, "tau_low=0.5 lies above tau_high=0.03"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(part: str, values: dict[str, Any], said: str) -> None:
    whole = example_profile().model_dump()
    with pytest.raises(ValidationError, match=said):
        Profile.model_validate(whole | {part: whole[part] | values})


def test_patchkv_takes_window_kappa_and_block_from_the_profile() -> None:
    profile = example_profile()
    policy = get_policy("patchkv", profile.options_for("patchkv"))
    want = get_policy("patchkv", {"length_model": profile.length.model.to_text(), "kappa": 0.015, "block": 32})
    assert policy == want
    assert LengthModel.from_text(profile.options_for("patchkv")["length_model"]) == profile.length.model  # type: ignore[arg-type]


def test_what_the_user_gives_is_kept() -> None:
    profile = example_profile()
    assert profile.options_for("patchkv", {"kappa": 0.5})["kappa"] == 0.5
    fixed = profile.options_for("patchkv", {"window": 64})
    assert "length_model" not in fixed
    get_policy("patchkv", fixed)
    options = profile.options_for("frontier")
    assert options == {
        "cosine": 0.998,
        "threshold": round(1 - profile.length.tau_v, 6),
        "length_model": profile.length.model.to_text(),
    }
    assert profile.options_for("frontier", {"threshold": 0.9})["threshold"] == 0.9
    assert "length_model" not in profile.options_for("frontier", {"first": 16})
    get_policy("frontier", {name: value for name, value in options.items() if name != "cosine"})


def test_a_policy_that_the_profile_knows_nothing_of_keeps_its_own_options() -> None:
    assert example_profile().options_for("edit_local") == {}
    assert example_profile().options_for("edit_local", {"k": 3}) == {"k": 3}
