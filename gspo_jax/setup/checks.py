"""Checks of a config that need neither data nor devices."""

import datetime
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from gspo_jax import foreign, sandbox
from gspo_jax.calls.calls import is_async
from gspo_jax.config import FRACTION
from gspo_jax.data import files, tasks
from gspo_jax.data.benchmarks import BENCHMARKS
from gspo_jax.data.templates import CLOCK
from gspo_jax.errors import UserError, choices
from gspo_jax.folder import weights_and_biases
from gspo_jax.models import lora, peft, published, transformer
from gspo_jax.models.config import ModelConfig, by_path
from gspo_jax.models.moe import BIAS
from gspo_jax.objectives import Objective
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rewards import environments, scorer, steps
from gspo_jax.setup import data, functions, inputs, learning, meshes, players, policy, servers, teacher
from gspo_jax.setup.fields import at, check_fields
from gspo_jax.training import shaping
from gspo_jax.training.state import make_optimizer

ARGUMENTS = "prompt", "completion", "record"
"""Arguments of rewards, step rewards and environments."""


def check(config: ConfigDict, *, count_devices: Callable[[], int] | None = None) -> ModelConfig:
    """Check a config and return its model's shape.

    A mesh with a -1 is left to `meshes.make_meshes`. `count_devices`, which may touch devices, is called as late as
    possible.

    Raises:
      UserError: one sentence with the value, the limit and the remedy.
    """
    _check_settings(config)
    weights_and_biases.check(config.log.wandb)
    model = policy.model_config(config)
    check_dense(config, model)
    check_recurrent(config, model)
    check_kept(config, model)
    policy.check_positions(config, model)
    _check_adapters_of(config, model)
    sizes = dict(config.mesh)
    teacher.read_model(config, sizes)
    if -1 not in sizes.values():
        if count_devices is not None:
            mesh_lib.mesh_sizes(sizes, count_devices())
        meshes.check_sizes(config, model, sizes)
    return model


def check_elsewhere(config: ConfigDict, *, devices: int, slices: int = 1) -> list[str]:
    """Check a config for a run on another machine with `devices` (0: unknown). Return what could not be checked.

    `model.folder`, `data.folder` and servers' keys may be missing here.

    Raises:
      UserError: as `check`, or the task needs `data.folder`.
    """
    config, left = servers.without_keys(config)
    _check_settings(config)
    policy.check_weights(config)
    tasks.check(config.data.task, config.data.folder or None, functions.own(config))
    folder = Path(config.model.folder)
    if not config.model.folder or folder.is_dir():
        model = policy.model_config(config)
    else:
        model = published.MODELS.get(config.model.published or folder.name)  # a folder is named like its model
    if model is None:
        left.append(f"the model in {folder}")
    else:
        check_dense(config, model)
        check_recurrent(config, model)
        check_kept(config, model)
        policy.check_positions(config, model)
        if (adapters := policy.make_adapters(config)) is not None:
            lora.check(model, adapters)
    if config.adapter.folder:
        left.append(f"the adapters in {config.adapter.folder}")
    sizes: dict[str, int] = dict(config.mesh)
    if devices:
        sizes = dict(zip(mesh_lib.AXES, mesh_lib.mesh_sizes(sizes, devices), strict=True))
    if not config.teacher.folder or Path(config.teacher.folder).is_dir():
        teacher.read_model(config, sizes)
    else:
        left.append(f"the teacher in {config.teacher.folder}")
    if -1 in sizes.values():
        left.append("the mesh, which takes the remaining devices")
    else:
        mesh_lib.check_slices(sizes["data"], slices)
        meshes.check_sizes(config, model, sizes)
    return left


def _check_settings(config: ConfigDict) -> None:
    check_fields(config)
    _check_places(config)
    functions.load(config)
    _check_choices(config)
    data.sources(config)
    _check_rewards(config)
    _check_episode_rewards(config)
    _check_filter(config)
    _check_benchmarks(config)
    _check_partial_rollouts(config)
    players.make_sampling(config)
    _check_adapters(config)
    objective = learning.make_objective(config)
    _check_learning(config, objective)
    _check_routing(config)
    _check_updates(config)
    check_packing(config)
    meshes.check_axes(config)


def _check_places(config: ConfigDict) -> None:
    places = inputs.places(config) | {
        f"{section}.folder": config[section].folder for section in ("model", "adapter", "teacher")
    }
    places |= {name: at(config, name) for name in servers.FILES}
    places |= {f"benchmarks.{name}.data": section.data for name, section in config.benchmarks.items()}
    for name, place in places.items():
        foreign.check_name(place, f"--config.{name}")


