"""The stages of `first`, in their order."""

from gspo_jax.bringup import kernels, machine, programs, rates, training
from gspo_jax.bringup.stages import Stage

STAGES = (
    Stage("machine", "What is here", 0.04, machine.run),
    Stage("kernels", "Kernels", 0.25, kernels.run),
    Stage("rates", "How fast it is", 0.2, rates.run),
    Stage("programs", "How fast a run is", 0.3, programs.run),
    Stage("training", "Does it learn", 0.2, training.run),
)
