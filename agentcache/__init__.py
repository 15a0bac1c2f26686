"""KV-cache recovery for agents that edit their own prompts, on an embedded vLLM."""