def _check_choices(config: ConfigDict) -> None:
    try:
        datetime.datetime.fromisoformat(config.data.clock)
    except ValueError:
        raise UserError(
            f"data.clock is {config.data.clock!r}; use a date, or a date and a time, such as {CLOCK!r}"
        ) from None
    if bad := [x for x in config.coldstart.terse if not isinstance(x, int | float) or not FRACTION.holds(x)]:
        raise UserError(f"coldstart.terse has {bad[0]!r}; use {FRACTION.words} for each stage")
    if config.environment.name:
        name = config.environment.name
        environment = environments.find(name, functions.own(config))
        if inspect.isclass(environment):
            if name in config.functions:
                environments.check_class(name, config.functions[name], environment)
            functions.check_calls(config, "environment", name)
        else:
            functions.check_calls(config, "environment", name, *ARGUMENTS)


def _check_rewards(config: ConfigDict) -> None:
    if not config.rewards:
        _check_no_rewards(config)
    own = functions.own(config)
    if config.rewards:
        _check_correct("eval.correct", config.eval.correct, config, own)
    for name, source in config.data.sources.items():
        own_rewards = source.rewards or tuple(config.rewards)
        for reward in own_rewards:
            if reward not in config.rewards:
                raise UserError(
                    f"data.sources.{name}.rewards has {reward!r}, which is not among the config's rewards; use one of "
                    f"{', '.join(config.rewards)}"
                )
        _check_correct(f"data.sources.{name}.correct", source.correct, config, own)
        correct = source.correct or config.eval.correct
        if correct and correct not in own_rewards:
            raise UserError(
                f"data.sources.{name} is judged by {correct!r}, which does not score it; set its `correct` to one of "
                f"{', '.join(own_rewards)}"
            )
    found = scorer.find(config.rewards, own, servers.make(config))
    if (found.programs or config.environment.name in environments.SANDBOXED) and not config.scoring.unsafe:
        sandbox.check_bubblewrap()
    scorer.check_names("step reward", config.step_rewards, [*steps.NAMES, *own])
    for kind, names in (("reward", config.rewards), ("step reward", config.step_rewards)):
        for name in names:
            function = found.waiting.get(name) if kind == "reward" else None
            plural = getattr(function, "batched", False)
            functions.check_calls(config, kind, name, *(f"{each}s" if plural else each for each in ARGUMENTS))
            _check_waiting(config, kind, name)


def _check_waiting(config: ConfigDict, kind: str, name: str) -> None:
    """Raise a UserError for a function that waits for others where nobody awaits it."""
    function = functions.load(config).get(name)
    marks = [mark for mark in ("own_process", "batched") if getattr(function, mark, False)]
    if len(marks) == 2:
        raise UserError(f"functions.{name} is marked own_process and batched; use one of the two")
    if function is None or not is_async(function):
        return
    if kind == "step reward" or "own_process" in marks:
        where = "step rewards" if kind == "step reward" else "functions marked own_process"
        raise UserError(f"functions.{name} is a coroutine function, and {where} are none; write def, not async def")


def _check_episode_rewards(config: ConfigDict) -> None:
    name = config.environment.name
    if "environment" not in (*config.rewards, *config.step_rewards):
        return
    if not name or not inspect.isclass(environments.find(name, functions.own(config))):
        raise UserError(
            f"the reward 'environment' is what an environment's object gives, and environment.name is {name!r}; set it "
            "to a class of yours (docs/own/environment.md), or take the reward out"
        )


def _check_correct(field: str, name: str, config: ConfigDict, own: Mapping[str, str]) -> None:
    if not name:
        return
    if name not in config.rewards:
        raise UserError(
            f"{field} is {name!r}, which is not among the config's rewards; use one of {', '.join(config.rewards)}, or "
            "leave it empty for no accuracy"
        )
    if scorer.is_graded(name, own):
        raise UserError(
            f"{field} is {name!r}, which gives scores between wrong and correct; use a reward that gives 0 or 1 alone "
            "(a weight of 0 only logs it), or leave it empty for mean rewards in place of an accuracy"
        )


def _check_no_rewards(config: ConfigDict) -> None:
    """Raise a UserError unless a teacher stands in for rewards, and nothing else needs them."""
    if not config.teacher.folder:
        raise UserError(
            "the config has no rewards; name at least one with its weight, such as exact_answer: 1.0, or a "
            "teacher.folder to learn from alone"
        )
    if config.eval.correct:
        raise UserError(
            f"eval.correct is {config.eval.correct!r} and the config has no rewards; add it to them, with weight 0 if "
            "the policy is to learn from its teacher alone, or leave it empty"
        )
    if config.sampling.rounds > 1:
        raise UserError(
            f"sampling.rounds is {config.sampling.rounds}, which replaces groups with equal rewards, and the config "
            "has no rewards; use 1"
        )


