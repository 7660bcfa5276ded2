"""A batch of responses with their rewards."""

import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Shaped

from gspo_jax.data.tokenizer import Tokenizer, decode_responses
from gspo_jax.parallel import hosts
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rewards.step_scorer import StepScorer, place_step_rewards
from gspo_jax.types import EpisodeBatch, Packing, Rollout


@struct.dataclass
class Scored:
    """Responses with their rewards: the rollout on the devices, everything else on the host of every process."""

    rollout: Rollout
    """The responses."""
    texts: Shaped[np.ndarray, " B"]
    """Prompt text of each response."""
    lengths: Int[np.ndarray, " B"]
    """Tokens of each response, including an environment's replies."""
    drawn: Int[np.ndarray, " B"]
    """Tokens of each response that the policy sampled."""
    truncated: Bool[np.ndarray, " B"]
    """True for responses cut off at the length limit."""
    turns: Int[np.ndarray, " B"]
    """Turns the policy took."""
    stale_tokens: Int[np.ndarray, " B"]
    """Tokens sampled by policies older than the current one (partial rollouts)."""
    records: Shaped[np.ndarray, " B"]
    """Data record of each prompt, such as its answer."""
    total: Float[np.ndarray, " B"]
    """Weighted sum of the reward functions; NaN if one of them, or of the step rewards, failed."""
    by_name: dict[str, Float[np.ndarray, " B"]]
    """Score of each reward function, and mean score per step of each step-reward function; NaN without a score."""
    learn: Bool[np.ndarray, " B"]
    """False for responses excluded from learning: not scored, or padding of a dynamic batch."""
    step_rewards: Float[np.ndarray, "B T"] | None = None
    """Weighted reward of a step at the token that ends it, 0 elsewhere; None without step rewards."""
    steps: Bool[np.ndarray, "B T"] | None = None
    """True at tokens that end a step; None without step rewards."""
    packing: Packing | None = None
    """Rows that compute the responses; None if they are padded, and before the batch is complete."""

    def contrast(self, group_size: int) -> Bool[np.ndarray, " P"]:
        """True for groups whose responses have different rewards, ignoring those that could not be scored."""
        groups = self.total.reshape(-1, group_size)
        scored = np.isfinite(groups)
        high = np.where(scored, groups, -np.inf).max(axis=1)
        return high > np.where(scored, groups, np.inf).min(axis=1)


def score_episodes(
    episodes: EpisodeBatch, tokenizer: Tokenizer, scorer: Scorer, step_scorer: StepScorer | None, mesh: Mesh
) -> Scored:
    """Score a batch of finished episodes; every process scores its own rows, and all receive all of them."""
    rollout, B = episodes.rollout, len(episodes.texts)
    own = hosts.own_rows(mesh, B)  # until the last line, columns hold this process's rows only
    tokens, mask, drawn, truncated = hosts.fetch_own_rows(
        mesh, (rollout.tokens, rollout.mask, rollout.action_mask, rollout.truncated)
    )
    completions = decode_responses(tokenizer, tokens, mask)
    texts, records = episodes.texts[own].tolist(), episodes.records[own].tolist()
    scores = scorer.score(texts, completions, records)
    total, by_name = scores.total, scores.by_name
    step_rewards = steps = None
    if step_scorer is not None:
        found = step_scorer.score(texts, completions, records)
        total, by_name = np.where(found.failed, np.float32(np.nan), total), by_name | found.by_name
        step_rewards, steps = place_step_rewards(found.steps, tokens, mask, tokenizer.decode)
        # An environment's reply is not a step of the policy.
        step_rewards, steps = np.where(drawn, step_rewards, 0), steps & drawn
    columns = {
        "lengths": mask.sum(axis=1),
        "drawn": drawn.sum(axis=1),
        "truncated": truncated,
        "total": total,
        "by_name": by_name,
        "learn": np.isfinite(total),
        "step_rewards": step_rewards,
        "steps": steps,
    }
    return Scored(**episodes._asdict(), **hosts.allgather_rows(mesh, columns, B))
