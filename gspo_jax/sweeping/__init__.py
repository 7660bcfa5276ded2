"""What `gspo_jax.sweep` stands on: which runs a sweep has, and their processes."""