def _check_filter(config: ConfigDict) -> None:
    name, rounds, known = config.sampling.filter, config.sampling.rounds, [*config.rewards, *config.step_rewards]
    if name and name not in known:
        raise UserError(
            f"sampling.filter is {name!r}, which is not among the config's rewards; {choices(name, known)}, or leave "
            "it empty"
        )
    if name and rounds == 1:
        raise UserError(
            f"sampling.filter is {name!r}, but sampling.rounds is 1, so that no group is replaced; set "
            "sampling.rounds to 2 or more, or leave it empty"
        )


def _check_benchmarks(config: ConfigDict) -> None:
    group = config.sampling.group_size
    for name, section in config.benchmarks.items():
        where = f"benchmarks.{name}"
        if not section.every:
            continue
        if not section.data:
            raise UserError(f"{where}.data is empty; set it to the benchmark's folder or file, or {where}.every to 0")
        if name not in BENCHMARKS and not section.data.endswith(files.FORMATS):
            raise UserError(
                f"{where}.data is {section.data!r}, but {name} is none of {', '.join(BENCHMARKS)}; give a file of "
                f"rows, {files.NAMES}"
            )
        if section.samples % group:
            raise UserError(
                f"{where}.samples is {section.samples}, but the run samples groups of sampling.group_size {group}; use "
                f"{group * max(1, round(section.samples / group))}"
            )


def _check_partial_rollouts(config: ConfigDict) -> None:
    partial, batch = config.sampling.partial, config.data.prompts_per_batch
    if partial.prompts is None:
        return
    if partial.prompts <= batch:
        raise UserError(
            f"sampling.partial.prompts is {partial.prompts} and data.prompts_per_batch {batch}: every batch would "
            f"wait for all of them; use more, such as {2 * batch}, or None for no partial rollouts"
        )


def _check_learning(config: ConfigDict, objective: Objective) -> None:
    reference, overlong = config.reference, config.overlong
    if len(config.step_rewards) and not objective.token_advantages:
        raise UserError(
            f"{objective.name} has one advantage per response, but step_rewards need one per token; use "
            "gspo_token, grpo, dapo, cispo, sapo or ppo, or remove step_rewards"
        )
    if config.teacher.folder and config.teacher.form == "advantage" and not objective.token_advantages:
        raise UserError(
            f"{objective.name} has one advantage per response, but teacher.form 'advantage' gives one per token; use "
            "gspo_token, grpo, reinforce, dapo, cispo, sapo or ppo, or teacher.form 'k2', 'k3' or 'full'"
        )
    if reference.place == "reward" and objective.critic is None:
        raise UserError(f"reference.place is 'reward', which needs a critic; {objective.name} has none, use 'loss'")
    if overlong.penalty or overlong.cache:
        shaping.overlong(np.zeros(0, int), limit=config.sampling.max_response_length, cache=overlong.cache)
    correction = learning.make_mismatch_correction(config)
    if correction is not None and not learning.recomputes(config):
        raise UserError(
            f"mismatch.correction {config.mismatch.correction!r} weighs the trainer's log-probs against the sampler's; "
            "set training.old_logprobs to 'recompute'"
        )
    if config.mismatch.center and not config.sampling.keep_top:
        raise UserError(
            "mismatch.center is True and sampling.keep_top 0, so that the sampler records no ids to centre over; set "
            "that to 20, or mismatch.center to False"
        )
    if config.mismatch.center and objective.weighs_tokens and not learning.recomputes(config):
        raise UserError(
            f"mismatch.center is True and training.old_logprobs 'sampler': {objective.name} then weighs each token by "
            "its ratio to the sampler, π_θ/μ, a correction already; set training.old_logprobs to 'recompute'"
        )
    if config.mismatch.bias_every:
        _check_bias_meter(config)


def _check_bias_meter(config: ConfigDict) -> None:
    every, prompts, rounds = config.mismatch.bias_every, config.data.prompts_per_batch, config.sampling.rounds
    if prompts < 3:
        raise UserError(
            f"mismatch.bias_every is {every}, which compares 3 or more groups of a batch, and data.prompts_per_batch "
            f"is {prompts}; set that to 3 or more, or mismatch.bias_every to 0"
        )
    if rounds > 1:
        raise UserError(
            f"mismatch.bias_every is {every}, and sampling.rounds {rounds} keeps groups by their rewards, which alone "
            "gives scores a mean; set sampling.rounds to 1, or mismatch.bias_every to 0"
        )


