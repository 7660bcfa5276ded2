"""Routing's share of importance-ratio noise: log-ratios after updates, split by replaying the old routes.

    python -m gspo_jax.noise --config=configs/tiny.py --workdir=runs/tiny --updates=1,2,4,16 --out=runs/tiny/noise

Samples the run's first prompts with its newest checkpoint, makes updates on that batch with the run's objective and
optimizer state, and measures after the given numbers of updates (routing/decomposition.py). After 0 updates it measures
the difference of trainer and sampler, if old log-probs are the sampler's. Writes `noise.json`, `noise.png`, and
`noise-narrow.png` for phones. The run folder is not changed.
"""

import itertools
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.errors import UserError
from gspo_jax.folder import lines
from gspo_jax.iteration import collect
from gspo_jax.measuring.noise import by_layer, described, flip_metrics, measure
from gspo_jax.measuring.opened import open_policy
from gspo_jax.parallel import hosts, processes
from gspo_jax.routing import decomposition
from gspo_jax.setup import keys, learning
from gspo_jax.studies import noise_figure
from gspo_jax.types import RouterRecord


def run(config: ConfigDict, workdir: str, updates: list[int], *, layers: bool = True) -> dict[str, Any]:
    """Measure after these numbers of updates. Return `{checkpoint, layers, experts, …, after: [facts]}`, None for NaN.

    With `layers` the last facts also have a split per layer, for a forward pass each.

    Raises:
      UserError: the policy is dense, or the run folder cannot be read.
    """
    with open_policy(config, workdir, trains=True) as opened:
        model = opened.model
        if not model.is_routed:
            raise UserError("the policy is dense and has no routes; give the run of a mixture of experts")
        (made, state, name), key = opened.start(), keys.sample_key(keys.run_key(config), 0)
        batch = collect(made, opened.player, opened.scorer, state, opened.prompts(), key)

        def on_host(routes: RouterRecord) -> RouterRecord:
            return batch.packing.in_order(hosts.allgather(routes))

        before, after, done = on_host(batch.routes), [], 0
        for count in updates:
            for number in range(done, count):
                state, _ = made.update(state, batch, number % made.minibatches)
            done, weights = count, made.weights(state)
            ratios, native, replayed = measure(made, weights, batch)
            assert native.routes is not None and replayed.routes is not None
            routes = before, on_host(native.routes), on_host(replayed.routes)
            options = {"group_size": config.sampling.group_size, "unseen": batch.packing.unseen(count)}
            facts = described(ratios, *routes, batch.prompt_lengths, **options)
            facts["replayed_flip_rate"] = flip_metrics(batch, native, replayed)["routing/replayed_flip_rate"]
            if layers and count == updates[-1]:
                alone = by_layer(made, weights, batch)
                facts["by_layer"] = [decomposition.of_layer(one.moments(config.sampling.group_size)) for one in alone]
            after.append({"updates": count} | facts)
    facts = {
        "checkpoint": name,
        "layers": model.num_layers,
        "experts": model.num_experts,
        "experts_per_token": model.experts_per_token,
        "router": "trained" if config.coldstart.train_router else "as drawn",
        "sampler": "" if learning.recomputes(config) else config.sampling.weights_dtype,
        "objective": config.objective.name,
        "learning_rate": config.optimizer.learning_rate,
        "replay": config.routing.replay,
        "dtype": config.model.dtype,
        "responses": len(batch.lengths),
        "after": after,
    }
    return lines.finite(facts)


def parse_updates(text: str) -> list[int]:
    """Return the numbers of updates. Raises UserError unless they rise from 0 or more."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or found[0] < 0 or any(a >= b for a, b in itertools.pairwise(found)):
        raise UserError(f"--updates is {text!r}; use rising whole numbers, such as 1,2,4,16")
    return found


def main(config: ConfigDict) -> None:
    """Run the command."""
    given = flags.FLAGS
    updates, out = parse_updates(given.updates), Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    facts = run(config, given.workdir, updates, layers=given.layers)
    if processes.is_first():
        cli.write_facts(str(out / "noise.json"), facts)
        noise_figure.draw_all([facts], out)
        print(noise_figure.table([facts]), end="")


if __name__ == "__main__":
    cli.run(main, "noise")
