"""Grouped matmul with low-rank adapters: y = x W + s (x A) B, with one W, A and B per expert.

On TPU the kernels add up all products before they write y or the gradient of x.
"""

import itertools
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from gspo_jax.kernels import adapted_matmul_tpu, grouped_matmul_tpu
from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.grouped_matmul import (
    Weights,
    all_layers,
    grouped_matmuls,
    stacked_matmuls,
    tpu_products,
    values_and_scales,
)
from gspo_jax.kernels.grouped_matmul_tpu import Thin


@struct.dataclass
class LowRank:
    """An adapter's matrices. Experts have one pair each."""

    a: Float[Array, "*E n r"]
    b: Float[Array, "*E r m"]
    scale: float = struct.field(pytree_node=False)

    def __call__(self, x: Float[Array, "*N n"]) -> Float[Array, "*N m"]:
        """Return s (x A) B in x's dtype."""
        return (x @ self.a * self.scale) @ self.b


Lows = tuple[LowRank | None, ...]
"""None: no adapter."""


def adapted_matmuls(
    rows: Float[Array, "N D"],
    weights: tuple[Weights, ...],
    lows: Lows,
    group_sizes: Int[Array, " E"],
    *,
    layer: Int[Array, ""] | None = None,
    likely: int | None = None,
) -> list[Float[Array, "N F"]]:
    """Multiply each row by its group's adapted matrices: out_i[n] = rows[n] @ (W_i + s_i A_i B_i).

    Rows past the groups are undefined, also in the gradient.

    Args:
      rows: sorted by group.
      weights: of one shape, all or none in int8. With adapters they are frozen: on TPU they get no gradient.
      layer: the layer of weights [L, E, D, F], without a gradient; None: one layer's weights. Adapters and scales are
        always one layer's.
      likely: expected sum of `group_sizes`, a tuning hint; None: N.
    """
    run = _together if platform() == "tpu" and any(low is not None for low in lows) else _apart
    return run(rows, weights, lows, group_sizes, layer=layer, likely=likely)


def _apart(
    rows: Array,
    weights: tuple[Weights, ...],
    lows: Lows,
    group_sizes: Array,
    *,
    layer: Array | None,
    likely: int | None,
) -> list[Array]:
    thin = partial(grouped_matmuls, group_sizes=group_sizes, likely=likely)
    given = [low for low in lows if low is not None]
    inner = tuple(low.a for low in given)
    if layer is None:  # rows are read once
        outs = thin(rows, (*weights, *inner))
        outs, inner = outs[: len(weights)], outs[len(weights) :]
    else:
        outs = stacked_matmuls(rows, weights, group_sizes, layer=layer, likely=likely)
        inner = thin(rows, inner) if inner else ()
    scaled = (checkpoint_name(y, "dot") * low.scale for y, low in zip(inner, given, strict=True))
    return [y if low is None else y + thin(next(scaled), (low.b,))[0] for y, low in zip(outs, lows, strict=True)]


def side_by_side(lows: Lows, dtype: Any) -> Thin:
    """Concatenate adapters, each B zero in the rows of the others.

    A rank of one gets a second row of zeros: the TPU compiler rejects products over a single column.
    """
    given = [low for low in lows if low is not None]
    ranks = [0 if low is None else low.a.shape[-1] for low in lows]
    ends, R = itertools.accumulate(ranks), max(2, sum(ranks))
    spare = R - sum(ranks)

    def padded(low: LowRank | None, end: int) -> Array:
        if low is None:
            return jnp.zeros((len(given[0].b), R, given[0].b.shape[-1]), dtype)
        return jnp.pad(low.b, ((0, 0), (end - low.b.shape[-2], R - end), (0, 0)))

    inner = jnp.concatenate([low.a.mT for low in given], axis=1)
    factors = np.repeat([*(low.scale for low in given), 0.0], [*(r for r in ranks if r), spare])
    return Thin(
        (jnp.pad(inner, ((0, 0), (0, spare), (0, 0))),),
        jnp.asarray(factors[None], jnp.float32),
        tuple(padded(low, end) for low, end in zip(lows, ends, strict=True)),
    )


def _together(
    rows: Array,
    weights: tuple[Weights, ...],
    lows: Lows,
    group_sizes: Array,
    *,
    layer: Array | None,
    likely: int | None,
    interpret: bool = False,
) -> list[Array]:
    thin = side_by_side(lows, rows.dtype)
    if layer is None:
        return _fused(rows, weights, thin, group_sizes, likely, interpret)
    options: Any = {"layer": layer, "likely": likely, "interpret": interpret}
    return list(tpu_products(rows, all_layers(weights), group_sizes, thin=thin, **options))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _fused(
    rows: Array, weights: tuple[Weights, ...], thin: Thin, group_sizes: Array, likely: int | None, interpret: bool
) -> list[Array]:
    """Differentiable in rows and adapters only."""
    return list(tpu_products(rows, weights, group_sizes, thin=thin, likely=likely, interpret=interpret))


def _backward(
    likely: int | None, interpret: bool, kept: tuple[Any, ...], grads: list[Array]
) -> tuple[Array, None, Thin, None]:
    rows, weights, thin, group_sizes = kept
    options: dict[str, Any] = {"likely": likely, "interpret": interpret}
    values, scales = values_and_scales(weights)
    d_rows = grouped_matmul_tpu.matmuls_transposed(grads, values, group_sizes, scales=scales, thin=thin.back, **options)
    d_inner, d_outer = adapted_matmul_tpu.gradient(rows, grads, thin, group_sizes, **options)
    return d_rows, None, Thin((d_inner,), cast(Any, None), d_outer), None


_fused.defvjp(lambda *given: (_fused(*given), given[:4]), _backward)
