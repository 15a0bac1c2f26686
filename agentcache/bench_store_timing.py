"""The timed parts of `agentcache bench store`: saves beside decoding requests, resumes by precision, restores beside a copy.

Arms alternate in one run, and the first round of each warms up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentcache.bench_resume import Edit, empty_prefix_cache, percentiles
from agentcache.cache import AgentCache
from agentcache.config import Precision
from agentcache.errors import AgentCacheError

__all__ = [
    "KV_BYTES",
    "STREAM_PROMPT",
    "Window",
    "decode_figures",
    "measure_decode",
    "measure_restore",
    "measure_resume",
    "wait_until_stored",
]

RESUME_ARMS: tuple[Precision, ...] = ("exact", "k8v4", "mixed")
KV_BYTES = 1 << 30  # the engine's own, so that it is the same everywhere
STREAM_PROMPT = 256
_WARM_STEPS = 4
_POLL_S = 0.05
_PATIENCE_S = 120.0

Tick = Callable[[], object]


def wait_until_stored(cache: AgentCache) -> None:
    """Returns when every save is stored.

    Raises:
        AgentCacheError: That took too long.
    """
    if not cache.flush(_PATIENCE_S):
        raise AgentCacheError(f"saves were still open after {_PATIENCE_S:.0f} s")


# -- decode ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stream:
    """A request that decodes while others pause, and when each of its tokens came."""

    times: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Window:
    """One stretch of decoding: its engine steps, the times of all requests' steps in it, and whether a save was open."""

    steps: int
    gaps_ms: list[float]
    seconds: float
    saw_save: bool


class _Streams:
    """Requests that decode for as long as the block lasts."""

    def __init__(self, streams: list[_Stream], failures: list[BaseException]) -> None:
        self._streams = streams
        self._failures = failures

    @property
    def steps(self) -> int:
        """Steps that every request has taken part in."""
        if self._failures:
            raise AgentCacheError("a decoding request has failed") from self._failures[0]
        return min(len(stream.times) for stream in self._streams)

    def wait(self, steps: int) -> None:
        """Returns when `steps` more steps are done."""
        goal, deadline = self.steps + steps, time.monotonic() + _PATIENCE_S
        while self.steps < goal:
            if time.monotonic() > deadline:
                raise AgentCacheError(f"{steps} decode steps took more than {_PATIENCE_S:.0f} s")
            time.sleep(0.001)

    def window_until(self, cache: AgentCache, steps: int | None) -> Window:
        """Returns the steps from now until no save is open, or until there are `steps` of them.

        Both ask the engine for its counters just as often, so that the asking costs both the same.
        """
        begun, first, seen = time.perf_counter(), self.steps, False
        while True:
            is_open = any(map(_has_open_save, cache.stats()["ranks"]))
            seen |= is_open
            done = self.steps - first
            # A save that has just begun is not known everywhere before the next step.
            if done >= (_WARM_STEPS if steps is None else steps) and not is_open:
                break
            if time.perf_counter() - begun > _PATIENCE_S:
                raise AgentCacheError(f"a save was not committed within {_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)
        ended = time.perf_counter()
        self.wait(1)  # the step that the window ended in
        inside = [_gaps(stream.times, begun, ended) for stream in self._streams]
        return Window(min(map(len, inside)), [gap for gaps in inside for gap in gaps], ended - begun, seen)


def _has_open_save(rank: dict[str, Any]) -> bool:
    """Whether a worker, or the scheduler half as far as it has told, has a save that is not stored in every tier."""
    tier = rank["tier"] or {"worker": {"pending": 0}, "scheduler": {}}
    known = (rank["pending_saves"], rank["index"].get("open_saves"), tier["worker"]["pending"])
    return any(known) or bool(tier["scheduler"].get("open_saves"))


def _gaps(times: Sequence[float], begun: float, ended: float) -> list[float]:
    """Returns the steps, in ms, that began between two times: that in which the request ended did not."""
    at = np.array(times)
    steps: list[float] = (np.diff(at) * 1e3)[(at[:-1] > begun) & (at[:-1] < ended)].tolist()
    return steps


@contextmanager
def _decoding(cache: AgentCache, prompts: Sequence[list[int]]) -> Generator[_Streams]:
    """Keeps a request decoding for each prompt inside the block."""
    stop = threading.Event()
    streams = [_Stream() for _ in prompts]
    failures: list[BaseException] = []

    def decode(stream: _Stream, prompt: list[int]) -> None:
        try:
            chunks = cache.stream(prompt, max_tokens=None, extra={"ignore_eos": True})
            for _ in chunks:
                stream.times.append(time.perf_counter())
                if stop.is_set():
                    chunks.close()
                    return
            failures.append(AgentCacheError(f"it ended after {len(stream.times)} tokens, at the model's length"))
        except AgentCacheError as error:
            failures.append(error)

    threads = [threading.Thread(target=decode, args=pair) for pair in zip(streams, prompts, strict=True)]
    for thread in threads:
        thread.start()
    try:
        running = _Streams(streams, failures)
        running.wait(_WARM_STEPS)
        yield running
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=_PATIENCE_S)


