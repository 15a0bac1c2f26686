"""Chunks through the asynchronous façade: encoded once, found in any prompt, forgotten when they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentcache import AgentCacheError, AsyncAgentCache, ConfigError
from agentcache.engine.chunks import chunk_id
from agentcache.engine.wire import ResumeParams
from agentcache.reply import RecoveryReport

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_bytes": 64 << 20, "max_model_len": 2048, "policy": "direct_reuse"}
SYSTEM = "You are a careful archivist. Answer from the memories alone."
MEMORIES = [
    f"Memory {number}. On the {day} the expedition reached the {place}; they found {found}, wrote it down in the log of the ship, "
    f"and the naturalist, who had been ill since the spring, drew {number} plates of it before the weather turned.\n"
    for number, day, place, found in [
        (3, "first of March", "northern glacier", "a cave full of blue ice"),
        (5, "ninth of April", "delta of the great river", "herons' nests on stilts"),
        (8, "last of May", "salt lake", "crusts with the tracks of foxes"),
    ]
]
REPLY: dict[str, Any] = {"max_tokens": 4, "extra": {"ignore_eos": True}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cache(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncAgentCache]:
    url = f"disk://{tmp_path_factory.mktemp('chunks')}?fsync=false"
    async with AsyncAgentCache(tiny("llama"), store=url, **SETTINGS) as cache:
        yield cache


def chat(*memories: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Memories:\n" + "\n".join(memories) + "\nWhat did they find at the lake?"},
    ]


async def test_memories_encoded_once_serve_prompts_in_any_order(cache: AsyncAgentCache) -> None:
    """With a real tokenizer: all but the tokens at a chunk's edges are found in the prompt."""
    ids = [await cache.encode_chunk(memory) for memory in MEMORIES]
    lengths = [len(cache.tokenizer.encode(memory, add_special_tokens=False)) for memory in MEMORIES]
    assert min(lengths) > 40
    for name, order in (("ask-1", (2, 0, 1)), ("ask-2", (1, 2))):
        reply = await cache.episode(name).generate(chat(*(MEMORIES[i] for i in order)), sources=ids, **REPLY)
        assert reply.recovery is not None
        assert reply.recovery.reason is None
        assert reply.recovery.sources == [ids[i] for i in sorted(order)]
        assert reply.recovery.source_tokens >= sum(lengths[i] - 2 for i in order)
        assert not reply.recovery.exact
        assert reply.parent is None
    plain = await cache.generate(chat(MEMORIES[2], MEMORIES[0], MEMORIES[1]), **REPLY)
    exact = await cache.episode("ask-3").generate(
        chat(MEMORIES[2], MEMORIES[0], MEMORIES[1]), sources=ids, policy="prefix_cache", **REPLY
    )
    assert exact.recovery is not None and exact.recovery.exact
    assert exact.token_ids == plain.token_ids


