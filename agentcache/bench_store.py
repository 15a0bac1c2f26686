"""`agentcache bench store`: what checkpoints take, what their precision costs, and how fast they are saved and restored.

Each part can run alone, and what is done is in the JSON file at once: `--resume` goes on where a long run was cut off.

| part | what |
|---|---|
| payload | bytes of a long real prompt's checkpoint in a disk store; KL of the next token after a restore, by precision |
| decode | decode steps of other requests while a checkpoint is quantised and stored, against the same steps without |
| resume | TTFT of an `edit_local` resume from lossy checkpoints, against exact ones |
| restore | the kernels alone: a checkpoint written to the pages, against a plain copy of as many bytes |
| episodes | many paused episodes in one store: bytes against distinct tokens, open after a restart, real ones resumed |
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentcache.bench_resume import NEW_SPAN, make_edit, sample_ids
from agentcache.bench_store_payload import Checkpoint, measure_kl, prompts, save_checkpoint
from agentcache.bench_store_report import print_summary, summarise
from agentcache.bench_store_timing import KV_BYTES, STREAM_PROMPT, measure_decode, measure_restore, measure_resume
from agentcache.cache import AgentCache
from agentcache.config import Precision
from agentcache.environment import hardware, versions
from agentcache.errors import ConfigError
from agentcache.samples import load_hotpot_sample
from agentcache.weights import resolve_model

__all__ = ["PARTS", "StoreBench", "run"]

PARTS = ("payload", "decode", "resume", "restore", "episodes")
_EDIT_AT = 0.3
_PRECISION: Final[Precision] = "mixed"
_STREAMS = 4
_LONGEST_CHAT = 3072  # tokens of a shipped question with all its documents, roomily
_STREAM_STEPS = 10  # steps of a decoding request for each that counts: requests are served between the saves
_DISK_BYTES_AN_EPISODE = 12_000_000
_MEMORY_BYTES_AN_EPISODE = 9_000_000
_ENGINE_BYTES = 6 << 30  # with the payloads that it holds


@dataclass(frozen=True, slots=True)
class StoreBench:
    """What is measured, and how often.

    Attributes:
        model: A folder, a hub id, or the name of a built-in model.
        tokens: Of the prompt whose checkpoint is weighed.
        prompts: Whose next tokens are compared.
        context: Tokens of a save beside decoding requests, of a resume, and of a restore.
        steps: Decode steps of each arm in each repetition.
        reps: Repetitions; arms alternate.
        episodes: Paused episodes in one store.
        real: Of them, prompts that an engine serves, each as two episodes.
    """

    model: str
    tokens: int = 8000
    prompts: int = 50
    context: int = 4096
    steps: int = 60
    reps: int = 7
    episodes: int = 1000
    real: int = 50

    def check(self, parts: Sequence[str], folder: Path) -> None:
        """Raises ConfigError, before anything is measured, when a part is unknown or this machine is too small for it."""
        unknown = [part for part in parts if part not in PARTS]
        if unknown or not parts:
            raise ConfigError(f"--parts {','.join(parts)!r}: give some of {', '.join(PARTS)}")
        if "episodes" in parts:
            if self.episodes < 2 * self.real:
                raise ConfigError(
                    f"--episodes {self.episodes}: each of the {self.real} --real prompts makes two of them; give at least "
                    f"{2 * self.real}"
                )
            needs = (
                ("disk", f"free in {folder}", _DISK_BYTES_AN_EPISODE * self.episodes, shutil.disk_usage(folder).free),
                (
                    "memory",
                    "available",
                    max(_ENGINE_BYTES, _MEMORY_BYTES_AN_EPISODE * self.episodes),
                    _available_bytes(),
                ),
            )
            for what, where, needed, there in needs:
                if needed > there:
                    raise ConfigError(
                        f"--episodes {self.episodes} needs about {needed / 1e9:.0f} GB of {what}, {there / 1e9:.0f} GB are "
                        f"{where}: give fewer episodes{', or another --folder' if what == 'disk' else ''}"
                    )


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


class _Bench:
    """The parts, and the one engine that most of them share."""

    def __init__(self, settings: StoreBench, folder: Path, done: dict[str, Any], progress: Progress) -> None:
        self.settings = settings
        self.folder = folder
        self.done = done
        self.progress = progress
        self._until_close = ExitStack()
        self._cache: AgentCache | None = None

    def part(self, name: str) -> dict[str, Any]:
        """Returns what a part has measured."""
        measured: dict[str, Any] = getattr(self, f"_{name}")()
        return measured

    @contextmanager
    def _stage(self, what: str, total: int) -> Iterator[Callable[[], object]]:
        """Shows a bar inside the block; yields what moves it on by one."""
        task = self.progress.add_task(what, total=total)
        yield lambda: self.progress.advance(task)
        self.progress.remove_task(task)

    def _engine(self) -> AgentCache:
        """Returns the shared engine, which starts when it is first asked for."""
        if self._cache is None:
            settings = self.settings
            longest = max(
                _LONGEST_CHAT,
                settings.tokens,
                settings.context + NEW_SPAN,
                STREAM_PROMPT + _STREAM_STEPS * settings.steps,
            )
            url = f"{self._url}?bytes=8GiB"
            self._cache = self._until_close.enter_context(
                AgentCache(settings.model, store=url, max_model_len=longest + 64, kv_bytes=KV_BYTES)
            )
        return self._cache

    @property
    def _url(self) -> str:
        return f"disk://{self.folder / 'engine'}"

    def close(self) -> None:
        """Ends the shared engine."""
        self._until_close.close()
        self._cache = None

    def _text(self, cache: AgentCache, tokens: int) -> list[int]:
        ids = sample_ids(cache.tokenizer.encode)
        if len(ids) < tokens:
            raise ConfigError(f"{tokens} tokens are too many: the shipped text has {len(ids)}; give fewer")
        return ids

    def _save(self, name: str, tokens: int) -> Checkpoint:
        from agentcache.store.tiers import open_store

        cache = self._engine()
        with open_store(self._url) as store:
            return save_checkpoint(cache, store, name, self._text(cache, tokens)[:tokens], _PRECISION)

    def _payload(self) -> dict[str, Any]:
        settings = self.settings
        cache = self._engine()
        row_bytes = cache.stats()["engine"]["row_bytes"]
        made = self._save("payload", settings.tokens)
        chats = [cache.render(chat).token_ids.tolist() for chat in prompts(load_hotpot_sample(), settings.prompts)]
        with self._stage("prompts compared", len(chats)) as tick:
            kl = measure_kl(cache, chats, tick)
        return {
            "precision": _PRECISION,
            **{name: value for name, value in made._asdict().items() if name != "runs"},
            "bytes": made.bytes,
            "exact_bytes": made.tokens * row_bytes,
            "payload_ratio": round(made.bytes / (made.tokens * row_bytes), 4),
            "tag_mix": made.tag_mix(),
            "runs": made.runs,
            "kl": kl,
            "prompt_tokens": {"min": min(map(len, chats)), "max": max(map(len, chats))},
        }

    def _decode(self) -> dict[str, Any]:
        settings = self.settings
        cache = self._engine()
        text = self._text(cache, settings.context)
        with self._stage("decode arms", 2 * (settings.reps + 1)) as tick:
            made = measure_decode(
                cache,
                text,
                context=settings.context,
                precision=_PRECISION,
                streams=_STREAMS,
                steps=settings.steps,
                reps=settings.reps,
                tick=tick,
            )
        return {"precision": _PRECISION, **made}

    def _resume(self) -> dict[str, Any]:
        settings = self.settings
        cache = self._engine()
        edit = make_edit(self._text(cache, settings.context), settings.context, _EDIT_AT)
        with self._stage("resumes", 3 * (settings.reps + 1)) as tick:
            return measure_resume(cache, edit, reps=settings.reps, tick=tick)

    def _restore(self) -> dict[str, Any]:
        measured = self.done.get("payload", {}).get("runs")
        mix = [(tag, count) for tag, count in measured or self._save("restore", self.settings.context).runs]
        self.close()  # nothing else may run beside the kernels
        text = self.folder / "text.txt"
        text.write_text("\n\n".join(f"{p.title}\n{p.text}" for item in load_hotpot_sample() for p in item.paragraphs))
        with self._stage("restore rounds", 1) as tick:
            made = measure_restore(
                Path(resolve_model(self.settings.model)),
                text,
                context=self.settings.context,
                mix=mix,
                repeats=2 * self.settings.reps,
            )
            tick()
        return made

    def _episodes(self) -> dict[str, Any]:
        from agentcache.bench_store_episodes import EpisodePlan, measure_episodes

        self.close()
        plan = EpisodePlan(self.settings.model, self.folder / "episodes", self.settings.episodes, self.settings.real)

        def stage(what: str, total: int) -> Callable[[int], object]:
            task = self.progress.add_task(what, total=total)
            return lambda done: self.progress.update(task, completed=done)

        return measure_episodes(plan, lambda cache: sample_ids(cache.tokenizer.encode), stage)


def run(
    settings: StoreBench,
    *,
    parts: Sequence[str] = PARTS,
    json_path: Path | None = None,
    resume: bool = False,
    folder: Path | None = None,
    console: Console,
) -> dict[str, Any]:
    """Measures the parts, prints a table, writes JSON after each when a path is given; returns what the JSON holds.

    Args:
        settings: What is measured.
        parts: Some of `PARTS`.
        json_path: File to write.
        resume: Leave out the parts that the file has already.
        folder: Where the stores of the measurement are made, and removed; None: the system's folder for such.
        console: Where it is printed.

    Raises:
        ConfigError: A setting is not allowed, or the file to go on with is of other settings, software or hardware.
    """
    home = folder or Path(tempfile.gettempdir())
    settings.check(parts, home)
    result = _begin(settings, json_path if resume else None)
    todo = [part for part in PARTS if part in parts and part not in result["parts"]]
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="agentcache-bench-", dir=home) as work,
        Progress(*bars, console=console, transient=True) as progress,
        ExitStack() as stack,
    ):
        bench = _Bench(settings, Path(work), result["parts"], progress)
        stack.callback(bench.close)
        for part in todo:
            started = time.perf_counter()
            measured = bench.part(part)
            ended = datetime.now(UTC).isoformat(timespec="seconds")
            result["parts"][part] = {**measured, "took_s": round(time.perf_counter() - started, 1), "ended": ended}
            result = summarise(result)
            if json_path is not None:
                _write(json_path, result)
    print_summary(result, console)
    if json_path is not None:
        console.print(f"wrote {json_path}")
    return result


def _begin(settings: StoreBench, path: Path | None) -> dict[str, Any]:
    """Returns the result so far: that of the file to go on with, or one without parts."""
    fresh: dict[str, Any] = {
        "model": settings.model,
        "data": _data(),
        "settings": asdict(settings),
        "versions": versions(),
        "hardware": hardware(),
        "parts": {},
    }
    if path is None or not path.exists():
        return summarise(fresh)
    try:
        found = json.loads(path.read_text())
        differs = [name for name in fresh if name != "parts" and found[name] != fresh[name]]
        parts = {name: dict(part) for name, part in found["parts"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not what this command has written: name another file, or leave out --resume"
        ) from error
    if differs:
        raise ConfigError(
            f"{path} has other {', '.join(differs)} than this run: name another file, or leave out --resume"
        )
    return summarise({**fresh, "parts": parts})


def _data() -> dict[str, Any]:
    items = load_hotpot_sample()
    text = "\n\n".join(p.text for item in items for p in item.paragraphs)
    return {
        "name": "HotpotQA sample shipped with agentcache (CC BY-SA 4.0)",
        "questions": len(items),
        "blake2b": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    }


def _write(path: Path, result: dict[str, Any]) -> None:
    """Replaces a file as a whole: a run that is cut off leaves the parts before."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(result, indent=2, default=_plain) + "\n")
    os.replace(part, path)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")
