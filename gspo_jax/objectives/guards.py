"""What hyper-parameters would do that nobody wants: sentences for the caller to show, nothing is raised."""

from gspo_jax.objectives.objective import Objective

WIDE_SEQUENCE_CLIP = 0.05
"""The mean over hundreds of tokens of log-ratios hardly ever leaves a clip range as wide as this."""
NARROW_TOKEN_CLIP = 0.01
"""The ratios of many tokens move further than this within a few updates."""


def clip_range_warning(objective: Objective) -> str | None:
    """One sentence where a bound is of the wrong size for the ratio it bounds, a token's or a response's, else None."""
    if objective.level == "sequence":
        suspicious = {name: bound for name, bound in objective.bounds.items() if bound >= WIDE_SEQUENCE_CLIP}
        bounded = "the ratio of a whole response"
        effect = "that mean over tokens hardly ever moves so far and next to nothing will be clipped"
        usual = "the GSPO paper uses low=3e-4 and high=4e-4"
    else:
        suspicious = {name: bound for name, bound in objective.bounds.items() if bound < NARROW_TOKEN_CLIP}
        bounded = "the ratio of every token"
        effect = "many tokens leave such a range in the first updates and will be cut there"
        usual = "papers with a ratio for each token use 0.2 and more"
    if not suspicious:
        return None
    given = " and ".join(f"{name}={bound:g}" for name, bound in suspicious.items())
    return f"{objective.name} bounds {bounded} by {given}: {effect}; {usual}"
