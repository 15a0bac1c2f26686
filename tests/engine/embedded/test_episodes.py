"""Episodes of the asynchronous façade: what a prompt is recovered from, forks, drops, several at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentcache import (
    AgentCacheError,
    AsyncAgentCache,
    ConfigError,
    KVPaused,
    KVResumed,
    PromptRevised,
    RevisionKind,
    UnknownVersionError,
)
from agentcache.events import ReplyEnded
from tests.engine.embedded.calls import LONG, chat, idle

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def test_an_edited_prompt_is_recovered_from_the_head(cache: AsyncAgentCache) -> None:
    episode = cache.episode("edit")
    first = await episode.generate(chat("It weighs 12 grams."), max_tokens=4)
    second = await episode.generate(chat("It weighs 49 grams, as was measured again."), max_tokens=4)
    assert first.recovery is not None and first.parent is None and first.recovery.reason is None
    assert first.recovery.saved == "pending"
    assert second.parent == first.version and second.version == episode.head
    report = second.recovery
    assert report is not None and report.policy == "edit_local" and report.reason is None
    assert report.reused_tokens > 300 and report.fresh_tokens > 0 and report.repair_tokens == 32
    assert (
        report.prefix_tokens + report.fresh_tokens + report.repair_tokens + report.reused_tokens + report.new_tokens
        == (second.prompt_tokens)
    )
    assert second.cached_tokens == second.prompt_tokens - report.new_tokens
    assert report.restore_ms > 0 and report.recompute_ms > 0 and report.ttft_ms == second.ttft_ms > 0
    assert not report.exact


async def test_history_tells_each_versions_kind_parent_and_tokens(cache: AsyncAgentCache) -> None:
    episode = cache.episode("history")
    assert episode.history() == [] and episode.head is None
    prompts = [chat("12 grams"), chat("12 grams", "And item 8?"), chat("49 grams", "And item 8?")]
    for number, prompt in enumerate(prompts):
        await episode.generate(prompt, max_tokens=3, attributes={"checkpoint": number}, extra={"ignore_eos": True})
    records = episode.history()
    assert [r.kind for r in records] == [RevisionKind.FIRST, RevisionKind.APPEND, RevisionKind.TOOL_RESULT]
    assert [r.parent for r in records] == [None, records[0].version, records[1].version]
    assert [r.attributes["checkpoint"] for r in records] == [0, 1, 2]
    assert [r.reply_tokens for r in records] == [3, 3, 3]
    last = records[-1].recovery
    assert last is not None and last.version == records[-1].version and last.reused_tokens > 0


async def test_the_exact_policys_tokens_are_those_of_a_plain_request(cache: AsyncAgentCache) -> None:
    episode = cache.episode("exact")
    await episode.generate(chat("12 grams"), max_tokens=2, policy="prefix_cache")
    edited = chat("It is 49 grams by now", "So?")
    reply = await episode.generate(edited, max_tokens=16, policy="prefix_cache")
    assert reply.recovery is not None and reply.recovery.exact and reply.recovery.reused_tokens == 0
    await idle(cache)
    plain = await cache.generate((await cache.render(edited)).token_ids.tolist(), max_tokens=16)
    assert plain.cached_tokens == 0 and plain.token_ids == reply.token_ids


async def test_a_fork_goes_on_from_the_version_it_began_at(cache: AsyncAgentCache) -> None:
    episode = cache.episode("trunk")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    second = await episode.generate(chat("49 grams"), max_tokens=2)
    assert first.version is not None
    fork = episode.fork(first.version, name="branch")
    reply = await fork.generate(chat("13 grams"), max_tokens=2)
    assert reply.parent == first.version and episode.head == second.version
    assert [r.version for r in fork.history()] == [first.version, reply.version]
    assert reply.recovery is not None and reply.recovery.reused_tokens > 0
    with pytest.raises(ConfigError, match="already"):
        episode.fork(name="branch")
    with pytest.raises(UnknownVersionError, match="no version 'nope'"):
        episode.fork("nope")
    with pytest.raises(UnknownVersionError, match="no version to fork from"):
        cache.episode("unborn").fork()


async def test_an_unknown_parent_is_served_exactly_and_said(cache: AsyncAgentCache) -> None:
    episode = cache.episode("foreign")
    reply = await episode.generate(chat("12 grams"), max_tokens=2, parent="another-process")
    assert reply.recovery is not None and reply.recovery.exact
    assert "'another-process' is unknown" in str(reply.recovery)


async def test_an_unsaved_version_is_not_the_default_parent(cache: AsyncAgentCache) -> None:
    episode = cache.episode("unsaved")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    trial = await episode.generate(chat("13 grams"), max_tokens=2, save=False)
    assert trial.recovery is not None and trial.recovery.saved == "no"
    after = await episode.generate(chat("14 grams"), max_tokens=2)
    assert trial.parent == after.parent == first.version
    assert after.recovery is not None and after.recovery.reason is None and after.recovery.reused_tokens > 0


async def test_a_policy_and_its_options_are_those_of_the_request(cache: AsyncAgentCache) -> None:
    episode = cache.episode("policies")
    first = await episode.generate(chat("12 grams"), max_tokens=1)
    reports = [
        (
            await episode.generate(chat("49 grams"), max_tokens=1, parent=first.version, save=False, salt=str(i), **o)
        ).recovery
        for i, o in enumerate(({"policy_options": {"k": 8}}, {"policy": "direct_reuse"}))
    ]
    assert [r.repair_tokens for r in reports if r is not None] == [8, 0]
    with pytest.raises(ConfigError, match="unknown policy"):
        await episode.generate(chat("x"), policy="nope")
    with pytest.raises(ConfigError, match="no option 'depth'"):
        await episode.generate(chat("x"), policy_options={"depth": 2})


async def test_a_request_that_ends_in_the_step_of_its_load_has_the_loads_times(cache: AsyncAgentCache) -> None:
    episode = cache.episode("one token")
    await episode.generate(chat("12 grams"), max_tokens=1)
    report = (await episode.generate(chat("49 grams, measured twice"), max_tokens=1)).recovery
    assert report is not None and report.restored_tokens > 300 and report.restore_ms > 0 and report.saved == "pending"


async def test_a_reply_that_a_stop_string_ends_is_reported_and_kept(cache: AsyncAgentCache) -> None:
    episode = cache.episode("stop")
    whole = await episode.generate(chat("12 grams"), max_tokens=24)
    text = whole.text[len(whole.text) // 2 :].strip()[:6]
    reply = await episode.generate(chat("12 grams"), max_tokens=24, stop=text)
    assert reply.finish_reason == "stop" and text not in reply.text and len(reply.token_ids) < len(whole.token_ids)
    assert reply.recovery is not None and reply.recovery.version == reply.version
    assert reply.recovery.saved == "pending" and reply.recovery.parent == whole.version
    child = await episode.generate(chat("49 grams"), max_tokens=1)
    assert child.parent == reply.version and child.recovery is not None and child.recovery.reused_tokens > 0


@pytest.mark.parametrize("policy", ["edit_local", "prophetkv"])
async def test_a_stop_string_leaves_the_report_as_it_is(cache: AsyncAgentCache, policy: str) -> None:
    """Without a save too, and with what was chosen in the worker."""
    episode = cache.episode(f"stop, {policy}")
    first = await episode.generate(chat("12 grams"), max_tokens=1)
    how: dict[str, Any] = {"policy": policy, "parent": first.version, "save": False, "max_tokens": 24}
    await idle(cache)  # both then find nothing in vLLM's own prefix cache
    whole = await episode.generate(chat("49 grams"), salt="whole", **how)
    text = whole.text[len(whole.text) // 2 :].strip()[:6]
    await idle(cache)
    ended = await episode.generate(chat("49 grams"), salt="ended", stop=text, **how)
    assert ended.finish_reason == "stop" and len(ended.token_ids) < len(whole.token_ids)
    assert whole.recovery is not None and ended.recovery is not None
    want, found = (
        {
            name: value
            for name, value in reply.recovery.model_dump().items()
            if name != "version" and not name.endswith("_ms") and name != "estimate"
        }
        for reply in (whole, ended)
    )
    assert found == want
    assert ended.recovery.rows and ended.recovery.repair_tokens > 0 and 0 < ended.recovery.recompute_ratio < 1


async def test_a_stop_string_leaves_the_report_of_a_request_that_is_served_plainly(cache: AsyncAgentCache) -> None:
    episode = cache.episode("stop, plain")
    how: dict[str, Any] = {"extra": {"skip_reading_prefix_cache": True}, "save": False, "max_tokens": 24}
    whole = await episode.generate(chat("12 grams"), **how)
    text = whole.text[len(whole.text) // 2 :].strip()[:6]
    ended = await episode.generate(chat("12 grams"), stop=text, **how)
    assert ended.finish_reason == "stop" and ended.recovery is not None
    assert ended.recovery.reason == "the request asked not to read any cache"
    assert ended.recovery.exact and ended.recovery.prompt_tokens == ended.prompt_tokens


async def test_subscribers_hear_of_revision_resume_and_pause_in_order(cache: AsyncAgentCache) -> None:
    heard: list[Any] = []

    async def listen(event: Any) -> None:
        heard.append(event)

    unsubscribe = cache.subscribe(listen)
    episode = cache.episode("events")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    episode.pause("tool-1", reason="a search")
    episode.resume_hint("tool-1")
    second = await episode.generate(chat("49 grams"), max_tokens=2)
    await asyncio.sleep(0)
    unsubscribe()
    await episode.generate(chat("50 grams"), max_tokens=1)
    kinds = [PromptRevised, ReplyEnded, KVPaused, KVPaused, KVResumed, PromptRevised, ReplyEnded, KVResumed, KVPaused]
    assert [type(e) for e in heard] == kinds
    assert heard[3].key == "tool-1" and heard[3].version == first.version
    assert heard[5].kind == RevisionKind.TOOL_RESULT and heard[5].parent == first.version
    assert heard[6].version == heard[7].version == heard[8].version == second.version
    assert heard[7].recovery == heard[6].recovery and heard[7].recovery["reused_tokens"] > 0
    assert heard[6].reply_tokens == 2 and heard[6].fresh_text is None


@pytest.mark.parametrize("episode_id", ["", "x" * 257])
async def test_an_episodes_id_has_a_length(cache: AsyncAgentCache, episode_id: str) -> None:
    with pytest.raises(ConfigError, match="1 to 256 characters"):
        cache.episode(episode_id)


async def test_an_episode_is_reopened_from_a_durable_store_only(cache: AsyncAgentCache) -> None:
    with pytest.raises(AgentCacheError, match="no durable store"):
        await cache.reopen("thread-1")


async def test_flush_waits_for_saves_in_memory(cache: AsyncAgentCache) -> None:
    episode = cache.episode("flushed")
    reply = await episode.generate(LONG, max_tokens=2)
    assert reply.recovery is not None and reply.recovery.saved == "pending"
    assert await cache.flush()
    stats = (await cache.stats())["ranks"]
    assert all(rank["pending_saves"] == 0 and rank["index"]["open_saves"] == 0 for rank in stats)
    await idle(cache)
    again = await episode.generate([*LONG, 5], max_tokens=1, policy="prefix_cache")
    assert again.recovery is not None and again.recovery.restored_tokens == len(LONG)


# -- dropping ----------------------------------------------------------------------------------------------------------


async def test_a_dropped_episode_is_forgotten(cache: AsyncAgentCache) -> None:
    episode = cache.episode("dropped")
    reply = await episode.generate(chat("12 grams"), max_tokens=1)
    await episode.drop()
    assert episode.history() == [] and reply.version not in cache._session.reports


async def held(cache: AsyncAgentCache) -> tuple[int, int]:
    """Returns how many versions the index holds, and how many objects the worker does."""
    assert await cache.flush()
    rank = (await cache.stats())["ranks"][0]
    return rank["index"]["versions"], rank["objects"]


async def test_a_dropped_episode_frees_its_kv(cache: AsyncAgentCache) -> None:
    before = await held(cache)
    episode = cache.episode("freed")
    await episode.generate(chat("13 grams"), max_tokens=2)
    await episode.generate(chat("14 grams"), max_tokens=2)
    assert (await held(cache))[0] == before[0] + 2
    await episode.drop()
    assert await held(cache) == before


async def test_a_fork_keeps_what_it_needs_of_a_dropped_episode(cache: AsyncAgentCache) -> None:
    episode = cache.episode("trunk")
    first = await episode.generate(chat("15 grams"), max_tokens=2)
    await episode.generate(chat("16 grams"), max_tokens=2)
    fork = episode.fork(first.version)
    before = await held(cache)
    await episode.drop()
    assert (await held(cache))[0] == before[0] - 1
    reply = await fork.generate(chat("17 grams"), max_tokens=2)
    assert reply.parent == first.version and reply.recovery is not None and reply.recovery.reused_tokens > 0
    await fork.drop()


async def test_a_reply_to_an_episode_that_was_dropped_meanwhile_is_not_kept(cache: AsyncAgentCache) -> None:
    before = await held(cache)
    episode = cache.episode("late")
    chunks = episode.stream(chat("18 grams"), max_tokens=8)
    await anext(chunks)
    await episode.drop()
    async for _ in chunks:
        pass
    deadline = asyncio.get_running_loop().time() + 30
    while await held(cache) != before:
        assert asyncio.get_running_loop().time() < deadline, await held(cache)


async def test_an_episode_that_is_dropped_while_its_next_prompt_is_rendered_stays_gone(cache: AsyncAgentCache) -> None:
    before = await held(cache)
    episode = cache.episode("rendering")
    await episode.generate(chat("19 grams"), max_tokens=2)
    late = asyncio.create_task(episode.generate(chat("20 grams"), max_tokens=2))
    await asyncio.sleep(0)  # up to the thread that renders
    await episode.drop()
    reply = await late
    assert len(reply.token_ids) == 2 and reply.version is None and reply.recovery is None
    assert episode.history() == [] and await held(cache) == before
    again = await episode.generate(chat("21 grams"), max_tokens=2)
    assert [record.version for record in episode.history()] == [again.version]
    await episode.drop()


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_eight_episodes_at_once_reply_as_one_after_the_other(cache: AsyncAgentCache) -> None:
    def prompts(i: int) -> list[list[dict[str, Any]]]:
        return [chat(f"{i} grams"), chat(f"{i}{i} grams, corrected", f"Question {i}?")]

    async def run(name: str, i: int) -> list[list[int]]:
        episode = cache.episode(f"{name} {i}")
        return [(await episode.generate(p, max_tokens=8, policy="prefix_cache")).token_ids for p in prompts(i)]

    await idle(cache)
    together = await asyncio.gather(*(run("together", i) for i in range(8)))
    await idle(cache)
    assert together == [await run("alone", i) for i in range(8)]


async def test_two_requests_of_one_episode_at_once_both_end(cache: AsyncAgentCache) -> None:
    episode = cache.episode("two at once")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    replies = await asyncio.gather(*(episode.generate(chat(f"{n} grams"), max_tokens=4) for n in (13, 14)))
    assert [r.parent for r in replies] == [first.version] * 2
    assert {r.version for r in replies} < {r.version for r in episode.history()}
    assert all(r.recovery is not None and r.recovery.reused_tokens > 0 for r in replies)
