"""`AsyncEpisode`: one agent's prompt through its versions. No torch, no vLLM."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import datetime
from itertools import chain
from typing import Any, Final, Unpack

from agentcache.engine.session import Session
from agentcache.engine.upkeep import free_late, free_versions, stored_versions
from agentcache.engine.wire import ResumeParams
from agentcache.episodes import Revision
from agentcache.episodes.pieces import TokenArray
from agentcache.errors import ConfigError, UnknownVersionError
from agentcache.events import KVPaused, KVResumed, ReplyEnded
from agentcache.recovery import get_policy
from agentcache.recovery.registry import check_policy_reaches_engine
from agentcache.reply import Reply, StreamChunk, VersionRecord
from agentcache.request import GenerateOptions, Messages, RequestOptions
from agentcache.token_text import token_texts

__all__ = ["BEGAN", "AsyncEpisode", "last_reply"]

BEGAN: Final = "agentcache.began_s"
"""Attribute of a version that an earlier process has left: when its episode began, in seconds since the epoch."""


async def last_reply(chunks: AsyncGenerator[StreamChunk, None]) -> Reply:
    """Returns the reply that the last chunk of a request carries."""
    reply: Reply | None = None
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            reply = chunk.reply
    assert reply is not None
    return reply


class AsyncEpisode:
    """One agent's prompt through its versions; made by `AsyncAgentCache.episode`.

    Attributes:
        id: Its id.
    """

    def __init__(self, session: Session, episode_id: str) -> None:
        if not 0 < len(episode_id) <= 256:
            raise ConfigError(f"an episode's id has 1 to 256 characters, got {len(episode_id)}: {episode_id[:64]!r}")
        try:
            episode_id.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"episode id {episode_id[:64]!r} holds half a character at {error.start}, which UTF-8 does not have; leave it out"
            ) from error
        self._session = session
        self.id = episode_id

    async def generate(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Reply:
        """Returns the reply to a prompt, which becomes a new version of the episode.

        Its KV is recovered from `parent` (the head when none is given) by the policy, and checkpointed when the reply ends.

        Raises:
            ConfigError: An option is unknown, out of range or refused.
            RenderError: The chat template refuses the messages.
            RequestTimeout: It took longer than `timeout`; it was aborted.
            EngineDeadError: The engine died.
        """
        return await last_reply(self._run(messages, options, every_token=False))

    async def stream(self, messages: Messages, **options: Unpack[GenerateOptions]) -> AsyncGenerator[StreamChunk, None]:
        """Yields the reply of `generate` token by token; the last chunk carries it whole. Closing the generator aborts it."""
        async with contextlib.aclosing(self._run(messages, options, every_token=True)) as chunks:
            async for chunk in chunks:
                yield chunk

    @property
    def head(self) -> str | None:
        """Id of the newest version, or None."""
        head = self._session.tracker.head(self.id)
        return None if head is None else head.version_id

    def history(self) -> list[VersionRecord]:
        """Returns the episode's versions, oldest first; those that led to a fork come before its own."""
        if self.id not in self._session.tracker.episodes():
            return []
        return [
            VersionRecord(
                version=version.version_id,
                parent=version.parent,
                kind=version.kind,
                prompt_tokens=len(version.token_ids),
                reply_tokens=len(version.generated),
                recovery=self._session.reports.get(version.version_id),
                attributes=version.attributes,
                created_s=version.created_s,
            )
            for version in self._session.tracker.history(self.id)
        ]

    def fork(self, version: str | None = None, name: str | None = None) -> AsyncEpisode:
        """Returns a new episode that begins at a version of this one.

        Args:
            version: Any of the history; None: the head.
            name: Id of the new episode; None makes one.

        Raises:
            UnknownVersionError: The episode has no such version.
            ConfigError: An episode of this name is there already.
        """
        at = version or self.head
        if at is None:
            raise UnknownVersionError(f"episode {self.id!r} has no version to fork from; call generate first")
        return AsyncEpisode(self._session, self._session.tracker.fork(self.id, at, name=name))

    def pause(self, key: str | None = None, *, reason: str = "") -> None:
        """Tells subscribers that the episode waits, e.g. for a tool; `key` says what for (None: the head version)."""
        waits_for = key or self.head or self.id
        self._session.bus.emit(KVPaused(episode=self.id, key=waits_for, version=self.head, reason=reason))

    def resume_hint(self, key: str | None = None) -> None:
        """Tells subscribers that the episode goes on soon; `key` as in `pause` (None: everything that it waits for).

        The head's checkpoint is then evicted last, and what only the store below memory has of it is fetched ahead.
        """
        head = self._recoverable_head()
        if head is not None:
            self._session.hint(head)
        self._session.bus.emit(KVResumed(episode=self.id, key=key, version=self.head))

    async def drop(self) -> None:
        """Forgets the episode and every version that no fork needs, and frees their KV, in memory and in the store below it.

        A request of it that still runs is answered, and not kept; one whose prompt is still being rendered is a plain request.
        Rows that other versions share stay with them.

        Raises:
            StoreError: The store below cannot be changed; the episode is forgotten all the same.
        """
        session = self._session
        await free_versions(session, session.forget(self.id))
        # Those of an earlier process.
        below = [v for v in await stored_versions(session, self.id) if not session.tracker.knows(v)]
        await free_versions(session, below)

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _run(
        self, messages: Messages, options: GenerateOptions, *, every_token: bool
    ) -> AsyncGenerator[StreamChunk, None]:
        session = self._session
        request = RequestOptions.build(options)
        policy, policy_options = self._policy(request)
        session.running()
        parent = request.parent if request.parent is not None else self._recoverable_head()
        with session.underway(self.id) as underway:
            prompt = await session.render(messages, request.tools, replies=self._replies(parent), began=self._began())
        started = time.perf_counter()
        if underway.dropped:  # recorded now, it would begin the episode anew
            plain = session.run(prompt, request, started=started, every_token=every_token)
            async with contextlib.aclosing(plain) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        revision = self._record(prompt, parent, request)
        session.without_kv.add(revision.version)
        admission = session.shadows.admit(
            request,
            episode=self.id,
            version=revision.version,
            parent=parent or revision.parent or next(iter(request.sources), None),
            policy=policy,
            options=policy_options,
        )
        resume = ResumeParams(
            version=revision.version,
            parent=parent or revision.parent,
            sources=request.sources if admission.objection is None else [],
            namespace=session.config.namespace,
            episode=self.id,
            policy=admission.policy,
            options=admission.options,
            aligned=[*revision.diff.aligned] if parent is not None and parent == revision.parent else None,
            boundaries=[*revision.boundaries],
            save=request.save,
            precision=request.precision,
            salt=request.salt,
        )
        generated: list[int] = []
        reply: Reply | None = None
        chunks = session.run(
            prompt,
            admission.request,
            started=started,
            resume=resume,
            diff_ms=revision.diff_ms,
            every_token=every_token,
        )
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    generated += chunk.token_ids
                    if chunk.reply is None:
                        yield chunk
                    else:
                        reply = session.shadows.settle(admission, chunk.reply, episode=self.id, prompt=prompt.token_ids)
        finally:
            self._finish(revision, generated, reply)
        yield replace(chunk, reply=reply)

    def _policy(self, request: RequestOptions) -> tuple[str, dict[str, Any]]:
        """Returns the request's policy and options, the cache's where it gives none; raises when they are not allowed."""
        config = self._session.config
        policy = request.policy or config.policy
        given = request.policy_options
        own = given if given is not None else config.policy_options if policy == config.policy else {}
        options = config.options_for(policy, own)
        check_policy_reaches_engine(get_policy(policy, options), config.connector.policy_modules)
        return policy, options

    def _recoverable_head(self) -> str | None:
        """Returns the newest version of the head's line whose KV is kept, or None."""
        tracker, version = self._session.tracker, self._session.tracker.head(self.id)
        while version is not None and version.version_id in self._session.without_kv:
            version = tracker.version(version.parent) if version.parent is not None else None
        return None if version is None else version.version_id

    def _replies(self, parent: str | None) -> tuple[Any, ...]:
        try:
            return self._session.tracker.replies(parent) if parent is not None else ()
        except UnknownVersionError:
            return ()  # recorded in another process: the engine says whether it knows it

    def _began(self) -> datetime:
        """Returns when the episode began: a date in the prompt must not change at midnight."""
        records = self.history()
        if not records:
            return datetime.now()
        return datetime.fromtimestamp(records[0].attributes.get(BEGAN, records[0].created_s))

    def _record(self, prompt: Any, parent: str | None, request: RequestOptions) -> Revision:
        try:
            return self._session.tracker.record(self.id, prompt, parent=parent, attributes=request.attributes)
        except UnknownVersionError:
            return self._session.tracker.record(self.id, prompt, attributes=request.attributes)

    def _finish(self, revision: Revision, generated: list[int], reply: Reply | None) -> None:
        """Adds what was generated to the version, however the request ended, and tells subscribers."""
        session, version = self._session, revision.version
        # The last sampled token has no KV.
        computed = revision.diff.new_len + max(len(generated) - 1, 0)
        try:
            finished = session.tracker.finish(version, generated, computed=computed)
        except UnknownVersionError:
            session.spawn(free_late(session, version))  # the episode was dropped meanwhile
            return
        if reply is None or reply.recovery is None:
            return
        session.reports[version] = reply.recovery
        session.chunks.forget(reply.recovery.lost_sources)
        session.bus.emit(self._ended(revision, reply, finished.token_ids))
        if reply.parent is not None:
            session.bus.emit(
                KVResumed(episode=self.id, version=version, recovery=reply.recovery.model_dump(mode="json"))
            )
        if reply.recovery.saved == "pending":
            session.without_kv.discard(version)
            session.bus.emit(KVPaused(episode=self.id, key=version, version=version, reason="the reply ended"))

    def _ended(self, revision: Revision, reply: Reply, prompt: TokenArray) -> ReplyEnded:
        assert reply.recovery is not None
        fresh_text = reply_text = None
        if self._session.config.events_text:
            tokenizer = self._session.tokenizer
            fresh = (token_texts(tokenizer, prompt[start:stop]) for start, stop in revision.diff.fresh)
            fresh_text, reply_text = tuple(chain.from_iterable(fresh)), token_texts(tokenizer, reply.token_ids)
        return ReplyEnded(
            episode=self.id,
            version=revision.version,
            finish_reason=reply.finish_reason,
            reply_tokens=len(reply.token_ids),
            recovery=reply.recovery.model_dump(mode="json"),
            spans=tuple((span.start, span.stop) for span in revision.spans),
            fresh_text=fresh_text,
            reply_text=reply_text,
        )
