"""Numbers as a person writes them: 0.00001, not 1e-05, and 0.1, not 0.10000000149011612."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np


def number_text(value: float) -> str:
    """Return a finite number without an exponent, in the fewest digits that identify it. 5.0 is "5"."""
    if isinstance(value, int):
        return str(value)
    text = format(Decimal(repr(float(value))), "f").removesuffix(".0")
    return "0" if text == "-0" else text


def widen(values: np.ndarray | np.generic) -> np.ndarray | np.generic:
    """Return narrow floats as the float64 with the same digits: float32 0.1 as float64 0.1."""
    narrow = values.dtype.kind == "f" and values.dtype.itemsize < np.dtype(np.float64).itemsize
    return values.astype(np.str_).astype(np.float64) if narrow else values


def widened(kind: Any) -> Any:
    """Return the pyarrow type that `kind` is widened to."""
    import pyarrow as pa

    return pa.float64() if kind in (pa.float16(), pa.float32()) else kind


def widen_as(value: Any, kind: Any) -> Any:
    """Widen the narrow floats in a value read by pyarrow."""
    import pyarrow.types as is_

    if value is None:
        return None
    if widened(kind) != kind:
        return float(widen(np.float16(value) if is_.is_float16(kind) else np.float32(value)))
    if is_.is_struct(kind) and isinstance(value, Mapping):
        return {field.name: widen_as(value[field.name], field.type) for field in kind}
    if is_.is_map(kind):
        return [(widen_as(key, kind.key_type), widen_as(inner, kind.item_type)) for key, inner in value]
    if is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind):
        return [widen_as(inner, kind.value_type) for inner in value]
    return value
