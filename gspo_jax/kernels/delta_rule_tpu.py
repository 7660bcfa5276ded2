"""The gated delta rule on TPU: Pallas kernels for forward and backward.

They compute what delta_rule.py says, in chunks of 128 tokens, for one key head with its value heads at a time. States
stay in VMEM from chunk to chunk, and so does all else of a chunk. A grid step takes a group of chunks: first what needs
no state, of several chunks together, then one after the other. The forward kernel writes the states before each group.
The backward kernel makes the group's other states from them again, and takes its chunks in reverse.

q and k enter products as they are, and rows are scaled by 1 / |q|, exp(c) and such before or after: bfloat16 goes
through the matrix units in one pass, beside a float32 factor in two, and two float32 factors in three. Numbers of
tokens are rows, tokens along lanes, until one transposition makes columns of them.

(I + A)^-1 begins with blocks on the diagonal, by substitution in float32, and doubles them: of (L, 0; M, R) the inverse
is (L^-1, 0; −R^-1 M L^-1, R^-1).

What a layer executes in either form, beside the floor: docs/plan/cycles.md.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.backend import unchecked
from gspo_jax.kernels.visits_tpu import LANES, VMEM

NAME = "delta_rule"
CYCLES = {f"{NAME}_backward": 3150, NAME: 1400}
"""Of a chunk and a value head, by how a kernel's name begins: what the compiler (libtpu 0.0.50.1) schedules on v5p for
two value heads to a key head."""
CHUNK = LANES
_GROUP = 4
"""Most chunks of a grid step."""
_TOGETHER = 2
"""Chunks prepared together, so that no product waits for another."""
_ROWS = 8
"""Rows of numbers per token: c, then β of each value head."""
MOST_VALUES = _ROWS // 2
"""Most value heads of a key head."""
_BLOCK = 8
"""Size of blocks inverted by substitution."""
_EPS = 1e-6
"""Added to squared lengths of q and k."""
_MASKED = -1e30
"""Exponent of 0."""


def _dot(a: Array, b: Array, a_over: int = 1, b_over: int = 0) -> Array:
    """Contract one dimension of each, in float32 up to 2^-16."""
    dimensions = (((a_over,), (b_over,)), ((), ()))

    def one(a: Array, b: Array) -> Array:
        precision = jax.lax.Precision.HIGH if a.dtype == jnp.float32 else None
        return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

    if a.dtype == b.dtype:
        return one(a, b)
    if a.dtype == jnp.float32:
        high, low = _halves(a, b.dtype)
        return one(high, b) + one(low, b)
    high, low = _halves(b, a.dtype)
    return one(a, high) + one(a, low)


def _halves(x: Array, dtype: Any) -> tuple[Array, Array]:
    high = x.astype(dtype)
    return high, (x - high.astype(x.dtype)).astype(dtype)


def _iota(shape: tuple[int, ...], axis: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _inverses(lowers: Sequence[Float[Array, "C C"]]) -> list[Float[Array, "C C"]]:
    """Return (I + a)^-1 of strictly lower triangular matrices.

    Equal blocks on a diagonal lie side by side, [b, C], so that few rows pass through the matrix units. One matrix
    after the other would wait for each product: all take a step together.
    """
    C, b = CHUNK, _BLOCK
    rows, columns = (_iota((C, C), axis) for axis in (0, 1))

    def whole(x: Array, b: int) -> Array:
        """Return the matrix with these blocks on its diagonal."""
        return jnp.where(rows // b == columns // b, jnp.concatenate([x] * (C // b), axis=0), 0)

    row, lane = (_iota((b, C), axis) for axis in (0, 1))
    own = rows // b == columns // b
    blocks = [jnp.where(own, a, 0).reshape(C // b, b, C).sum(axis=0) for a in lowers]
    found = [jnp.where(lane % b == row, 1.0, 0.0)] * len(lowers)
    for j in range(b - 1):
        at = lane // b * b + j
        factors = [jnp.take_along_axis(x, at, axis=1, mode="promise_in_bounds") for x in blocks]
        found = [x - factor * x[j : j + 1] for x, factor in zip(found, factors, strict=True)]
    while b < C:
        second = _iota((b, C), 1) // b % 2 == 1
        between = (rows // b == columns // b + 1) & (rows // b % 2 == 1)
        corners = [_dot(jnp.where(second, x, 0), jnp.where(between, a, 0)) for x, a in zip(found, lowers, strict=True)]
        corners = [_dot(corner, whole(x, b)) for x, corner in zip(found, corners, strict=True)]
        found = [
            jnp.concatenate([jnp.where(second, 0, x), jnp.where(second, x, -corner)], axis=0)
            for x, corner in zip(found, corners, strict=True)
        ]
        b *= 2
    return found


class _Token(NamedTuple):
    """A token whose state is read, by its place in a chunk; with leading dimensions, of all chunks."""

    place: Any
    """-1 for none: the state is that before the chunk."""
    start: Any
    end: Any
    own: Any
    """Its spans, counted from the chunk's first token."""
    of_run: Any
    of_prompt: Any
    """1 if it continues this state, else 0."""

    @classmethod
    def at(cls, table: Any, n: Any) -> "_Token":
        """Read one column of a table in SMEM."""
        return cls(*(table[f, n] for f in range(len(cls._fields))))


