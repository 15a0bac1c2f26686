"""What the templates of real models do to an agent's prompt, and that the tracker follows it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from agentcache.episodes import EpisodeTracker, Rendered, Renderer, Revision
from agentcache.integrations.langchain import ChatAgentCache
from agentcache.integrations.langchain.calls import Caller
from agentcache.integrations.langchain.forms import Wanted
from agentcache.integrations.langchain.runs import Run
from agentcache.integrations.langchain.tools import takes_several_calls
from agentcache.integrations.routing import Router
from agentcache.types import RevisionKind
from tests.episodes.families import make_tokenizer

FOLDER = Path(__file__).parent / "templates"
SPECIAL = re.compile(r"<[|｜][^<>'\"{}]*?[|｜]>|<\|?turn\|?>|<\|?channel\|?>|<\|?tool\w*\|?>|<bos>|</?think>")
START = datetime(2026, 7, 1, 12)

APPEND, RETOKENISATION = RevisionKind.APPEND, RevisionKind.RETOKENISATION
KINDS = {
    # template: in a tool loop, and on the user's next turn
    "qwen2_5": (APPEND, APPEND),
    "qwen3_instruct_2507": (APPEND, APPEND),
    "llama3_2": (APPEND, APPEND),
    "qwen3": (APPEND, RETOKENISATION),
    "qwen3_6": (APPEND, RETOKENISATION),
    "glm4moe": (APPEND, RETOKENISATION),
    "lfm2_2_5": (APPEND, RETOKENISATION),
    "gemma4_v5": (APPEND, RETOKENISATION),
    "gptoss": (APPEND, RETOKENISATION),
    # It opens a thinking after a user's turn, and never writes any into the history.
    "deepseekv3": (RETOKENISATION, APPEND),
}
DATED = ("llama3_2", "gptoss")
OWN_KEY = {"lfm2_2_5": "thinking", "gptoss": "thinking"}  # where the thinking of a message stands
WITHOUT_THINKING = ("qwen2_5", "qwen3_instruct_2507", "llama3_2")

SEARCH, WEIGH = (
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {
                "type": "object",
                "properties": {
                    "q": {"type": "string", "description": "what"},
                    "n": {"type": "integer", "description": "how many"},
                },
                "required": ["q"],
            },
        },
    }
    for name, text in (("search", "Searches the web."), ("weigh", "Weighs an item."))
)


def conversation(template: str, arguments: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    def thinks(text: str) -> dict[str, str]:
        return {} if template in WITHOUT_THINKING else {OWN_KEY.get(template, "reasoning_content"): text}

    call = {"id": "call00001", "type": "function"}
    call |= {"function": {"name": "search", "arguments": arguments or {"q": "item 7", "n": 3}}}
    return [
        {"role": "system", "content": "You are careful."},
        {"role": "user", "content": "How heavy is item 7, and where does it stand?"},
        {"role": "assistant", "content": "", **thinks("I search for the item, then I say it."), "tool_calls": [call]},
        {
            "role": "tool",
            "name": "search",
            "tool_call_id": "call00001",
            "content": "Item 7: 49 grams, shelf two. " * 20,
        },
        {"role": "assistant", "content": "It weighs 49 grams.", **thinks("The tool says 49 grams, so I say that.")},
        {"role": "user", "content": "And item 8?"},
    ]


@dataclass
class Model:
    """A template, a tokenizer that knows its special tokens, and a renderer."""

    name: str
    tokenizer: Any
    renderer: Renderer

    def render(self, messages: list[dict[str, Any]], **options: Any) -> Rendered:
        return self.renderer.render(messages, **{"tools": [SEARCH, WEIGH], "now": START, **options})

    def reply(self, before: list[dict[str, Any]], message: dict[str, Any]) -> list[int]:
        """What the model has written, in other tokens than a tokenizer makes of the same text: word by word."""
        prompt = self.render(before).text
        whole = self.render([*before, message], add_generation_prompt=False).text
        end = prompt[-40:]
        if end in whole:  # the template may have dropped thinking before
            text = whole[whole.rindex(end) + len(end) :]
        else:  # the prompt opens a thinking that the history leaves out
            opened = prompt.removesuffix("<think>\n")
            assert opened != prompt and whole.startswith(opened)
            text = f"{message['reasoning_content']}\n</think>" + whole.removeprefix(opened)
        words = re.findall(r"\s*\S+|\s+$", text)
        return [i for word in words for i in self.tokenizer.encode(word, add_special_tokens=False)]


@cache
def model(name: str) -> Model:
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(source, sorted(set(SPECIAL.findall(source))))
    return Model(name, tokenizer, Renderer(tokenizer))


def run(m: Model) -> tuple[list[Rendered], list[Revision]]:
    """The prompts of a tool loop and the user's next turn, each recorded with the reply to it."""
    tracker, chat = EpisodeTracker(), conversation(m.name)
    prompts: list[Rendered] = []
    revisions: list[Revision] = []
    replies: list[list[int]] = []
    for stop in (2, 4, 6):
        prompts.append(m.render(chat[:stop], generated=replies))
        revisions.append(tracker.record("e", prompts[-1]))
        if stop < len(chat):
            replies.append(m.reply(chat[:stop], chat[stop]))
            computed = len(prompts[-1].token_ids) + len(replies[-1]) - 1
            tracker.finish(revisions[-1].version, replies[-1], computed=computed)
    return prompts, revisions


