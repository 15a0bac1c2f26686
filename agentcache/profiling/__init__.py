"""Offline profiling of a model."""
