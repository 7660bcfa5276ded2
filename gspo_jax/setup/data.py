"""Records, prompt batches and reward functions, from a config."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from gspo_jax.data import tasks
from gspo_jax.data.pipeline import Batches, EvalBatches, PromptBatch, eval_batches, prompt_batches
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.parallel import processes
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rewards.step_scorer import StepScorer
from gspo_jax.setup import functions


def load_records(config: ConfigDict, split: str) -> Sequence[Record]:
    """Load the task's records: the first `data.limit` for training, the first `eval.prompts` of the test split."""
    data = config.data
    limit = config.eval.prompts if split == "test" else data.limit
    return tasks.load(
        data.task,
        own=functions.load(config),
        split=split,
        folder=data.folder or None,
        data_dir=data.data_dir or None,
        limit=limit if limit else None,
        **data.options,
    )


def training_prompts(config: ConfigDict, tokenizer: Tokenizer, records: Sequence[Record]) -> Batches[PromptBatch]:
    """Endless shuffled batches of tokenised training prompts, with a checkpointable position."""
    return prompt_batches(
        records,
        tokenizer,
        prompts_per_batch=config.data.prompts_per_batch,
        max_prompt_length=config.data.max_prompt_length,
        seed=config.seed,
    )


def held_out_prompts(config: ConfigDict, tokenizer: Tokenizer, records: Sequence[Record]) -> EvalBatches:
    """Batches that cover every test prompt once, in order."""
    return eval_batches(
        records,
        tokenizer,
        prompts_per_batch=config.data.prompts_per_batch,
        max_prompt_length=config.data.max_prompt_length,
    )


def make_scorer(config: ConfigDict) -> Scorer:
    """The weighted reward functions, with worker processes for those that may hang; all processes have to call it."""
    own, scoring = functions.own(config), config.scoring
    workers = processes.own_cores() if scoring.workers is None else scoring.workers
    return Scorer(config.rewards.to_dict(), own=own, timeout_s=scoring.timeout_s, workers=workers)


def make_step_scorer(config: ConfigDict) -> StepScorer | None:
    """The weighted step-reward functions; None if the config has none."""
    if not len(config.step_rewards):
        return None
    return StepScorer(config.step_rewards.to_dict(), own=functions.own(config))
