"""`agentcache eval table`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentcache.errors import ConfigError
from agentcache.evaluation.app import eval_app

__all__ = ["table"]


@eval_app.command("table")
def table(
    results: Annotated[
        list[Path],
        typer.Argument(help="JSON files of `eval paired-edit` and `eval qa`, of one model each."),
    ],
) -> None:
    """Print one line a policy, as Markdown: what it recomputes, its time, its margin recovery by distance, its F1 difference."""
    from agentcache.evaluation.policy_table import policy_table

    typer.echo(policy_table(map(_read, results)), nl=False)


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no result: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("cells"), list):
        raise ConfigError(f"{path} is no result of `agentcache eval`: it has no cells")
    return found
