"""The policy: model families, the transformer, adapters, and folders of Hugging Face and of peft."""

from gspo_jax.models import families as families  # fills config.FAMILIES
