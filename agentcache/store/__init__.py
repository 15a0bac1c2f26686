"""Checkpoints: the block index and the block store."""
