"""LangChain's chat model on an embedded vLLM whose KV follows every revision of the prompt."""

from agentcache.integrations.langchain.chat_model import ChatAgentCache

__all__ = ["ChatAgentCache"]
