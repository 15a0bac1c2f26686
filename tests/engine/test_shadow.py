"""Exact twins of resumes: when they run, what they find, and that nobody else notices."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from agentcache import AsyncAgentCache, EngineDeadError, PolicyFellBack, QualityChecked, Reply
from agentcache.config import GuardConfig
from agentcache.engine.shadow import Admission, Shadows
from agentcache.events import EventBus
from agentcache.guard import QualityGuard, first_tokens, top_kl
from agentcache.reply import RecoveryReport
from agentcache.request import RequestOptions

# -- without an engine -------------------------------------------------------------------------------------------------

NEAR, FAR = {1: math.log(0.9), 2: math.log(0.1)}, {1: math.log(0.1), 2: math.log(0.9)}
PROMPT = np.arange(3, dtype=np.int32)


class Desk(Shadows):
    """Twins that answer when a test says so."""

    def __init__(self, **settings: Any) -> None:
        self.bus = EventBus()
        self.guard = QualityGuard(GuardConfig(**{"share": 1, "episode_strikes": 1, "window": 1} | settings))
        config = SimpleNamespace(block_size=32)
        self.session = SimpleNamespace(guard=self.guard, bus=self.bus, engine=object(), config=config)
        super().__init__(self.session)  # type: ignore[arg-type]
        self.asked: list[asyncio.Future[dict[int, float]]] = []
        self.prompt = PROMPT
        self.lengths: list[int] = []
        self.events: list[Any] = []
        self.bus.subscribe(self.events.append)

    async def _plain(self, prompt: Any) -> dict[int, float]:
        assert np.array_equal(prompt, self.prompt[: len(prompt)])
        self.lengths.append(len(prompt))
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    def resume(self, version: str = "v", *, exact: bool = False, asked: int | None = None, **more: Any) -> Reply:
        """Returns the settled reply of a whole request of episode `e`."""
        request = RequestOptions(logprobs=asked, **more)
        admission = self.admit(request, episode="e", version=version, parent="u", policy="direct_reuse", options={})
        listed = admission.request.logprobs is not None
        reply = dataclasses.replace(REPLY, version=version, logprobs=[NEAR, FAR] if listed else None)
        assert reply.recovery is not None
        reply = dataclasses.replace(reply, recovery=reply.recovery.model_copy(update={"exact": exact}))
        return self.settle(admission, reply, episode="e", prompt=self.prompt)

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = self.guard.stats()["policies"].get("direct_reuse", {})
        return {name: found[name] for name in ("agreed", "disagreed", "failed", "dropped", "unfit") if found.get(name)}


REPLY = Reply(
    "", [1, 2], "stop", 3, 2, 1.0, "v", "u", RecoveryReport(policy="direct_reuse", exact=False, prefix_tokens=100)
)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_twin_runs_after_the_reply_and_its_result_is_told() -> None:
    desk = Desk()
    with desk.giving_way():
        assert desk.resume().logprobs is None
        await turns()
        assert desk.asked == [] and desk.waiting == 1
    await turns()
    desk.asked[0].set_result(NEAR)
    await turns()
    (checked,) = desk.events
    assert (checked.episode, checked.version, checked.policy) == ("e", "v", "direct_reuse")
    assert checked.kl == pytest.approx(0, abs=1e-9) and checked.top1_agrees and not checked.strike
    assert desk.waiting == 0 and desk.counts() == {"agreed": 1}


async def test_a_fall_is_logged_told_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(policy_episodes=1)
    desk.resume()
    await turns()
    desk.asked[0].set_result(FAR)
    await turns()
    checked, *falls = desk.events
    assert checked.strike and not checked.top1_agrees
    assert checked.kl == pytest.approx(0.9 * math.log(9) - 0.1 * math.log(9))
    assert [each.scope for each in falls] == ["episode", "policy"]
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [each.reason for each in falls]
    after = desk.resume()
    assert after.recovery is not None and after.recovery.requested_policy == "direct_reuse"
    assert after.recovery.reason == falls[1].reason
    await turns()
    assert len(desk.asked) == 1


def admit(desk: Desk, policy: str = "direct_reuse", parent: str | None = "u", **options: Any) -> Admission:
    request = RequestOptions(**options)
    return desk.admit(request, episode="e", version="v", parent=parent, policy=policy, options={})


def test_a_request_that_fell_back_runs_with_prefix_cache_and_without_the_policys_options() -> None:
    desk = Desk()
    request = RequestOptions()
    desk.guard.record("e", "v", "edit_local", 9.0, False)
    admission = desk.admit(request, episode="e", version="w", parent="u", policy="edit_local", options={"k": 8})
    assert (admission.policy, admission.options, admission.request) == ("prefix_cache", {}, request)
    assert not admission.shadowed
    recovery = RecoveryReport(reason="the parent was evicted")
    told = desk.settle(admission, dataclasses.replace(REPLY, recovery=recovery), episode="e", prompt=PROMPT).recovery
    assert told is not None and admission.objection is not None
    assert told.reason == f"{admission.objection}; the parent was evicted"
    assert "edit_local was asked for; the quality guard has episode 'e' run exactly" in str(told)


def test_what_needs_no_shadow_runs_as_asked() -> None:
    desk = Desk()
    desk.guard.record("e", "v", "direct_reuse", 9.0, False)
    for plain in (admit(desk, "prefix_cache"), admit(desk, parent=None), admit(Desk(share=0))):
        assert not plain.shadowed and plain.objection is None and plain.request is plain.asked
        assert plain.policy == plain.asked_policy


@pytest.mark.parametrize("name", ["structured_outputs", "logprob_token_ids"])
def test_masked_or_named_log_probabilities_are_not_compared(name: str) -> None:
    desk = Desk()
    admission = admit(desk, extra={name: {}})
    assert not admission.shadowed and admission.request is admission.asked
    assert desk.counts() == {"unfit": 1}


async def test_an_exact_resume_has_no_twin_and_its_log_probabilities_go_nevertheless() -> None:
    desk = Desk()
    assert desk.resume(exact=True).logprobs is None
    await turns()
    assert desk.asked == []


@pytest.mark.parametrize(
    ("asked", "want"), [(None, None), (0, [[1], [1]]), (1, [[1], [1, 2]]), (2, [[1, 2]] * 2), (-1, [[1, 2]] * 2)]
)
async def test_the_caller_gets_the_log_probabilities_that_it_asked_for(asked: int | None, want: Any) -> None:
    desk = Desk()
    reply = desk.resume(
        asked=asked
    )  # the sampled token, the first of each, is the second most likely at the second place
    assert (None if reply.logprobs is None else [sorted(p) for p in reply.logprobs]) == want
    assert admit(desk, logprobs=asked).request.logprobs == (-1 if asked == -1 else 20)
    assert admit(desk, logprobs=30).request.logprobs == 30
    await desk.stop()


async def test_one_twin_at_a_time_and_the_oldest_makes_room() -> None:
    desk = Desk()
    with desk.giving_way():
        for i in range(20):
            desk.resume(f"v{i}")
    assert desk.waiting == 16 and desk.counts() == {"dropped": 4}
    for i in range(16):
        await turns()
        assert len(desk.asked) == i + 1
        desk.asked[i].set_result(NEAR)
    await turns()
    assert [each.version for each in desk.events] == [f"v{i}" for i in range(4, 20)]


async def test_a_twin_gives_way_to_a_request_and_is_tried_again() -> None:
    desk = Desk()
    desk.resume()
    await turns()
    with desk.giving_way(), desk.giving_way():
        await turns()
        assert desk.asked[0].cancelled() and desk.waiting == 1
    await turns()
    desk.asked[1].set_result(NEAR)
    await turns()
    assert desk.counts() == {"agreed": 1} and len(desk.asked) == 2


async def test_a_twin_is_prefilled_in_slices_and_goes_on_where_it_gave_way() -> None:
    desk = Desk()
    desk.prompt = np.arange(700, dtype=np.int32)
    desk.resume()  # vLLM has the first 100 tokens
    await turns()
    desk.asked[0].set_result(FAR)
    await turns()
    with desk.giving_way():
        await turns()
    for i in (2, 3):
        await turns()
        assert len(desk.asked) == i + 1
        desk.asked[i].set_result(NEAR)
    await turns()
    assert desk.lengths == [356, 612, 612, 700] and desk.asked[1].cancelled()
    assert desk.counts() == {"agreed": 1}


@pytest.mark.parametrize(("block", "lengths"), [(100, [400, 700]), (512, [612, 700]), (1024, [700])])
async def test_slices_are_whole_blocks(block: int, lengths: list[int]) -> None:
    desk = Desk()
    desk.session.config.block_size, desk.prompt = block, np.arange(700, dtype=np.int32)
    desk.resume()
    for i in range(len(lengths)):
        await turns()
        desk.asked[i].set_result(NEAR)
    await turns()
    assert desk.lengths == lengths and desk.counts() == {"agreed": 1}


async def test_a_twin_without_patience_runs_beside_requests() -> None:
    desk = Desk(patience_s=0)
    with desk.giving_way():
        desk.resume()
        await turns()
        with desk.giving_way():
            desk.asked[0].set_result(NEAR)
            await turns()
    assert desk.counts() == {"agreed": 1}


async def test_a_twin_waits_no_longer_than_its_patience() -> None:
    desk = Desk(patience_s=0.01)
    with desk.giving_way():
        desk.resume()
        async with asyncio.timeout(30):
            while not desk.asked:
                await asyncio.sleep(0.001)
        desk.asked[0].set_result(NEAR)
        await turns()
    assert desk.counts() == {"agreed": 1}


@pytest.mark.parametrize("error", [EngineDeadError("the engine has died"), RuntimeError("a fault")])
async def test_a_failed_twin_is_counted_and_logged_and_the_next_one_runs(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk()
    desk.resume("v1")
    desk.resume("v2")
    await turns()
    desk.asked[0].set_exception(error)
    await turns()
    desk.asked[1].set_result(NEAR)
    await turns()
    assert desk.counts() == {"agreed": 1, "failed": 1}
    assert "version v1 was not compared" in caplog.text and str(error) in caplog.text


async def test_stopping_aborts_and_drops_and_a_new_engine_goes_on() -> None:
    desk = Desk()
    engine, desk.session.engine = desk.session.engine, None
    desk.resume("late")
    desk.session.engine = engine
    for version in ("v1", "v2"):
        desk.resume(version)
    await turns()
    await desk.stop()
    assert desk.asked[0].cancelled() and desk.waiting == 0 and desk.counts() == {"dropped": 3}
    await desk.stop()
    desk.resume("v3")
    await turns()
    desk.asked[1].set_result(NEAR)
    await turns()
    assert desk.counts() == {"dropped": 3, "agreed": 1}


# -- on a real engine --------------------------------------------------------------------------------------------------

OLD = list(range(1000, 1800))
REUSE: dict[str, Any] = {"max_tokens": 4, "policy": "direct_reuse", "extra": {"ignore_eos": True}}


def edited(i: int) -> list[int]:
    return [*OLD[:150], *range(3000 + 100 * i, 3020 + 100 * i), *OLD[160:]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cache(tiny: Callable[[str], Path]) -> AsyncIterator[AsyncAgentCache]:
    guard = {"share": 1, "max_kl": 1e-7, "episode_strikes": 2, "policy_episodes": 2}
    settings = {"dtype": "float32", "kv_bytes": 64 << 20, "max_model_len": 2048}
    async with AsyncAgentCache(tiny("llama"), guard=guard, **settings) as cache:
        yield cache


async def settled(cache: AsyncAgentCache) -> dict[str, Any]:
    """Returns the guard's figures once no twin is left."""
    async with asyncio.timeout(60):
        while cache._session.shadows._worker is not None and not cache._session.shadows._worker.done():
            await asyncio.sleep(0.01)
    found: dict[str, Any] = (await cache.stats())["guard"]
    return found


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="module")
async def test_the_kl_is_that_of_the_resume_to_a_plain_request(cache: AsyncAgentCache) -> None:
    heard: list[Any] = []
    unsubscribe = cache.subscribe(heard.append, ["quality_checked"])
    episode = cache.episode("kl")
    await episode.generate(OLD, **REUSE)
    resumed = await episode.generate(edited(1), **REUSE, logprobs=-1)
    bare = await episode.generate(edited(1), **REUSE, parent=resumed.parent, salt="bare", save=False, temperature=1.5)
    assert resumed.recovery is not None and not resumed.recovery.exact
    assert resumed.logprobs is not None and len(resumed.logprobs[0]) == 49_152 and bare.logprobs is None
    await settled(cache)
    unsubscribe()
    plain = await cache.generate(edited(1), max_tokens=1, logprobs=-1)
    assert plain.logprobs is not None
    exact, other = (first_tokens(each.logprobs[0]) for each in (plain, resumed))  # type: ignore[index]
    assert [type(each) for each in heard] == [QualityChecked] * 2
    assert heard[0].version == resumed.version and heard[0].kl == pytest.approx(top_kl(exact, other), rel=0.01)
    assert heard[0].kl > 1e-5 and heard[0].strike
    # What is compared does not depend on how the token is sampled.
    assert heard[1].version == bare.version and heard[1].kl == pytest.approx(heard[0].kl, rel=0.01)
    cache.guard.reset()


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="module")
async def test_episodes_then_the_policy_fall_back_until_they_are_reset(cache: AsyncAgentCache) -> None:
    heard: list[Any] = []
    unsubscribe = cache.subscribe(heard.append, ["policy_fell_back"])
    for name in ("one", "two"):
        episode = cache.episode(name)
        for i in range(3):
            await episode.generate(edited(i), **REUSE)
            await settled(cache)
    unsubscribe()
    assert [(each.scope, each.episode) for each in heard] == [("episode", "one"), ("episode", "two"), ("policy", "two")]
    assert all(isinstance(each, PolicyFellBack) for each in heard)
    stats = await settled(cache)
    assert [*stats["episodes"]] == ["one", "two"] and stats["policies"]["direct_reuse"]["off"] == heard[2].reason
    of_episode = (await cache.episode("one").generate(edited(3), **REUSE | {"policy": "edit_local"})).recovery
    assert of_episode is not None and of_episode.policy == "prefix_cache" and of_episode.reason == heard[0].reason
    first = (await cache.episode("three").generate(OLD, **REUSE)).recovery
    assert first is not None and first.reason is None  # it had no parent
    reply = await cache.episode("three").generate(edited(1), **REUSE)
    report = reply.recovery
    assert report is not None and report.exact and report.policy == "prefix_cache"
    assert report.requested_policy == "direct_reuse" and report.reason == heard[2].reason
    plain = await cache.generate(edited(1), max_tokens=4, extra={"ignore_eos": True})
    assert reply.token_ids == plain.token_ids
    other = (await cache.episode("three").generate(edited(2), **REUSE | {"policy": "edit_local"})).recovery
    assert other is not None and other.policy == "edit_local"
    assert cache.guard.reset(policy="direct_reuse")
    again = (await cache.episode("three").generate(edited(3), **REUSE)).recovery
    assert again is not None and again.policy == "direct_reuse"


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="module")
async def test_closing_drops_open_shadows(cache: AsyncAgentCache) -> None:
    outcomes = ("agreed", "disagreed", "dropped")
    await settled(cache)
    before = cache.guard.stats()["policies"]["direct_reuse"]
    episode = cache.episode("closing")
    for i in range(3):
        await episode.generate(edited(i), **REUSE)
    async with asyncio.timeout(60):
        await cache.close()
    after = cache.guard.stats()["policies"]["direct_reuse"]
    assert sum(after[name] - before[name] for name in outcomes) == 2
    assert after["dropped"] > before["dropped"] and after["failed"] == before["failed"]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="module")
async def test_a_restart_keeps_what_fell_back(cache: AsyncAgentCache) -> None:
    cache.guard.reset()
    await cache.start()
    episode = cache.episode("restarted")
    for i in range(3):
        await episode.generate(edited(i), **REUSE)
    fell = await settled(cache)
    assert fell["episodes"]
    await cache.restart()
    assert (await settled(cache))["episodes"] == fell["episodes"]
    await episode.generate(edited(3), **REUSE)
    report = (await episode.generate(edited(4), **REUSE)).recovery
    assert report is not None and report.policy == "prefix_cache" and report.reason == fell["episodes"]["restarted"]
