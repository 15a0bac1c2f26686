"""The engine: the vLLM connector and the embedded façade."""
