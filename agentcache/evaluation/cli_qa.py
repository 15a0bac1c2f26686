"""`agentcache eval qa`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from agentcache.evaluation.app import (
    ItemsOption,
    ModelOption,
    OutOption,
    PlotsOption,
    PoliciesOption,
    ProfileOption,
    QuickOption,
    SeedOption,
    eval_app,
    words,
)

__all__ = ["ABLATIONS", "POLICIES", "QUICK", "Ablation", "qa"]

POLICIES: Final = (
    "prefix_cache,direct_reuse,edit_local,edit_local_boundary,epic:k=128,patchkv,cacheblend,prophetkv,mean_shift,attended,"
    "frontier,auto,attention_blocks,edit_to_carrier,random,structural"
)
"""All that choose without knowing the answer; `epic` with its other budget, since with 32 it is `edit_local`."""

QUICK: Final = "prefix_cache,direct_reuse,patchkv,attended"


class Ablation(StrEnum):
    """What is varied of a policy, as in PatchKV's ablations."""

    attention = "attention"
    block = "block"
    precision = "precision"


ABLATIONS: Final[dict[Ablation, tuple[str, ...]]] = {
    Ablation.attention: tuple(f"patchkv:kappa={share}" for share in (0, 0.015, 0.03, 0.05, 0.1)),
    Ablation.block: (
        *(f"patchkv:block={size}" for size in (16, 32, 64, 128)),
        *(f"attended:k=128:block={size}" for size in (8, 16, 32, 64, 128)),
    ),
    Ablation.precision: ("exact", "mixed", "k8v8", "k8v4", "int8", "int4", "fp8_e4m3", "kivi4", "kivi2", "ott"),
}
"""The arms of each; of `precision` the ways in which the old chat is stored, for each policy that is asked for."""


@eval_app.command("qa")
def qa(
    model: ModelOption = "smollm2",
    out: OutOption = Path("qa.json"),
    items: ItemsOption = 150,
    policies: PoliciesOption = "",
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="A file or folder of questions with answers (HotpotQA, MuSiQue, 2Wiki, your own), or `sample`, the 12 that ship and "
            "the default. One or several; the files of one data set may be several.",
        ),
    ] = None,
    edits: Annotated[
        str,
        typer.Option(
            "--edits", help="Kinds of edits, separated by commas: replace, update and others; all by default."
        ),
    ] = "",
    ablation: Annotated[
        Ablation | None,
        typer.Option(
            help="Vary patchkv's attention share, the block size, or how the checkpoint of --policies is stored."
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=64, help="Length of the documents in tokens, about.")] = 800,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer; its first line counts.")] = 16,
    profile: ProfileOption = None,
    calibrated_on: Annotated[
        list[str] | None,
        typer.Option(
            help="A file that the profile was made of: its tasks are left out. One or several; those of --data are known."
        ),
    ] = None,
    noise: Annotated[bool, typer.Option(help="Measure the exact arm twice, to see what rounding does.")] = True,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    plots: PlotsOption = False,
) -> None:
    """Measure answers to questions whose documents were edited before (PatchKV, Fig. 7): F1 against the time to the first token."""
    from agentcache.evaluation.qa import QARun, run
    from agentcache.evaluation.qa_edits import QA_EDITS

    chosen: Any = tuple(words(edits, "--edits")) if edits else QA_EDITS
    run(
        QARun(
            model=model,
            out=out,
            policies=_arms(policies or (QUICK if quick else POLICIES), ablation, given=bool(policies)),
            data=tuple(data or ["sample"]),
            items=min(items, 4) if quick else items,
            seed=seed,
            context=min(context, 300) if quick else context,
            kinds=chosen,
            max_tokens=min(max_tokens, 8) if quick else max_tokens,
            profile=profile,
            calibrated_on=tuple(calibrated_on or ()),
            overlap=quick,
            noise=noise,
            ablation=ablation.value if ablation is not None else "",
            plots=plots,
        ),
        Console(),
    )


def _arms(policies: str, ablation: Ablation | None, *, given: bool) -> tuple[str, ...]:
    """Returns the arms of an ablation, or those that are asked for."""
    asked = words(policies, "--policies")
    if ablation is None:
        return tuple(asked)
    if ablation is not Ablation.precision:
        return (*ABLATIONS[ablation], *(asked if given else ()))
    repairs = asked if given else ["patchkv"]
    stored = ABLATIONS[ablation]
    return tuple(policy if tag == "exact" else f"{policy}@{tag}" for policy in repairs for tag in stored)
