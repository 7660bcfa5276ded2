"""Eight CPU devices before jax is imported, no silent rank promotion, and shapes checked as the annotations say."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jaxtyping

jax.config.update("jax_numpy_rank_promotion", "raise")

# Not the objectives, whose tests hand over wrong shapes on purpose, to read the message; nor routing, whose sums are
# rebuilt with a leading axis by `scan`.
jaxtyping.install_import_hook([f"gspo_jax.{room}" for room in ("kernels", "models", "rollout")], "beartype.beartype")
