"""`agentcache demo`: a research episode on real documents whose prompt is edited while it runs.

Each turn is asked twice from the same state, in which vLLM still holds the previous version: once through agentcache, once
as a plain request that vLLM's own prefix cache serves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from agentcache.bench_resume import empty_prefix_cache
from agentcache.cache import AgentCache, Episode
from agentcache.environment import hardware, versions
from agentcache.episodes.diff import as_ids, common_prefix
from agentcache.quality import kl_divergence, top1_agrees
from agentcache.reply import RecoveryReport, Reply
from agentcache.samples import HotpotItem, load_hotpot_sample

__all__ = ["Turn", "run_demo", "script"]

Message = dict[str, Any]
_REPS = 3
_LONG_MS = 2000.0  # a run that takes longer is not repeated
_REPLY_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of the episode.

    Attributes:
        name: What the agent just did.
        edit: What changed against the previous call.
        messages: The whole prompt.
    """

    name: str
    edit: str
    messages: list[Message]


def _documents(item: HotpotItem, start: int, stop: int | None) -> str:
    return "\n\n".join(
        f"Document {i}: {p.title}\n{p.text}" for i, p in enumerate(item.paragraphs[start:stop], start + 1)
    )


def script(items: Sequence[HotpotItem]) -> list[Turn]:
    """Returns the turns of a research episode over two real questions and their documents."""
    first, second = items[0], items[1]
    system: Message = {
        "role": "system",
        "content": "You are a careful research assistant. Answer from the documents, in one sentence.",
    }
    question: Message = {"role": "user", "content": f"{first.question}\nAlso: {second.question}", "id": "question"}

    def call(name: str, query: str) -> Message:
        return {"role": "assistant", "content": f'I will look it up: {name}("{query}")', "id": f"call-{name}"}

    def tool(name: str, content: str) -> Message:
        return {"role": "tool", "content": content, "tool_call_id": name, "id": f"result-{name}"}

    stale = (
        "Catalogue record 4711, status: provisional. Reviewed in 2019. 3 sources, 1 unconfirmed. Subject to correction."
    )
    corrected = (
        "Catalogue record 4711, status: confirmed. Reviewed again in 2024 by two editors, who replaced the provisional entry of "
        "2019. 5 sources, all of them confirmed. No further correction is expected."
    )
    opening: list[Message] = [system, question, call("catalogue", "record 4711")]
    reading = [
        call("search", first.question),
        tool("search", _documents(first, 0, None)),
        call("search_again", second.question),
        tool("search_again", _documents(second, 0, None)),
    ]
    summary: Message = {
        "role": "user",
        "content": "Summary of the conversation so far: the catalogue confirms record 4711 (two editors, 5 sources). "
        "The documents for both questions follow.",
        "id": "summary",
        "tags": ["summarization"],
    }
    first_turn = [*opening, tool("catalogue", stale)]
    second_turn = [*first_turn, *reading]
    third_turn = [*opening, tool("catalogue", corrected), *reading]
    fourth_turn = [system, question, summary, *reading[1:]]
    return [
        Turn("asks, calls a tool", "first version", first_turn),
        Turn("reads what it retrieved", "append", second_turn),
        Turn("the tool's record was corrected", "tool result replaced", third_turn),
        Turn("old turns become a summary", "summarisation", fourth_turn),
    ]


