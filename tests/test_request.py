"""What a caller may say about one request."""

from __future__ import annotations

from typing import Any

import pytest

from agentcache.errors import ConfigError
from agentcache.request import REFUSED, GenerateOptions, RequestOptions


def test_keyword_types_and_validated_options_have_the_same_names() -> None:
    assert GenerateOptions.__annotations__.keys() == RequestOptions.model_fields.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_parameter_says_why_wherever_it_is_given(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=2 is not supported: {REFUSED[name][:20]}"):
        RequestOptions.build({name: 2})
    with pytest.raises(ConfigError, match=f"{name}=2 is not supported"):
        RequestOptions.build({"extra": {name: 2}})


def test_an_unknown_option_names_the_way_to_sampling_parameters() -> None:
    with pytest.raises(ConfigError, match=r"unknown option top_k=5.*extra=\{'top_k': \.\.\.\}"):
        RequestOptions.build({"top_k": 5})


def test_extra_may_not_repeat_an_argument() -> None:
    with pytest.raises(ConfigError, match="extra may not hold 'seed'"):
        RequestOptions.build({"extra": {"seed": 1}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("logprobs", -2),
        ("timeout", 0),
        ("stop", 3),
        ("save", "maybe"),
        ("policy_options", {"k": []}),
        ("sources", "chunk"),
        ("sources", [""]),
        ("sources", ["c" * 257]),
        ("sources", ["c"] * 65),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        RequestOptions.build({name: value})


def test_options_of_an_episode_are_refused_outside_of_one() -> None:
    RequestOptions.build({"max_tokens": 3, "salt": "x"}).refuse_recovery()
    for options in (
        {"policy": "edit_local"},
        {"parent": "v"},
        {"sources": ["c"]},
        {"save": False},
        {"attributes": {"a": 1}},
    ):
        with pytest.raises(ConfigError, match="needs an episode"):
            RequestOptions.build(options).refuse_recovery()


def test_no_extra_is_the_same_as_none() -> None:
    assert RequestOptions.build({"extra": None}).extra == {}
