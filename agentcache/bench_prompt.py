"""`agentcache bench prompt`: what a model call of a long agent run costs beside the engine, stage by stage.

Each call is one turn of an agent on LangGraph: an old tool result was cleared, and a tool call and its result were added. The
template's own time, which any client pays, is taken beside each call and is not part of the overhead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from agentcache.environment import hardware, versions
from agentcache.episodes import EpisodeTracker, Rendered, Renderer
from agentcache.errors import ConfigError
from agentcache.events import EventBus
from agentcache.profiling.datasets import load_dataset

__all__ = ["STAGES", "bench_prompt", "run"]

STAGES: Final = ("convert", "route", "render", "record", "finish")
"""`convert`: LangChain's messages to dicts. `route`: which episode. `render`: to token ids and spans, beyond the template's own
time, the replies to splice included. `record`: the diff, its kind, the version. `finish`: the reply joins the version and the episode."""

_REPLY: Final = "I look that up."
_WARM: Final = 2  # first calls, which are not counted


def bench_prompt(
    tokenizer: Any, texts: list[str], *, messages: int = 200, tokens: int = 32_768, repeats: int = 15
) -> dict[str, Any]:
    """Returns median times of a model call's prompt work, in milliseconds.

    Args:
        tokenizer: A fast one with a chat template.
        texts: Real texts that the tool results are cut from, again and again where they are short.
        messages: Of a call's history.
        tokens: Of its prompt, about.
        repeats: Calls; their median counts. At least 5.

    Returns:
        `messages`, `tokens` (of the prompts), `repeats`, `template_ms`, `overhead_ms`, `stages` and `kinds`, the revisions as
        the tracker named them.

    Raises:
        ConfigError: There are no texts, or too few messages.
    """
    repeats = max(repeats, 5)
    if messages < 4 * (repeats + _WARM):
        raise ConfigError(f"messages={messages} are too few for {repeats} repeats; take {4 * (repeats + _WARM)}")
    if not any(texts):
        raise ConfigError("the data holds no text of a document or tool result; give other --data")
    # The history grows by a turn each call; the median call has what was asked for.
    history, fresh = _history(tokenizer, texts, messages - 2 * (_WARM + repeats // 2), tokens, repeats + _WARM)
    call = _Call(tokenizer)
    call(history)
    rows: list[dict[str, float]] = []
    kinds: list[str] = []
    sizes: list[int] = []
    for number in range(_WARM + repeats):
        cleared = history[2 + 2 * number]
        history = [*history, *fresh[number]]
        history[2 + 2 * number] = cleared.model_copy(update={"content": "[cleared]"})
        row, kind, size = call(history)
        if number >= _WARM:
            rows.append(row)
            kinds.append(kind)
            sizes.append(size)
    return {
        "messages": messages,
        "tokens": int(median(sizes)),
        "repeats": repeats,
        "template_ms": median(row["template"] for row in rows),
        "overhead_ms": median(sum(row[stage] for stage in STAGES) for row in rows),
        "stages": {stage: median(row[stage] for row in rows) for stage in STAGES},
        "kinds": sorted(set(kinds)),
    }


class _Call:
    """One agent's model calls, without the engine."""

    def __init__(self, tokenizer: Any) -> None:
        from agentcache.integrations.langchain.messages import to_chat
        from agentcache.integrations.routing import Router

        self._tokenizer, self._convert = tokenizer, to_chat
        self._renderer, self._router, self._tracker = Renderer(tokenizer), Router(), EpisodeTracker(EventBus())
        self._reply = tokenizer.encode(_REPLY, add_special_tokens=False)
        self._count = 0

    def __call__(self, history: list[Any]) -> tuple[dict[str, float], str, int]:
        """Returns the times of the stages, the kind of revision, and the prompt's tokens."""
        from langchain_core.messages import AIMessage

        self._count += 1
        row: dict[str, float] = {}
        chat = _timed(row, "convert", lambda: self._convert(history))
        route = _timed(row, "route", lambda: self._router.route(history, {"thread_id": "bench"}, str(self._count)))
        prompt = _timed(row, "render", lambda: self._render(chat))
        made = _timed(row, "record", lambda: self._tracker.record("bench", prompt))
        _timed(row, "finish", lambda: self._finish(route, made.version, AIMessage(_REPLY)))
        _timed(row, "template", lambda: self._tokenizer.apply_chat_template(chat, tokenize=False))
        row["render"] -= row["template"]
        return row, made.kind.value, len(prompt.token_ids)

    def _render(self, chat: list[dict[str, Any]]) -> Rendered:
        head = self._tracker.head("bench")
        replies = self._tracker.replies(head.version_id) if head is not None else ()
        return self._renderer.render(chat, generated=replies)

    def _finish(self, route: Any, version: str, reply: Any) -> None:
        self._tracker.finish(version, self._reply)
        self._router.ended(route, version, reply)


