"""A policy with its engine, for measurement or a custom training loop. No folder changes."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
from ml_collections import ConfigDict

from gspo_jax import engine
from gspo_jax.data.pipeline import Batches
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.engine import Engine
from gspo_jax.folder.storage import RunFolder, open_folder
from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel import hosts
from gspo_jax.rewards.batches import BatchScorer
from gspo_jax.rewards.replies import Replies
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rollout.episodes import Player
from gspo_jax.setup import data, inputs, players, policy, teacher
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.training.checkpoint import load_newest
from gspo_jax.training.state import TrainState
from gspo_jax.types import Prompts, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenPolicy:
    """A policy with its sampler and rewards. The trainer's mesh is in scope."""

    config: ConfigDict
    files: RunFolder | None
    """None without a run folder."""
    model: ModelConfig
    tokenizer: Tokenizer
    engine: Engine
    player: Player
    """Plays whole episodes, without partial rollouts or rounds, with the weights that `load` or an iteration syncs."""
    replies: Replies | None
    """The environment, if any."""
    scorer: BatchScorer

    @property
    def folder(self) -> Path:
        """Hugging Face folder that the run starts from."""
        return policy.initial_folder(self.config, Path() if self.files is None else self.files.local)

    @property
    def inputs(self) -> Mapping[str, str]:
        """Digests of the files behind policy and rewards."""
        return inputs.of_run(self.config, self.folder)

    def load(self, step: int | None = None) -> tuple[Weights, str]:
        """Load weights into the sampler: as `policy.weights_of_run`, or `model.folder`'s. Return them with their name.

        Raises:
          UserError: there is no checkpoint of iteration `step`.
        """
        made = self.engine
        if self.files is None:
            weights, name = made.load(self.folder), "the first policy"
        else:
            weights, name = policy.weights_of_run(self.config, self.files, made.policy, made.meshes.trainer, step=step)
        made.sampler.load(weights)
        return weights, name

    def start(self) -> tuple[Engine, TrainState, str]:
        """Return the engine with its weights, the newest or initial train state, and the state's name."""
        config, made, folder = self.config, self.engine, self.folder
        mesh = made.meshes.trainer
        teacher.check_tokens(config, self.tokenizer)
        reference, restored = policy.reference_params(config, folder, made.policy, mesh), None
        if self.files is not None:
            where = self.files.checkpoints
            restored = load_newest(where, made.state_shapes, made.shardings, field_of=policy.field_of)
        if restored is not None:
            frozen = made.policy.frozen(folder, mesh, run=restored.run)
            state, name = restored.state, f"iteration {restored.step}"
        else:
            weights = made.load(folder)
            state, frozen, name = made.begin(weights), weights.frozen, "the first policy"
        taught_by = None if made.teacher is None else made.teacher.load(mesh)
        return dataclasses.replace(made, frozen=frozen, reference=reference, teacher_params=taught_by), state, name

    def prompts(self) -> Batches[Prompts]:
        """Return endless batches of training prompts."""
        return data.training_prompts(self.config, self.tokenizer, data.load_records(self.config, "train"))


@contextmanager
def open_policy(
    config: ConfigDict,
    workdir: str | Path | None = None,
    *,
    make_scorer: Callable[[], Scorer] | None = None,
    trains: bool = False,
) -> Iterator[OpenPolicy]:
    """Open the policy of a run folder, or the one that a run of the config would start from.

    Args:
      workdir: run folder. None: the model in `model.folder`.
      make_scorer: builds the reward functions. None: the config's.
      trains: leave room for the optimizer beside the sampler.

    Raises:
      UserError: the config or folder does not allow it. Raised before anything is compiled.
    """
    check(config, count_devices=jax.device_count)
    policy.check_weights(config)
    with ExitStack() as stack:
        files = None if workdir is None else stack.enter_context(open_folder(workdir, write=False))
        if files is not None:
            model, tokenizer = policy.read_run(config, files)
        elif config.model.folder:
            model, tokenizer = policy.read_folder(config, Path(config.model.folder))
        else:
            policy.refuse_no_model()
        meshes = make_meshes(config, model)
        stack.enter_context(jax.set_mesh(meshes.trainer))
        scorer = stack.enter_context(make_scorer() if make_scorer else data.make_scorer(config))
        replies = stack.enter_context(players.make_replies(config))
        stop, memory = players.stop_rule_of(config, tokenizer), hosts.memory_of(meshes.sampler)
        made = engine.build(config, model, meshes, stop, memory=memory, trains=trains)
        player = players.make_player(config, tokenizer, made.sampler, replies)
        scored = BatchScorer(scorer, tokenizer.decode, meshes.trainer, steps=data.make_step_scorer(config))
        if scorer.asks_ahead:
            player.heard = scored.ahead
        yield OpenPolicy(
            config=config,
            files=files,
            model=model,
            tokenizer=tokenizer,
            engine=made,
            player=player,
            replies=replies,
            scorer=scored,
        )
