"""Group Sequence Policy Optimization for mixture-of-experts language models, in JAX/Flax."""

__version__ = "0.1.0"
