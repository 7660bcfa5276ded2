"""Names of scopes (`jax.named_scope`) by which programs tell the planner what their text does not."""

AT_MOST = r"at_most_(\d+)"
"""Pattern of the names that `at_most` makes."""
RARELY = "rarely"
"""A branch that is taken, or a loop that turns, so rarely that costs ignore it."""


def at_most(trips: int) -> str:
    """The name that declares the maximum trip count of a loop whose trips depend on data."""
    return f"at_most_{trips}"
