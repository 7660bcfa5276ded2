"""Warnings about legal but probably unintended hyper-parameters, returned as text for the caller to show."""

from gspo_jax.objectives.objective import Objective

WIDE_SEQUENCE_CLIP = 0.05
"""Bound that the mean log-ratio over hundreds of tokens almost never reaches."""
NARROW_TOKEN_CLIP = 0.01
"""Bound that the ratios of many tokens exceed within a few updates."""


def clip_range_warning(objective: Objective) -> str | None:
    """Return a one-sentence warning if a bound has the wrong scale for its token or sequence ratio, else None."""
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
