"""Digests of the files that a config names: what a run reads besides the config, its records and its weights.

A function counts with the file that its reference names, the one that it is defined in, and what these import that is
neither installed nor of this package.
"""

from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax import foreign, references
from gspo_jax.data import tokenizer
from gspo_jax.data.contents import file_digest
from gspo_jax.models.config_json import CONFIG
from gspo_jax.setup import functions

MODEL_FILES = (CONFIG, *tokenizer.FILES)
"""Files of a model's folder that its shape, its tokenizer and its chat template are read from."""

SHAPE = f"{CONFIG} of the model"
"""What messages call the file that has the model's shape."""

FUNCTION = "functions."
"""How what messages call a function of the config's own begins."""


def of_run(config: ConfigDict, folder: Path) -> dict[str, str]:
    """Digests of the files, beside data and weights, that responses and rewards depend on, by what messages call them.

    Args:
      config: the config.
      folder: the Hugging Face folder that the run starts from.
    """
    there = [name for name in MODEL_FILES if foreign.is_file(folder / name, inside=folder)]
    found = {f"{name} of the model": file_digest(folder / name) for name in there}
    found |= {"data.few_shot": file_digest(Path(config.data.few_shot))} if config.data.few_shot else {}
    return {name: one for name, one in (found | of_functions(config)).items() if one}


def of_functions(config: ConfigDict) -> dict[str, str]:
    """Digests of the source files of the config's own functions, by the names of function and file."""
    found: dict[str, str] = {}
    for name, reference in functions.own(config).items():
        files = references.files(reference)
        for file in files:
            place = file.relative_to(files[0].parent) if file.is_relative_to(files[0].parent) else file.name
            key = f"{FUNCTION}{name} ({place})"
            found[key] = found.get(key, "") + file_digest(file)  # elsewhere, two files may have one name
    return found


def of_rows(config: ConfigDict) -> dict[str, str]:
    """Digests of the files and folders of rows, conversations and examples that a config names, by field."""
    data = config.data
    named = {f"data.{name}": data[name] for name in ("folder", "train", "test", "few_shot")}
    named["coldstart.conversations"] = config.coldstart.conversations
    for source, section in data.sources.items():
        named |= {f"data.sources.{source}.{name}": section[name] for name in ("train", "test")}
    return {name: file_digest(Path(place)) for name, place in named.items() if place}