class _Reads(NamedTuple):
    """A token's state, and each row of numbers, as sums: Σ_j weights_j k_j Δ_j^T + run · S_run + prompt · S_prompt."""

    weights: Float[Array, "n C"]
    run: Float[Array, "n 1"]
    prompt: Float[Array, "n 1"]

    @classmethod
    def of(cls, total: Float[Array, "n C"], token: _Token) -> "_Reads":
        place = _iota(total.shape, 1)
        last = jnp.where(place == token.place, total, 0).sum(axis=1, keepdims=True)
        seen = (token.own <= place) & (place <= token.place) | (token.start <= place) & (place < token.end)
        decay = jnp.exp(last)
        run, prompt = (decay * x.astype(jnp.float32) for x in (token.of_run, token.of_prompt))
        return cls(jnp.exp(jnp.where(seen, last - total, _MASKED)), run, prompt)


_COLUMNS = ("numbers", "step", "run", "run_k", "prompt", "prompt_k", "of_last", "of_prompt_last", "over")
"""Numbers of tokens, `_ROWS` columns each. With |q|' = √dk |q|: c and β; β / |k|; exp(c) of tokens that continue the
running state, 0 of others; the same over |k|; both of the prompt's state; weights of two tokens' states, over |k|; and
1 / |q|', 1 / |k|."""


