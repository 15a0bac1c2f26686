"""Requests of the asynchronous façade outside of an episode, and what its engine is."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from agentcache import AgentCacheError, AsyncAgentCache, ConfigError
from tests.engine.embedded.calls import LONG, unfinished

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def test_a_stream_gives_the_tokens_of_generate_one_by_one(cache: AsyncAgentCache) -> None:
    whole = await cache.generate(LONG, max_tokens=12, extra={"ignore_eos": True})
    chunks = [c async for c in cache.stream(LONG, max_tokens=12, extra={"ignore_eos": True})]
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids and len(whole.token_ids) == 12
    assert len(chunks) > 1  # tokens that come while this loop is busy share a chunk
    assert "".join(c.text for c in chunks) == whole.text
    assert [c.reply is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].reply is not None and chunks[-1].reply.text == whole.text
    assert whole.finish_reason == "length" and whole.prompt_tokens == len(LONG)


async def test_a_plain_request_has_no_version_and_no_report(cache: AsyncAgentCache) -> None:
    reply = await cache.generate("hello", max_tokens=2)
    assert (reply.version, reply.parent, reply.recovery) == (None, None, None)
    assert reply.ttft_ms > 0


async def test_a_string_is_one_user_message(cache: AsyncAgentCache) -> None:
    as_text = await cache.render("hello")
    as_message = await cache.render([{"role": "user", "content": "hello"}])
    assert as_text.token_ids.tolist() == as_message.token_ids.tolist()
    assert [s.role for s in as_text.spans] == ["user"]


async def test_log_probabilities_of_the_whole_vocabulary(cache: AsyncAgentCache) -> None:
    reply = await cache.generate(LONG, max_tokens=2, logprobs=-1, extra={"ignore_eos": True})
    assert reply.logprobs is not None and [len(p) for p in reply.logprobs] == [49_152] * 2
    for token, position in zip(reply.token_ids, reply.logprobs, strict=True):
        assert max(position, key=position.__getitem__) == token
    top = await cache.generate(LONG, max_tokens=2, logprobs=3, extra={"ignore_eos": True})
    assert top.logprobs is not None and [len(p) for p in top.logprobs] == [3, 3]


async def test_a_salt_keeps_a_plain_requests_blocks_to_itself(cache: AsyncAgentCache) -> None:
    await cache.reset_prefix_cache()
    await cache.generate(LONG, max_tokens=1, salt="one")
    assert (await cache.generate(LONG, max_tokens=1, salt="two")).cached_tokens == 0
    assert (await cache.generate(LONG, max_tokens=1, salt="one")).cached_tokens > 0


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        (LONG, {"n": 2}, "one continuation"),
        (LONG, {"extra": {"prompt_logprobs": 1}}, "nothing can be recovered"),
        (LONG, {"policy": "edit_local"}, "needs an episode"),
        (LONG, {"extra": {"nonsense": 1}}, "nonsense"),
        (LONG, {"extra": {"min_p": 7.0}}, "min_p"),
        (LONG, {"extra": {"extra_args": {"kv_transfer_params": {}}}}, "kv_transfer_params"),
        (list(range(2100)), {}, "2048"),
        ([10**9], {}, "out of vocabulary"),
        ([[1, 2], [3, 4]], {}, "flat sequence"),
    ],
)
async def test_a_bad_request_is_refused_with_its_reason(
    cache: AsyncAgentCache, messages: Any, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        await cache.generate(messages, **options)
    assert unfinished(cache) == 0


async def test_another_event_loop_is_refused(cache: AsyncAgentCache) -> None:
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(cache.generate(LONG, max_tokens=1))
        except AgentCacheError as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert "another event loop" in str(failures[0])


async def test_stats_say_what_the_engine_is(cache: AsyncAgentCache) -> None:
    stats = await cache.stats()
    assert stats["engine"]["dtype"] == "float32" and stats["engine"]["layers"] == 4
    # The KV space is exactly what was asked for, to a block.
    row_bytes = stats["engine"]["row_bytes"]
    assert 0 <= (64 << 20) - stats["kv_tokens"] * row_bytes < 32 * row_bytes
    assert stats["ranks"][0]["attached"]


async def test_no_thread_of_enginecore_is_bound_to_one_core(cache: AsyncAgentCache) -> None:
    (pid,) = cache.pids
    cores = os.sched_getaffinity(0)
    threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset(cores)}
