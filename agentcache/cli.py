"""The command line. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentcache.errors import AgentCacheError, ConfigError
from agentcache.evaluation.cli import eval_app
from agentcache.profiling.cli import profile_app
from agentcache.report.cli import report
from agentcache.store.cli import store_app

__all__ = ["app", "main"]

_HELP = """Resume an agent's edited prompt without re-prefilling it.

`agentcache demo` shows it on a real model; `agentcache doctor` checks an installation.
"""


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuses, before anything is measured, a file whose folder is missing."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


_MODEL_HELP = "A model folder, a hub id, or the built-in `smollm2`."
Model = Annotated[str, typer.Argument(help=_MODEL_HELP)]
ModelOption = Annotated[str, typer.Option("--model", help=_MODEL_HELP)]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, callback=_in_a_folder, help="Also write the result to this file."),
]
ContextOption = Annotated[int, typer.Option(min=256, help="Prompt length in tokens.")]
RepsOption = Annotated[int, typer.Option(min=1, help="Repetitions; arms alternate, medians are reported.")]

app = typer.Typer(
    help=_HELP, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown", add_completion=False
)
bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(eval_app, name="eval")
app.add_typer(profile_app, name="profile")
app.command()(report)
app.add_typer(store_app, name="store")


@dataclass
class _Session:
    """What the options before the command set."""

    debug: bool = False


def main() -> None:
    """Runs the command line; an error that agentcache raised on purpose is one message and exit status 2."""
    session = _Session()
    try:
        app(obj=session)
    except AgentCacheError as error:
        if session.debug:
            raise
        Console(stderr=True).print(f"[bold red]error:[/] [red]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
        sys.exit(2)


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    context.ensure_object(_Session).debug = debug


@app.command()
def demo(
    model: ModelOption = "smollm2",
    policy: Annotated[str, typer.Option(help="The recovery policy that resumes each edit.")] = "attended",
    json_path: JsonOption = None,
) -> None:
    """Run a real episode whose prompt is edited in the middle; compare each resume with plain prefix caching."""
    from agentcache.demo import run_demo

    run_demo(model, json_path, Console(), policy=policy)


@app.command()
def doctor(
    model: Model = "smollm2",
    gpu: Annotated[bool, typer.Option("--gpu", help="Check the engine on a CUDA device (5 minutes at most).")] = False,
) -> None:
    """Check this installation and a model; exit with 1 when something does not work."""
    from agentcache.doctor import run_doctor

    if not run_doctor(model, gpu, Console()):
        raise typer.Exit(1)


@app.command()
def fetch(model: Model = "smollm2") -> None:
    """Make a built-in model in the cache folder, so that later commands need no network; print its folder."""
    from agentcache.weights import resolve_model

    typer.echo(resolve_model(model))


@app.command()
def version() -> None:
    """Print the versions of agentcache, its engine, and Python."""
    from agentcache.environment import versions

    for name, found in versions().items():
        typer.echo(f"{name} {found}")


@bench.command()
def resume(
    model: ModelOption = "smollm2",
    context: ContextOption = 4096,
    edit_at: Annotated[
        float, typer.Option(min=0.01, max=0.95, help="Where the edit is, as a share of the prompt.")
    ] = 0.3,
    policies: Annotated[
        str,
        typer.Option(
            help="Recovery policies, separated by commas, options behind colons (cacheblend:share=0.15); prefix_cache is the baseline."
        ),
    ] = "prefix_cache,direct_reuse,edit_local",
    reps: RepsOption = 7,
    profile: Annotated[
        Path | None, typer.Option(help="The model's profile; by default the one that ships, if there is one.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Time the resume of an edited prompt under each policy: from the call to the first token."""
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--policies {policies!r} names no policy: give at least one, e.g. prefix_cache,edit_local")
    from agentcache.bench_resume import run

    run(
        model=model,
        context=context,
        edit_at=edit_at,
        policies=names,
        reps=reps,
        profile=profile,
        json_path=json_path,
        console=Console(),
    )


@bench.command()
def load(
    model: ModelOption = "smollm2",
    context: ContextOption = 4096,
    turn: Annotated[int, typer.Option(min=1, help="Length of the new turn in tokens.")] = 3000,
    streams: Annotated[int, typer.Option(min=1, help="Requests that decode meanwhile.")] = 4,
    reps: RepsOption = 3,
    json_path: JsonOption = None,
) -> None:
    """Time how long a resume with a long new turn makes the requests that decode beside it wait."""
    from agentcache.bench_load import run

    run(
        model=model,
        context=context,
        turn=turn,
        streams=streams,
        reps=reps,
        json_path=json_path,
        console=Console(),
    )


