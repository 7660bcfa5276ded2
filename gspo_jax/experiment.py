"""What every entry point builds from a config: the mesh, the policy's shape, the tokenizer, the data, the sampler.

The one place below `configs/` that reads a ConfigDict's fields for others; everything it calls takes plain arguments.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Int
from ml_collections import ConfigDict

from gspo_jax import objectives
from gspo_jax.data import tasks
from gspo_jax.data.pipeline import Batches, EvalBatches, PromptBatch, eval_batches, prompt_batches
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer, check_vocabulary
from gspo_jax.models import critic as critic_lib
from gspo_jax.models import huggingface, transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.dispatch import Dispatch, check_dispatch
from gspo_jax.models.published import check as check_published
from gspo_jax.models.published import find as find_published
from gspo_jax.objectives import Objective, mismatch
from gspo_jax.objectives.mismatch import Correction, make_correction
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel import processes
from gspo_jax.rewards import environments, shaping
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rewards.step_scorer import StepScorer
from gspo_jax.rollout.episodes import Buffer, Episodes, Player
from gspo_jax.rollout.sampler import Sampler
from gspo_jax.rollout.sampling import Sampling
from gspo_jax.routing.replay import REPLAYS
from gspo_jax.storage import RunFolder
from gspo_jax.training.checkpoint import Checkpointer, Restored, load_newest
from gspo_jax.training.scoring import Scoring
from gspo_jax.training.state import CriticRule, TrainState, make_optimizer, new_state, state_shardings
from gspo_jax.training.update import Penalties
from gspo_jax.types import UserError

_POSITIVE = (
    "iterations",
    "cpu_devices",
    "processes.heartbeat_s",
    "processes.start_s",
    "data.prompts_per_batch",
    "data.max_prompt_length",
    "sampling.group_size",
    "sampling.max_response_length",
    "sampling.rounds",
    "environment.turns",
    "training.minibatches",
    "training.microbatches",
    "training.logprob_chunk",
    "eval.every",
    "log.samples_every",
    "log.samples",
    "checkpoint.every",
    "checkpoint.keep",
    "scoring.workers",
    "coldstart.batch",
    "coldstart.log_every",
)


def check(config: ConfigDict) -> None:
    """Everything about a config that can be wrong without a look at devices, data or models.

    Raises:
      UserError: with the value, the limit and the remedy.
    """
    for name in _POSITIVE:
        value: Any = config
        for key in name.split("."):
            value = value[key]
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    if not (config.model.folder or config.model.published or config.coldstart.steps):
        no_folder()
    if not 0 <= config.coldstart.terse <= 1:
        raise UserError(f"coldstart.terse is {config.coldstart.terse}; it is a share, from 0 to 1")
    if not config.rewards:
        raise UserError("the config has no rewards; name at least one with its weight, such as exact_answer: 1.0")
    if config.sampling.temperature == 0:
        raise UserError("sampling.temperature is 0: all responses to a prompt are the same; use a positive number")
    for name, value in (("data.limit", config.data.limit), ("eval.prompts", config.eval.prompts)):
        if value < 0:
            raise UserError(f"{name} is {value}; use a positive number, or 0 for all")
    if config.training.old_logprobs not in ("sampler", "recompute"):
        raise UserError(f"training.old_logprobs is {config.training.old_logprobs!r}; use 'sampler' or 'recompute'")
    if config.model.dtype not in ("float32", "bfloat16"):
        raise UserError(f"model.dtype is {config.model.dtype!r}; use 'float32' or 'bfloat16'")
    if config.model.remat not in transformer.REMATS:
        raise UserError(f"model.remat is {config.model.remat!r}; use {', '.join(map(repr, transformer.REMATS))}")
    if config.eval.correct not in config.rewards:
        raise UserError(
            f"eval.correct is {config.eval.correct!r}, which is no reward of this config; use one of "
            f"{', '.join(config.rewards)}"
        )
    if config.environment.name:
        environments.find(config.environment.name)
    check_partial(config)
    make_sampling(config)
    make_dispatch(config)
    check_learning(config, make_objective(config))
    make_update_rule(config)
    make_optimizer(total_updates=max(config.coldstart.steps, 1), **config.coldstart.optimizer)
    if not config.model.folder:
        check_experts(config, model_config(config))
    sizes = dict(config.mesh)
    if -1 not in sizes.values():
        check_batch(config, sizes)


def check_folder(config: ConfigDict) -> None:
    """Raises a UserError where there are no weights to begin from: no folder, and no cold start."""
    if not (config.model.folder or config.coldstart.steps):
        no_folder()


def no_folder() -> NoReturn:
    """Says that there is no model."""
    raise UserError(
        "model.folder is empty and there is no cold start; give a folder in Hugging Face format, "
        "--config.model.folder=DIR"
    )


def model_config(config: ConfigDict) -> ModelConfig:
    """The shape of the policy: the folder's, the published model's, or that of the cold start.

    Raises:
      UserError: the folder's model is not the published one.
    """
    published, folder = config.model.published, config.model.folder
    if folder:
        found = huggingface.read_config(Path(folder))
        if published:
            check_published(found, published, folder)
        return found
    return find_published(published) if published else cold_start_model(config)


def check_partial(config: ConfigDict) -> None:
    """Raises a UserError where partial rollouts have no room to be partial, or would never end a call."""
    partial, batch = config.sampling.partial, config.data.prompts_per_batch
    if partial.prompts is None:
        return
    if partial.prompts <= batch:
        raise UserError(
            f"sampling.partial.prompts is {partial.prompts} and data.prompts_per_batch {batch}: a batch would wait for "
            f"all of them; use more than {batch}, or None for no partial rollouts"
        )
    if not 0 < partial.share <= 1:
        raise UserError(f"sampling.partial.share is {partial.share}; use a share above 0, up to 1")
    if partial.tokens is not None and partial.tokens < 1:
        raise UserError(f"sampling.partial.tokens is {partial.tokens}; use a positive number, or None for any number")


def cold_start_model(config: ConfigDict, **of_tokenizer: Any) -> ModelConfig:
    """The shape of the model that a cold start makes.

    Raises:
      UserError: model.architecture lacks a field, or has one too many.
    """
    try:
        return ModelConfig(vocab_size=config.coldstart.vocab_size, **config.model.architecture, **of_tokenizer)
    except TypeError as error:
        what = str(error).partition(" ")[2]
        raise UserError(f"model.architecture is no model: {what}; see the fields of ModelConfig") from None


def check_learning(config: ConfigDict, objective: Objective) -> None:
    """Raises a UserError where the objective cannot do what the config asks beside it."""
    reference, overlong = config.reference, config.overlong
    if len(config.step_rewards) and not objective.token_advantages:
        raise UserError(
            f"{objective.name} has one advantage for each response, and step_rewards give one to each token; use "
            "gspo_token, grpo, dapo, cispo, sapo or ppo, or take them out"
        )
    if reference.kl_weight < 0:
        raise UserError(f"reference.kl_weight is {reference.kl_weight}; use a positive number, or 0 for none")
    for field, value, known in (
        ("reference.estimator", reference.estimator, ("k1", "k2", "k3")),
        ("reference.place", reference.place, ("loss", "reward")),
        ("critic.trunk", config.critic.trunk, ("own", "policy")),
    ):
        if value not in known:
            raise UserError(f"{field} is {value!r}; use {' or '.join(map(repr, known))}")
    if reference.place == "reward" and objective.critic is None:
        raise UserError(f"reference.place is 'reward', which needs a critic; {objective.name} has none, use 'loss'")
    if overlong.penalty or overlong.cache:
        shaping.overlong(np.zeros(0, int), limit=config.sampling.max_response_length, cache=overlong.cache)
    check_routing(config, objective)
    if make_correction_of(config) is not None and config.training.old_logprobs != "recompute":
        raise UserError(
            f"mismatch.correction {config.mismatch.correction!r} weighs the trainer's log-probs against the sampler's; "
            "set training.old_logprobs to 'recompute'"
        )


def check_routing(config: ConfigDict, objective: Objective) -> None:
    """Raises a UserError where the routes that the config asks for are not to be had."""
    routing, recompute = config.routing, config.training.old_logprobs == "recompute"
    if routing.replay not in REPLAYS:
        raise UserError(f"routing.replay is {routing.replay!r}; use {', '.join(map(repr, REPLAYS))}")
    if routing.replay == "r2" and not recompute:
        raise UserError(
            "routing.replay is 'r2', which replays what the trainer's routers did when it scored the old log-probs; "
            "set training.old_logprobs to 'recompute', or use 'r3' for the sampler's routes"
        )
    if objective.router_shift and not (recompute or routing.router_logprobs):
        raise UserError(
            f"{objective.name} damps tokens by the shift of their router, whose log-probs nobody keeps; set "
            "routing.router_logprobs to True"
        )
    for name in ("balance_weight", "z_weight"):
        if routing[name] < 0:
            raise UserError(f"routing.{name} is {routing[name]}; use a positive number, or 0 for none")


def check_experts(config: ConfigDict, model: ModelConfig) -> None:
    """Raises a UserError where the config asks for what a dense model has not."""
    routing, dispatch = config.routing, config.model.dispatch
    for what, asked, instead in (
        (config.objective.name, make_objective(config).router_shift, "gmpo"),
        (f"routing.replay {routing.replay!r}", routing.replay != "none", "'none'"),
        (f"routing.balance_weight {routing.balance_weight}", routing.balance_weight, "0"),
        (f"routing.z_weight {routing.z_weight}", routing.z_weight, "0"),
        (f"model.dispatch {dispatch!r}", dispatch != "gather", "'gather'"),
    ):
        if asked and not model.is_routed:
            raise UserError(f"{what} is for mixtures of experts, and the model is dense; use {instead}")


def check_batch(config: ConfigDict, sizes: dict[str, int]) -> None:
    """Raises a UserError unless prompts, slots, mini-batches and micro-batches divide over the batch axes of the mesh.

    Prompts are prefilled spread over the shards; a mini-batch takes whole groups, and cuts its rows into micro-batches
    that are spread over the shards again.
    """
    mesh_lib.mesh_sizes(sizes, math.prod(sizes.values()))
    shards, by = mesh_lib.batch_shards(sizes), "data×fsdp×expert"
    training, group = config.training, config.sampling.group_size
    rows = shards * training.microbatches  # a mini-batch's rows come in multiples of this, its groups of
    groups = training.minibatches * (rows // math.gcd(rows, group))
    parts = f"what {by} = {shards}, {training.minibatches} mini-batches and {training.microbatches} micro-batches need"
    mesh_lib.check_divides("data.prompts_per_batch", config.data.prompts_per_batch, parts, math.lcm(shards, groups))
    under_way = config.sampling.partial.prompts
    if under_way is not None:
        mesh_lib.check_divides("sampling.partial.prompts", under_way, by, shards)
    slots, responses = config.sampling.slots, config.data.prompts_per_batch * group
    if slots is not None:
        if not 0 < slots <= responses:
            raise UserError(
                f"sampling.slots is {slots} and data.prompts_per_batch × sampling.group_size make {responses} "
                f"responses; use 1 to {responses}, or None for all of them"
            )
        mesh_lib.check_divides("sampling.slots", slots, by, shards)
    if config.coldstart.steps and not config.model.folder:
        mesh_lib.check_divides("coldstart.batch", config.coldstart.batch, by, shards)


def make_mesh(config: ConfigDict) -> Mesh:
    """The mesh over all devices, checked against the batch.

    Raises:
      UserError: it does not fit, or the devices lack what the dispatch needs.
    """
    if jax.default_backend() == "cpu":
        mesh_lib.check_divides("cpu_devices", config.cpu_devices, "the number of processes", jax.process_count())
    mesh = mesh_lib.make_mesh(dict(config.mesh))
    check_batch(config, dict(mesh.shape))
    if mesh.shape["expert"] > 1:
        check_dispatch(make_dispatch(config), jax.default_backend())
    processes.connect(mesh)
    return mesh


def make_sampler_mesh(config: ConfigDict, mesh: Mesh) -> Mesh:
    """The sampler's: the trainer's devices in the same order, so that rows stay where they are, cut by other axes.

    Raises:
      UserError: its sizes do not make up the trainer's devices, or do not divide prompts or slots.
    """
    sizes = dict(config.sampling.mesh)
    if not any(sizes.values()):
        return mesh
    made = mesh_lib.reshaped(mesh, {axis: size or 1 for axis, size in sizes.items()})
    shards, by = mesh_lib.batch_shards(made.shape), "the sampler's data×fsdp×expert"
    mesh_lib.check_divides("data.prompts_per_batch", config.data.prompts_per_batch, by, shards)
    if config.sampling.slots is not None:
        mesh_lib.check_divides("sampling.slots", config.sampling.slots, by, shards)
    return made


def make_dispatch(config: ConfigDict) -> Dispatch:
    """How tokens reach their experts."""
    return Dispatch(config.model.dispatch, config.model.capacity_factor)


def make_sampling(config: ConfigDict) -> Sampling:
    """How training rollouts are drawn."""
    s = config.sampling
    return Sampling(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)


def make_objective(config: ConfigDict) -> Objective:
    """The objective by name, with its section's hyper-parameters."""
    name = config.objective.name
    return objectives.make(name, **_hyper_parameters("objective", config.objective, name, objectives.catalogue.__all__))


