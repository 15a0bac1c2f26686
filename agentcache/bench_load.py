"""`agentcache bench load`: how long a resume with a long new turn makes the requests that decode beside it wait.

Two arms, alternating in one run, both with the same new turn: an append to a version that vLLM's own prefix cache holds
(vLLM's chunked prefill of that turn), and a resume after an edit in the middle (restore, repair, then the same turn).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from agentcache.bench_resume import empty_prefix_cache, make_edit, sample_ids
from agentcache.cache import AgentCache
from agentcache.environment import hardware, versions
from agentcache.reply import Reply

__all__ = ["run"]

_EDIT_AT = 0.3
_WARM_TOKENS = 4  # tokens every stream must have decoded before the resume is sent


@dataclass(slots=True)
class _Stream:
    """A request that decodes while others arrive, and when each of its tokens came."""

    thread: threading.Thread
    times: list[float] = field(default_factory=list)


class _Load:
    def __init__(self, cache: AgentCache, streams: int) -> None:
        self.cache = cache
        self.count = streams
        self.ids = sample_ids(cache.tokenizer.encode)

    def _start(self, salt: int) -> tuple[list[_Stream], threading.Event]:
        """Starts the decoding requests; returns them and the event that ends them."""
        stop = threading.Event()
        streams: list[_Stream] = []

        def decode(stream: _Stream, prompt: list[int]) -> None:
            chunks = self.cache.stream(prompt, max_tokens=2000, extra={"ignore_eos": True})
            for _ in chunks:
                stream.times.append(time.perf_counter())
                if stop.is_set():
                    chunks.close()
                    return

        for i in range(self.count):
            stream = _Stream(threading.Thread(), [])
            prompt = self.ids[salt * 97 + i * 211 :][:256]
            stream.thread = threading.Thread(target=decode, args=(stream, prompt), daemon=True)
            stream.thread.start()
            streams.append(stream)
        while any(len(s.times) < _WARM_TOKENS for s in streams):
            time.sleep(0.01)
        return streams, stop

    def gaps(self, request: Callable[[], Reply], salt: int) -> tuple[list[float], float]:
        """Returns the decode steps' times in ms while a request is served up to its first token, and its TTFT."""
        streams, stop = self._start(salt)
        begun = time.perf_counter()
        reply = request()
        ended = time.perf_counter()
        time.sleep(0.05)
        stop.set()
        for stream in streams:
            stream.thread.join(timeout=60)
        out: list[float] = []
        for stream in streams:
            times = np.array(stream.times)
            steps = np.diff(times) * 1e3
            # A step counts when any part of it lies in the window.
            inside = (times[1:] > begun) & (times[:-1] < ended)
            out += steps[inside].tolist()
        return out, reply.ttft_ms


def run(
    *, model: str, context: int, turn: int, streams: int, reps: int, json_path: Path | None, console: Console
) -> dict[str, Any]:
    """Measures both arms, prints the percentiles, writes JSON when a path is given; returns what the JSON holds."""
    with AgentCache(model, max_model_len=context + turn + 256) as cache:
        load = _Load(cache, streams)
        edit = make_edit(load.ids, context, _EDIT_AT)
        tail = (load.ids[context + 64 :] + load.ids)[:turn]
        episode = cache.episode("bench")
        gaps: dict[str, list[float]] = {"chunked_prefill": [], "edit_local": []}
        ttft: dict[str, list[float]] = {name: [] for name in gaps}
        for rep in track(range(-1, reps), description="measuring", console=console, transient=True):
            # Every repetition's turn differs in its first token, so that none is found in the prefix cache.
            new_turn = [load.ids[rep + 1], *tail[1:]]
            empty_prefix_cache(cache)
            parent = episode.generate(edit.old, max_tokens=1).version

            def append(new_turn: list[int] = new_turn) -> Reply:
                return cache.generate(edit.old + new_turn, max_tokens=1)

            def resume(new_turn: list[int] = new_turn, parent: str | None = parent) -> Reply:
                return episode.generate(
                    edit.new + new_turn, max_tokens=1, policy="edit_local", parent=parent, save=False
                )

            arms = [("chunked_prefill", append), ("edit_local", resume)]
            for name, request in arms if rep % 2 else arms[::-1]:
                steps, first = load.gaps(request, rep + 1)
                if rep >= 0:  # the first round warms up
                    gaps[name] += steps
                    ttft[name].append(first)
        recovery = episode.history()[-1].recovery
        assert recovery is not None
        asynchronous = recovery.asynchronous
    p95 = {name: float(np.percentile(values, 95)) for name, values in gaps.items()}
    result = {
        "model": model,
        "context": context,
        "turn": turn,
        "streams": streams,
        "reps": reps,
        "decode_p95_ms": {name: round(value, 2) for name, value in p95.items()},
        "decode_max_ms": {name: round(max(values), 2) for name, values in gaps.items()},
        "steps": {name: len(values) for name, values in gaps.items()},
        "ttft_ms": {name: round(float(np.median(values)), 2) for name, values in ttft.items()},
        "p95_ratio": round(p95["edit_local"] / p95["chunked_prefill"], 3),
        "asynchronous": asynchronous,
        "versions": versions(),
        "hardware": hardware(),
    }
    console.print(
        f"{streams} requests decode beside a {turn}-token turn: a step waits {p95['edit_local']:.0f} ms (p95) for the resume, "
        f"{p95['chunked_prefill']:.0f} ms for vLLM's chunked prefill: ratio {result['p95_ratio']:.2f}"
    )
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"wrote {json_path}")
    return result