@pytest.mark.parametrize("name", KINDS)
def test_the_tracker_says_what_the_template_did_and_loses_nothing_that_is_still_there(name: str) -> None:
    m = model(name)
    prompts, (first, loop, turn) = run(m)
    assert (loop.kind, turn.kind) == KINDS[name]
    assert first.kind is RevisionKind.FIRST and [s.role for s in turn.spans[-3:]] == ["tool", "assistant", "user"]
    for revision, prompt, message in ((loop, prompts[1], -1), (turn, prompts[2], -1)):
        diff = revision.diff
        # All but the new message and the turn opened after it was there before; the last token of a reply has no KV, and a
        # template may write a few more behind it.
        new_turn = len(prompt.token_ids) - revision.spans[message].start
        aligned = sum(run.length for run in diff.aligned)
        assert diff.new_len - new_turn - 8 <= aligned <= diff.new_len - new_turn + 8
        if revision.kind is RETOKENISATION:
            assert diff.prefix < diff.old_len - 1 and len(diff.suffix) >= 1
            assert aligned - diff.prefix > 50  # a call, or a tool's result, behind the thinking that went


@pytest.mark.parametrize("name", KINDS)
def test_thinking_that_a_template_drops_is_all_that_a_turn_loses(name: str) -> None:
    m = model(name)
    prompts, (_, _, turn) = run(m)
    old_len = turn.diff.old_len
    lost = old_len - sum(run.length for run in turn.diff.aligned)
    if KINDS[name][1] is APPEND:
        assert lost == 0
    else:
        thinking = [c.get(OWN_KEY.get(name, "reasoning_content"), "") for c in conversation(name)]
        tokens = sum(len(m.tokenizer.encode(text, add_special_tokens=False)) for text in thinking if text)
        assert 0 < lost <= tokens + 40  # and the tags around it
        assert not any(text and text in prompts[2].text for text in thinking)


@pytest.mark.parametrize("name", KINDS)
def test_the_order_of_tools_and_arguments_does_not_change_the_prompt(name: str) -> None:
    m = model(name)
    chat = conversation(name)
    one = m.render(chat, tools=[SEARCH, WEIGH]).token_ids
    two = m.render(conversation(name, {"n": 3, "q": "item 7"}), tools=[WEIGH, SEARCH]).token_ids
    assert one.tolist() == two.tolist()
    as_text = conversation(name)
    as_text[2]["tool_calls"][0]["function"]["arguments"] = '{"q": "item 7", "n": 3}'
    assert m.render(as_text).token_ids.tolist() == one.tolist()
    assert m.render(chat).text.count("item 7") >= 1


@pytest.mark.parametrize("name", KINDS)
def test_a_conversation_goes_on_after_a_call_that_was_cut(name: str) -> None:
    m, chat = model(name), conversation(name)
    cut = '{"q": "item seven'
    chat[2]["tool_calls"][0]["function"]["arguments"] = cut
    answered = m.render(chat)
    shown = cut if cut in answered.text else json.dumps(cut)[1:-1]
    assert answered.text.count(shown) == 1
    assert [span.role for span in answered.spans[-5:]] == ["user", "assistant", "tool", "assistant", "user"]
    del chat[3:5]  # a call that is no call has no result
    assert m.render(chat).text.count(shown) == 1
    assert [span.role for span in m.render(chat).spans[-3:]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("name", KINDS)
def test_only_llamas_template_refuses_a_reply_of_two_calls(name: str) -> None:
    assert takes_several_calls(model(name).renderer) is (name != "llama3_2")


@pytest.mark.parametrize("name", ["llama3_2", "qwen3"])
def test_a_reply_calls_several_tools_where_the_template_takes_that_unless_the_caller_says(name: str) -> None:
    asked: list[Wanted] = []
    caller: Any = Caller.__new__(Caller)
    caller.renderer, caller.router, caller._tools_are_shown = model(name).renderer, Router(), True
    caller.parsers = SimpleNamespace(of=lambda wanted, _: asked.append(wanted))
    default = ChatAgentCache.model_fields["parallel_tool_calls"].default
    for own, said in ((default, {}), (True, {}), (default, {"parallel_tool_calls": True}), (False, {})):
        caller.prepare([HumanMessage("go")], Run(), {}, {"tools": [SEARCH], **said}, parallel=own, retries=0)
    assert [wanted.parallel for wanted in asked] == [name != "llama3_2", True, True, False]


@pytest.mark.parametrize("name", DATED)
def test_a_date_that_the_template_prints_is_that_of_the_episode(name: str) -> None:
    m, chat = model(name), conversation(name)
    assert m.render(chat, now=START).text == m.render(chat, now=START.replace(hour=23)).text
    assert m.render(chat, now=START).text != m.render(chat, now=START.replace(day=2)).text
    assert re.search(r"01 Jul 2026|2026-07-01", m.render(chat, now=START).text)
