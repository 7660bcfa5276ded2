"""The policy: model families, the transformer, adapters, and Hugging Face and peft folders."""

from gspo_jax.models import families as families  # fills config.FAMILIES
