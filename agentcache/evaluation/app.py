"""`agentcache eval`: the group of commands, and the options that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentcache.errors import ConfigError

__all__ = [
    "DataOption",
    "ItemsOption",
    "ModelOption",
    "OutOption",
    "PlotsOption",
    "PoliciesOption",
    "ProfileOption",
    "QuickOption",
    "SeedOption",
    "eval_app",
    "numbers",
    "words",
    "work_path",
]

eval_app = typer.Typer(
    no_args_is_help=True,
    help="Measure what policies do to answers and to time, as the papers do.\n\n"
    "Each command measures item by item; started again after an interruption, it goes on where it was.",
)


def _result_path(path: Path) -> Path:
    """Refuses, before anything is measured, a file that could not be written."""
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    if path.suffix != ".json":
        raise typer.BadParameter(f"{path} is no .json file")
    return path


ModelOption = Annotated[str, typer.Option("--model", help="A model folder, a hub id, or the built-in `smollm2`.")]
OutOption = Annotated[
    Path,
    typer.Option(
        "--out",
        dir_okay=False,
        callback=_result_path,
        help="The result, JSON; a Markdown table is written beside it, and what was measured so far (.work.jsonl).",
    ),
]
ItemsOption = Annotated[int, typer.Option("--items", min=1, help="Items to measure.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Another one makes other items.")]
DataOption = Annotated[
    str, typer.Option("--data", help="File or folder of a public data set, or `sample`, the text that ships.")
]
PoliciesOption = Annotated[
    str, typer.Option("--policies", help="Separated by commas, options behind colons (cacheblend:share=0.15).")
]
ProfileOption = Annotated[
    Path | None,
    typer.Option("--profile", help="The model's profile; by default the one that ships, if there is one."),
]
QuickOption = Annotated[bool, typer.Option("--quick", help="A size that takes a minute: shows that it works.")]
PlotsOption = Annotated[bool, typer.Option("--plots", help="Also draw plots beside the result (needs matplotlib).")]


def words(text: str, option: str) -> list[str]:
    """Returns the words of a list with commas, each once, in their order.

    Raises:
        ConfigError: There is none.
    """
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise ConfigError(f"{option} {text!r} names nothing; give at least one, separated by commas")
    return found


def numbers(text: str, option: str) -> list[int]:
    """Returns the whole numbers of a list with commas, each once, in their order.

    Raises:
        ConfigError: There is none, or a word is no whole number.
    """
    found = words(text, option)
    try:
        return list(dict.fromkeys(int(word) for word in found))
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is no list of whole numbers, such as 8,16,32") from error


def work_path(out: Path) -> Path:
    """Returns where a result's measurements are kept."""
    return out.with_name(f"{out.name}.work.jsonl")
