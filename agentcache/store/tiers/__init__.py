"""Tiers of the checkpoint store: memory, disk, Redis, and one over another. No torch, no vLLM."""