def make_correction_of(config: ConfigDict) -> Correction | None:
    """What is done about the mismatch of sampler and trainer, by name with its section; None for nothing."""
    name = config.mismatch.correction
    if not name:
        return None
    return make_correction(name, **_hyper_parameters("mismatch", config.mismatch, name, mismatch.__all__))


def _hyper_parameters(title: str, section: ConfigDict, name: str, known: Sequence[str]) -> Mapping[str, Any]:
    """What a section of the config gives to the chosen one of its choices; nothing to one that does not exist."""
    if name not in known:
        return {}  # its factory says what there is
    if name not in section:
        raise UserError(f"the config has no section {title}.{name}; add one, empty for its own defaults")
    given: Any = section[name]
    return given


def make_penalties(config: ConfigDict) -> Penalties:
    """What the loss holds beside the objective."""
    reference = config.reference
    return Penalties(
        kl=reference.kl_weight if reference.place == "loss" else 0.0,
        kl_estimator=reference.estimator,
        entropy=config.training.entropy_weight,
        balance=config.routing.balance_weight,
        router_z=config.routing.z_weight,
    )


def make_critic(config: ConfigDict, model: ModelConfig) -> CriticRule | None:
    """The critic of an objective that has one, as large as its policy where it has a trunk of its own."""
    if make_objective(config).critic is None:
        return None
    graph, shapes = critic_lib.abstract(
        model,
        own_trunk=config.critic.trunk == "own",
        dtype=jnp.dtype(config.model.dtype),
        dispatch=make_dispatch(config),
    )
    return CriticRule(graph, shapes, make_optimizer(total_updates=total_updates(config), **config.critic.optimizer)[0])


