"""Weights in fp8 with a scale per block, as in DeepSeek-V3's checkpoints (arXiv 2412.19437): read, never written.

A weight is its fp8 value times its block's scale, in float32. Matrices are dequantised as they are read;
activations stay as they are. Other layouts are refused by name.
"""

import dataclasses
import json
import pathlib
import struct
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32

from gspo_jax.errors import UserError

DTYPE = "F8_E4M3"
"""In a safetensors header."""
SCALE = "_scale_inv"
"""What a scale's name adds to its matrix's."""
REMEDY = "give a folder with the model's weights in bfloat16 or float32, those it was quantised from"

Place = tuple[int, tuple[int, ...]]
"""A tensor's first byte in its file, and its shape."""
_SUPPORTED = {"quant_method": ("fp8",), "fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of a matrix that share a scale. Those at its ends may be partial."""

    rows: int
    columns: int

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a matrix's scales; leading dimensions have their own."""
        *outer, rows, columns = shape
        return (*outer, -(-rows // self.rows), -(-columns // self.columns))

    def touched(self, window: tuple[range, ...]) -> tuple[slice, ...]:
        """Return the part of the scales that a part of the matrix needs."""
        *outer, rows, columns = window
        sizes = (rows, self.rows), (columns, self.columns)
        blocks = [slice(span.start // size, -(-span.stop // size)) for span, size in sizes]
        return (*(slice(span.start, span.stop) for span in outer), *blocks)

    def dequantize(
        self, values: Float[np.ndarray, "*E n m"], scales: Float[np.ndarray, "*E a b"], window: tuple[range, ...]
    ) -> Float32[np.ndarray, "*E n m"]:
        """Return the weights at `window` from their values and `touched` scales."""
        rows, columns = (
            np.arange(span.start, span.stop) // size - span.start // size
            for span, size in zip(window[-2:], (self.rows, self.columns), strict=True)
        )
        weights = values.astype(np.float32)
        weights *= scales.astype(np.float32)[..., columns][..., rows, :]
        return weights


def blocks(file: pathlib.Path, quantization: Any) -> Blocks | None:
    """Return the blocks that a config.json's `quantization_config` tells, None if there is none.

    Raises:
      UserError: the weights are quantised in another way.
    """
    if quantization is None:
        return None
    what = f"{file}: quantization_config"
    if not isinstance(quantization, dict):
        raise UserError(f"{what} is {json.dumps(quantization):.100}; it must be an object, so {REMEDY}")
    for field, values in _SUPPORTED.items():
        if (found := quantization.get(field)) not in values:
            only = f"only {json.dumps(values[0])}, with a scale per block"
            raise UserError(f"{what} has {field} {json.dumps(found):.100}; supported: {only}; {REMEDY}")
    size = quantization.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in size):
        only = "only two sizes, such as [128, 128]"
        raise UserError(f"{what} has weight_block_size {json.dumps(size):.100}; supported: {only}; {REMEDY}")
    return Blocks(*size)


def places(file: pathlib.Path) -> dict[str, Place]:
    """Return the place of each tensor of a safetensors file."""
    with open(file, "rb") as content:
        (size,) = struct.unpack("<Q", content.read(8))
        header = json.loads(content.read(size))
    header.pop("__metadata__", None)
    return {name: (8 + size + entry["data_offsets"][0], tuple(entry["shape"])) for name, entry in header.items()}


def read(file: pathlib.Path, place: Place, window: tuple[range, ...]) -> Float[np.ndarray, "*E n m"]:
    """Return a part of a tensor in fp8, which safetensors' NumPy reader does not know."""
    offset, shape = place
    whole = np.memmap(file, np.uint8, "r", offset, shape)
    return np.array(whole[tuple(slice(span.start, span.stop) for span in window)]).view(jnp.float8_e4m3fn)
