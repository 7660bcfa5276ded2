"""Warnings about legal but probably unintended settings, returned as text."""

from gspo_jax.objectives.objective import Objective

WIDE_SEQUENCE_CLIP = 0.05
"""The mean log-ratio over hundreds of tokens almost never reaches it."""
NARROW_TOKEN_CLIP = 0.01
"""The ratios of many tokens exceed it within a few updates."""
MOST_GATED = 0.02
"""Share of responses with an advantage that rounding may gate."""


def rounding_warning(objective: Objective, gated: float, *, recomputed: bool) -> str | None:
    """Return a one-sentence warning if too many responses are gated in mini-batch 0, where only rounding moves ratios.

    `gated` is its `clip_fraction/learning`, on tokens of the current policy or, with `recomputed`, on its own
    log-probs.
    """
    if gated <= MOST_GATED:
        return None
    what = "responses" if objective.level == "sequence" else "tokens"
    says = (
        f"{gated:.1%} of the {what} with an advantage are gated in mini-batch 0, where every ratio is 1 but for "
        f"rounding ({MOST_GATED:.0%} at most)"
    )
    if recomputed:
        return (
            f"{says}, although the old log-probs are recomputed: two passes of the trainer over the same weights "
            "differ, which is a fault to report; use --config.model.dtype=float32 or wider bounds"
        )
    return (
        f"{says}: {objective.name} does not tolerate the sampler's log-probs as the old policy's here; use "
        "--config.training.old_logprobs=recompute"
    )


def clip_range_warning(objective: Objective) -> str | None:
    """Return a one-sentence warning if a bound has the wrong scale for its token or sequence ratio."""
    if objective.level == "sequence":
        suspicious = {name: bound for name, bound in objective.bounds.items() if bound >= WIDE_SEQUENCE_CLIP}
        bounded = "the ratio of a whole response"
        effect = "a mean over its tokens almost never moves that far, so next to nothing will be clipped"
        usual = "the GSPO paper uses low=3e-4 and high=4e-4"
    else:
        suspicious = {name: bound for name, bound in objective.bounds.items() if bound < NARROW_TOKEN_CLIP}
        bounded = "the ratio of every token"
        effect = "many tokens leave such a narrow range within the first updates and will be clipped"
        usual = "papers with per-token ratios use 0.2 and more"
    if not suspicious:
        return None
    given = " and ".join(f"{name}={bound:g}" for name, bound in suspicious.items())
    return f"{objective.name} bounds {bounded} by {given}: {effect}; {usual}"
