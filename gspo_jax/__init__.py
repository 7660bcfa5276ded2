"""Group Sequence Policy Optimization for mixture-of-experts language models, in JAX/Flax."""
