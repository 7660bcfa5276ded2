"""Digests of files that a config names."""

from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax import foreign, references
from gspo_jax.data import tokenizer
from gspo_jax.data.contents import file_digest
from gspo_jax.models.config_json import CONFIG
from gspo_jax.setup import functions, servers
from gspo_jax.setup.fields import at

MODEL_FILES = (CONFIG, *tokenizer.FILES)

SHAPE = f"{CONFIG} of the model"

FUNCTION = "functions."


def of_run(config: ConfigDict, folder: Path) -> dict[str, str]:
    """Return digests of files that responses and rewards depend on, except data and weights, by name in messages."""
    there = [name for name in MODEL_FILES if foreign.is_file(folder / name, inside=folder)]
    found = {f"{name} of the model": file_digest(folder / name) for name in there}
    found |= {"data.few_shot": file_digest(Path(config.data.few_shot))} if config.data.few_shot else {}
    found |= {name: file_digest(Path(at(config, name))) for name in servers.FILES if _used(config, name)}
    return {name: one for name, one in (found | of_functions(config)).items() if one}


def of_teacher(config: ConfigDict) -> dict[str, str]:
    """Return the digest of the teacher's config.json, if there is a teacher, by name in messages."""
    folder = config.teacher.folder
    return {f"{CONFIG} of the teacher": file_digest(Path(folder) / CONFIG)} if folder else {}


def _used(config: ConfigDict, name: str) -> bool:
    return name.partition(".")[0] in config.rewards and bool(at(config, name))


def of_functions(config: ConfigDict) -> dict[str, str]:
    """Return digests of user functions' source files, by function and file."""
    found: dict[str, str] = {}
    for name, reference in functions.own(config).items():
        files = references.files(reference)
        for file in files:
            place = file.relative_to(files[0].parent) if file.is_relative_to(files[0].parent) else file.name
            key = f"{FUNCTION}{name} ({place})"
            found[key] = found.get(key, "") + file_digest(file)  # files elsewhere may share a name
    return found


def places(config: ConfigDict) -> dict[str, str]:
    """Return the files and folders of rows, conversations and examples, by field. Unused ones are empty."""
    found = {f"data.{name}": config.data[name] for name in ("folder", "train", "test", "few_shot")}
    found["coldstart.conversations"] = config.coldstart.conversations
    for source, section in config.data.sources.items():
        found |= {f"data.sources.{source}.{name}": section[name] for name in ("train", "test")}
    return found


def of_rows(config: ConfigDict) -> dict[str, str]:
    """Return digests of configured rows, conversations and examples, by field."""
    return {name: file_digest(Path(place)) for name, place in places(config).items() if place}
