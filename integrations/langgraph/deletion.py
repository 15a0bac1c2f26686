"""`FreeOnDelete`: a checkpointer that drops a thread's episodes with the thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)

from agentcache.cache import AgentCache
from agentcache.engine.embedded import AsyncAgentCache
from agentcache.integrations.routing import Router

__all__ = ["FreeOnDelete"]


class FreeOnDelete(BaseCheckpointSaver[Any]):
    """A checkpointer over another one: a thread that is deleted takes its episodes and their KV along.

    `delete_thread` and `prune(..., strategy="delete")`, and their asynchronous forms, drop them after the checkpointer below has
    deleted the thread; a deletion that fails drops nothing. What keeps the newest checkpoint of a thread keeps its KV. Of a thread
    that only an earlier process has run, its own episode is dropped; those of its subgraphs leave the store when that needs room.

    ```python
    agent = create_agent(model, tools, checkpointer=FreeOnDelete(InMemorySaver(), cache))
    ```

    Args:
        saver: The checkpointer below.
        cache: The episodes'.
    """

    def __init__(self, saver: BaseCheckpointSaver[Any], cache: AgentCache | AsyncAgentCache) -> None:
        super().__init__(serde=saver.serde)
        self.saver = saver
        self._router = Router.of(cache)

    # -- what frees ----------------------------------------------------------------------------------------------------

    def delete_thread(self, thread_id: str) -> None:
        """Deletes a thread's checkpoints and drops its episodes."""
        self.saver.delete_thread(thread_id)
        self._router.forget(thread_id)

    async def adelete_thread(self, thread_id: str) -> None:
        """Deletes a thread's checkpoints and drops its episodes."""
        await self.saver.adelete_thread(thread_id)
        await self._router.aforget(thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Prunes threads; strategy `delete` drops their episodes."""
        self.saver.prune(thread_ids, strategy=strategy)
        for thread_id in thread_ids if strategy == "delete" else ():
            self._router.forget(thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Prunes threads; strategy `delete` drops their episodes."""
        await self.saver.aprune(thread_ids, strategy=strategy)
        for thread_id in thread_ids if strategy == "delete" else ():
            await self._router.aforget(thread_id)

    # -- what is passed on ---------------------------------------------------------------------------------------------

    @property
    def config_specs(self) -> list[Any]:
        """Those of the checkpointer below."""
        specs: list[Any] = self.saver.config_specs
        return specs

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Passed on."""
        return self.saver.get_tuple(config)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Passed on."""
        return await self.saver.aget_tuple(config)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Passed on."""
        found: Iterator[CheckpointTuple] = self.saver.list(config, filter=filter, before=before, limit=limit)
        return found

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Passed on."""
        async for found in self.saver.alist(config, filter=filter, before=before, limit=limit):
            yield found

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Passed on."""
        return self.saver.put(config, checkpoint, metadata, new_versions)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Passed on."""
        return await self.saver.aput(config, checkpoint, metadata, new_versions)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Passed on."""
        self.saver.put_writes(config, writes, task_id, task_path)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Passed on."""
        await self.saver.aput_writes(config, writes, task_id, task_path)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Passed on: the threads stay."""
        self.saver.delete_for_runs(run_ids)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Passed on: the threads stay."""
        await self.saver.adelete_for_runs(run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Passed on."""
        self.saver.copy_thread(source_thread_id, target_thread_id)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Passed on."""
        await self.saver.acopy_thread(source_thread_id, target_thread_id)

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Passed on."""
        history: Mapping[str, DeltaChannelHistory] = self.saver.get_delta_channel_history(
            config=config, channels=channels
        )
        return history

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Passed on."""
        history: Mapping[str, DeltaChannelHistory] = await self.saver.aget_delta_channel_history(
            config=config, channels=channels
        )
        return history

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Passed on."""
        return self.saver.get_next_version(current, channel)

    def with_allowlist(self, extra_allowlist: Any) -> BaseCheckpointSaver[Any]:
        """Returns this checkpointer over the one below with that allowlist."""
        below = self.saver.with_allowlist(extra_allowlist)
        if below is self.saver:
            return self
        clone = FreeOnDelete.__new__(FreeOnDelete)
        clone.__dict__.update(self.__dict__, saver=below, serde=below.serde)
        return clone