class _Demo:
    def __init__(self, cache: AgentCache, policy: str) -> None:
        self.cache = cache
        self.policy = policy
        self.episode: Episode = cache.episode("demo")
        self.previous: list[int] = []
        self.parent: str | None = None
        self.warm = False

    def turn(self, turn: Turn) -> dict[str, Any]:
        """Runs one turn both ways; returns its row."""
        ids = list(self.cache.render(turn.messages).token_ids)
        row: dict[str, Any] = {"turn": turn.name, "edit": turn.edit, "prompt_tokens": len(ids)}
        recovery: RecoveryReport | None = None
        if self.parent is not None:
            found, recovery = self._compared(turn, ids)
            row |= found
        reply = self._ours(turn, ids, "", max_tokens=_REPLY_TOKENS, save=True)
        self.previous = ids + reply.token_ids
        self.parent = reply.version
        recovery = recovery or reply.recovery
        assert recovery is not None
        row |= {
            "prefix": recovery.prefix_tokens,
            "fresh": recovery.fresh_tokens,
            "repair": recovery.repair_tokens,
            "reused": recovery.reused_tokens,
            "new": recovery.new_tokens,
            "reason": recovery.reason,
            "reply": reply.text.strip(),
        }
        return row

    def _compared(self, turn: Turn, ids: list[int]) -> tuple[dict[str, Any], RecoveryReport | None]:
        """Returns both arms' times and how far the policy is from an exact prefill; and what it recovered.

        The first run of each arm gives its distribution. Where that takes seconds it gives its time too; else that is the median
        of further runs, in turns.
        """
        arms = {"ours": partial(self._ours, turn, ids), "theirs": partial(self._theirs, ids)}
        if not self.warm:  # the first distribution that an engine gives takes seconds
            self.warm = True
            self.cache.generate(ids[:1], max_tokens=1, logprobs=-1)
        first = {name: run("quality", logprobs=-1) for name, run in arms.items()}
        times = {name: [reply.ttft_ms] if reply.ttft_ms > _LONG_MS else [] for name, reply in first.items()}
        short = [name for name in arms if not times[name]]
        for rep in range(_REPS):
            for name in short:
                times[name].append(arms[name](f"demo {rep}").ttft_ms)
        ours, theirs = median(times["ours"]), median(times["theirs"])
        mine, exact = first["ours"].logprobs, first["theirs"].logprobs
        assert mine is not None and exact is not None
        row = {
            "ttft_ms": ours,
            "prefix_cache_ttft_ms": theirs,
            "ratio": theirs / ours,
            "runs": {name: len(found) for name, found in times.items()},
            "kl": kl_divergence(exact[0], mine[0]),
            "top1_agrees": top1_agrees(exact[0], mine[0]),
        }
        return row, first["ours"].recovery

    def _ours(
        self,
        turn: Turn,
        ids: list[int],
        salt: str,
        *,
        max_tokens: int = 1,
        save: bool = False,
        logprobs: int | None = None,
    ) -> Reply:
        """Returns the reply under the policy."""
        self._restore_state(ids)
        return self.episode.generate(
            turn.messages,
            max_tokens=max_tokens,
            policy=self.policy,
            parent=self.parent,
            save=save,
            salt=salt,
            logprobs=logprobs,
        )

    def _theirs(self, ids: list[int], salt: str, *, logprobs: int | None = None) -> Reply:  # noqa: ARG002
        """Returns the reply to a plain request."""
        self._restore_state(ids)
        return self.cache.generate(ids, max_tokens=1, logprobs=logprobs)

    def _restore_state(self, ids: list[int]) -> None:
        """Leaves in vLLM's prefix cache what it holds of this prompt once it has computed the previous version, and nothing else.

        It comes back from the checkpoint, exactly: to compute the previous version anew would take most of the demo's time.
        """
        empty_prefix_cache(self.cache)
        shared = common_prefix(as_ids(self.previous), as_ids(ids))
        if shared:
            self.episode.generate(ids[:shared], max_tokens=1, policy="prefix_cache", parent=self.parent, save=False)


def run_demo(model: str, json_path: Path | None, console: Console, policy: str = "attended") -> dict[str, Any]:
    """Runs the episode, prints its table, writes JSON when a path is given; returns what the JSON holds."""
    turns = script(load_hotpot_sample())
    console.print(f"[bold]agentcache demo[/]: {model} in an embedded vLLM, policy {policy}, {len(turns)} turns\n")
    rows: list[dict[str, Any]] = []
    with AgentCache(model, policy=policy) as cache:
        demo = _Demo(cache, policy)
        for turn in turns:
            with console.status(f"turn {len(rows) + 1} of {len(turns)}: {turn.name}"):
                rows.append(demo.turn(turn))
            console.print(_line(rows[-1]))
        result = {
            "model": model,
            "policy": policy,
            "reps": _REPS,
            "rows": rows,
            "engine": cache.stats().get("engine", {}),
            "versions": versions(),
            "hardware": hardware(),
        }
    _print(rows, policy, console)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"wrote {json_path}")
    return result


def _line(row: dict[str, Any]) -> str:
    """Returns what is told of a turn once it has been run."""
    told = f"[dim]{row['turn']}: {row['prompt_tokens']} tokens"
    if "ttft_ms" in row:
        told += f", {row['ttft_ms']:.0f} ms, plain {row['prefix_cache_ttft_ms']:.0f} ms"
    return f"{told}[/]"


def _print(rows: list[dict[str, Any]], policy: str, console: Console) -> None:
    table = Table(
        title="time to the first token after each edit", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("what changed, tokens", no_wrap=True)
    for name in (policy, "prefix cache", "faster", "KL", "top-1"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        counts = zip("PXRFN", ("prefix", "fresh", "repair", "reused", "new"), strict=True)
        what = f"{row['edit']}\n[dim]{' '.join(f'{letter} {row[name]}' for letter, name in counts)}[/]"
        if "ttft_ms" not in row:
            table.add_row(what, *["–"] * 5)
            continue
        table.add_row(
            what,
            f"{row['ttft_ms']:.0f} ms",
            f"{row['prefix_cache_ttft_ms']:.0f} ms",
            f"[bold]{row['ratio']:.1f}×[/]",
            f"{row['kl']:.4f}",
            "=" if row["top1_agrees"] else "≠",
        )
    console.print(table)
    console.print(
        "P: prefix kept · X: new tokens before the last reused one · R: repaired · F: reused · N: computed by vLLM as usual\n"
        f"median of {_REPS}, or one run of {_LONG_MS / 1000:.0f} s and more; both arms from the same state: vLLM's prefix cache holds "
        "the previous version. "
        "KL: next-token distribution against an exact prefill, in nats."
    )
