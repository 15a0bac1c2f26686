"""Policies and their options as one word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.recovery.spec import format_policy, parse_policy

names = st.text("abcxyz_", min_size=1)
values = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab ,.1\"'=")
)


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ("edit_local", ("edit_local", {})),
        ("edit_local:k=64", ("edit_local", {"k": 64})),
        ("cacheblend:share=0.15:check=2", ("cacheblend", {"share": 0.15, "check": 2})),
        ("edit_local:to=boundary", ("edit_local", {"to": "boundary"})),
        ("structural:ids=1100, 1200", ("structural", {"ids": "1100, 1200"})),
    ],
)
def test_a_word_is_read(spec, parsed):
    assert parse_policy(spec) == parsed


@pytest.mark.parametrize("spec", ["edit_local:k", "edit_local:=3", "edit_local:"])
def test_what_is_no_option_is_said(spec):
    with pytest.raises(ConfigError, match="write name:option=value"):
        parse_policy(spec)


@given(name=names, options=st.dictionaries(names, values, max_size=4))
def test_what_is_written_is_read_again(name, options):
    assert parse_policy(format_policy(name, options)) == (name, options)


def test_a_value_with_a_colon_is_no_word():
    with pytest.raises(ConfigError, match="a colon ends an option"):
        format_policy("edit_local", {"to": "a:b"})
