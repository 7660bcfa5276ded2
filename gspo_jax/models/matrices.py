"""A matrix as a layer computes with it: weights, int8 column scales, an adapter, and a bias beside.

Modules hold these as parameters named after the weights.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from gspo_jax.kernels.adapted_matmul import LowRank
from gspo_jax.kernels.dense_matmul import matmul
from gspo_jax.kernels.grouped_matmul import scaled
from gspo_jax.parallel import spread

ADAPTER = "_adapter"
"""Name suffix of a parameter's `lora.Adapter`."""
SCALE = "_scale"
"""Name suffix of a parameter's `int8.Scale`."""
BIAS = "_bias"
"""Name suffix of a projection's bias, which is trained with the matrix and has no adapter."""


class Matrix(NamedTuple):
    """W · diag(scale) + s A B, or one per expert. The parts are never added up."""

    weights: Shaped[Array, "*E n m"]
    """W: int8 if there is a scale, else in the tokens' dtype."""
    scale: Float[Array, "*E m"] | None = None
    """Per column, float32."""
    low: LowRank | None = None
    """In the tokens' dtype."""
    shard: Shaped[Array, "e n m"] | None = None
    """This shard's part of experts' gathered weights, which a TPU's backward pass gathers again."""

    def __call__(self, x: Float[Array, "*N n"]) -> Float[Array, "*N m"]:
        """Return x times the matrix, in x's dtype; not for experts."""
        y = matmul(x, self.weights.astype(x.dtype))
        y = y if self.scale is None else scaled(y, self.scale)
        return y if self.low is None else y + self.low(x)


def matrix(module: nnx.Module, name: str, dtype: DTypeLike) -> Matrix:
    """Return a module's matrix `name` to compute in `dtype`."""
    weights: Any = getattr(module, name)
    scale, adapter = (getattr(module, name + beside, None) for beside in (SCALE, ADAPTER))
    return Matrix(
        weights.astype(dtype) if scale is None else weights[...],
        None if scale is None else scale[...],
        None if adapter is None else adapter.low_rank(dtype),
    )


def project(module: nnx.Module, names: Sequence[str], x: Float[Array, "B T n"]) -> list[Float[Array, "B T _"]]:
    """Return x times each of a module's matrices, plus its bias if it has one, in x's dtype."""
    own = {name: matrix(module, name, x.dtype) for name in names}
    bases = {name: m._replace(low=None) for name, m in own.items()}
    over = [name for name in names if spread.is_spread(getattr(module, name))]
    found = {name: bases[name](x) for name in names if name not in over}
    if over:
        columns = [getattr(module, name).get_metadata("axes")[-1] for name in over]
        found |= zip(over, spread.products([bases[name] for name in over], columns, x), strict=True)
    found = {name: found[name] if m.low is None else found[name] + m.low(x) for name, m in own.items()}
    biases = {name: getattr(module, name + BIAS, None) for name in names}
    return [y if (bias := biases[name]) is None else y + bias.astype(y.dtype)[None, None] for name, y in found.items()]