def measure_decode(
    cache: AgentCache,
    text: list[int],
    *,
    context: int,
    precision: Precision | None,
    streams: int,
    steps: int,
    reps: int,
    tick: Tick = lambda: None,
) -> dict[str, Any]:
    """Returns how much longer other requests' decode steps take while a paused prompt is quantised and stored.

    In the arm `save` a request of `context` tokens, whose rows vLLM holds, ends again and again; the steps between its end and
    the commit of its checkpoint, in memory and in the store below, count until there are `steps` of them. In the arm `idle` the
    same request ends without a save, and as many steps after each end count.

    Args:
        cache: Any.
        text: Real text, longer than `context`.
        context: Rows of a save.
        precision: Of the save; None takes the cache's.
        streams: Requests that decode.
        steps: Engine steps of each arm in each repetition.
        reps: Repetitions of both arms; one more warms up.
        tick: Is called after each arm.

    Raises:
        AgentCacheError: No save was open after a request's end, or the decoding failed.
    """
    ids = text[:context]
    cache.generate(ids, max_tokens=1)  # each use keeps it the last to be evicted from vLLM's prefix cache
    stretch = 8
    arms: dict[str, list[list[Window]]] = {"save": [], "idle": []}
    for rep in range(-1, reps):
        for arm in ("save", "idle") if rep % 2 else ("idle", "save"):
            prompts = [(text[i * 211 + (rep + 1) * 97 :] + text)[:STREAM_PROMPT] for i in range(streams)]
            windows: list[Window] = []
            with _decoding(cache, prompts) as running:
                while sum(window.steps for window in windows) < steps:
                    episode = cache.episode(f"decode {rep} {arm} {len(windows)}")
                    episode.generate(ids, max_tokens=1, precision=precision, save=arm == "save")
                    window = running.window_until(cache, None if arm == "save" else stretch)
                    windows.append(window)
                    if arm == "save":
                        stretch = max(1, round(np.mean([w.steps for w in windows])))
            if rep >= 0:
                arms[arm].append(windows)
            tick()
    return {"context": context, "streams": streams, "reps": reps, **decode_figures(arms)}