def make_scorer(config: ConfigDict) -> Scorer:
    """The reward functions with their weights, and the processes for those that may hang."""
    scoring = config.scoring
    return Scorer(config.rewards.to_dict(), timeout_s=scoring.timeout_s, workers=scoring.workers)


def make_step_scorer(config: ConfigDict) -> StepScorer | None:
    """The step-reward functions with their weights; None without any."""
    return StepScorer(config.step_rewards.to_dict()) if len(config.step_rewards) else None


def load_records(config: ConfigDict, split: str) -> Sequence[Record]:
    """The records of the config's task: `data.limit` of the training split, `eval.prompts` of the test split."""
    data = config.data
    limit = config.eval.prompts if split == "test" else data.limit
    return tasks.load(
        data.task,
        split=split,
        folder=data.folder or None,
        data_dir=data.data_dir or None,
        limit=limit if limit else None,
        **data.options,
    )


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy on the mesh: what is fixed about it while its parameters change."""

    config: ModelConfig
    graph: nnx.GraphDef[transformer.Transformer]
    """The model without parameters, computing in the config's dtype."""
    shapes: nnx.State
    tokenizer: Tokenizer


def open_policy(config: ConfigDict, folder: Path) -> Policy:
    """Reads the shape of a Hugging Face folder's model, and its tokenizer; no weights yet, no device touched."""
    model = huggingface.read_config(folder)
    if config.model.published:
        check_published(model, config.model.published, str(folder))
    check_experts(config, model)
    if -1 not in dict(config.mesh).values():
        model.check_mesh(dict(config.mesh))
    tokenizer = Tokenizer.load(folder)
    check_vocabulary(tokenizer, model.vocab_size)
    stop_ids(config, tokenizer)
    opening(config, tokenizer)
    graph, shapes = transformer.abstract(model, dtype=jnp.dtype(config.model.dtype), dispatch=make_dispatch(config))
    return Policy(model, graph, shapes, tokenizer)


