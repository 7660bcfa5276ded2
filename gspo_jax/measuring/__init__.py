"""Evaluation of policies on held-out prompts and published benchmarks."""