def _check_adapters(config: ConfigDict) -> None:
    if policy.make_adapters(config) is None:
        if stored := config.adapter.base_dtype:
            raise UserError(
                f"adapter.base_dtype is {stored!r} and there are no adapters, so all weights are trained; set "
                "adapter.rank, or leave it empty"
            )
        return
    if config.adapter.base_dtype == "int8" and config.sampling.weights_dtype:
        raise UserError(
            f"sampling.weights_dtype is {config.sampling.weights_dtype!r}, and a base in int8 is not rounded again; "
            "leave it empty"
        )
    if learning.make_objective(config).critic is not None and config.critic.trunk == "own":
        raise UserError(
            f"{config.objective.name} has a critic with a trunk of its own, a second model beside the adapters' base; "
            "set critic.trunk to 'policy'"
        )


def _check_adapters_of(config: ConfigDict, model: ModelConfig) -> None:
    adapters = policy.make_adapters(config)
    if adapters is None:
        return
    lora.check(model, adapters)
    if config.adapter.folder:
        if not config.model.folder:
            raise UserError("adapter.folder has adapters of a model that is trained already; give it in model.folder")
        peft.check(config.adapter.folder, model, adapters)


def _check_updates(config: ConfigDict) -> None:
    for section in ("optimizer", "critic.optimizer", "coldstart.optimizer"):
        try:
            make_optimizer(total_updates=1, **at(config, section))
        except UserError as error:
            raise UserError(f"{section}: {error}") from None


def check_packing(config: ConfigDict) -> None:
    """Raise a UserError if a prompt and a response of full length do not fit in a row."""
    training, prompt, response = config.training, config.data.max_prompt_length, config.sampling.max_response_length
    if training.row_tokens is not None and training.row_tokens < prompt + response:
        raise UserError(
            f"training.row_tokens is {training.row_tokens}, too few for data.max_prompt_length {prompt} and "
            f"sampling.max_response_length {response}, since no response is cut; use {prompt + response} or more"
        )


def _check_routing(config: ConfigDict) -> None:
    if config.routing.replay == "r2" and not learning.recomputes(config):
        raise UserError(
            "routing.replay is 'r2', which replays the routes of the trainer's recomputed old log-probs; "
            "set training.old_logprobs to 'recompute', or use 'r3' for the sampler's routes"
        )


def check_recurrent(config: ConfigDict, model: ModelConfig) -> None:
    """Raise a UserError if a model with states is to decode several tokens a step."""
    if model.is_recurrent and config.sampling.draft != "none":
        raise UserError(
            f"sampling.draft is {config.sampling.draft!r}, and this model's linear-attention layers keep a state that "
            "cannot take back a wrong draft; use --config.sampling.draft=none"
        )


def check_kept(config: ConfigDict, model: ModelConfig) -> None:
    """Raise a UserError if more ids per token are to be recorded than the vocabulary has."""
    if config.sampling.keep_top > model.vocab_size:
        raise UserError(
            f"sampling.keep_top is {config.sampling.keep_top}, and the model's vocabulary has {model.vocab_size} "
            "tokens; use fewer, such as 64"
        )


def check_dense(config: ConfigDict, model: ModelConfig) -> None:
    """Raise a UserError if a dense model's config needs routers, or a routed one's what its routers do not have."""
    if model.is_routed:
        _check_routers(config, model)
        return
    routing, dispatch = config.routing, config.model.dispatch
    for what, asked, instead in (
        (config.objective.name, learning.make_objective(config).router_shift, "gmpo"),
        (f"routing.replay {routing.replay!r}", routing.replay != "none", "'none'"),
        (f"routing.balance_weight {routing.balance_weight}", routing.balance_weight, "0"),
        (f"routing.z_weight {routing.z_weight}", routing.z_weight, "0"),
        (f"routing.bias_rate {routing.bias_rate}", routing.bias_rate, "0"),
        (f"routing.noise_every {routing.noise_every}", routing.noise_every, "0"),
        (f"model.dispatch {dispatch!r}", dispatch != "gather", "'gather'"),
    ):
        if asked:
            raise UserError(f"{what} is for mixtures of experts, and the model is dense; use {instead}")


def _check_routers(config: ConfigDict, model: ModelConfig) -> None:
    rate, adapters = config.routing.bias_rate, config.adapter.rank or config.adapter.expert_rank
    if rate and adapters:
        raise UserError(f"routing.bias_rate is {rate}, and adapters leave the routers' biases as they are; use 0")
    if rate and not _biased(model):
        raise UserError(f"routing.bias_rate is {rate}, and the model's routers have no correction bias; use 0")
    if config.routing.replay == "r3w" and not model.norm_topk_prob and _biased(model):
        raise UserError(
            "routing.replay is 'r3w', which rebuilds weights from the sampler's router log-probs, but those of this "
            "model's sigmoid routers need their sum too, since norm_topk_prob is false; use 'r3'"
        )


def _biased(model: ModelConfig) -> bool:
    """Return True if routers have a correction bias, as all sigmoid ones."""
    return any(BIAS in path.split(".") for path in by_path(transformer.abstract(model)[1]))
