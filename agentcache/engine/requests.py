"""One request's life in the caller: sampling parameters, token stream, deadline, abort, report.

Import it only after `launch.start` has imported vLLM quietly.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError as VLLMDeadError
from vllm.v1.engine.exceptions import EngineGenerateError

from agentcache.engine.launch import Engine
from agentcache.engine.wire import ENDED, KEY, Recovery, ResumeParams
from agentcache.errors import ConfigError, RequestError, RequestTimeout
from agentcache.labels import overlay
from agentcache.reply import RecoveryReport, Reply, StreamChunk
from agentcache.request import RequestOptions

__all__ = ["run_request", "sampling_params"]

logger = logging.getLogger(__name__)

TRANSFER = "kv_transfer_params"
# vLLM sends the first and the last output of a request at once whatever the interval.
_ENDS_ONLY = 1 << 30
_LOAD_FIELDS = (
    "restored_tokens",
    "restored_bytes",
    "recomputed_tokens",
    "lost_tokens",
    "restore_ms",
    "select_ms",
    "recompute_ms",
)
_LATE_TRIES = 100
_LATE_WAIT_S = 0.01
_numbers = itertools.count(1)


def sampling_params(options: RequestOptions, resume: ResumeParams | None, *, every_token: bool) -> SamplingParams:
    """Returns the sampling parameters of one request.

    Args:
        options: What the caller asked for.
        resume: The request's place in its episode; None outside of one.
        every_token: Whether each token comes back as soon as it is there; else the first, and the rest at the end.

    Raises:
        ConfigError: vLLM does not know or not allow a value.
    """
    extra = dict(options.extra)
    extra_args = dict(extra.pop("extra_args", None) or {})
    if TRANSFER in extra_args:
        raise ConfigError(f"extra_args may not hold {TRANSFER!r}: agentcache sets it")
    if resume is not None:
        extra_args |= resume.to_extra_args()
    try:
        return SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop=options.stop,
            logprobs=options.logprobs,
            flat_logprobs=options.logprobs is not None,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=1 if every_token else _ENDS_ONLY,
            extra_args=extra_args or None,
            skip_clone=True,
            **extra,
        )
    except (TypeError, ValueError, VLLMClientError) as error:
        raise ConfigError(f"vLLM does not accept these sampling parameters: {error}") from error


async def run_request(
    engine: Engine,
    token_ids: list[int],
    options: RequestOptions,
    *,
    started: float,
    resume: ResumeParams | None = None,
    diff_ms: float = 0.0,
    every_token: bool = True,
    priority: int = 0,
) -> AsyncGenerator[StreamChunk, None]:
    """Yields the chunks of one request; the last one carries the reply. Closing the generator aborts the request.

    Args:
        engine: The running engine.
        token_ids: The rendered prompt.
        options: What the caller asked for.
        started: `time.perf_counter()` of the call; TTFT counts from it.
        resume: The request's place in its episode; None outside of one.
        diff_ms: Time that the diff took.
        every_token: Whether each token is a chunk, or only the first and the rest.
        priority: Smaller ones go first where the engine schedules by priority.

    Raises:
        ConfigError: vLLM does not allow the request, e.g. a prompt that is too long.
        RequestTimeout: It took longer than `options.timeout`; it was aborted.
        RequestError: It failed in the engine.
        EngineDeadError: The engine died.
    """
    params = sampling_params(options, resume, every_token=every_token)
    salt = options.salt if resume is None and options.salt else None
    prompt = tokens_input(token_ids, cache_salt=salt)
    deadline = None if options.timeout is None else asyncio.get_running_loop().time() + options.timeout
    outputs = engine.llm.generate(prompt, params, f"agentcache-{next(_numbers)}", priority=priority)
    texts: list[str] = []
    ids: list[int] = []
    logprobs: list[Mapping[int, float]] | None = None if options.logprobs is None else []
    ttft_ms: float | None = None
    try:
        while True:
            async with asyncio.timeout_at(deadline):
                output = await anext(outputs)
            (new,) = output.outputs
            if ttft_ms is None:
                ttft_ms = (time.perf_counter() - started) * 1e3
            texts.append(new.text)
            ids.extend(new.token_ids)
            if logprobs is not None:
                logprobs += _plain_logprobs(new.logprobs)
            if output.finished:
                break
            yield StreamChunk(new.text, list(new.token_ids))
        if new.finish_reason == "error":
            raise RequestError("the request failed in the engine; its log says why")
        recovery = None if resume is None else await _recovery(engine, output, resume, diff_ms, ttft_ms)
    except TimeoutError as error:
        raise RequestTimeout(
            f"the request took longer than timeout={options.timeout:g} s and was aborted; its blocks are free"
        ) from error
    except VLLMDeadError as error:
        raise engine.death() from error
    except VLLMClientError as error:
        raise ConfigError(f"vLLM does not accept this request: {error}") from error
    except EngineGenerateError as error:
        raise RequestError(f"the request failed: {error.__cause__ or error}") from error
    finally:
        await outputs.aclose()
    reply = Reply(
        text="".join(texts),
        token_ids=ids,
        finish_reason=new.finish_reason,
        prompt_tokens=len(token_ids),
        cached_tokens=output.num_cached_tokens or 0,
        ttft_ms=ttft_ms,
        version=None if resume is None else resume.version,
        parent=None if resume is None else resume.parent,
        recovery=recovery,
        logprobs=logprobs,
    )
    yield StreamChunk(new.text, list(new.token_ids), reply)


async def _recovery(
    engine: Engine, output: Any, resume: ResumeParams, diff_ms: float, ttft_ms: float
) -> RecoveryReport:
    """Returns the connector's report, completed by the worker where vLLM could not carry all of it."""
    report = (output.kv_transfer_params or {}).get(KEY)
    if report is None:
        report = await _late_report(engine, resume)
    if _is_early(report):
        noted = await _noted(engine, resume)
        before = report["lost_tokens"]  # those that the scheduler half knew of
        report |= {name: noted[name] for name in _LOAD_FIELDS if name in noted}
        report["lost_tokens"] += before if "lost_tokens" in noted else 0
        report["reason"] = report["reason"] or noted.get("fault")
        for name, sign in (("repair_tokens", 1), ("reused_tokens", -1)):
            report[name] += sign * noted.get("repaired_tokens", 0)
        report["rows"] = overlay(report.get("rows", ""), "R", noted.get("repaired_rows", ()))
    recovery = RecoveryReport.model_validate(report | {"diff_ms": diff_ms, "ttft_ms": ttft_ms})
    recovery.count_reuse()
    return recovery


