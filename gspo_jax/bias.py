"""The bias that sampler-trainer mismatch gives a policy gradient, E_μ[∇ log π(y_t)], by source.

    python -m gspo_jax.bias --config=configs/tiny.py --workdir=runs/tiny --updates=4 --out=runs/tiny/bias

Samples the run's first prompts with its newest checkpoint. The tokens have a mean score under the trainer, which is 0
but for the mismatch (measuring/bias.py). On their prefixes each source alone gives a policy q, whose mean score is
exact in the next token:

    rounding    the sampler's weights, with the trainer's routes
    routes      the trainer's weights, with the sampler's routes
    truncation  the trainer's policy, after top-k, top-p and min-p
    all         the sampler's weights and routes, truncated
    staleness   the trainer's policy before `--updates` updates on the run's next batch

What the decoder's kernels and cache do beyond that is in the tokens alone, which are scored over kept sets as in
training; the sources are against the full softmax. Writes `bias.json`, `bias.png`, and `bias-narrow.png` for phones.
The run folder is not changed.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Int
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.engine import Engine
from gspo_jax.iteration import collect
from gspo_jax.measuring import bias as meter
from gspo_jax.measuring.bias import Bias, Measured
from gspo_jax.measuring.opened import open_policy
from gspo_jax.models.config import by_path
from gspo_jax.parallel import hosts, processes
from gspo_jax.parallel.mesh import param_shardings
from gspo_jax.routing.replay import OF_SAMPLER
from gspo_jax.setup import keys, players
from gspo_jax.studies import bias_figure
from gspo_jax.training.sketch import SketchFn
from gspo_jax.types import Batch, Weights

SAMPLED = "sampled tokens"
"""Name of the measurement that sees everything."""


def run(config: ConfigDict, workdir: str, updates: int) -> dict[str, Any]:
    """Return `{checkpoint, …, sources: [facts]}`, with staleness if there are updates.

    Raises:
      UserError: the run folder cannot be read, or a batch has too few groups.
    """
    config.mismatch.bias_every = 1  # checked as in a run
    with open_policy(config, workdir, trains=True) as opened:
        (made, state, name), prompts = opened.start(), opened.prompts()

        def sampled(number: int) -> Batch:
            key = keys.sample_key(keys.run_key(config), number)
            return collect(made, opened.player, opened.scorer, state, prompts, key)

        batch, weights = sampled(0), made.weights(state)
        sampling, exact = players.make_sampling(config), meter.expected_sketch(made)
        truncated = meter.expected_sketch(made, sampling) if sampling.truncates else exact
        found, facts = measure(made, weights, batch, exact=exact, truncated=truncated)
        if updates:
            before = dataclasses.replace(weights, trainable=jax.tree.map(jnp.copy, weights.trainable))
            routes, others = own_routes(made, before, batch), sampled(1)
            for number in range(updates):
                state, _ = made.update(state, others, number % made.minibatches)
            found["staleness"] = meter.of_expected(made, made.weights(state), batch, before, routes, exact)
        tensors = list(by_path(weights.trainable))
    variance = found[SAMPLED].bias.variance
    fields = "weights_dtype", "cache_dtype", "temperature", "top_k", "top_p", "min_p"
    return {
        "checkpoint": name,
        "layers": opened.model.num_layers,
        "experts": opened.model.num_experts,
        "experts_per_token": opened.model.experts_per_token,
        "sampling": {field: config.sampling[field] for field in fields},
        "replay": config.routing.replay,
        "dtype": config.model.dtype,
        "updates": updates,
        "responses": len(batch.lengths),
        "tokens": int(found[SAMPLED].tokens.sum()),
        "score_std": math.sqrt(variance),
        **facts,
        "sources": [described(source, one, variance, tensors) for source, one in found.items()],
    }


def measure(
    made: Engine, weights: Weights, batch: Batch, *, exact: SketchFn, truncated: SketchFn
) -> tuple[dict[str, Measured], dict[str, float]]:
    """Return measurements of a batch by source, and how well the emulated sampler explains its log-probs."""
    other, routes, experts = as_sampled(made, weights), own_routes(made, weights, batch), batch.rollout.routes.experts
    found = {SAMPLED: meter.of_sampled(made, weights, batch)}
    for source, q in {
        "all": (other, experts, truncated),
        "rounding": (other, routes, exact),
        "routes": (weights, experts, exact),
        "truncation": (weights, routes, truncated),
    }.items():
        found[source] = meter.of_expected(made, weights, batch, *q)
    replay = made.config.routing.replay
    trainer = (made.programs.replayed if replay in OF_SAMPLER else made.programs.native)(weights, None, None, batch)
    emulated = made.programs.replayed(other, None, None, batch)
    columns = batch.rollout.logprobs, trainer.logprobs, emulated.logprobs, batch.rollout.action_mask
    mu, log_pi, log_q, mask = batch.packing.in_order(hosts.allgather(columns))
    spread = {"log_ratio_std": mu - log_pi, "unexplained_std": mu - log_q}
    return found, {name: float(np.sqrt(np.square(x[mask], dtype=np.float64).mean())) for name, x in spread.items()}


def as_sampled(made: Engine, weights: Weights) -> Weights:
    """Return the sampler's copy of the weights, cast and rounded, in the trainer's layout."""
    with jax.set_mesh(made.sampler.mesh):
        copied = made.sampler.copied(weights)
    return jax.device_put(copied, param_shardings(made.policy.shapes, made.meshes.trainer))


def own_routes(made: Engine, weights: Weights, batch: Batch) -> Int[Array, "M Q N L K"]:
    """Return the experts that an update with these weights begins with: under R3 the sampler's, else its own."""
    if made.config.routing.replay in OF_SAMPLER:
        return batch.rollout.routes.experts
    record = made.programs.native(weights, None, None, batch).routes
    return batch.rollout.routes.experts if record is None else record.experts  # a dense policy has none of either


def described(source: str, found: Measured, variance: float, tensors: list[str]) -> dict[str, Any]:
    """Return a measurement's facts, in units of the variance of the sampled tokens' scores."""
    bias = found.bias.over(variance)
    return {
        "source": source,
        "kl": None if source == SAMPLED else float(-found.values.sum() / found.tokens.sum()),
        **_facts(bias),
        "tokens_to_dominate": None if math.isnan(tokens := meter.tokens_to_dominate(bias)) else tokens,
        "head": _facts(found.of_head.over(variance)),
        "by_tensor": dict(zip(tensors, (one.over(variance).squared for one in found.by_tensor), strict=True)),
    }


def _facts(bias: Bias) -> dict[str, Any]:
    return {"bias": bias.squared, "interval": [bias.low, bias.high], "p": bias.p}


def main(config: ConfigDict) -> None:
    """Run the command."""
    given = flags.FLAGS
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    facts = run(config, given.workdir, given.updates)
    if processes.is_first():
        cli.write_facts(str(out / "bias.json"), facts)
        bias_figure.draw_all(facts, out)
        print(bias_figure.table(facts), end="")


if __name__ == "__main__":
    cli.run(main, "bias")
