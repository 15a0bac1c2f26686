"""What `agentcache bench store` says: the fields at the top of its JSON, and its table."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["print_summary", "summarise"]

_TAGS = ("exact", "k8v4", "mixed")


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """Returns a result with the fields at its top that its parts have measured, `parts` last; None: not measured.

    `restore_ms` is the median of the shifted, unaligned restore; `restore_share` its share, and that of whole pages without a
    shift, of the copy's speed.
    """
    parts = result["parts"]
    payload, decode, resume, restore, episodes = (
        parts.get(name, {}) for name in ("payload", "decode", "resume", "restore", "episodes")
    )
    mixed = payload.get("kl", {}).get("mixed", {})
    times, shares = restore.get("restore_ms"), restore.get("share")
    top = {
        "payload_ratio": payload.get("payload_ratio"),
        "tag_mix": payload.get("tag_mix"),
        "kl_mean": mixed.get("mean"),
        "kl_interval": mixed.get("interval"),
        "restore_ms": times and {tag: times[tag]["shifted"]["p50"] for tag in _TAGS},
        "restore_aligned_ms": times and {tag: times[tag]["aligned0"]["p50"] for tag in _TAGS},
        "copy_ms": restore.get("copy_ms", {}).get("p50"),
        "restore_share": shares and {tag: shares[tag] for tag in _TAGS},
        "attention_isa": restore.get("isa"),
        "decode_p95_ratio": decode.get("p95_ratio"),
        "resume_ttft_ratio": resume["rows"]["k8v4"]["ratio_to_exact"] if resume else None,
        "paused_episodes": episodes.get("paused_episodes"),
        "bytes": episodes.get("bytes"),
        "distinct_bytes": episodes.get("distinct_bytes"),
        "bytes_ratio": episodes.get("bytes_ratio"),
        "open_s": episodes.get("open_s"),
        "resumed_episodes": episodes.get("resumed_episodes"),
        "resumed_correct": episodes.get("resumed_correct"),
    }
    head = {name: value for name, value in result.items() if name not in top and name != "parts"}
    return {**head, **top, "parts": parts}


def print_summary(result: dict[str, Any], console: Console) -> None:
    """Prints what was measured beside what it is to be."""
    table = Table(title=f"checkpoints of {result['model']}", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("what", "measured", "goal"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in _rows(result):
        table.add_row(*row)
    console.print(table)


def _rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    parts = result["parts"]
    rows: list[tuple[str, str, str]] = []
    if "payload" in parts:
        mix = ", ".join(f"{share:.0%} {tag}" for tag, share in result["tag_mix"].items())
        low, high = result["kl_interval"]
        tokens = parts["payload"]["tokens"]
        rows.append((f"bytes of {tokens:,} tokens against exact ({mix})", f"{result['payload_ratio']:.3f}", "≤ 0.45"))
        rows.append(
            ("KL of the next token, nats (95 % interval)", f"{result['kl_mean']:.4f} ({low:.4f}–{high:.4f})", "≤ 0.01")
        )
    if "decode" in parts:
        rows.append(("p95 of a decode step beside a save", f"{result['decode_p95_ratio']:.2f}×", "≤ 1.2×"))
    if "resume" in parts:
        rows.append(("edit_local TTFT, k8v4 against exact", f"{result['resume_ttft_ratio']:.2f}×", "≤ 1.15×"))
    if "restore" in parts:
        share = result["restore_share"]
        slower = 1 / share["exact"]["aligned0"]
        rows.append(
            (f"exact restore of whole pages against a copy ({result['attention_isa']})", f"{slower:.2f}×", "≤ 1.3×")
        )
        rows.append(("k8v4 restore, shifted, of a copy's bandwidth", f"{share['k8v4']['shifted']:.0%}", "≥ 25 %"))
        rows.append(
            (
                f"k8v4 restore of {parts['restore']['tokens']:,} tokens",
                f"{result['restore_ms']['k8v4']:.1f} ms",
                "≤ 25 ms",
            )
        )
    if "episodes" in parts:
        for tier, ratio in result["bytes_ratio"].items():
            what = f"{result['paused_episodes']:,} paused episodes on {tier} against their distinct tokens"
            rows.append((what.replace("on memory", "in memory"), f"{ratio:.3f}", "≤ 1.1"))
        rows.append(("open after a restart", f"{result['open_s']:.2f} s", "≤ 5 s"))
        resumed = f"{result['resumed_correct']} of {result['resumed_episodes']}"
        rows.append(("real episodes that resume as a full prefill", resumed, "all"))
    return rows
