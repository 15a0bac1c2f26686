"""Tools and tool choices in vLLM's form."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.tools import tool
from pydantic import BaseModel

from agentcache import ConfigError
from agentcache.integrations.langchain.forms import Wanted
from agentcache.integrations.langchain.tools import choose, format_tools, is_forced, rendered


@tool
def weigh(item: int) -> int:
    """Weighs an item."""
    return item


class Shelve(BaseModel):
    """Puts an item on a shelf."""

    item: int


SCHEMA = {"parameters": {"type": "object", "properties": {}}, "name": "count", "description": "Counts."}
TOOLS = format_tools([weigh, Shelve, SCHEMA])
NAMED = {"type": "function", "function": {"name": "weigh"}}


def test_tools_of_every_kind_have_one_form_and_one_order_of_keys() -> None:
    assert [t["function"]["name"] for t in TOOLS] == ["weigh", "Shelve", "count"]
    assert {tuple(t["function"]) for t in TOOLS} == {("name", "description", "parameters")}


def test_the_prompt_does_not_show_whether_a_tool_is_strict() -> None:
    strict, free = format_tools([weigh], True), format_tools([weigh], False)
    assert [t[0]["function"]["strict"] for t in (strict, free)] == [True, False]
    assert all("strict" not in t["function"] for t in (*rendered(strict), *rendered(free)))
    assert rendered(free) == rendered(format_tools([weigh]))


def test_a_providers_own_tool_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"web_search.*no function"):
        format_tools([{"type": "web_search"}])


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (None, "auto"),
        (False, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("any", "required"),
        ("required", "required"),
        (True, "required"),
        ("weigh", NAMED),
        (NAMED, NAMED),
        ({"type": "tool", "name": "weigh"}, NAMED),
    ],
)
def test_choices(given: Any, chosen: Any) -> None:
    assert choose(given, TOOLS) == chosen


@pytest.mark.parametrize(
    "given", ["measure", {"type": "function", "function": {"name": "measure"}}, {"function": 3}, 7]
)
def test_a_choice_of_no_tool_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"names none of the bound tools .weigh, Shelve, count.*'any'"):
        choose(given, TOOLS)


def test_only_what_the_caller_forces_is_forced() -> None:
    assert not is_forced("auto") and not is_forced("none")
    assert is_forced("required") and is_forced(NAMED)
    assert not Wanted(choice="required").forced  # no tools
