"""Stage: does it learn? Iterations of GSPO whose reward is the share of sampled tokens in half of the vocabulary."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.bench import Iterations
from gspo_jax.bringup.programs import Tried, with_iterations
from gspo_jax.bringup.stages import FAILED, OK, WARNING, Given, Result
from gspo_jax.doctor import Finding
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.types import Batch, Rewards

ITERATIONS = 20
ENDS = 5
"""Iterations whose rewards are averaged, at either end."""
MISMATCH = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest KL of the trainer's log-probs to the sampler's, with the same weights, by rounding alone."""
RATIOS = {"float32": 1e-3, "bfloat16": 1e-2}
"""Largest mean log-ratio of a response before the first update, of two programs of the trainer that round otherwise."""
KEPT = (
    *("actor/grad_norm", "actor/entropy", "clip_fraction/sequence", "ratio/sequence_log_max", "ratio/token_log_std"),
    *("mismatch/kl", "mismatch/max", "mismatch/flip_rate", "routing/flip_rate", "routing/max_violation"),
    *("routing/load_entropy", "update/skipped"),
)
"""Metrics in the record, of each iteration's first and last update."""


class Learning(Iterations):
    """Iterations with a reward that can be learned."""

    def begin(self, batch: Batch) -> Callable[[], Rewards]:
        """Reward each response by its share of tokens in the lower half of the vocabulary."""
        half = self.engine.policy.config.vocab_size // 2

        @jax.jit
        def share(tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " B"]:
            return (mask & (tokens < half)).sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)

        mesh = self.engine.meshes.sampler
        with jax.set_mesh(mesh):
            whole = jax.jit(share, out_shardings=mesh_lib.replicated(mesh))(batch.rollout.tokens, batch.rollout.mask)
        self.rewards = total = np.asarray(whole, np.float32)
        return lambda: Rewards(total=total, learn=np.ones(total.shape, bool))


def run(given: Given) -> Result:
    """Train, and judge what the metrics say."""
    return with_iterations(given, Learning, learned)


def learned(iterations: Learning, tried: Tried) -> Result:
    """Train for ITERATIONS."""
    rows: list[dict[str, Any]] = []
    for number in range(ITERATIONS):
        seconds = iterations.run(number)["iteration"]
        ends = iterations.measured[0], iterations.measured[-1]
        first, last = ({name: _number(of.get(name)) for name in KEPT} for of in ends)
        rows.append({"reward": float(iterations.rewards.mean()), "seconds": seconds, "first": first, "last": last})
    memory = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    figures = {"model": tried.says, "iterations": rows, "peak_bytes": memory}
    return judged(rows, tried.work.dtype, memory, tried.memory), figures


def _number(value: Any) -> float | None:
    return None if value is None else float(np.asarray(value))


def judged(rows: list[dict[str, Any]], dtype: str, peak: int | None, memory: float) -> list[Finding]:
    """Judge the metrics of a training."""
    found = []
    broken = [
        number
        for number, row in enumerate(rows)
        for update in (row["first"], row["last"])
        if update["update/skipped"] or not math.isfinite(update["actor/grad_norm"])
    ]
    if broken:
        text = f"an update of iteration {broken[0] + 1} is not finite"
        found.append(
            Finding("updates", FAILED, text, "A kernel or the sampler is wrong: see the stage of the kernels.")
        )
    kl = max(abs(row["first"]["mismatch/kl"]) for row in rows)
    text = f"sampler and trainer differ by a KL of {kl:.1e} with the same weights"
    limit = MISMATCH[dtype]
    remedy = (
        "" if kl <= limit else f"More than the {limit:g} of rounding: decode step and trainer compute other models."
    )
    found.append(Finding("mismatch", OK if kl <= limit else FAILED, text, remedy))
    ratio = max(row["first"]["ratio/sequence_log_max"] for row in rows)
    still = ratio < RATIOS[dtype]
    text = f"ratios before the first update are 1, to {ratio:.1e}"
    found.append(
        Finding("ratios", OK if still else FAILED, text, "" if still else "Scoring and update compute other log-probs.")
    )
    moved = max(row["last"]["ratio/token_log_std"] for row in rows)
    if not moved > 0:
        found.append(Finding("updates", FAILED, "no update changes a log-prob", "The optimizer does not act."))
    begin, end = (float(np.mean([row["reward"] for row in part])) for part in (rows[:ENDS], rows[-ENDS:]))
    text = f"reward from {begin:.4f} to {end:.4f} in {len(rows)} iterations"
    rose = end > begin
    found.append(
        Finding("learning", OK if rose else WARNING, text, "" if rose else "Too few iterations, or none help.")
    )
    if rows[-1]["last"]["routing/flip_rate"] is not None:
        flips, load = rows[-1]["last"]["routing/flip_rate"], rows[-1]["last"]["routing/max_violation"]
        found.append(
            Finding(
                "routing", OK, f"{flips:.2%} of experts change in an iteration, largest load {load:.2f} over the mean"
            )
        )
    if peak is not None:
        found.append(Finding("memory", OK, f"{peak / 1e9:.1f} of {memory / 1e9:.1f} GB at most"))
    return found
