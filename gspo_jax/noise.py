"""How much of the importance ratio's noise is routing: log-ratios after updates, split by replaying the old routes.

    python -m gspo_jax.noise --config=configs/tiny.py --workdir=runs/tiny --updates=1,2,4,16 --out=runs/tiny/noise

Samples the run's first prompts with its newest checkpoint, makes updates on that batch with the run's objective and
optimizer state, and measures after each of the given numbers of updates (routing/decomposition.py); after 0 of them,
what separates trainer and sampler, if old log-probs are the sampler's. Rewards are those of whole responses: overlong
penalties and step rewards are left out. Writes `noise.json` and `noise.png`, and
`noise-narrow.png` for phones. Nothing in the run folder changes.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from flax import nnx
from ml_collections import ConfigDict

from gspo_jax import cli, engine, estimates, noise_figure
from gspo_jax.data.tokenizer import Tokenizer, decode_responses
from gspo_jax.engine import Engine
from gspo_jax.errors import UserError
from gspo_jax.parallel import hosts, processes
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rewards.shaping import fill_failures
from gspo_jax.routing import decomposition
from gspo_jax.routing.decomposition import LogRatios
from gspo_jax.setup import data, keys, policy, sampling
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.storage import RunFolder, open_folder
from gspo_jax.training.checkpoint import load_newest
from gspo_jax.training.experience import Rewards
from gspo_jax.training.state import TrainState
from gspo_jax.types import Experience, OldPolicy, Packing, Rollout, RouterRecord, Weights

POSITIONS = 8
"""Parts of a response by position."""
PROBABILITIES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
"""Classes of flipped experts by the probability that the old router gave them."""
SEED = 0
"""Seed of the intervals."""


def measure(
    engine: Engine, weights: Weights, rollout: Rollout, old: OldPolicy, packing: Packing
) -> tuple[LogRatios, OldPolicy]:
    """Split the log-ratios of the sampled tokens under `weights`; also return the native scores. Two forward passes.

    Every process has the whole result of the first, on its host.
    """
    before = rollout.routes if old.routes is None else old.routes
    native = engine.native(weights, None, None, rollout, packing)
    replayed = engine.replayed(weights, None, None, dataclasses.replace(rollout, routes=before), packing)
    columns = hosts.allgather((old.logprobs, replayed.logprobs, native.logprobs, rollout.action_mask))
    return LogRatios.of(*columns), native


def by_layer(engine: Engine, weights: Weights, rollout: Rollout, old: OldPolicy, packing: Packing) -> list[LogRatios]:
    """The same for each layer alone: only its routes are those of its own router. A forward pass for each layer."""
    before = rollout.routes if old.routes is None else old.routes

    def logprobs(experts: Any) -> Any:
        routes = RouterRecord(experts, before.logprobs)
        return engine.replayed(weights, None, None, dataclasses.replace(rollout, routes=routes), packing).logprobs

    replayed, found = logprobs(before.experts), []
    for layer in range(before.experts.shape[2]):
        alone = logprobs(before.experts.at[:, :, layer].set(-1))
        columns = hosts.allgather((old.logprobs, replayed, alone, rollout.action_mask))
        found.append(LogRatios.of(*columns))
    return found


def described(
    ratios: LogRatios, rollout: Rollout, old: OldPolicy, native: OldPolicy, *, group_size: int
) -> dict[str, Any]:
    """Return everything that is measured after a number of updates; arrays are on the host."""
    before = rollout.routes if old.routes is None else old.routes
    assert native.routes is not None
    found = decomposition.flips(
        np.asarray(before.experts).astype(int),
        np.asarray(native.routes.experts).astype(int),
        np.asarray(rollout.prompt_lengths),
        prompt_columns=rollout.prompts.shape[1],
        old_logprobs=None if before.logprobs is None else np.asarray(before.logprobs),
    )
    tokens, K = max(1, int(ratios.mask.sum())), found.old.shape[3]
    gone = found.old & ratios.mask[:, :, None, None]
    lost, of_group = gone.sum(axis=(1, 2, 3)), ratios.mask.sum(axis=1)
    lost, of_group = (x.reshape(-1, group_size).sum(axis=1) for x in (lost, of_group))
    rates = lost / (np.maximum(of_group, 1) * found.old.shape[2] * K)
    facts: dict[str, Any] = {
        "tokens": int(ratios.mask.sum()),
        "flip_rate": float(gone.sum() / (tokens * found.old.shape[2] * K)),
        "flip_interval": list(estimates.interval(rates[of_group > 0], seed=SEED)),
        "flip_rate_per_layer": (gone.sum(axis=(0, 1, 3)) / (tokens * K)).tolist(),
        "tokens_changed": float((gone.any(axis=(2, 3))).sum() / tokens),
    }
    for level, these in (("token", ratios), ("sequence", ratios.of_responses)):
        moments = these.moments(group_size)
        one = decomposition.split(moments)
        between = decomposition.share_interval(moments, seed=SEED)
        facts[level] = one._asdict() | {"share": one.share, "interval": list(between)}
    facts["by_position"] = decomposition.by_position(ratios, parts=min(POSITIONS, ratios.mask.shape[1]))
    facts["by_flips"] = decomposition.by_flips(ratios, found)
    facts["by_rank"] = decomposition.by_rank(ratios, found)
    if found.probability is not None:
        facts["by_probability"] = decomposition.by_probability(ratios, found, PROBABILITIES)
    return facts


def run(config: ConfigDict, workdir: str, updates: list[int]) -> dict[str, Any]:
    """Measure after each of these numbers of updates; return `{checkpoint, layers, experts, …, after: [facts]}`.

    Raises:
      UserError: the policy is dense, or the run folder cannot be read.
    """
    check(config, count_devices=jax.device_count)
    policy.check_weights(config)
    with open_folder(workdir, write=False) as files:
        model, tokenizer = policy.read_run(config, files)
        if not model.is_routed:
            raise UserError("the policy is dense and has no routes; give the run of a mixture of experts")
        meshes = make_meshes(config, model)
        with jax.set_mesh(meshes.trainer), data.make_scorer(config) as scorer:
            made = engine.build(config, model, meshes, sampling.stop_rule_of(config, tokenizer))
            state, frozen, name = _state(config, files, made)
            folder = policy.initial_folder(config, files.local)
            reference = policy.reference_params(config, folder, made.policy, meshes.trainer)
            experience = _experience(config, tokenizer, scorer, made, state, frozen, reference)
            old, rollout, packing = experience.old, experience.rollout, experience.packing
            assert packing is not None
            host_rollout, host_old = hosts.allgather((rollout, old))
            after, done = [], 0
            for count in updates:
                for number in range(done, count):
                    minibatch = number % config.training.minibatches
                    state, _ = made.update(made.objective, state, frozen, experience, minibatch)
                done, weights = count, Weights(state.params, frozen)
                ratios, native = measure(made, weights, rollout, old, packing)
                facts = described(
                    ratios, host_rollout, host_old, hosts.allgather(native), group_size=config.sampling.group_size
                )
                if count == updates[-1]:
                    alone = by_layer(made, weights, rollout, old, packing)
                    facts["by_layer"] = [decomposition.split(one.moments(1))._asdict() for one in alone]
                after.append({"updates": count} | facts)
    return {
        "checkpoint": name,
        "layers": model.num_layers,
        "experts": model.num_experts,
        "experts_per_token": model.experts_per_token,
        "router": "trained" if config.coldstart.train_router else "as drawn",
        "sampler": config.sampling.weights_dtype if config.training.old_logprobs == "sampler" else "",
        "objective": config.objective.name,
        "learning_rate": config.optimizer.learning_rate,
        "replay": config.routing.replay,
        "dtype": config.model.dtype,
        "responses": int(host_rollout.tokens.shape[0]),
        "after": after,
    }


def _state(config: ConfigDict, files: RunFolder, made: Engine) -> tuple[TrainState, Any, str]:
    """The state of the newest checkpoint, or before the first update; frozen weights; and its name."""
    restored = load_newest(files.checkpoints, made.state_shapes, made.shardings, field_of=policy.field_of)
    folder = policy.initial_folder(config, files.local)
    if restored is not None:
        frozen = made.policy.frozen(folder, made.meshes.trainer, run=restored.run)
        return restored.state, frozen, f"iteration {restored.step}"
    weights = made.load(folder)
    return made.begin(weights), weights.frozen, "the first policy"


def _experience(
    config: ConfigDict,
    tokenizer: Tokenizer,
    scorer: Scorer,
    made: Engine,
    state: TrainState,
    frozen: nnx.State,
    reference: nnx.State | None,
) -> Experience:
    """The policy's responses to the run's first prompts, with rewards of whole responses and their advantages."""
    mesh, weights = made.meshes.trainer, Weights(state.params, frozen)
    with sampling.make_replies(config) as replies:
        made.sampler.load(weights)
        player = sampling.make_player(config, tokenizer, made.sampler, replies)
        batch = next(data.training_prompts(config, tokenizer, data.load_records(config, "train")))
        key = keys.sample_key(keys.run_key(config), 0)
        played = player.play(batch.prompts, batch.texts, batch.records, key)
        made.sampler.release()
    rollout, B = played.rollout, len(played.texts)
    own = hosts.own_rows(mesh, B)
    tokens, mask = hosts.fetch_own_rows(mesh, (rollout.tokens, rollout.mask))
    completions = decode_responses(tokenizer, tokens, mask)
    scores = scorer.score(played.texts[own].tolist(), completions, played.records[own].tolist())
    (total,) = hosts.allgather_rows(mesh, [scores.total], B)
    packing = made.packer(*hosts.allgather((rollout.mask.sum(axis=1), rollout.prompt_lengths)))
    critic = None if state.critic is None else state.critic.params
    old = made.score(weights, critic, reference, rollout, packing)
    filled = fill_failures(total, group_size=config.sampling.group_size)
    columns: Any = hosts.shard_rows(mesh, (filled, np.isfinite(total)))
    rewards = Rewards(*columns)
    experience = made.experience(made.objective, rollout, old, rewards)
    return dataclasses.replace(experience, packing=packing)


def parse_updates(text: str) -> list[int]:
    """Return the numbers of updates after which to measure; raises UserError unless they rise from 0 or more."""
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
    facts = run(config, given.workdir, updates)
    if processes.is_first():
        cli.write_facts(str(out / "noise.json"), facts)
        noise_figure.draw_all([facts], out)
        print(noise_figure.table([facts]), end="")


if __name__ == "__main__":
    cli.run(main, "noise")
