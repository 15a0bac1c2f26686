"""`agentcache profile`: measure a model once, and look at what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from agentcache.errors import ConfigError

__all__ = ["profile_app"]


class _MeasureByDefault(TyperGroup):
    """`profile MODEL` is `profile measure MODEL`; a model whose folder is named as a command is given as ./NAME."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["measure", *args]
        return super().parse_args(ctx, args)


profile_app = typer.Typer(
    cls=_MeasureByDefault,
    no_args_is_help=True,
    help="Measure how a model's KV drifts behind edits, and what recovery policies should do about it.\n\n"
    "`agentcache profile MODEL` is `agentcache profile measure MODEL`.",
)


@profile_app.command()
def measure(
    model: Annotated[str, typer.Argument(help="A model folder, a hub id, or the built-in `smollm2`.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A file or folder of tasks (HotpotQA, MuSiQue, 2Wiki, AMA-Bench, tau-bench, your own documents), or "
            "`sample`, the text that ships with agentcache and the default. May be given several times."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(dir_okay=False, help="The profile.")] = Path("profile.json"),
    pairs: Annotated[int, typer.Option(min=14, help="Edits to measure.")] = 90,
    seed: Annotated[int, typer.Option(help="Of the edits, and of which tasks train.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=512, help="Longest prompt.")] = 3072,
) -> None:
    """Measure a model and write its profile; started again after an interruption, it goes on where it was.

    Every edit is real text of the data: prefilled before and after it, compared row by row, and recovered in many ways. With the
    default settings SmolLM2 takes about ten minutes on two cores.
    """
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    from agentcache.profiling.datasets import SAMPLE
    from agentcache.profiling.runner import ProfileRun, run

    run(ProfileRun(model, out, tuple(data or [SAMPLE]), pairs, seed, max_tokens), Console())


@profile_app.command()
def plot(
    profile: Annotated[Path, typer.Argument(help="A file that `agentcache profile` has written.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="A folder, made where it is missing.")] = Path("plots"),
) -> None:
    """Draw a profile: drift by distance, attention by position, quality by recompute ratio, blocks in 4 bits."""
    from agentcache.profiling.plots import plot_profile
    from agentcache.profiling.profile import Profile

    for path in plot_profile(Profile.load(profile), out):
        typer.echo(path)
