"""Returns what cannot cross."""


def f(x):
    return iter(range(10_000_000))
