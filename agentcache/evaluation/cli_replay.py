"""`agentcache eval replay`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from agentcache.evaluation.app import ModelOption, OutOption, QuickOption, eval_app

__all__ = ["cells_of", "replay", "run_replay"]

_QUICK_RUNS = 2


@eval_app.command("replay")
def replay(
    data: Annotated[
        Path, typer.Option("--data", exists=True, dir_okay=False, help="Recorded runs of tau-bench, JSON.")
    ],
    model: ModelOption = "smollm2",
    template: Annotated[
        Path | None,
        typer.Option(
            "--template",
            exists=True,
            dir_okay=False,
            help="A chat template (.jinja) that shows tools, if the model's own does not.",
        ),
    ] = None,
    out: OutOption = Path("replay.json"),
    items: Annotated[int | None, typer.Option("--items", min=1, help="Runs to replay; all by default.")] = None,
    policy: Annotated[
        str, typer.Option("--policy", help="One that chooses by lengths alone (edit_local:k=32).")
    ] = "edit_local",
    clear_trigger: Annotated[int, typer.Option(min=1, help="Tokens above which old tool results are cleared.")] = 2500,
    summary_trigger: Annotated[int, typer.Option(min=1, help="Tokens above which old messages are summarised.")] = 3500,
    quick: QuickOption = False,
) -> None:
    """Replay recorded agent runs whose history two LangChain middlewares revise; count the prefill that a resume saves.

    No engine runs and no model is asked: each prompt is rendered, compared with the one before and planned as a request would be.
    It needs langchain (pip install 'agentcache-kv[langgraph]').
    """
    from agentcache.evaluation.replay import Rules

    run_replay(
        data, model, out, Console(), template=template, items=_QUICK_RUNS if quick else items, policy=policy,
        rules=Rules(clear_trigger=clear_trigger, summary_trigger=summary_trigger),
    )  # fmt: skip


def run_replay(
    data: Path,
    model: str,
    out: Path,
    console: Console,
    *,
    rules: Any,
    template: Path | None = None,
    items: int | None = None,
    policy: str = "edit_local",
) -> dict[str, Any]:
    """Returns what the JSON holds, after replaying all runs, and writes it."""
    from dataclasses import asdict

    import xxhash
    from transformers import AutoTokenizer

    from agentcache.episodes import Renderer
    from agentcache.errors import ConfigError
    from agentcache.evaluation.provenance import DataUse, fingerprint, provenance
    from agentcache.evaluation.replay import RULES, histories, replay_run, revise
    from agentcache.evaluation.report import Column, Section, number, write_report
    from agentcache.recovery import get_policy
    from agentcache.recovery.base import OnlinePolicy
    from agentcache.recovery.spec import parse_policy

    chosen = get_policy(*parse_policy(policy))
    if isinstance(chosen, OnlinePolicy) or chosen.reads_attention:
        raise ConfigError(
            f"--policy {policy!r} chooses by what only an engine measures; take edit_local, epic or structural"
        )
    raw = data.read_bytes()
    rows = json.loads(raw)[:items]
    folder, known = fingerprint(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if template is not None:
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    renderer = Renderer(tokenizer)

    def count(messages: Sequence[Any]) -> int:
        texts = [f"{m.text}{json.dumps(getattr(m, 'tool_calls', None) or '')}" for m in messages]
        return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    runs = list(histories(rows))
    calls = [
        call
        for run, messages in track(runs, "replaying", console=console, transient=True)
        for rule in RULES
        for call in replay_run(run, list(revise(messages, rule, count, rules)), rule, renderer, chosen)
    ]
    cells = cells_of(calls)
    use = DataUse("tau_bench", xxhash.xxh3_128(raw).hexdigest(), len(rows), "runs")
    made = provenance(known, dtype="none", seeds={}, data=[use])
    result = {"part": "replay", "policy": policy, "rules": asdict(rules), "cells": cells, "provenance": made}
    columns = [
        Column("rule", lambda row: row["rule"], left=True),
        Column("revision", lambda row: row["kind"], left=True),
        *(Column(name, number(name, 0)) for name in ("calls", "tokens", "cached", "computed", "reused")),
        Column("saved", number("saved_share", 1, percent=True)),
    ]
    text = (
        "Tokens of all prompts; `cached`: what prefix caching has of them, whichever earlier prompt of the run it is from; `reused`: what "
        f"`{policy}` restores beyond that; `saved`: its share of what prefix caching computes."
    )
    written = write_report(out, result, "Agent runs replayed", [Section("By revision", cells, columns, text)])
    console.print(f"wrote {', '.join(map(str, written))}")
    return result


def cells_of(calls: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns sums over calls, by rule and kind of revision, and over all of a rule."""
    sums: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for call in calls:
        for kind in (call.kind, "all"):
            sums[call.rule, kind].update(
                calls=1, tokens=call.tokens, cached=call.cached, reused=call.reused, computed=call.computed
            )
    return [
        {
            "rule": rule,
            "kind": kind,
            **found,
            "saved_share": round(found["reused"] / (found["tokens"] - found["cached"]), 4),
        }
        for (rule, kind), found in sorted(sums.items())
    ]
