"""`agentcache report`: what an event log tells, as one page that needs no network. No torch, no vLLM."""

from __future__ import annotations

from agentcache.report.log import Entry, Pause, read_log
from agentcache.report.model import Family, Report, Row, Totals, build_report
from agentcache.report.page import render_page

__all__ = ["Entry", "Family", "Pause", "Report", "Row", "Totals", "build_report", "read_log", "render_page"]