def decode_figures(arms: dict[str, list[list[Window]]]) -> dict[str, Any]:
    """Returns the figures of both arms' windows, by repetition.

    Raises:
        AgentCacheError: In no window of the arm `save` a save was seen open.
    """
    gaps = {arm: [g for rep in all_reps for w in rep for g in w.gaps_ms] for arm, all_reps in arms.items()}
    p95 = {arm: float(np.percentile(values, 95)) for arm, values in gaps.items()}
    each = [
        np.percentile([g for w in save for g in w.gaps_ms], 95)
        / np.percentile([g for w in idle for g in w.gaps_ms], 95)
        for save, idle in zip(arms["save"], arms["idle"], strict=True)
    ]
    saves = [window for rep in arms["save"] for window in rep]
    seen = sum(window.saw_save for window in saves)
    if not seen:
        raise AgentCacheError("no save was open when its request had ended: there is nothing to measure")
    return {
        "steps": {arm: sum(w.steps for rep in all_reps for w in rep) for arm, all_reps in arms.items()},
        "saves": len(saves),
        "saves_seen_open": seen,
        "steps_a_save": percentiles([window.steps for window in saves]),
        "save_s": percentiles([window.seconds for window in saves]),
        "step_p50_ms": {arm: round(float(np.median(values)), 3) for arm, values in gaps.items()},
        "step_p95_ms": {arm: round(value, 3) for arm, value in p95.items()},
        "step_max_ms": {arm: round(max(values), 3) for arm, values in gaps.items()},
        "p95_ratio": round(p95["save"] / p95["idle"], 4),
        "p95_ratio_by_rep": [round(float(ratio), 4) for ratio in each],
    }


# -- resume ------------------------------------------------------------------------------------------------------------


def measure_resume(cache: AgentCache, edit: Edit, *, reps: int, tick: Tick = lambda: None) -> dict[str, Any]:
    """Returns the TTFT of an `edit_local` resume by the precision of the parent's checkpoint, vLLM's prefix cache empty.

    Raises:
        AgentCacheError: A resume was not served from its checkpoint.
    """
    episodes = {arm: cache.episode(f"resume {arm}") for arm in RESUME_ARMS}
    empty_prefix_cache(cache)
    parents = {arm: e.generate(edit.old, max_tokens=1, precision=arm).version for arm, e in episodes.items()}
    wait_until_stored(cache)
    ttft: dict[str, list[float]] = {arm: [] for arm in RESUME_ARMS}
    reports: dict[str, list[Any]] = {arm: [] for arm in RESUME_ARMS}
    for rep in range(-1, reps):
        for arm in (*RESUME_ARMS[rep % 3 :], *RESUME_ARMS[: rep % 3]):
            empty_prefix_cache(cache)
            reply = episodes[arm].generate(
                edit.new, max_tokens=1, policy="edit_local", parent=parents[arm], save=False, salt=f"rep {rep}"
            )
            if reply.recovery is None or reply.recovery.reused_tokens == 0:
                raise AgentCacheError(f"the resume from {arm} was not served from its checkpoint: {reply.recovery}")
            if rep >= 0:
                ttft[arm].append(reply.ttft_ms)
                reports[arm].append(reply.recovery)
            tick()
    medians = {arm: float(np.median(values)) for arm, values in ttft.items()}
    rows = {
        arm: {
            "ttft_ms": percentiles(ttft[arm]),
            "restore_ms": percentiles([r.restore_ms for r in reports[arm]]),
            "recompute_ms": percentiles([r.recompute_ms for r in reports[arm]]),
            "restored_tokens": reports[arm][-1].restored_tokens,
            "recomputed_tokens": reports[arm][-1].recomputed_tokens,
            "ratio_to_exact": round(medians[arm] / medians["exact"], 4),
        }
        for arm in RESUME_ARMS
    }
    return {"context": len(edit.old), "edit_at": edit.at, "policy": "edit_local", "reps": reps, "rows": rows}


# -- restore -----------------------------------------------------------------------------------------------------------


def measure_restore(
    model: Path, text: Path, *, context: int, mix: Sequence[tuple[str, int]], repeats: int
) -> dict[str, Any]:
    """Returns how long the kernels take to restore a model's own KV of a text, beside a copy; see `restore_times`.

    Args:
        model: Folder.
        text: File.
        context: Tokens.
        mix: Runs of the `mixed` checkpoint.
        repeats: Rounds; 9 at least are made.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from agentcache.kernels.bench.material import real_kv
    from agentcache.kernels.bench.restore import restore_times

    disable_progress_bar()  # ours is there
    material = real_kv(model, context, torch.bfloat16, text)
    made: dict[str, Any] = restore_times(material=material, mix=mix, repeats=max(repeats, 9))
    return made
