"""Recovery reports as LangSmith run metadata and as attributes of the current OpenTelemetry span."""

from __future__ import annotations

from typing import Any

from agentcache.reply import Reply

try:
    from opentelemetry import trace
except ModuleNotFoundError:  # an extra
    trace = None  # type: ignore[assignment]

__all__ = ["annotate", "report_values"]

_FIELDS = (
    "policy",
    "requested_policy",
    "exact",
    "reason",
    "tier",
    "prompt_tokens",
    "prefix_tokens",
    "fresh_tokens",
    "repair_tokens",
    "reused_tokens",
    "source_tokens",
    "new_tokens",
    "lost_tokens",
    "diff_ms",
    "plan_ms",
    "fetch_ms",
    "restore_ms",
    "select_ms",
    "recompute_ms",
    "ttft_ms",
)


def report_values(episode: str | None, reply: Reply) -> dict[str, str | int | float | bool]:
    """Returns a reply's recovery report as flat values, each name beginning with `agentcache.`."""
    recovery = reply.recovery
    values: dict[str, Any] = {"episode": episode, "version": reply.version, "parent": reply.parent}
    values |= {"cached_tokens": reply.cached_tokens}
    if recovery is not None:
        values |= {name: getattr(recovery, name) for name in _FIELDS}
    return {f"agentcache.{name}": value for name, value in values.items() if value is not None}


def annotate(episode: str | None, reply: Reply, run_manager: Any = None) -> None:
    """Writes a reply's report to the current span, if one records, and to the run of each tracer of a call.

    Args:
        episode: The episode's id.
        reply: Of the engine.
        run_manager: LangChain's, of the call; its tracers (LangSmith's among them) keep runs by id.
    """
    values = report_values(episode, reply)
    if trace is not None:
        span = trace.get_current_span()
        if span.is_recording():
            span.set_attributes(values)
    for handler in getattr(run_manager, "handlers", ()):
        run = getattr(handler, "run_map", {}).get(str(run_manager.run_id))
        if run is not None:
            run.add_metadata(values)
