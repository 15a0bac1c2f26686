"""Kernel benchmarks."""
