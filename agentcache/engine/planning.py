"""From a request and its parent's checkpoint to a recovery plan, or the reason why there is none. Pure: no vLLM, no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentcache.engine.wire import ResumeParams
from agentcache.episodes.diff import as_ids, common_prefix, diff_tokens, find_spans
from agentcache.errors import ConfigError
from agentcache.recovery.auto import Auto, auto_arms
from agentcache.recovery.base import OnlinePolicy, PolicyContext, RecoveryPlan, RecoveryPolicy
from agentcache.recovery.planner import plan
from agentcache.recovery.prefix_cache import PrefixCache
from agentcache.recovery.registry import get_policy
from agentcache.recovery.rows import QUERY_ROWS
from agentcache.store.compose import Composition
from agentcache.store.index import Version
from agentcache.store.scores import decode_scores
from agentcache.types import AlignedRun, PromptDiff, Run

__all__ = ["Estimator", "OnlineOrder", "Planned", "plan_request", "refusal"]

logger = logging.getLogger(__name__)

Estimator = Callable[[RecoveryPlan | None, int], float]
"""Returns the seconds of a plan whose policy may choose so many more rows in the worker; of vLLM alone when there is no plan."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What was planned for a request.

    Attributes:
        plan: None when nothing can be reused.
        prefix: |P|.
        reason: Why there is no plan, or not the one that was asked for.
        policy: When it chooses further rows in the worker.
        context: What it was shown; None without a plan.
        estimate: What `auto` compared, in ms; see `Recovery.estimate`.
    """

    plan: RecoveryPlan | None
    prefix: int
    reason: str | None
    policy: OnlinePolicy | None = None
    context: PolicyContext | None = None
    estimate: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class OnlineOrder:
    """What a worker needs to choose further rows of one load.

    Attributes:
        policy: Chooses.
        context: What the policy was shown in the scheduler.
        rows: Restored rows of S that it may choose, ascending and disjoint; none of them in a block of vLLM's own hit.
        query: The prompt's last tokens, those that ask: all or the last of what follows `load_end`.
    """

    policy: OnlinePolicy
    context: PolicyContext
    rows: tuple[Run, ...]
    query: tuple[int, ...]


def refusal(request: Any) -> str | None:
    """Returns why vLLM must serve this request alone, or None.

    Args:
        request: vLLM's `Request`.
    """
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "prompt embeddings have no token ids to compare"
    if getattr(request, "lora_request", None) is not None:
        return "LoRA adapters change the KV; checkpoints are the base model's"
    if getattr(request, "mm_features", None):
        return "multimodal inputs are not part of the token ids"
    if getattr(request, "pooling_params", None) is not None:
        return "pooling requests have no KV to keep"
    if getattr(request, "resumable", False):
        return "resumable streaming requests change their prompt while they run"
    sampling = request.sampling_params
    if sampling is not None and sampling.prompt_logprobs is not None:
        return "prompt log-probabilities need every prompt row to be computed"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "the request asked not to read any cache"
    if getattr(request, "cache_salt", None):
        return "the request has a cache_salt, which checkpoints do not know"
    return None


def _checked_diff(token_ids: np.ndarray[Any, Any], parent: Version, params: ResumeParams) -> PromptDiff:
    """Returns the diff of the caller when it holds for the stored ids, otherwise our own."""
    old = parent.token_ids
    if params.aligned is not None:
        # The caller counts the last sampled token, whose KV never existed.
        runs = [AlignedRun(*run) for run in params.aligned]
        clipped = [r._replace(length=min(r.length, len(old) - r.old_start)) for r in runs if r.old_start < len(old)]
        try:
            diff = PromptDiff(len(old), len(token_ids), tuple(r for r in clipped if r.length > 0))
        except ValueError:
            diff = None
        if diff is not None and all(
            np.array_equal(old[r.old_start : r.old_stop], token_ids[r.new_start : r.new_stop]) for r in diff.aligned
        ):
            return diff
        logger.warning("version %s: the sent diff does not fit its parent's tokens; computing our own", params.version)
    return diff_tokens(old, token_ids)


def _diff(
    token_ids: np.ndarray[Any, Any], composition: Composition, params: ResumeParams, *, sources: bool
) -> PromptDiff:
    """Returns the diff to the parent, and where the rest of the prompt stands in the sources, if they are to be searched."""
    base = composition.base
    start = 0
    if base.version_id == params.parent:
        diff = _checked_diff(token_ids, base, params)
        if len(composition.parts) == 1:
            return diff
        start = composition.source_start
    else:
        prefix = common_prefix(as_ids(base.token_ids), as_ids(token_ids))
        diff = PromptDiff(prefix, len(token_ids), (AlignedRun(0, 0, prefix),) if prefix else ())
    spans = find_spans(composition.token_ids[start:], token_ids, diff.fresh) if sources else ()
    found = (AlignedRun(span.old_start + start, span.new_start, span.length) for span in spans)
    aligned = sorted((*diff.aligned, *found), key=lambda run: run.new_start)
    return PromptDiff(len(composition.token_ids), len(token_ids), tuple(aligned))


def _measured(
    composition: Composition, parent: Version, diff: PromptDiff
) -> tuple[np.ndarray[Any, np.dtype[np.float32]] | None, np.ndarray[Any, np.dtype[np.int32]]]:
    """Returns what is known of the rows at their places in the new prompt: attention and generations."""
    of_parent = np.zeros(len(parent.token_ids), dtype=np.int32)
    for extent in parent.extents:
        of_parent[extent.position : extent.stop] = extent.generation
    scores = None if parent.attention is None else decode_scores(parent.attention)
    if scores is not None:
        for part in composition.parts[:-1]:  # policies leave out the rows that asked, and look for them at the very end
            scores[max(part.stop - QUERY_ROWS, part.offset) : part.stop] = 0
    attention = None if scores is None else np.zeros(diff.new_len, dtype=np.float32)
    generations = np.zeros(diff.new_len, dtype=np.int32)
    for run in diff.aligned:
        generations[run.new_start : run.new_stop] = of_parent[run.old_start : run.old_stop]
        if attention is not None and scores is not None:
            attention[run.new_start : run.new_stop] = scores[run.old_start : run.old_stop]
    return attention, generations


def plan_request(
    prompt: Sequence[int],
    composition: Composition,
    params: ResumeParams,
    exact_end: int,
    estimate: Estimator | None = None,
) -> Planned:
    """Returns the plan of a resume, or the reason why there is none.

    Args:
        prompt: The new prompt's ids.
        composition: The parent, and the sources that are there.
        params: What the caller asked for.
        exact_end: Leading rows of the base that can be had exactly.
        estimate: What `auto` compares plans by; None while the engine has not told how fast it is.
    """
    token_ids = np.asarray(prompt, dtype=np.int32)
    parent = composition.view()

    def planned(policy: RecoveryPolicy, context: PolicyContext) -> Planned:
        made = plan(policy, context, parent_exact_end=exact_end, missing=parent.missing(), limit=len(token_ids) - 1)
        if made.load_end == 0:
            return Planned(None, context.diff.prefix, _nothing(params))
        online = policy if isinstance(policy, OnlinePolicy) and made.reused_tokens else None
        return Planned(made, context.diff.prefix, None, online, context)

    try:
        policy = get_policy(params.policy, params.options)
        diff = _diff(token_ids, composition, params, sources=not policy.exact)
        context = PolicyContext(diff, token_ids, params.boundary_tuple(), *_measured(composition, parent, diff))
        if policy.exact and params.sources:
            reason = f"policy {params.policy!r} is exact: it takes nothing of the sources behind the prompt's prefix"
            return replace(planned(policy, context), reason=reason)
        arms = auto_arms(policy)
        if arms is None:
            return planned(policy, context)
        auto, lossy = arms
        made, exact = planned(lossy, context), planned(PrefixCache(), context)
        if made.plan is None or made.plan.exact:  # the same rows, unless some of P are lost
            return max(exact, made, key=lambda each: 0 if each.plan is None else each.plan.load_end)
        return _choose(auto, made, exact, estimate)
    except ConfigError as error:
        return Planned(None, 0, str(error))
    except Exception as error:  # a policy may be anybody's code; the request must live
        logger.exception("policy %s failed", params.policy)
        return Planned(None, 0, f"policy {params.policy!r} failed: {type(error).__name__}: {error}")


def _nothing(params: ResumeParams) -> str:
    asked = [*(["parent"] if params.parent is not None else []), *(["sources"] if params.sources else [])]
    return f"nothing of the {' or the '.join(asked)} can be reused"


def _choose(auto: Auto, lossy: Planned, exact: Planned, estimate: Estimator | None) -> Planned:
    """Returns the lossy plan where it saves enough time, else the exact one, or vLLM alone where that is faster still.

    Args:
        auto: Decides.
        lossy: Has a plan.
        exact: Has one when exact rows can be restored.
        estimate: Of the engine, or None.
    """
    assert lossy.plan is not None and lossy.context is not None
    if estimate is None:
        return replace(exact, reason="auto is exact until the engine has timed a few forwards")
    most = 0 if lossy.policy is None else lossy.policy.most(lossy.context)
    lossy_s, exact_s, alone_s = estimate(lossy.plan, most), estimate(exact.plan, 0), estimate(None, 0)
    if auto.accepts(exact_s, alone_s):  # what must be fetched first may come too late
        exact, exact_s = Planned(None, lossy.prefix, None), alone_s
    name = lossy.plan.policy
    found = {"exact_ms": round(exact_s * 1e3, 3), f"{name}_ms": round(lossy_s * 1e3, 3)}
    if auto.accepts(exact_s, lossy_s):
        return replace(lossy, estimate=found)
    reason = f"prefix caching was chosen: it is estimated to take {exact_s * 1e3:.0f} ms, {name} {lossy_s * 1e3:.0f} ms"
    return replace(exact, reason=reason, estimate=found)