class _Room(NamedTuple):
    """VMEM for what a group's chunks compute before any state is known."""

    columns: Any
    """[group, C, 128]: `_COLUMNS`."""
    turned: Any
    """[group, dk, 2 C]: q, then k, transposed: the compiler fails where it does so within products."""
    products: Any
    """[group, 2 C, C]: q_i·k_j, and k_i·k_j for j < i."""
    decays: Any
    """[group, values, C, C]: Γ_ij / |k_j|."""
    inverses: Any
    """[group, values, C, C]: (I + A)^-1."""

    @classmethod
    def shapes(cls, rows: "_Rows", dtype: Any) -> list[Any]:
        C, wide = CHUNK, jnp.float32
        matrices = (rows.values, C, C), wide
        shapes = ((C, LANES), wide), ((LANES, 2 * C), dtype), ((2 * C, C), wide), matrices, matrices
        return [pltpu.VMEM((rows.group, *shape), dtype) for shape, dtype in shapes]

    def fill(self, chunks: Sequence["_Given"]) -> None:
        """Prepare chunks."""
        values, lowers = self.decays.shape[1], []
        for chunk in chunks:
            i, total = chunk.number, chunk.numbers
            for n, x in enumerate((chunk.q, chunk.k)):
                self.turned[i, :, n * CHUNK : (n + 1) * CHUNK] = x.T
            q_over, k_over = (_over_length(x.T) for x in (chunk.q, chunk.k))
            q_over *= chunk.q.shape[1] ** -0.5
            run, prompt = (jnp.exp(total) * chunk.flags[n : n + 1] for n in range(2))
            weights = (_Reads.of(total, token).weights * k_over for token in chunk.tokens)
            over = jnp.concatenate([q_over, k_over, jnp.zeros((_ROWS - 2, CHUNK), jnp.float32)], axis=0)
            rows = total, total * k_over, run, run * k_over, prompt, prompt * k_over, *weights, over
            rest = jnp.zeros((LANES - len(rows) * _ROWS, CHUNK), jnp.float32)
            columns = jnp.concatenate([*rows, rest], axis=0).T
            self.columns[i] = columns
            column = _columns(columns)
            products = _dot(jnp.concatenate([chunk.q, chunk.k], axis=0), chunk.k, 1, 1)
            self.products[i, :CHUNK] = products[:CHUNK]
            near = _off_diagonal(products[CHUNK:])
            self.products[i, CHUNK:] = near
            shifted = total - jnp.log(k_over)
            for j in range(values):
                difference = column("numbers", j) - shifted[j : j + 1]
                decays = jnp.exp(jnp.where(chunk.seen > 0, difference, _MASKED))
                self.decays[i, j] = decays
                lowers.append(near * decays * column("step", values + j))
        for n, inverse in enumerate(_inverses(lowers)):
            self.inverses[chunks[n // values].number, n % values] = inverse


class _Given(NamedTuple):
    """A chunk of a group."""

    number: Any
    q: Array
    k: Array
    seen: Array
    flags: Array
    numbers: Array
    tokens: Sequence[_Token]


def _over_length(x: Float[Array, "k C"]) -> Float[Array, "1 C"]:
    x = x.astype(jnp.float32)
    return jax.lax.rsqrt((x * x).sum(axis=0, keepdims=True) + _EPS)


def _columns(x: Any) -> Callable[[str, int], Float[Array, "C 1"]]:
    def column(name: str, n: int) -> Array:
        at = _COLUMNS.index(name) * _ROWS + n
        return x[:, at : at + 1]

    return column


def _off_diagonal(x: Float[Array, "C C"]) -> Float[Array, "C C"]:
    return jnp.where(_iota(x.shape, 0) == _iota(x.shape, 1), 0, x)


class _Chunk(NamedTuple):
    """A chunk whose states are known."""

    number: Any
    """Number of the chunk in its group."""
    q: Float[Array, "C k"]
    k: Float[Array, "C k"]
    turned: Float[Array, "k 2C"]
    column: Callable[[str, int], Array]
    tokens: Sequence[_Token]
    reads: tuple[_Reads, _Reads]
    reads_prompt: Array

    @classmethod
    def at(cls, room: _Room, i: Any, table: Any, n: Any, q: Any, k: Any, numbers: Any) -> "_Chunk":
        *tokens, reads_prompt = _tokens(table, n)
        reads = _Reads.of(numbers[i], tokens[0]), _Reads.of(numbers[i], tokens[1])
        column = _columns(room.columns.at[i])
        return cls(i, q[_at(i), :], k[_at(i), :], room.turned[i], column, tokens, reads, reads_prompt)

    @property
    def both(self) -> Array:
        return jnp.concatenate([self.q, self.k], axis=0)


def _advance(
    room: _Room,
    chunk: _Chunk,
    v: Any,
    before: Any,
    after: Any,
    known: Any,
    put: Callable[[list[Array], list[Array]], None],
) -> None:
    """Take one chunk of all value heads: write the states after it.

    `known` gets exp(c) S^T k of the keys; if it has room for them, first that of the queries, times |q|'.
    put(errors, Δs) takes v − exp(c) S^T k and Δ of all heads.
    """
    values, C, column = len(known), CHUNK, chunk.column
    rows = chunk.both if known.shape[1] > C else chunk.k

    def read(which: int, name: str, put: Callable[[int, Any, Array], None]) -> None:
        for j in range(values):
            found = _dot(rows, before[which, j])
            if len(rows) > C:
                put(j, slice(C), column(name, j) * found[:C])
            put(j, slice(len(rows) - C, len(rows)), column(f"{name}_k", j) * found[-C:])

    def first(j: int, at: Any, found: Array) -> None:
        known[j, at] = found

    def second(j: int, at: Any, found: Array) -> None:
        known[j, at] += found

    read(0, "run", first)
    pl.when(chunk.reads_prompt)(lambda: read(1, "prompt", second))
    errors = [
        v[_at(chunk.number), j * LANES : (j + 1) * LANES].astype(jnp.float32) - known[j, len(rows) - C :]
        for j in range(values)
    ]
    deltas = [
        _dot(room.inverses[chunk.number, j], column("numbers", values + j) * error) for j, error in enumerate(errors)
    ]
    put(errors, deltas)
    # All are read before any is written: to the compiler they may be the same.
    new = [_state(chunk, column("of_last", j), chunk.reads[0], delta, before, j) for j, delta in enumerate(deltas)]
    prompt = before[1]
    for j, state in enumerate(new):
        after[0, j] = state
    after[1] = prompt

    @pl.when(chunk.tokens[1].place >= 0)
    def _() -> None:
        for j, delta in enumerate(deltas):
            after[1, j] = _state(chunk, column("of_prompt_last", j), chunk.reads[1], delta, before, j)


def _state(chunk: _Chunk, weights: Float[Array, "C 1"], reads: _Reads, delta: Array, before: Any, j: int) -> Array:
    """Return the state at a token."""
    one = slice(j, j + 1)
    kept = reads.run[one] * before[0, j] + reads.prompt[one] * before[1, j]
    return kept + _dot(chunk.turned[:, CHUNK:], weights * delta)


def _tokens(table: Any, n: Array) -> tuple[_Token, _Token, Array]:
    """Return a chunk's last token, the last of the prompt that following responses continue, and whether the chunk
    reads the newest prompt's state.
    """
    fields = len(_Token._fields)
    last, prompt = (_Token(*(table[at + f, n] for f in range(fields))) for at in (0, fields))
    return last, prompt, table[2 * fields, n] != 0


def _chunks(group: int, one: Callable[[Any], None], *, reverse: bool = False) -> None:
    def body(i: Any, _: None) -> None:
        one(group - 1 - i if reverse else i)

    jax.lax.fori_loop(0, group, body, None)


def _at(i: Any) -> Any:
    """Return the tokens of a group's chunk."""
    return pl.ds(pl.multiple_of(i * CHUNK, CHUNK), CHUNK)


def _parts(qkv: Any) -> tuple[Any, Any, Any]:
    return qkv.at[:, :LANES], qkv.at[:, LANES : 2 * LANES], qkv.at[:, 2 * LANES :]


def _fill(room: _Room, table: Any, first: Any, seen: Any, flags: Any, numbers: Any, q: Any, k: Any) -> None:
    """Prepare all chunks of a group, the first of which has this number."""
    group = len(seen)
    together = min(_TOGETHER, group)

    def some(n: Any, _: None) -> None:
        chunks = []
        for i in (n * together + m for m in range(together)):
            tokens = _tokens(table, first + i)[:2]
            chunks.append(_Given(i, q[_at(i), :], k[_at(i), :], seen[i], flags[i], numbers[i], tokens))
        room.fill(chunks)

    jax.lax.fori_loop(0, group // together, some, None)


def _forward_kernel(
    table: Any,
    read: Any,
    counts: Any,
    seen: Any,
    flags: Any,
    numbers: Any,
    qkv: Any,
    out: Any,
    found: Any,
    *rest: Any,
    group: int,
) -> None:
    """`found` gets the states at the tokens of `read`, of which counts[n] come before chunk n."""
    *kept, states, known, deltas, held, sent = rest[: -len(_Room._fields)]
    room, (q, k, v) = _Room(*rest[-len(_Room._fields) :]), _parts(qkv)
    head, n = pl.program_id(0), pl.program_id(2)
    first = (pl.program_id(1) * pl.num_programs(2) + n) * group
    values, C = len(known), CHUNK

    @pl.when(n == 0)
    def _() -> None:
        states[0] = jnp.zeros_like(states[0])

    if kept:
        kept[0][...] = states[n * group % 2]

    _fill(room, table, first, seen, flags, numbers, q, k)

    def one(i: Any) -> None:
        number, at = n * group + i, _at(i)
        chunk = _Chunk.at(room, i, table, first + i, q, k, numbers)
        before, after = states.at[number % 2], states.at[(number + 1) % 2]

        def put(errors: list[Array], found: list[Array]) -> None:
            del errors
            for j, delta in enumerate(found):
                deltas[j] = delta
                o = known[j, :C] + _dot(room.products[i, :C] * room.decays[i, j], delta)
                out[at, j * LANES : (j + 1) * LANES] = (chunk.column("over", 0) * o).astype(out.dtype)

        _advance(room, chunk, v, before, after, known, put)

        def keep(e: Any, _: None) -> None:
            reads = _Reads.of(numbers[i], _Token.at(read, e))
            rest = jnp.zeros((LANES - _ROWS, C), jnp.float32)
            weights = jnp.concatenate([reads.weights, rest], axis=0).T * chunk.column("over", 1)
            for j in range(values):
                held[j] = _state(chunk, weights[:, j : j + 1], reads, deltas[j], before, j)
            copy = pltpu.make_async_copy(held, found.at[e, head], sent)
            copy.start()
            copy.wait()

        jax.lax.fori_loop(counts[first + i], counts[first + i + 1], keep, None)

    _chunks(group, one)


def _backward_kernel(
    table: Any,
    seen: Any,
    flags: Any,
    numbers: Any,
    qkv: Any,
    kept: Any,
    grads: Any,
    d_qkv: Any,
    d_numbers: Any,
    states: Any,
    known: Any,
    errors: Any,
    deltas: Any,
    d_states: Any,
    more: Any,
    d_delta: Any,
    d_written: Any,
    solved: Any,
    d_read: Any,
    last_grads: Any,
    *of_room: Any,
    group: int,
) -> None:
    """`d_states` are the gradients of the states after a chunk, then before it.

    Tokens take part in c's gradient by what they read, times it, less what they write.
    """
    row, n = pl.program_id(1), pl.num_programs(2) - 1 - pl.program_id(2)
    first = (row * pl.num_programs(2) + n) * group
    values, C, room = len(known), CHUNK, _Room(*of_room)
    (q, k, v), (dq, dk, dv) = _parts(qkv), _parts(d_qkv)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        d_states[...] = jnp.zeros_like(d_states)

    states[0] = kept[...]

    _fill(room, table, first, seen, flags, numbers, q, k)

    def again(i: Any) -> None:
        chunk = _Chunk.at(room, i, table, first + i, q, k, numbers)

        def put(own_errors: list[Array], own_deltas: list[Array]) -> None:
            for j, (error, delta) in enumerate(zip(own_errors, own_deltas, strict=True)):
                errors[i, j], deltas[i, j] = error, delta

        _advance(room, chunk, v, states.at[i], states.at[i + 1], known, put)

    _chunks(group, again)

    def back(i: Any) -> None:
        chunk, at = _Chunk.at(room, i, table, first + i, q, k, numbers), _at(i)
        rows, column, tokens = chunk.both, chunk.column, chunk.tokens
        scores, near = room.products[i, :C], room.products[i, C:]
        before, after = states.at[i], states.at[i + 1]

        def scaled(j: int) -> Array:
            return column("over", 0) * grads[at, j * LANES : (j + 1) * LANES].astype(jnp.float32)

        def through(weight: Array, which: int, j: int) -> tuple[Array, Array, Array]:
            """Return the gradients of Δ, of the keys as written, and of c at the token."""
            d_state = d_states[which, j]
            at_token = (d_state * after[which, j]).sum(axis=0, keepdims=True).sum(axis=1, keepdims=True)
            return weight * _dot(chunk.k, d_state), _dot(weight * deltas[i, j], d_state, 1, 1), at_token

        def taken(name: str, j: int) -> Array:
            d_error = column("numbers", values + j) * solved[j]
            return jnp.concatenate([column(name, j) * scaled(j), -column(f"{name}_k", j) * d_error], axis=0)

        @pl.when(tokens[1].place >= 0)
        def _() -> None:
            for j in range(values):
                reads, d_state = chunk.reads[1], d_states[1, j]
                d_delta[j], d_written[j], at_token = through(column("of_prompt_last", j), 1, j)
                last_grads[j : j + 1] = jnp.broadcast_to(at_token, (1, LANES))
                more[j] = reads.run[j : j + 1] * d_state
                d_states[1, j] = reads.prompt[j : j + 1] * d_state

        @pl.when(tokens[1].place < 0)
        def _() -> None:
            for x in (d_delta, d_written, more, last_grads):
                x[...] = jnp.zeros_like(x)

        lane = _iota((1, C), 1)
        of_tokens = []
        for j in range(values):
            reads, d_state = chunk.reads[0], d_states[0, j]
            delta_grad, written, at_token = through(column("of_last", j), 0, j)
            of_tokens.append(
                jnp.where(lane == tokens[0].place, at_token, 0)
                + jnp.where(lane == tokens[1].place, last_grads[j : j + 1], 0)
            )
            d_written[j] += written
            delta_grad += d_delta[j] + _dot(scores * room.decays[i, j], scaled(j), 0, 0)
            y = _dot(room.inverses[i, j], delta_grad, 0, 0)
            solved[j] = y
            dv[at, j * LANES : (j + 1) * LANES] = (column("numbers", values + j) * y).astype(dv.dtype)
            taken_grad = taken("run", j)
            d_read[j] = _dot(taken_grad, before[0, j], 1, 1)
            d_states[1, j] += reads.prompt[j : j + 1] * d_state
            d_states[0, j] = reads.run[j : j + 1] * d_state + more[j] + _dot(chunk.turned, taken_grad)

        @pl.when(chunk.reads_prompt)
        def _() -> None:
            for j in range(values):
                taken_grad = taken("prompt", j)
                d_read[j] += _dot(taken_grad, before[1, j], 1, 1)
                d_states[1, j] += _dot(chunk.turned, taken_grad)

        wide_q, wide_k = (x.astype(jnp.float32) for x in (chunk.q, chunk.k))
        d_scores = d_near = jnp.zeros((C, C), jnp.float32)
        d_q = d_k = jnp.zeros((C, LANES), jnp.float32)
        columns, of_rows = jnp.zeros((C, C), jnp.float32), []
        for j in range(values):
            decays, y, delta = room.decays[i, j], solved[j], deltas[i, j]
            own_scores = _dot(scaled(j), delta, 1, 1) * decays
            own_near = -_dot(y, delta, 1, 1) * decays
            by_near = own_near * near
            step = column("step", values + j)
            d_scores += own_scores
            d_near += step * own_near
            by_decays = own_scores * scores + step * by_near
            q_read, k_read, written = d_read[j, :C], d_read[j, C:], d_written[j]
            d_q += q_read
            d_k += k_read + written
            by_total = by_decays + wide_q * q_read + wide_k * (k_read - written)
            of_total = by_total.sum(axis=1, keepdims=True)
            of_beta = (y * errors[i, j] + column("over", 1) * by_near).sum(axis=1, keepdims=True)
            place = _iota((C, C), 1)
            columns += jnp.where(place == j, of_total, 0) + jnp.where(place == values + j, of_beta, 0)
            of_rows.append(of_tokens[j] - by_decays.sum(axis=0, keepdims=True))
        both = jnp.concatenate([d_scores, _off_diagonal(d_near)], axis=0)
        found = _dot(both, chunk.k)
        d_q += found[:C]
        d_k += found[C:] + _dot(both, rows, 0, 0)
        of_rows.append(jnp.zeros((_ROWS - values, C), jnp.float32))
        d_numbers[i] = columns.T[:_ROWS] + jnp.concatenate(of_rows, axis=0)
        for n, (out, grad, x, scale) in enumerate(((dq, d_q, wide_q, LANES), (dk, d_k, wide_k, 1))):
            over = column("over", n)
            inner = (x * grad).sum(axis=1, keepdims=True) * (scale * over * over)
            out[at, :] = (grad - x * inner).astype(out.dtype)

    _chunks(group, back, reverse=True)


class _Rows(NamedTuple):
    """Static sizes."""

    rows: int
    groups: int
    """Grid steps of a row."""
    group: int
    """Chunks of a grid step."""
    values: int
    interpret: bool


def _call(
    kernel: Callable[..., None],
    rows: _Rows,
    scalars: Sequence[Array],
    inputs: Sequence[tuple[Array, pl.BlockSpec]],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: Sequence[Any],
    name: str,
) -> tuple[Array, ...]:
    heads = len(inputs[2][0])
    run = pl.pallas_call(
        functools.partial(kernel, group=rows.group),
        out_shape=tuple(shape for shape, _ in outputs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            in_specs=tuple(spec for _, spec in inputs),
            out_specs=tuple(spec for _, spec in outputs),
            grid=(heads, rows.rows, rows.groups),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=rows.interpret,
        name=name,
    )
    return unchecked(run, *scalars, *(x for x, _ in inputs))


class _Specs(NamedTuple):
    seen: pl.BlockSpec
    flags: pl.BlockSpec
    numbers: pl.BlockSpec
    qkv: pl.BlockSpec
    out: pl.BlockSpec
    states: pl.BlockSpec

    @classmethod
    def of(cls, rows: _Rows, *, reverse: bool = False) -> "_Specs":
        group, values, groups, L = rows.group, rows.values, rows.groups, LANES

        def step(row: Any, n: Any) -> Any:
            return row * groups + (groups - 1 - n if reverse else n)

        return cls(
            pl.BlockSpec((group, CHUNK, CHUNK), lambda h, b, n, *_: (step(b, n), 0, 0)),
            pl.BlockSpec((group, _ROWS, CHUNK), lambda h, b, n, *_: (step(b, n), 0, 0)),
            pl.BlockSpec((None, group, _ROWS, CHUNK), lambda h, b, n, *_: (h, step(b, n), 0, 0)),
            pl.BlockSpec((group * CHUNK, (2 + values) * L), lambda h, b, n, *_: (step(b, n), h)),
            pl.BlockSpec((group * CHUNK, values * L), lambda h, b, n, *_: (step(b, n), h)),
            pl.BlockSpec((None, None, 2, values, L, L), lambda h, b, n, *_: (h, step(b, n), 0, 0, 0, 0)),
        )


def _states(*lead: int) -> Any:
    return pltpu.VMEM((*lead, LANES, LANES), jnp.float32)


def _run(qkv: Array, numbers: Array, places: "_Places", rows: _Rows, *, keep: bool) -> tuple[Array, ...]:
    """Return o, the states that were read, and with `keep` the states before each group."""
    specs, values, heads = _Specs.of(rows), rows.values, len(numbers)
    read = jax.ShapeDtypeStruct((places.read.shape[1], heads, values, LANES, LANES), jnp.float32)
    kept = jax.ShapeDtypeStruct((heads, rows.rows * rows.groups, 2, values, LANES, LANES), jnp.float32)
    out = jax.ShapeDtypeStruct((len(qkv), heads * values * LANES), qkv.dtype)
    return _call(
        _forward_kernel,
        rows,
        (places.table, places.read, places.counts),
        (
            (places.seen, specs.seen),
            (places.flags, specs.flags),
            (numbers, specs.numbers),
            (qkv, specs.qkv),
        ),
        (
            (out, specs.out),
            (read, pl.BlockSpec(memory_space=pl.ANY)),
            *([(kept, specs.states)] if keep else []),
        ),
        (
            _states(2, 2, values),
            pltpu.VMEM((values, 2 * CHUNK, LANES), jnp.float32),
            *[_states(values)] * 2,
            pltpu.SemaphoreType.DMA,
            *_Room.shapes(rows, qkv.dtype),
        ),
        NAME,
    )


class _Places(NamedTuple):
    """Which tokens and states the tokens of each chunk continue."""

    seen: Float[Array, "n C C"]
    """1 where the third axis's token is the second's or its ancestor, else 0."""
    flags: Float[Array, "n 8 C"]
    """1 for tokens that continue the running state, and for those that continue the newest prompt's."""
    table: Int[Array, "f n"]
    """The two tokens of `_tokens` per chunk, and 1 if some token reads the prompt's state."""
    read: Int[Array, "f E"]
    """Tokens whose states are returned, in order."""
    counts: Int[Array, " n+1"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rule(qkv: Array, numbers: Array, places: _Places, rows: _Rows) -> tuple[Array, Array]:
    out, found = _run(qkv, numbers, places, rows, keep=False)
    return out, found


def _rule_forward(qkv: Any, numbers: Any, places: Any, rows: _Rows) -> tuple[tuple[Array, Array], Any]:
    given = qkv, numbers, places
    qkv, numbers, places = jax.tree.map(lambda x: x.value, given, is_leaf=lambda x: hasattr(x, "perturbed"))
    out, found, kept = _run(qkv, numbers, places, rows, keep=True)
    out, kept = (checkpoint_name(x, "dot") for x in (out, kept))
    return (out, found), (qkv, numbers, places, kept)


def _rule_backward(rows: _Rows, residuals: Any, grads: Any) -> tuple[Any, ...]:
    qkv, numbers, places, kept = residuals
    if not isinstance(grads[1], jax.custom_derivatives.SymbolicZero):
        raise NotImplementedError("the delta rule's states have no gradient on TPU")
    d_out: Any = grads[0]
    if isinstance(d_out, jax.custom_derivatives.SymbolicZero):
        d_out = jnp.zeros((len(qkv), len(numbers) * rows.values * LANES), qkv.dtype)
    specs, values, group, C = _Specs.of(rows, reverse=True), rows.values, rows.group, CHUNK
    one = pltpu.VMEM((values, C, LANES), jnp.float32)
    found = _call(
        _backward_kernel,
        rows,
        (places.table,),
        (
            (places.seen, specs.seen),
            (places.flags, specs.flags),
            (numbers, specs.numbers),
            (qkv, specs.qkv),
            (kept, specs.states),
            (d_out, specs.out),
        ),
        [(jax.ShapeDtypeStruct(x.shape, x.dtype), of) for x, of in ((qkv, specs.qkv), (numbers, specs.numbers))],
        (
            _states(group + 1, 2, values),
            one,
            *[pltpu.VMEM((group, values, C, C), jnp.float32)] * 2,
            _states(2, values),
            _states(values),
            *[one] * 3,
            pltpu.VMEM((values, 2 * C, LANES), jnp.float32),
            pltpu.VMEM((_ROWS, C), jnp.float32),
            *_Room.shapes(rows, qkv.dtype),
        ),
        f"{NAME}_backward",
    )
    return *found, None


_rule.defvjp(_rule_forward, _rule_backward, symbolic_zeros=True)


def fits(key_dim: int, value_dim: int, values_per_key: int) -> bool:
    """Return True for heads of whole lanes, few to a key head."""
    return key_dim == value_dim == LANES and values_per_key <= MOST_VALUES


def group_of(tokens: int, values: int, itemsize: int) -> int:
    """Return the chunks of a grid step: up to four, as many as the backward kernel has VMEM for."""
    matrix = 4 * CHUNK * LANES
    one = 6 * values + 4 + itemsize * (1.5 * values + 2.5)
    fitting = (n for n in (_GROUP, 2) if (n * one + 15 * values) * matrix <= VMEM and tokens > n // 2 * CHUNK)
    return next(fitting, 1)


def delta_rule(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    g: Float[Array, "B N Hv"],
    beta: Float[Array, "B N Hv"],
    spans: Sequence[Int[Array, "B N"]],
    chunks: Any,
    read: Int[Array, " E"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "E Hv dk dv"]]:
    """Return o in v's dtype and the states at the tokens `read`, for a multiple of `CHUNK` · `group_of` tokens.

    Args:
      g: 0 for padding, and so is β.
      spans: prompt_start, prompt_end and own_start of `packed_attention.Spans`.
      chunks: `delta_rule._Chunk` of these spans.
      read: ascending, in rows that lie end to end; beyond the rows for none, whose states are unspecified.
      interpret: on any backend, slowly, for tests.
    """
    (B, N, Hk, dk), (Hv, dv) = k.shape, v.shape[2:]
    r, n = Hv // Hk, N // CHUNK
    group = group_of(N, r, v.dtype.itemsize)
    rows = _Rows(B, n // group, group, r, interpret)
    seen, of_run, of_prompt, last, prompt_last = (
        jnp.swapaxes(x, 0, 1).reshape(B * n, *x.shape[2:])
        for x in (chunks.seen, chunks.of_run, chunks.of_prompt, chunks.last, chunks.prompt_last)
    )
    first = (jnp.arange(n, dtype=jnp.int32) * CHUNK)[None, :, None]
    start, end, own = ((x.reshape(B, n, CHUNK) - first).reshape(B * n, CHUNK) for x in spans)
    # The state at a token of an empty chunk is the one before.
    fields = start, end, own, of_run | (last < 0)[:, None], of_prompt

    def token(chunk: Array, place: Array) -> list[Array]:
        return [place, *(x[chunk, jnp.maximum(place, 0)].astype(jnp.int32) for x in fields)]

    every, at = jnp.arange(B * n), jnp.minimum(read, B * N - 1)
    table = [*token(every, last), *token(every, prompt_last), of_prompt.any(axis=1).astype(jnp.int32)]
    counts = (read[None] < CHUNK * jnp.arange(B * n + 1)[:, None]).sum(axis=1, dtype=jnp.int32)
    flags = jnp.stack([of_run, of_prompt], axis=1).astype(jnp.float32)
    places = _Places(
        seen.astype(jnp.bfloat16),
        jnp.pad(flags, ((0, 0), (0, _ROWS - 2), (0, 0))),
        jnp.stack(table),
        jnp.stack(token(at // CHUNK, at % CHUNK)),
        counts,
    )

    def of_heads(x: Array) -> Float[Array, "Hk n r C"]:
        return jnp.moveaxis(x.astype(jnp.float32).reshape(B * n, CHUNK, Hk, r), (2, 3), (0, 2))

    high = jax.lax.Precision.HIGH
    total = jnp.einsum("ncd,hnrd->hnrc", seen.astype(jnp.float32), of_heads(g), precision=high)
    rest = jnp.zeros((Hk, B * n, _ROWS - 2 * r, CHUNK), jnp.float32)
    numbers = jnp.concatenate([total, of_heads(beta), rest], axis=2)
    # The compiler finds them so in the convolution's output, and copies nothing.
    qkv = jnp.concatenate([q, k, v.reshape(B, N, Hk, r * dv)], axis=-1).reshape(B * N, -1)
    out, found = _rule(qkv, numbers, places, rows)
    return out.reshape(v.shape), found.reshape(-1, Hv, dk, dv)
