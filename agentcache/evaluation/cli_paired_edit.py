"""`agentcache eval paired-edit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentcache.evaluation.app import (
    DataOption,
    ItemsOption,
    ModelOption,
    OutOption,
    PlotsOption,
    PoliciesOption,
    ProfileOption,
    QuickOption,
    SeedOption,
    eval_app,
    numbers,
    words,
)

_QUICK_REPLY = "The context says: Lookup table value for the alias of {name}:"  # the built-in model is small
_QUICK_POLICIES = "edit_local,attended,direct_reuse"


@eval_app.command("paired-edit")
def paired_edit(
    model: ModelOption = "smollm2",
    out: OutOption = Path("paired-edit.json"),
    items: ItemsOption = 30,
    policies: PoliciesOption = "paper,ours",
    conditions: Annotated[str, typer.Option(help="`direct`, `derived`, or both with a comma.")] = "direct,derived",
    forms: Annotated[
        str,
        typer.Option(
            help="Of the derived condition: `table` (the paper's), `indirect`, `paraphrase`, `competing`, `chain`, `two_edits`, "
            "`length`; `hard` stands for all but the first."
        ),
    ] = "table",
    distances: Annotated[
        str, typer.Option(help="Tokens between the edit and the text with the answer.")
    ] = "0,250,1500",
    budgets: Annotated[
        str, typer.Option("--k", help="Aligned tokens that a policy may recompute beside the edit.")
    ] = "32",
    transplants: Annotated[
        str, typer.Option("--transplant", help="Policies whose rows are also copied from a full prefill, a diagnostic.")
    ] = "",
    draws: Annotated[
        int | None,
        typer.Option(min=1, help="Most items a cell that the model is asked; three times --items by default."),
    ] = None,
    exact_every: Annotated[
        int,
        typer.Option(
            min=1,
            help="Time the exact policy on each so manyth item only: it is the longest arm, and its answer is known.",
        ),
    ] = 1,
    tokens: Annotated[
        int | None, typer.Option(min=64, help="Least tokens of background; by default 600, or what a distance needs.")
    ] = None,
    data: DataOption = "sample",
    seed: SeedOption = 1000,
    reply: Annotated[
        str,
        typer.Option(
            help="What every reply begins with, for models that would not begin with the value; {name} is whom it asks about."
        ),
    ] = "",
    profile: ProfileOption = None,
    quick: QuickOption = False,
    plots: PlotsOption = False,
) -> None:
    """Edit one fact and see how much of its effect on an answer each policy recovers, as in EditLocal's benchmark.

    `paper` among the policies stands for the paper's six, `ours` for the others that are deployable, `carrier_window` and
    `direct_reuse`. An item is kept when the model answers it after a full prefill and the edit matters. The result holds all
    parts that were measured with the same --out, model, data and seed.
    """
    from agentcache.evaluation.paired_arms import named_policies
    from agentcache.evaluation.paired_edit import PairedRun, run
    from agentcache.evaluation.paired_items import named_forms

    if quick:
        items, draws, conditions, budgets, tokens = min(items, 2), draws or 4, "direct", "16", tokens or 200
        policies = _QUICK_POLICIES if policies == "paper,ours" else policies
        reply = reply or _QUICK_REPLY
    run(
        PairedRun(
            model=model,
            out=out,
            conditions=tuple(words(conditions, "--conditions")),
            forms=named_forms(words(forms, "--forms")),
            distances=tuple(numbers(distances, "--distances")),
            policies=named_policies(words(policies, "--policies")),
            budgets=tuple(numbers(budgets, "--k")),
            transplants=tuple(words(transplants, "--transplant")) if transplants else (),
            items=items,
            draws=draws or 3 * items,
            exact_every=exact_every,
            tokens=tokens,
            data=data,
            seed=seed,
            reply=reply,
            profile=profile,
            plots=plots,
            overlap=quick,
        ),
        Console(),
    )