async def test_a_chunk_that_is_there_is_not_encoded_again(
    cache: AsyncAgentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MEMORIES[0].replace("expedition", "caravan")
    runs: list[int] = []
    real = cache._session.run

    def counted(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(len(prompt.token_ids))
        return real(prompt, *args, **kwargs)

    monkeypatch.setattr(cache._session, "run", counted)
    first, second = await asyncio.gather(cache.encode_chunk(text), cache.encode_chunk(text))
    tokens = cache.tokenizer.encode(text, add_special_tokens=False)
    assert first == second == await cache.encode_chunk(tokens)
    assert runs == [len(tokens)]
    assert (await cache.stats())["chunks"][first] == {"tokens": len(tokens), "context_tokens": 0}


async def test_context_and_namespace_make_another_chunk(cache: AsyncAgentCache) -> None:
    alone = await cache.encode_chunk(MEMORIES[0])
    behind = await cache.encode_chunk(MEMORIES[0], context=SYSTEM)
    assert alone != behind
    context, text = (cache.tokenizer.encode(t, add_special_tokens=False) for t in (SYSTEM, MEMORIES[0]))
    assert behind == chunk_id("default", context, text)
    assert alone == chunk_id("default", [], text) != chunk_id("other", [], text)
    assert chunk_id("n", [1], [2]) != chunk_id("n", [], [1, 2])
    assert (await cache.stats())["chunks"][behind] == {"tokens": len(text), "context_tokens": len(context)}


@pytest.mark.parametrize(
    ("text", "context", "reason"),
    [
        ("", None, "a chunk needs text"),
        ([], SYSTEM, "a chunk needs text"),
        ([7] * 2048, None, r"2048 tokens behind 0 .* fewer than 2048"),
        ([7] * 1024, [8] * 1024, r"1024 tokens behind 1024 .*Cut it"),
        ([[7]], None, "flat sequence of integers"),
        ([10**7], None, "vocabulary"),
        ([5, -1], None, "got -1 to 5"),
        ([5, 1 << 40], None, "from 0 to the vocabulary's end"),
    ],
)
async def test_what_is_no_chunk_is_refused(cache: AsyncAgentCache, text: Any, context: Any, reason: str) -> None:
    before = (await cache.stats())["chunks"]
    with pytest.raises(ConfigError, match=reason):
        await cache.encode_chunk(text, context)
    assert (await cache.stats())["chunks"] == before


async def test_a_dropped_chunk_is_gone_everywhere_and_may_be_encoded_again(cache: AsyncAgentCache) -> None:
    text = MEMORIES[1].replace("herons", "storks")
    chunk = await cache.encode_chunk(text)
    assert await cache.flush()
    store = cache._session.store
    assert store is not None and store.has("default", chunk)
    await cache.drop_chunk(chunk)
    assert not store.has("default", chunk)
    assert chunk not in (await cache.stats())["chunks"]
    without = await cache.episode("drop-1").generate(chat(text), sources=[chunk], **REPLY)
    assert without.recovery is not None
    assert without.recovery.lost_sources == [chunk]
    assert without.recovery.reason == f"source {chunk!r} is unknown or was evicted"
    assert await cache.encode_chunk(text) == chunk
    with_it = await cache.episode("drop-2").generate(chat(text), sources=[chunk], **REPLY)
    assert with_it.recovery is not None and with_it.recovery.sources == [chunk]
    with pytest.raises(ConfigError, match="'drop-2' is no chunk"):
        await cache.drop_chunk("drop-2")
    await cache.drop_chunk(chunk_id("default", [], [1, 2, 3]))  # one that never was


async def test_a_chunk_that_memory_lost_comes_up_from_the_store(cache: AsyncAgentCache) -> None:
    chunk = await cache.encode_chunk(MEMORIES[2])
    assert await cache.flush()
    async with asyncio.timeout(60):
        while not await cache.reset_prefix_cache(checkpoints=True):
            await asyncio.sleep(0.05)
    assert (await cache.stats())["chunks"] == {}
    runs: list[int] = []
    real = cache._session.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache._session, "run", lambda p, *a, **k: runs.append(len(p.token_ids)) or real(p, *a, **k))
        assert await cache.encode_chunk(MEMORIES[2]) == chunk
    assert runs == [1], "the engine is asked whether it has it"
    reply = await cache.episode("up").generate(chat(MEMORIES[2]), sources=[chunk], **REPLY)
    assert reply.recovery is not None and reply.recovery.sources == [chunk]


async def test_what_an_episode_hears_of_a_lost_chunk_has_it_encoded_again(
    cache: AsyncAgentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = await cache.encode_chunk(MEMORIES[0])
    assert await cache.flush()
    store = cache._session.store
    assert store is not None and store.delete("default", chunk) is True
    await cache._session.running().call("agentcache_drop", "default", [chunk])
    await cache.generate([0], max_tokens=1)
    assert await cache.encode_chunk(MEMORIES[0]) == chunk, "it believes that the chunk is there"
    reply = await cache.episode("lost-1").generate(chat(MEMORIES[0]), sources=[chunk], **REPLY)
    assert reply.recovery is not None and reply.recovery.lost_sources == [chunk]
    assert await cache.encode_chunk(MEMORIES[0]) == chunk
    again = await cache.episode("lost-2").generate(chat(MEMORIES[0]), sources=[chunk], **REPLY)
    assert again.recovery is not None and again.recovery.sources == [chunk]


async def test_a_chunk_that_the_engine_has_and_this_cache_does_not_know_is_not_stored_twice(
    cache: AsyncAgentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = await cache.encode_chunk(MEMORIES[1])
    objects = (await cache.stats())["ranks"][0]["objects"]
    cache._session.chunks.forget()
    monkeypatch.setattr(cache._session, "store", None)  # so that only the engine can say it
    assert await cache.encode_chunk(MEMORIES[1]) == chunk
    assert chunk in (await cache.stats())["chunks"]
    assert (await cache.stats())["ranks"][0]["objects"] == objects


async def test_a_chunk_whose_kv_cannot_be_kept_says_why(
    cache: AsyncAgentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(ids: list[int], resume: ResumeParams) -> RecoveryReport:
        return RecoveryReport(saved="refused", reason="400 bytes do not fit", lost_sources=resume.sources)

    monkeypatch.setattr(cache._session.chunks, "_ask", refused)
    text = MEMORIES[1].replace("delta", "mouth")
    with pytest.raises(AgentCacheError, match=r"a chunk of \d+ tokens could not be kept: 400 bytes do not fit"):
        await cache.encode_chunk(text)
    monkeypatch.undo()
    chunk = await cache.encode_chunk(text)
    assert chunk in (await cache.stats())["chunks"], "and may be tried again"