async def _late_report(engine: Engine, resume: ResumeParams) -> dict[str, Any]:
    """Returns the report of a request that a stop string ended: in the caller, before the engine's own report.

    The engine hears of the end as an abort, and the workers of the report in its next step, which vLLM makes after every end. Each
    question waits for a step that is under way: few are needed, however long steps take.
    """
    for _ in range(_LATE_TRIES):
        noted = await _noted(engine, resume)
        if ENDED in noted:
            return dict(noted[ENDED])
        await asyncio.sleep(_LATE_WAIT_S)
    reason = "a stop string ended the request, and the engine has not told what became of it"
    logger.warning("version %s: %s", resume.version, reason)
    own = Recovery(version=resume.version, parent=resume.parent, requested_policy=resume.policy, exact=False)
    return own.model_dump(mode="json") | noted | {"reason": reason}


async def _noted(engine: Engine, resume: ResumeParams) -> dict[str, Any]:
    (first, *_) = await engine.call("agentcache_report", resume.namespace, resume.version)
    return dict(first or {})


def _is_early(report: Mapping[str, Any]) -> bool:
    """Whether the request ended in the step of its load, whose times the report then lacks."""
    promised = sum(report[f"{part}_tokens"] for part in ("prefix", "fresh", "repair", "reused"))
    return promised > report["local_tokens"] and not report["restored_tokens"] and not report["recomputed_tokens"]


def _plain_logprobs(flat: Any) -> list[Mapping[int, float]]:
    """Returns log-probabilities by token id, one mapping a position of vLLM's `FlatLogprobs`."""
    return [
        dict(zip(flat.token_ids[a:b], flat.logprobs[a:b], strict=True))
        for a, b in zip(flat.start_indices, flat.end_indices, strict=True)
    ]
