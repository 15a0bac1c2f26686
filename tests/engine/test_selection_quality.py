"""How much of a far edit's effect each policy recovers, through the product's own engine: EditLocal's derived items.

Needs a model that follows an alias to a table, 1.5B parameters or more (what is asked for here was measured on
Qwen2.5-Coder-1.5B-Instruct): its folder in AGENTCACHE_DERIVED_MODEL.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from agentcache import AgentCache
from agentcache.bench_resume import empty_prefix_cache
from agentcache.profiling.derived import ChatFrame, DerivedItem, derived_items, is_kept, margin, margin_recovery
from agentcache.samples import load_hotpot_sample

logger = logging.getLogger(__name__)

MODEL = "AGENTCACHE_DERIVED_MODEL"
KEPT = 6  # items a cell
DRAWN = 24  # of which the model must answer as many
CONTROL = "edit alone"
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    CONTROL: ("direct_reuse", {}),
    "edit_local 32": ("edit_local", {"k": 32}),
    "attended 64": ("attended", {"k": 64, "block": 8, "window": 0}),
}

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cache() -> Iterator[AgentCache]:
    if MODEL not in os.environ:
        pytest.skip(f"{MODEL} does not name the folder of a model that answers the derived items")
    folder = Path(os.environ[MODEL])
    assert folder.is_dir(), f"{MODEL}={str(folder)!r} is not a folder"
    with AgentCache(folder, max_model_len=2048, kv_bytes=1 << 30) as cache:
        yield cache


def answer(cache: AgentCache, ids: tuple[int, ...], item: DerivedItem) -> float:
    """Returns the margin after a full prefill."""
    reply = cache.generate(list(ids), max_tokens=1, logprobs=-1)
    assert reply.logprobs is not None
    return margin(reply.logprobs[0], item)


def repaired(cache: AgentCache, item: DerivedItem, parent: str, arm: str) -> float:
    """Returns the margin after the edit, everything up to the question recovered from `parent`."""
    policy, options = ARMS[arm]
    empty_prefix_cache(cache)
    reply = cache.episode(parent).generate(
        list(item.new), max_tokens=1, logprobs=-1, policy=policy, policy_options=options, save=False, salt=arm
    )
    report = reply.recovery
    assert report is not None and reply.logprobs is not None
    assert report.policy == policy and report.reason is None, report
    # The prefix and the edit are exact whatever the policy; only what follows is in question.
    assert report.prefix_tokens == item.edit.start and report.fresh_tokens == len(range(*item.edit)), report
    suffix = item.query_start - item.edit.stop
    assert report.suffix_tokens == suffix, report
    assert report.reused_tokens >= 0.7 * suffix, report
    assert report.repair_tokens <= options.get("k", 0) + options.get("window", 0), report
    return margin(reply.logprobs[0], item)


def measure(cache: AgentCache, distance: int) -> dict[str, float]:
    """Returns each arm's mean margin recovery on the first items of a distance that can be used."""
    encode = partial(cache.tokenizer.encode, add_special_tokens=False)
    render = partial(cache.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    documents = [f"{p.title}. {p.text}" for item in load_hotpot_sample() for p in item.paragraphs]
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    drawn = derived_items(encode, documents, ChatFrame.of(render), count=DRAWN, distance=distance)
    for at, item in enumerate(drawn):
        stale, oracle = answer(cache, item.old, item), answer(cache, item.new, item)
        if not is_kept(stale, oracle):
            continue
        # The question is a new turn: what is cached ends before it, so that its own rows are never stale.
        name = f"item {distance} {at}"
        cache.episode(name).generate(list(item.old[: item.query_start]), max_tokens=1)
        for arm in ARMS:
            found[arm].append(margin_recovery(repaired(cache, item, name, arm), stale, oracle))
        if len(found[CONTROL]) == KEPT:
            return {arm: mean(values) for arm, values in found.items()}
    pytest.fail(f"the model answers {len(found[CONTROL])} of {DRAWN} items at d = {distance}, {KEPT} are needed")


@pytest.mark.parametrize("distance", [0, 250])
def test_edit_local_recovers_what_is_near_and_attended_also_what_is_far(cache: AgentCache, distance: int) -> None:
    recovery = measure(cache, distance)
    logger.info("d = %d: %s", distance, recovery)
    assert abs(recovery[CONTROL]) <= 0.2, recovery  # the edit alone changes nothing: the items can tell
    if distance == 0:
        assert recovery["edit_local 32"] >= 0.94, recovery
    else:
        assert recovery["edit_local 32"] <= 0.3, recovery
        assert recovery["attended 64"] >= 0.9, recovery
