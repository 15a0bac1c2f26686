"""Episodes, versions and diffs: pure Python."""

from agentcache.episodes.diff import diff_tokens
from agentcache.episodes.render import Rendered, Renderer
from agentcache.episodes.tracker import EpisodeTracker, Revision, Version

__all__ = ["EpisodeTracker", "Rendered", "Renderer", "Revision", "Version", "diff_tokens"]
