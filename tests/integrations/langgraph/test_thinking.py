"""A real template that drops thinking on the user's next turn, on a real engine: an edit that nobody made on purpose."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from agentcache import AgentCache, RevisionKind
from agentcache.episodes import Renderer
from tests.integrations.langgraph.conftest import TEMPLATE
from tests.integrations.langgraph.scripted import FREE, only

pytestmark = pytest.mark.engine

CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": {"q": "item 7"}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "How heavy is item 7?"},
    {"role": "assistant", "content": "", "reasoning_content": "I look it up before I say it.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "\n".join(f"Item {i} weighs {7 * i} grams." for i in range(40))},
    {"role": "assistant", "content": "It weighs 49 grams.", "reasoning_content": "The list says 49, so that is it."},
    {"role": "user", "content": "And item 8?"},
]


@pytest.fixture
def renderer(engine: AgentCache, monkeypatch: pytest.MonkeyPatch) -> Renderer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine.config.model)
    tokenizer.chat_template = TEMPLATE.with_name("qwen3.jinja").read_text(encoding="utf-8")
    made = Renderer(tokenizer)
    monkeypatch.setattr(engine._cache._session, "_renderer", made)
    return made


def turns(engine: AgentCache, renderer: Renderer, policy: str) -> tuple[list[Any], list[Any]]:
    """The replies and the history of an episode with this policy: a tool loop, and a next turn whose reply nothing forces."""
    episode = engine.episode(uuid4().hex)
    replies = []
    for stop in (1, 3, 5):
        options = dict(FREE)
        if stop < len(CHAT):
            prompt = renderer.render(CHAT[:stop]).text
            whole = renderer.render(CHAT[: stop + 1], add_generation_prompt=False).text
            options = {"extra": only(whole.removeprefix(prompt).removesuffix("<|im_end|>\n")), "max_tokens": 200}
        replies.append(episode.generate(CHAT[:stop], policy=policy, **options))
    return replies, episode.history()


def test_thinking_that_is_dropped_is_an_edit_and_all_behind_it_is_reused(
    engine: AgentCache, renderer: Renderer
) -> None:
    (_, loop, turn), history = turns(engine, renderer, "edit_local")
    assert [record.kind for record in history] == [RevisionKind.FIRST, RevisionKind.APPEND, RevisionKind.RETOKENISATION]
    assert loop.recovery.reused_tokens == 0 and loop.recovery.prefix_tokens > len(renderer.render(CHAT[:1]).token_ids)
    t = turn.recovery
    tool_result = len(engine.tokenizer.encode(CHAT[2]["content"], add_special_tokens=False))
    assert t.policy == "edit_local" and t.reused_tokens > tool_result - 64 > 300
    assert t.prefix_tokens + t.fresh_tokens + t.repair_tokens + t.reused_tokens + t.new_tokens == t.prompt_tokens
    assert t.prefix_tokens < history[1].prompt_tokens and t.repair_tokens <= 3 * 32
    assert "I look it up" not in renderer.render(CHAT).text


def test_with_the_exact_policy_its_next_turn_is_that_of_a_plain_request(engine: AgentCache, renderer: Renderer) -> None:
    (*_, turn), history = turns(engine, renderer, "prefix_cache")
    assert turn.recovery.exact and turn.recovery.reused_tokens == 0
    assert history[-1].kind is RevisionKind.RETOKENISATION
    ids = engine._cache._session.tracker.version(turn.version).token_ids.tolist()
    plain = engine.generate(ids, salt="plain thinking", **FREE)
    assert plain.cached_tokens == 0 and plain.token_ids == turn.token_ids
