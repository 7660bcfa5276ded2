"""Runs of `gspo_jax.sweep`, and their processes."""
