"""Shell commands that install what is missing, for messages.

No package index has this project, so a command names what an extra requires, by the installed metadata. It works in a
checkout and beside a wheel.
"""

import importlib.util
import os
import shlex
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def python() -> str:
    """Return this interpreter as a shell in the current folder takes it."""
    near = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if near.startswith(os.pardir) else near)


def of_extra(extra: str) -> str:
    """Return the command that installs the extra's packages."""
    found = [each for each in requirements() if each.marker is not None and each.marker.evaluate({"extra": extra})]
    if not found:  # run from a checkout that is not installed
        return _install("-e", f"{Path(__file__).resolve().parents[1]}[{extra}]")
    return _install(*(str(each).partition(";")[0].strip() for each in found))


def of_package(name: str) -> str:
    """Return the command that installs a package, in a version that this project supports."""
    bound = bounds().get(canonicalize_name(name))
    return _install(name if bound is None else f"{bound.name}{bound.specifier}")


def of_system(package: str) -> str:
    """Return the command that installs a package of Debian's or Ubuntu's."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    return f"{sudo}apt-get update && {sudo}apt-get install -y {package}"


def requirements() -> list[Requirement]:
    """Return what this project requires, with its extras, by the installed metadata; [] without."""
    try:
        return [Requirement(text) for text in metadata.requires("gspo_jax") or ()]
    except metadata.PackageNotFoundError:
        return []


def bounds() -> dict[str, Requirement]:
    """Return the requirement of each package by canonical name, an extra's where no other names it."""
    found: dict[str, Requirement] = {}
    for each in requirements():
        found.setdefault(canonicalize_name(each.name), each)
    return found


def _install(*words: str) -> str:
    pip = f"{python()} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python={python()}"
    return f"{pip} {' '.join(map(shlex.quote, words))}"