def _timed(row: dict[str, float], stage: str, work: Callable[[], Any]) -> Any:
    began = perf_counter()
    found = work()
    row[stage] = 1e3 * (perf_counter() - began)
    return found


def _history(
    tokenizer: Any, texts: list[str], messages: int, tokens: int, turns: int
) -> tuple[list[Any], list[list[Any]]]:
    """Returns a history of tool calls and their results, and further turns."""
    from langchain_core.messages import AIMessage, SystemMessage, ToolMessage

    from agentcache.integrations.langchain.messages import to_chat

    def turn(number: int, found: str) -> list[Any]:
        call = {"name": "search", "args": {"query": f"record {number}", "limit": 5}, "id": f"call-{number}"}
        reply = AIMessage(_REPLY, tool_calls=[call], id=f"reply-{number}")
        return [reply, ToolMessage(found, tool_call_id=f"call-{number}")]

    system = SystemMessage("You look records up and answer from them.")
    count = messages // 2
    bare = [system, *(message for number in range(count) for message in turn(number, "."))]
    around = len(
        tokenizer.encode(tokenizer.apply_chat_template(to_chat(bare), tokenize=False), add_special_tokens=False)
    )
    size = max((tokens - around) // count, 4)
    ids: list[int] = []
    for text in cycle(texts):  # results are cut from it elsewhere each time, so none is there twice
        ids += tokenizer.encode(text + "\n", add_special_tokens=False)
        if len(ids) >= (count + turns) * size:
            break
    made = [turn(at, tokenizer.decode(ids[at * size : (at + 1) * size])) for at in range(count + turns)]
    return [system, *(message for both in made[:count] for message in both)][:messages], made[count:]


def run(
    *, model: str, messages: int, tokens: int, reps: int, data: str, json_path: Path | None, console: Console
) -> dict[str, Any]:
    """Prints what a model call costs beside the engine; returns and, where asked, writes the result.

    Raises:
        ConfigError: The model or the data cannot be read.
    """
    from transformers import AutoTokenizer

    from agentcache.evaluation.provenance import fingerprint, spoken_command

    folder, known = fingerprint(model)
    dataset = load_dataset(data)
    texts = [result for task in dataset.tasks for turn in task.turns for result in turn.results if result.strip()]
    found = bench_prompt(AutoTokenizer.from_pretrained(folder), texts, messages=messages, tokens=tokens, repeats=reps)
    result = {
        "part": "prompt",
        "command": spoken_command(sys.argv),
        "model": known.name,
        "data": {"name": dataset.name, "hash": dataset.hash},
        **found,
        "versions": versions(),
        "hardware": hardware(),
    }
    title = f"a model call of {found['messages']} messages, {found['tokens']:,} tokens, beside the engine"
    table = Table("stage", title=title, box=box.SIMPLE)
    table.add_column("ms", justify="right")
    for stage, value in found["stages"].items():
        table.add_row(stage, f"{value:.1f}")
    table.add_row("[bold]all[/bold]", f"[bold]{found['overhead_ms']:.1f}[/bold]")
    table.add_row("the template's own time", f"{found['template_ms']:.1f}")
    console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"wrote {json_path}")
    return result
