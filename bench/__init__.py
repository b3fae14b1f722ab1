"""Benchmarks: every figure is a ratio against a real peer measured in the same run."""
