"""Functions of a user's own that end the process they are called in, each in another way, and a config that does."""

import argparse
import os
import sys


def get_config(way: str) -> None:
    """End the process while the config is made."""
    {"exit": exit, "quit": quit, "os": lambda: os._exit(0)}[way]()


def get_sweep(way: str) -> None:
    """End the process while the sweep is planned."""
    get_config(way)


def exits(prompt: object = None, completion: object = None, record: object = None) -> None:
    """End the process as most do: a reward, an environment, an objective, a data set."""
    del prompt, completion, record
    sys.exit(0)


def leaves(prompt: object = None, completion: object = None, record: object = None) -> None:
    """End the process at once."""
    del prompt, completion, record
    os._exit(0)


def reads(split: str, **options: object) -> None:
    """End the process where the rows of a data set are asked for."""
    del split, options
    raise SystemExit


def parses(prompt: object = None, completion: object = None, record: object = None) -> None:
    """End the process from within a module of Python's, as one does that parses a completion as a command."""
    argparse.ArgumentParser().parse_args([str(prompt), str(completion), str(record)])


def becomes_another(prompt: object = None, completion: object = None, record: object = None) -> None:
    """End the process with code 0 where nothing in it can tell."""
    del prompt, completion, record
    os.execv(sys.executable, [sys.executable, "-c", ""])


def cancels(prompt: object = None, completion: object = None, record: object = None) -> None:
    """Raise what is no Exception, as a library of Rust does that panics."""
    raise GeneratorExit(prompt, completion, record)
