"""Raises what says that a name of the tests is missing."""


def f(x):
    raise NameError("name '__builtins__' is not defined", name="__builtins__")