def make_sampler(config: ConfigDict, policy: Policy, mesh: Mesh) -> Sampler:
    """The sampler of a run. Evaluation uses it too, so that it measures what training samples, and compiles once.

    `mesh` is the trainer's; see `make_sampler_mesh`.
    """
    own = make_sampler_mesh(config, mesh)
    policy.config.check_mesh(dict(own.shape))
    return Sampler(
        policy.graph,
        policy.shapes,
        own,
        dtype=jnp.dtype(config.model.dtype),
        group_size=config.sampling.group_size,
        length=config.sampling.max_response_length,
        sampling=make_sampling(config),
        eos_ids=(*policy.tokenizer.eos_ids, *stop_ids(config, policy.tokenizer)),
        pad_id=policy.tokenizer.pad_id,
        slots=config.sampling.slots,
        router_logprobs=keeps_router_logprobs(config, policy.config),
    )


def stop_ids(config: ConfigDict, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of `sampling.stop_ids`; raises a UserError for a text of several tokens."""
    found = []
    for stop in config.sampling.stop_ids:
        ids = tokenizer.encode(stop) if isinstance(stop, str) else [stop]
        if len(ids) != 1:
            raise UserError(
                f"sampling.stop_ids has {stop!r}, which is {len(ids)} tokens; use texts of one, or their ids"
            )
        found += ids
    return tuple(found)


def opening(config: ConfigDict, tokenizer: Tokenizer) -> list[int]:
    """The tokens of `sampling.prefix`; raises a UserError where they leave no room for another."""
    tokens, limit = tokenizer.encode(config.sampling.prefix), config.sampling.max_response_length
    if len(tokens) >= limit:
        raise UserError(
            f"sampling.prefix has {len(tokens)} tokens and sampling.max_response_length is {limit}; use a shorter "
            f"text, or a limit above {len(tokens)}"
        )
    return tokens


def make_player(config: ConfigDict, policy: Policy, sampler: Sampler) -> Player:
    """What plays episodes, with the environment that replies where there is one."""
    environment, tokenizer = config.environment, policy.tokenizer
    begins = opening(config, tokenizer)
    if not environment.name:
        return Player(sampler, opening=begins)
    answer = environments.find(environment.name)

    def reply(prompt: str, response: list[int], record: Record) -> list[int] | None:
        said = answer(prompt, tokenizer.decode(response), record)
        if said is None:
            return None
        # Behind a stop id of sampling.stop_ids, such as that of a tool's call, the reply stands as it is.
        return tokenizer.encode(tokenizer.user_turn(said) if response[-1] in tokenizer.eos_ids else said)

    return Player(sampler, reply=reply, turns=environment.turns, opening=begins)


def make_buffer(config: ConfigDict, player: Player, left: Episodes | None = None) -> Buffer | None:
    """The buffer of partial rollouts, with what an earlier start has left in it; None without them."""
    partial = config.sampling.partial
    if partial.prompts is None:
        return None
    return Buffer(
        player,
        groups=config.data.prompts_per_batch,
        group_size=config.sampling.group_size,
        under_way=partial.prompts,
        share=partial.share,
        budget=partial.tokens,
        left=left,
    )


def keeps_router_logprobs(config: ConfigDict, model: ModelConfig) -> bool:
    """Whether the sampler does: where the trainer makes a record of its own, nobody would read them."""
    wanted = config.routing.router_logprobs and config.training.old_logprobs == "sampler"
    return model.is_routed and wanted


def completions(tokenizer: Tokenizer, tokens: Int[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]) -> list[str]:
    """The text of each response, special tokens left out."""
    return [tokenizer.decode(row[keep].tolist()) for row, keep in zip(tokens, mask, strict=True)]


def make_update_rule(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer and its schedule over the whole run."""
    return make_optimizer(total_updates=total_updates(config), **config.optimizer)


def total_updates(config: ConfigDict) -> int:
    """Optimizer updates of the whole run."""
    return config.iterations * config.training.minibatches


def initial_folder(config: ConfigDict, workdir: Path) -> Path:
    """The Hugging Face folder a run begins from: the config's, or the one its cold start makes in the run folder."""
    return Path(config.model.folder) if config.model.folder else workdir / "coldstart"


@dataclasses.dataclass(frozen=True)
class Learners:
    """Who learns in a run, and where their state lives."""

    policy: Policy
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    critic: CriticRule | None
    mesh: Mesh

    @property
    def shardings(self) -> TrainState:
        """Where every leaf of the state lives."""
        return state_shardings(self.policy.shapes, self.optimizer, self.mesh, critic=self.critic)

    def restore(self, checkpointer: Checkpointer) -> Restored | None:
        """The newest checkpoint of a run on this mesh; None if there is none."""
        return checkpointer.restore(jax.eval_shape(self._new, self.policy.shapes), self.shardings)

    def begin(self, folder: Path) -> TrainState:
        """The state before the first update, its parameters from a Hugging Face folder straight onto the mesh."""
        params = huggingface.load_params(folder, self.policy.config, self.mesh)
        return jax.jit(self._new, out_shardings=self.shardings)(params)

    def _new(self, params: nnx.State) -> TrainState:
        return new_state(params, self.optimizer, critic=self.critic)


def make_learners(config: ConfigDict, policy: Policy, mesh: Mesh) -> Learners:
    """Policy and critic with their optimizers."""
    optimizer, schedule = make_update_rule(config)
    return Learners(policy, optimizer, schedule, make_critic(config, policy.config), mesh)


def reference_params(config: ConfigDict, folder: Path, policy: Policy, mesh: Mesh) -> nnx.State | None:
    """The policy that the run begins from, in the compute dtype and the trainer's layout; None where no KL is asked."""
    if not config.reference.kl_weight:
        return None
    return huggingface.load_params(folder, policy.config, mesh, dtype=jnp.dtype(config.model.dtype))


def scoring(config: ConfigDict) -> Scoring:
    """How the trainer scores responses: at the temperature that they are sampled with."""
    return Scoring(
        temperature=make_sampling(config).scoring_temperature,
        logprob_chunk=config.training.logprob_chunk,
        group_size=config.sampling.group_size,
        remat=config.model.remat,
    )


def init_key(config: ConfigDict) -> jax.Array:
    """The key that a cold start draws its first weights with."""
    return jax.random.split(jax.random.key(config.seed))[0]


def run_key(config: ConfigDict) -> jax.Array:
    """The key of a run, which its rollouts and evaluations derive theirs from."""
    return jax.random.split(jax.random.key(config.seed))[1]


def sample_key(key: jax.Array, iteration: int) -> jax.Array:
    """The key that an iteration's rollout draws with; `key` is the run's."""
    return jax.random.fold_in(jax.random.fold_in(key, 0), iteration)


def eval_key(key: jax.Array) -> jax.Array:
    """The key that every evaluation draws with; `key` is the run's."""
    return jax.random.fold_in(key, 1)


def newest_params(config: ConfigDict, files: RunFolder, policy: Policy, mesh: Mesh) -> tuple[nnx.State, str]:
    """The parameters of a run's newest checkpoint, or those it would begin from, and what they are called."""
    wanted = {"policy": {"params": policy.shapes}}
    places = {"policy": {"params": mesh_lib.param_shardings(policy.shapes, mesh)}}
    restored = load_newest(files.checkpoints, wanted, places)
    if restored is None:
        return huggingface.load_params(initial_folder(config, files.local), policy.config, mesh), "the first policy"
    return restored.state["policy"]["params"], f"iteration {restored.step}"


def training_prompts(config: ConfigDict, policy: Policy, records: Sequence[Record]) -> Batches[PromptBatch]:
    """Endless batches of the training split's records."""
    return prompt_batches(
        records,
        policy.tokenizer,
        prompts_per_batch=config.data.prompts_per_batch,
        max_prompt_length=config.data.max_prompt_length,
        seed=config.seed,
    )


def held_out(config: ConfigDict, policy: Policy, records: Sequence[Record]) -> EvalBatches:
    """Every prompt of the test split's records, in order."""
    return eval_batches(
        records,
        policy.tokenizer,
        prompts_per_batch=config.data.prompts_per_batch,
        max_prompt_length=config.data.max_prompt_length,
    )
