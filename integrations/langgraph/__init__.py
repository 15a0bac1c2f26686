"""Agents on LangGraph: their tool calls, interrupts and deleted threads are the pauses, resumes and drops of episodes.

`ChatAgentCache` alone follows the prompts of an agent. What an agent's graph knows beside them comes from here:
`AgentCacheMiddleware` for `create_agent`, `wrap_node` for the nodes of any `StateGraph`, `AgentCacheCallbackHandler` for
interrupts, and `FreeOnDelete` for checkpointers.
"""

from agentcache.integrations.langgraph.callbacks import AgentCacheCallbackHandler
from agentcache.integrations.langgraph.deletion import FreeOnDelete
from agentcache.integrations.langgraph.middleware import AgentCacheMiddleware
from agentcache.integrations.langgraph.nodes import wrap_node

__all__ = ["AgentCacheCallbackHandler", "AgentCacheMiddleware", "FreeOnDelete", "wrap_node"]