@bench.command("auto")
def bench_auto(
    model: ModelOption = "smollm2",
    candidate: Annotated[
        str, typer.Option(help="The policy that auto may choose, options behind colons (attended:k=48).")
    ] = "edit_local",
    margin: Annotated[float, typer.Option(help="Share of prefix caching's time that it must save.")] = 0.1,
    edits: Annotated[int, typer.Option(min=1, help="Random edits of real prompts.")] = 100,
    reps: RepsOption = 2,
    data: Annotated[
        str, typer.Option(help="File or folder of a public data set, as for `agentcache profile`, or `sample`.")
    ] = "sample",
    seed: Annotated[int, typer.Option(help="Another one makes other edits.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=256, help="Longest prompt; what is longer is cut.")] = 4800,
    json_path: JsonOption = None,
    go_on: Annotated[
        bool, typer.Option("--resume", help="Leave out the edits that the --json file has already.")
    ] = False,
) -> None:
    """Time the policy `auto` against prefix caching and its own candidate over many random edits; 5 minutes on two cores."""
    if go_on and json_path is None:
        raise ConfigError("--resume goes on with the file that --json names: give --json")
    from agentcache.bench_auto import run

    run(
        model=model,
        candidate=candidate,
        margin=margin,
        edits=edits,
        reps=reps,
        data=data,
        seed=seed,
        max_tokens=max_tokens,
        json_path=json_path,
        resume=go_on,
        console=Console(),
    )


@bench.command("store")
def bench_store(
    model: ModelOption = "smollm2",
    parts: Annotated[
        str, typer.Option(help="Which parts, separated by commas: payload, decode, resume, restore, episodes.")
    ] = "payload,decode,resume,restore,episodes",
    tokens: Annotated[int, typer.Option(min=64, help="Length of the prompt whose checkpoint is weighed.")] = 8000,
    prompts: Annotated[int, typer.Option(min=1, max=120, help="Prompts whose next tokens are compared.")] = 50,
    context: ContextOption = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of each arm in each repetition.")] = 60,
    reps: RepsOption = 7,
    episodes: Annotated[int, typer.Option(min=2, help="Paused episodes in one store.")] = 1000,
    real: Annotated[
        int, typer.Option(min=1, max=200, help="Of them, prompts that the engine serves, each as two episodes.")
    ] = 50,
    folder: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Where the stores are made, and removed in the end: 12 GB."),
    ] = None,
    json_path: JsonOption = None,
    go_on: Annotated[
        bool, typer.Option("--resume", help="Leave out the parts that the --json file has already.")
    ] = False,
) -> None:
    """Measure checkpoints: their bytes, what their precision costs, and how fast they are saved and restored.

    On SmolLM2 and two cores the parts take about 3 (payload), 2 (decode), 1 (resume), 1 (restore) and 10 minutes (episodes).
    """
    if go_on and json_path is None:
        raise ConfigError("--resume goes on with the file that --json names: give --json")
    from agentcache.bench_store import StoreBench, run

    run(
        StoreBench(model, tokens, prompts, context, steps, reps, episodes, real),
        parts=[name.strip() for name in parts.split(",") if name.strip()],
        json_path=json_path,
        resume=go_on,
        folder=folder,
        console=Console(),
    )


@bench.command()
def precision(
    model: ModelOption = "smollm2",
    tokens: Annotated[int, typer.Option(min=128, help="Length of the prompt whose rows are compared.")] = 4096,
    prompts: Annotated[int, typer.Option(min=1, max=120, help="Prompts whose next tokens are compared.")] = 10,
    json_path: JsonOption = None,
) -> None:
    """Print what each precision loses of a model's keys and values, and what that does to the next token."""
    from agentcache.bench_precision import run

    run(model=model, tokens=tokens, chats=prompts, json_path=json_path, console=Console())


@bench.command()
def prompt(
    model: ModelOption = "smollm2",
    messages: Annotated[int, typer.Option(min=16, help="Messages of the history.")] = 200,
    tokens: Annotated[int, typer.Option(min=512, help="Tokens of its prompt, about.")] = 32_768,
    reps: RepsOption = 15,
    data: Annotated[
        str, typer.Option(help="Whose texts the tool results are: a folder, a file, or `sample`.")
    ] = "sample",
    json_path: JsonOption = None,
) -> None:
    """Time what a LangGraph agent's model call costs beside the engine: routing, rendering, diff, tracking."""
    from agentcache.bench_prompt import run

    run(model=model, messages=messages, tokens=tokens, reps=reps, data=data, json_path=json_path, console=Console())


@bench.command()
def diff(
    tokens: Annotated[int, typer.Option(min=16_384, help="Length of the old prompt in tokens.")] = 131_072,
    reps: RepsOption = 9,
    json_path: JsonOption = None,
) -> None:
    """Time the differ on a long prompt with few edits, with many, and on its worst cases."""
    from agentcache.episodes.bench import bench_diff

    result = bench_diff(tokens, reps)
    table = Table("case", title=f"diff of a {tokens:,}-token prompt")
    for name in ("ms", "aligned runs", "aligned tokens"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(row["case"], f"{row['diff_ms']:.1f}", f"{row['aligned_runs']:,}", f"{row['aligned_tokens']:,}")
    console = Console()
    console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"wrote {json_path}")
