"""`agentcache store`: look into a checkpoint store, check it, and clear it up."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentcache.errors import StoreError

if TYPE_CHECKING:
    from agentcache.store.tiers import KVStore

__all__ = ["store_app"]

store_app = typer.Typer(help="Look into a checkpoint store, check it, and clear it up.", no_args_is_help=True)

Url = Annotated[str, typer.Argument(help="The store, e.g. disk:///var/lib/agentcache or redis://host:6379/0.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _open(url: str) -> KVStore:
    """Returns a store that is there already: a command that looks makes no folder."""
    from agentcache.store.tiers import open_store, parse_store_url

    spec = parse_store_url(url)
    durable = spec.lower or spec
    if durable.scheme == "disk" and durable.path and not Path(durable.path).is_dir():
        raise StoreError(f"there is no store folder {durable.path}")
    return open_store(url)


@store_app.command()
def ls(
    url: Url,
    namespace: Annotated[str | None, typer.Option(help="Only this tenant's versions.")] = None,
    as_json: Json = False,
) -> None:
    """List the versions of a store, oldest first, and what they take."""
    from agentcache.store.tiers import Refused

    with _open(url) as store:
        found, stats = store.versions(namespace), store.stats()
    if isinstance(found, Refused):
        raise StoreError(found.reason)
    if as_json:
        typer.echo(json.dumps({"versions": [asdict(info) for info in found], "tiers": stats}, indent=2))
        return
    table = Table("namespace", "version", "episode", "parent", title=f"{len(found):,} versions")
    for name in ("tokens", "objects", "bytes"):
        table.add_column(name, justify="right")
    for info in found:
        names = [escape(str(text)) for text in (info.namespace, info.version, info.group, info.parent or "")]
        table.add_row(*names, f"{info.tokens:,}", f"{info.objects:,}", f"{info.payload_bytes:,}")
    console = Console()
    console.print(table)
    for tier in stats:
        tags = ", ".join(f"{tag} {size:,}" for tag, size in tier["bytes_by_tag"].items())
        console.print(f"{tier['tier']}: {tier['used_bytes']:,} bytes ({tags or 'empty'})")


@store_app.command()
def verify(url: Url, as_json: Json = False) -> None:
    """Read everything in a store and compare all checksums; exit with 1 when something is damaged."""
    from agentcache.store.tiers import Refused

    with _open(url) as store:
        report = store.verify()
    if isinstance(report, Refused):
        raise StoreError(report.reason)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        typer.echo(f"{report.versions:,} versions, {report.objects:,} objects, {report.payload_bytes:,} payload bytes")
        for fault in report.faults:
            typer.echo(f"damaged: {fault}")
        typer.echo(f"{len(report.faults)} faults" if report.faults else "all checksums match")
    if report.faults:
        raise typer.Exit(1)


@store_app.command()
def gc(url: Url, as_json: Json = False) -> None:
    """Clear away what crashes left behind: cut-off saves, damaged manifests, payloads that no version needs."""
    from agentcache.store.tiers import Refused

    with _open(url) as store:
        report = store.gc()
    if isinstance(report, Refused):
        raise StoreError(report.reason)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
        return
    typer.echo(
        f"removed {report.saves} cut-off saves, {report.manifests} damaged manifests and {report.payloads} payloads; "
        f"freed {report.freed_bytes:,} bytes"
    )
