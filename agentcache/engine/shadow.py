"""Runs the exact twins of the resumes that the quality guard has chosen, off everybody's critical path. No torch, no vLLM.

A chosen request returns its first token's log-probabilities; its reply is given without them. The twin is a plain request with the
same prompt: vLLM serves it from exact blocks, and keeps the new ones for whoever comes next. It starts after the reply has ended,
alone, once no request is open, and is aborted when one arrives. So that this one waits for a short step only, a twin is prefilled
slice by slice, each a request of its own whose blocks stay in vLLM's prefix cache: the next slice, or the next try, goes on from
there. A twin that has waited for `GuardConfig.patience_s` runs beside requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from agentcache.config import SHADOW_TOKENS
from agentcache.episodes.pieces import TokenArray
from agentcache.errors import AgentCacheError, RequestError
from agentcache.guard import first_tokens, top_kl
from agentcache.quality import top1_agrees
from agentcache.recovery import get_policy
from agentcache.reply import Reply
from agentcache.request import RequestOptions

if TYPE_CHECKING:
    from agentcache.engine.session import Session

__all__ = ["Admission", "Shadows"]

logger = logging.getLogger(__name__)

_MOST_WAITING: Final = 16
_SLICE_TOKENS: Final = 256
# Smaller values go first where the engine's scheduling policy is `priority`; requests have 0.
_PRIORITY: Final = 1
# A grammar masks logits before vLLM takes log-probabilities; named tokens replace the most likely ones.
_UNFIT: Final = frozenset({"structured_outputs", "logprob_token_ids"})


@dataclass(frozen=True, slots=True)
class Admission:
    """How the guard lets one request run.

    Attributes:
        asked_policy: The policy that was asked for.
        policy: The policy that it runs with.
        options: That policy's settings.
        asked: What the caller asked for.
        request: The same, with the log-probabilities that are compared.
        objection: Why it runs exactly; None when it runs as asked.
        shadowed: Whether it gets a twin.
    """

    asked_policy: str
    policy: str
    options: dict[str, Any]
    asked: RequestOptions
    request: RequestOptions
    objection: str | None = None
    shadowed: bool = False


@dataclass(slots=True)
class _Shadow:
    """A resume that waits for its twin, until `due` (of `time.monotonic`) for one that disturbs nobody.

    vLLM has the first `cached` tokens of its prompt in exact blocks, unless they were evicted.
    """

    episode: str
    version: str
    policy: str
    prompt: TokenArray
    cached: int
    resumed: dict[int, float]
    due: float


class Shadows:
    """Admits requests, settles their replies, and runs twins one at a time. Use it on the cache's event loop.

    Args:
        session: Its guard judges, its engine runs the twins, its bus tells.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: deque[_Shadow] = deque()
        self._open = 0
        self._idle = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._twin: asyncio.Task[None] | None = None  # the one that gives way

    @property
    def waiting(self) -> int:
        """How many resumes wait for their twins."""
        return len(self._waiting)

    def admit(
        self,
        request: RequestOptions,
        *,
        episode: str,
        version: str,
        parent: str | None,
        policy: str,
        options: dict[str, Any],
    ) -> Admission:
        """Returns how a request runs: as asked, as asked and shadowed, or exactly."""
        guard = self._session.guard
        as_asked = Admission(policy, policy, options, request, request)
        if not guard.config.share or parent is None or get_policy(policy, options).exact:
            return as_asked
        objection = guard.objection(episode, policy)
        if objection is not None:
            return replace(as_asked, policy="prefix_cache", options={}, objection=objection)
        if not guard.chooses(version):
            return as_asked
        if not _UNFIT.isdisjoint(request.extra):
            guard.missed(policy, "unfit")
            return as_asked
        if _lists_fewer(request.logprobs):
            request = request.model_copy(update={"logprobs": SHADOW_TOKENS})
        return replace(as_asked, request=request, shadowed=True)

    def settle(self, admission: Admission, reply: Reply, *, episode: str, prompt: TokenArray) -> Reply:
        """Returns the reply as the caller gets it, and has its twin run if it was chosen and is not exact."""
        recovery = reply.recovery
        assert recovery is not None and reply.version is not None
        if admission.objection is not None:
            reason = "; ".join(filter(None, (admission.objection, recovery.reason)))
            told = recovery.model_copy(update={"requested_policy": admission.asked_policy, "reason": reason})
            return replace(reply, recovery=told)
        if not admission.shadowed:
            return reply
        if not recovery.exact and reply.logprobs:
            due = time.monotonic() + self._session.guard.config.patience_s
            resumed = first_tokens(reply.logprobs[0])
            self._submit(
                _Shadow(episode, reply.version, admission.asked_policy, prompt, recovery.prefix_tokens, resumed, due)
            )
        return replace(reply, logprobs=_as_asked(reply.logprobs, admission.asked.logprobs))

    @contextlib.contextmanager
    def giving_way(self) -> Iterator[None]:
        """Keeps twins away while a request is open."""
        self._open += 1
        self._idle.clear()
        if self._twin is not None:
            self._twin.cancel()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def stop(self) -> None:
        """Aborts the twin that runs, and drops it and those that wait; the session has no engine any more."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.cancel()
            await asyncio.wait([worker])
        while self._waiting:
            self._drop(self._waiting.popleft())

    # -- twins ---------------------------------------------------------------------------------------------------------

    def _submit(self, shadow: _Shadow) -> None:
        if self._session.engine is None:
            self._drop(shadow)
            return
        while len(self._waiting) >= _MOST_WAITING:
            self._drop(self._waiting.popleft())
        self._waiting.append(shadow)
        if self._worker is None or self._worker.done():
            self._idle = asyncio.Event()  # of this event loop
            self._worker = asyncio.create_task(self._work())

    def _drop(self, shadow: _Shadow) -> None:
        self._session.guard.missed(shadow.policy, "dropped")
        logger.info(
            "version %s was not compared with an exact run: others were to be, or the engine ends", shadow.version
        )

    async def _work(self) -> None:
        """Runs the twins of all that wait, the oldest first."""
        while self._waiting:
            patience_s = self._waiting[0].due - time.monotonic()
            if self._open and patience_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await self._idle.wait()
                continue  # the oldest may be another one by now
            shadow = self._waiting.popleft()
            twin = asyncio.create_task(self._compare(shadow))
            self._twin = twin if patience_s > 0 else None
            try:
                await asyncio.wait([twin])
            finally:
                self._twin = None
                if not twin.done():
                    twin.cancel()
                    await asyncio.wait([twin])
                if twin.cancelled():
                    self._waiting.appendleft(shadow)

    async def _compare(self, shadow: _Shadow) -> None:
        """Runs a twin and tells what came of it. Never raises anything but its cancellation."""
        try:
            exact = await self._exact(shadow)
        except AgentCacheError as error:
            self._session.guard.missed(shadow.policy, "failed")
            logger.warning("version %s was not compared with an exact run: %s", shadow.version, error)
            return
        except Exception:
            self._session.guard.missed(shadow.policy, "failed")
            logger.exception("version %s was not compared with an exact run", shadow.version)
            return
        checked, falls = self._session.guard.record(
            shadow.episode,
            shadow.version,
            shadow.policy,
            top_kl(exact, shadow.resumed),
            top1_agrees(exact, shadow.resumed),
        )
        self._session.bus.emit(checked)
        for fell_back in falls:
            logger.warning("%s", fell_back.reason)
            self._session.bus.emit(fell_back)

    async def _exact(self, shadow: _Shadow) -> dict[int, float]:
        """Returns the first token's most likely tokens after a full prefill, which it makes slice by slice."""
        block = self._session.config.block_size
        step = -(-_SLICE_TOKENS // block) * block  # whole blocks: others are not kept
        while shadow.cached + step < len(shadow.prompt):
            await self._plain(shadow.prompt[: shadow.cached + step])
            shadow.cached += step
        return await self._plain(shadow.prompt)

    async def _plain(self, prompt: TokenArray) -> dict[int, float]:
        """Returns the most likely tokens after a prompt."""
        from agentcache.engine.requests import run_request  # it imports vLLM, which `launch` does quietly

        options = RequestOptions(max_tokens=1, logprobs=SHADOW_TOKENS)
        started = time.perf_counter()
        engine = self._session.running()
        chunks = run_request(engine, prompt.tolist(), options, started=started, every_token=False, priority=_PRIORITY)
        reply: Reply | None = None
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                reply = chunk.reply
        if reply is None or not reply.logprobs:
            raise RequestError("the exact run was aborted in the engine")
        return first_tokens(reply.logprobs[0])


def _lists_fewer(asked: int | None) -> bool:
    """Whether a request's own log-probabilities are too few to compare; -1 asks for all."""
    return asked is None or 0 <= asked < SHADOW_TOKENS


def _as_asked(logprobs: list[Mapping[int, float]] | None, asked: int | None) -> list[Mapping[int, float]] | None:
    """Returns log-probabilities as a request that is not shadowed has them: of the sampled token, and the `asked` most likely."""
    if asked is None or logprobs is None:
        return None
    if not _lists_fewer(asked):
        return logprobs
    # vLLM puts the sampled token first.
    keep = [{next(iter(position)), *first_tokens(position, asked)} for position in logprobs]
    return [{t: p for t, p in position.items() if t in kept} for position, kept in zip(logprobs, keep, strict=True)]
