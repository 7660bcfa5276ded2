"""JSON lines, and atomic file replacement."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gspo_jax.folder import storage

MAX_LIST = 1024
"""Maximum length of a list metric: one number per layer or expert, never per token."""


def to_python(name: str, value: Any) -> float | int | list[Any]:
    """Return a Python number or list of numbers."""
    array = np.asarray(value)
    if array.ndim > 1 or array.size > MAX_LIST:
        raise ValueError(f"metric {name} has shape {array.shape}; log a number or a list of at most {MAX_LIST} numbers")
    if array.dtype.kind in "OUSMm":
        raise ValueError(f"metric {name} is {value!r}; log a number or a list of numbers")
    if array.dtype.kind in "bui":
        numbers = [int(x) for x in array.reshape(-1)]
    elif array.dtype == np.float32:
        # Shortest decimal of the same float32: 0.1, not 0.10000000149011612.
        numbers = [float(str(x)) for x in array.reshape(-1)]
    else:
        numbers = [float(x) for x in array.reshape(-1)]
    return numbers if array.ndim else numbers[0]


def dumps(row: Mapping[str, Any]) -> str:
    """Return strict one-line ASCII JSON. NaN and infinities become null."""
    return json.dumps(finite(dict(row)), allow_nan=False)


def finite(value: Any) -> Any:
    """Return a value of JSON with null in place of NaN and infinities."""
    if isinstance(value, dict):
        return {name: finite(x) for name, x in value.items()}
    if isinstance(value, list):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically. Links are replaced, not followed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with open(temporary, "x", encoding="utf-8") as file:  # do not follow a link
        file.write(text)
    storage.sync(temporary)
    os.replace(temporary, path)
