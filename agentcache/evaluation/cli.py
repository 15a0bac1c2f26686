"""All commands of `agentcache eval`; importing this registers them. Each imports what it needs when it runs."""

from __future__ import annotations

from agentcache.evaluation import cli_drift, cli_frontier, cli_memory, cli_paired_edit, cli_qa, cli_replay, cli_table
from agentcache.evaluation.app import eval_app

__all__ = [
    "cli_drift",
    "cli_frontier",
    "cli_memory",
    "cli_paired_edit",
    "cli_qa",
    "cli_replay",
    "cli_table",
    "eval_app",
]
