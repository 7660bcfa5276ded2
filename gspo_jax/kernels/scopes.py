"""Names of scopes (`jax.named_scope`) that inform the planner."""

AT_MOST = r"at_most_(\d+)"
"""Pattern of `at_most` names."""
RARELY = "rarely"
"""A branch taken, or a loop repeated, so rarely that costs ignore it."""


def at_most(trips: int) -> str:
    """Return the scope name for the maximum trip count of a data-dependent loop."""
    return f"at_most_{trips}"
