"""All commands of `agentcache eval`; importing this registers them. Each imports what it needs when it runs."""

from __future__ import annotations

import agentcache.evaluation.cli_drift
import agentcache.evaluation.cli_memory  # noqa: F401
from agentcache.evaluation.app import eval_app

__all__ = ["eval_app"]
