"""Grouped matmul beside low-rank adapters, y = x W + s (x A) B with a W, an A and a B for each expert.

On TPU the kernels that multiply by W compute the adapters' products too, of all matrices at once, and add them before
they write y, as they do with the gradient of x. Elsewhere the products are grouped matmuls of their own, and added up.
Matrices that every token passes, and their adapters, are multiplied in models/matrices.py.
"""

import itertools
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from gspo_jax.kernels import adapted_matmul_tpu, grouped_matmul_tpu
from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.grouped_matmul import Scaled, Weights, grouped_matmuls, stacked_matmuls, values_and_scales
from gspo_jax.kernels.grouped_matmul_tpu import Thin


@struct.dataclass
class LowRank:
    """The matrices of an adapter; experts have one pair each, [E, n, r] and [E, r, m]."""

    a: Float[Array, "*E n r"]
    b: Float[Array, "*E r m"]
    scale: float = struct.field(pytree_node=False)
    """Factor of their product."""

    def __call__(self, x: Float[Array, "*N n"]) -> Float[Array, "*N m"]:
        """s (x A) B, in x's dtype; the thin product is scaled, and no matrix."""
        return (x @ self.a * self.scale) @ self.b


Lows = tuple[LowRank | None, ...]
"""The adapter of each matrix, None for one without."""


def adapted_matmuls(
    rows: Float[Array, "N D"],
    weights: tuple[Weights, ...],
    lows: Lows,
    group_sizes: Int[Array, " E"],
    *,
    layer: Int[Array, ""] | None = None,
    likely: int | None = None,
) -> list[Float[Array, "N F"]]:
    """Multiply each row by the matrices of its group and by their adapters: out_i[n] = rows[n] @ (W_i + s_i A_i B_i).

    Rows beyond the groups are undefined, in the output as in the gradient.

    Args:
      rows: sorted by group.
      weights: all of one shape, and all or none in int8. Beside adapters they are frozen: nothing may ask for their
        gradient, which on TPU is not computed.
      lows: their adapters.
      group_sizes: int32, summing to at most N.
      layer: the layer to take from weights of all layers, [L, E, D, F], without a gradient; adapters and scales are
        the layer's. None if the weights are one layer's.
      likely: expected total of `group_sizes`, a tuning hint; None expects all N rows in use.
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
    """`adapted_matmuls` by a grouped matmul for each product, which are added up."""
    thin = partial(grouped_matmuls, group_sizes=group_sizes, tail=False, likely=likely)
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


def _side_by_side(lows: Lows, dtype: Any) -> Thin:
    """The adapters of matrices of which one or more have any, as one of rank R, the sum of theirs.

    B of each matrix is zero in the rows of other adapters than its own. A rank of one gets a second row of zeros: the
    TPU compiler takes no product over a single column.
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
    """`adapted_matmuls` by the kernels for TPU."""
    thin = _side_by_side(lows, rows.dtype)
    if layer is None:
        return _fused(rows, weights, thin, group_sizes, likely, interpret)
    whole = tuple(w._replace(values=_flat(w.values)) if isinstance(w, Scaled) else _flat(w) for w in weights)
    return _products(rows, whole, thin, group_sizes, layer=layer, likely=likely, interpret=interpret)


def _flat(w: Shaped[Array, "L E D F"]) -> Shaped[Array, "M D F"]:
    """The matrices of all layers in one dimension."""
    return w.reshape(-1, *w.shape[2:])


def _products(rows: Array, weights: tuple[Weights, ...], thin: Thin, group_sizes: Array, **options: Any) -> list[Array]:
    values, scales = values_and_scales(weights)
    return list(grouped_matmul_tpu.matmuls(rows, values, group_sizes, scales=scales, thin=thin, **options))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _fused(
    rows: Array, weights: tuple[Weights, ...], thin: Thin, group_sizes: Array, likely: int | None, interpret: bool
) -> list[Array]:
    """The products; only rows and adapters have a gradient."""
    return _products(rows, weights, thin, group_sizes, likely=likely, interpret=interpret)


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
