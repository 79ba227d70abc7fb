"""Rows that are put in the order of their experts, multiplied by `lax.ragged_dot`, and put back.

What is made of a row hangs on that row and its expert alone, in whatever order rows lie: with rows
left where they are each ragged product is a ``grouped_linear`` (x [n, k], index [n] of groups,
weight [g, k, m] -> [n, m]), and all between works row by row. Whoever has some of the rows needs no
others then, while a sort needs all. Programs sort the rows of their own device
(`autopar.runtime.jax.parallel.grouped`).

    order = argsort(index)               rows lie by group behind it
    x[order], tokens[order // k]         rows in that order; those of tokens with k routes each
    ragged_dot(rows, weight, sizes)      sizes: how many rows each group has
    rows[argsort(order)]                 rows where they were; zeros.at[order].set(rows) likewise

(Gale et al. 2022, MegaBlocks, section 4; `layers/moe.py` of MaxText has this form.) What is read in
another way stays as it is written.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from autopar.frontends.jax.draft import (
    Builder,
    Draft,
    Node,
    Operand,
    Shape,
    Value,
    every_node,
    merged,
    rewrite,
)
from autopar.frontends.jax.jaxprs import draft_of
from autopar.frontends.jax.match import Matcher
from autopar.frontends.jax.simplify import simplified
from autopar.frontends.jax.vocabulary import lookups_lifted
from autopar.rules.called import CALL
from autopar.rules.elementwise import ELEMENTWISE

GROUPED = "grouped_linear"
_RAGGED = "jax::ragged_dot_general"
_BY_ROWS = re.compile(
    r"lax\.ragged_dot_general\(\{0\}, \{1\}, \{2\}, (preferred_element_type=\{\w+\}, )?"
    r"ragged_dot_dimension_numbers=lax\.RaggedDotDimensionNumbers\("
    r"dot_dimension_numbers=\(\(\(1,\), \(1,\)\), \(\(\), \(\)\)\), "
    r"lhs_ragged_dimensions=\(0,\), rhs_group_dimensions=\(0,\)\)\)"
)
"""A product of rows [n, k] by matrices [g, k, m]."""


def rows_in_place(draft: Draft) -> Draft:
    """The draft without sorts of rows by group that nothing else reads."""
    if not any(node.kind == _RAGGED for node in every_node(draft)):
        return draft
    return simplified(merged(rewrite(draft, _Places().visit)))


@dataclass(slots=True, eq=False)
class _Places:
    """What is known of values while a draft is gone through.

    orders:   by an order the groups [n] that it sorts rows by; ``inverses``: by the places at which
              rows lie then, the order.
    in_place: by rows that lie in an order, that order and the same rows where they were.
    """

    orders: dict[Value, Value] = field(default_factory=dict)
    inverses: dict[Value, Value] = field(default_factory=dict)
    in_place: dict[Value, tuple[Value, Operand]] = field(default_factory=dict)

    def visit(self, node: Node, builder: Builder) -> Sequence[Operand] | None:
        if node.kind == "jax::sort":
            self._sorted(node, builder)
        elif node.kind == "embedding":
            ids, table = node.inputs
            return self._taken(node, ids, table, builder)
        elif node.kind == "index_select" and node.attrs["dim"] == 0:
            table, ids = node.inputs
            return self._taken(node, ids, table, builder)
        elif node.kind in ("jax::scatter", "jax::scatter-add"):
            return self._put_back(node, builder)
        elif node.kind == _RAGGED:
            self._multiplied(node, builder)
        elif node.kind in ELEMENTWISE or node.kind == "cast":
            self._by_place(node, builder)
        elif node.kind in ("reshape", "expand"):
            self._reshaped(node, builder)
        elif node.kind in ("slice", "split"):
            self._of_columns(node, builder)
        return None

    def _sorted(self, node: Node, builder: Builder) -> None:
        attrs = node.attrs
        if len(node.inputs) != 2 or attrs["num_keys"] != 1 or len(node.out.shape) != 1:
            return
        keys, places = node.inputs
        count = builder.made_by(places, "arange")
        if not isinstance(keys, Value) or "int" not in keys.dtype or count is None:
            return
        if (count.attrs["start"], count.attrs["step"]) != (0, 1):
            return
        in_order, order = node.outputs
        if keys in self.orders:
            self.inverses[order] = keys
        else:
            self.orders[order] = keys
            self.in_place[in_order] = order, keys

    def _taken(
        self, node: Node, ids: Operand, table: Operand, builder: Builder
    ) -> Sequence[Operand] | None:
        if not isinstance(ids, Value) or not isinstance(table, Value):
            return None
        if ids in self.in_place and table not in self.in_place:
            self._as_placed(node, self.in_place[ids][0], builder)  # a row of its own for each
            return None
        if ids in self.inverses:
            return self._where_they_were(table, self.inverses[ids])
        order, each = self._order_of(ids, table.shape[0], builder)
        if order is not None:
            self.in_place[node.out] = order, _repeated(table, each, builder)
        return None

    def _put_back(self, node: Node, builder: Builder) -> Sequence[Operand] | None:
        """Rows written to their places, or added up by token: of an order every place is there
        once."""
        rows = next((v for v in reversed(node.values) if v in self.in_place), None)
        if rows is None or not node.out.shape or rows.shape[1:] != node.out.shape[1:]:
            return None
        each, more = divmod(rows.shape[0], node.out.shape[0])
        if more or not each:
            return None
        order, where = self.in_place[rows]
        shapes = ((order.shape, order.dtype), (rows.shape, rows.dtype))
        written = _WRITTEN if each == 1 else ()
        if any(_bound(form, shapes, node, builder) == (order, rows) for form in written):
            return [where]
        added = _added(each, node.out.shape[0])
        if any(_bound(form, shapes, node, builder) == (order, rows) for form in added):
            return [_summed(where, each, builder)]
        return None

    def _where_they_were(self, rows: Value, order: Value) -> Sequence[Operand] | None:
        known = self.in_place.get(rows)
        return [known[1]] if known is not None and known[0] is order else None

    def _order_of(self, ids: Value, rows: int, builder: Builder) -> tuple[Value | None, int]:
        """The order that ``ids`` are, or whole parts of, where ``rows`` have so many each."""
        if ids in self.orders:
            return (ids, 1) if ids.shape[0] == rows else (None, 0)
        each, more = divmod(ids.shape[0], rows)
        if more or len(ids.shape) != 1:
            return None, 0
        order = _read_by(_parts(each), ids, builder)
        return (order, each) if order in self.orders else (None, 0)

    def _multiplied(self, node: Node, builder: Builder) -> None:
        rows, weight, sizes = node.inputs
        known = self.in_place.get(rows) if isinstance(rows, Value) else None
        if known is None or not _BY_ROWS.fullmatch(node.attrs.get(CALL, "")):
            return
        if not rows.dtype == weight.dtype == node.out.dtype:
            return
        order, x = known
        index = self.orders[order]
        if isinstance(sizes, Value) and _counts_of(index, sizes, weight.shape[0], builder):
            out = node.out
            made = builder.op(GROUPED, (x, index, weight), out.shape, out.dtype)
            self.in_place[out] = order, made

    def _reshaped(self, node: Node, builder: Builder) -> None:
        """Where every row stays a row."""
        (x,), shape = node.inputs, node.out.shape
        known = self.in_place.get(x) if isinstance(x, Value) else None
        alike = node.kind == "reshape" or len(shape) == len(x.shape)
        if known is not None and alike and shape and shape[0] == x.shape[0]:
            self._as_placed(node, known[0], builder)

    def _of_columns(self, node: Node, builder: Builder) -> None:
        """Parts of every row."""
        (x,) = node.inputs
        known = self.in_place.get(x) if isinstance(x, Value) else None
        if known is not None and node.attrs["dim"] % len(x.shape):
            self._as_placed(node, known[0], builder)

    def _by_place(self, node: Node, builder: Builder) -> None:
        """Of rows in one order, and of what every row has alike."""
        orders = {self.in_place[v][0] for v in node.values if v in self.in_place}
        if len(orders) != 1 or len(node.outputs) != 1:
            return
        out, rows = node.out.shape, len(node.out.shape)
        for value in node.values:
            alike = len(value.shape) < rows or value.shape[0] == 1
            own = len(value.shape) == rows and value.shape[0] == out[0]
            if not (own if value in self.in_place else alike):
                return
        self._as_placed(node, orders.pop(), builder)

    def _as_placed(self, node: Node, order: Value, builder: Builder) -> None:
        """The op of what it reads where that was before it was put in the order."""
        inputs = [
            self.in_place[x][1] if isinstance(x, Value) and x in self.in_place else x
            for x in node.inputs
        ]
        made = tuple(Value(out.shape, out.dtype) for out in node.outputs)
        builder.append(replace(node, inputs=tuple(inputs), outputs=made, source=builder.source))
        self.in_place.update(
            (out, (order, own)) for out, own in zip(node.outputs, made, strict=True)
        )


def _repeated(table: Value, each: int, builder: Builder) -> Operand:
    """[t, ...] -> [t * each, ...], every row so often, one behind the other."""
    if each == 1:
        return table
    count, *rest = table.shape
    wide = builder.expand(builder.reshape(table, (count, 1, *rest)), (count, each, *rest))
    return builder.reshape(wide, (count * each, *rest))


def _summed(rows: Operand, each: int, builder: Builder) -> Operand:
    """[t * each, ...] -> [t, ...], the sum of those of a token."""
    if each == 1:
        return rows
    count, *rest = rows.shape
    apart = builder.reshape(rows, (count // each, each, *rest))
    return builder.op("sum", (apart,), (count // each, *rest), rows.dtype, dims=(1,), keepdim=False)


# -- numbers that follow from an order, or from groups, in the forms that jnp has for them --------


Form = Callable[..., jax.Array]


@functools.lru_cache(maxsize=64)
def _parts(each: int) -> tuple[Form, ...]:
    """The token of each route, of ``each`` to a token."""
    return (
        lambda order: order // each,
        lambda order: jax.lax.div(order, jnp.asarray(each, order.dtype)),
    )


@functools.lru_cache(maxsize=64)
def _counts(groups: int) -> tuple[Form, ...]:
    """How many rows each group has."""
    each: tuple[Form, ...] = (
        lambda index: jnp.bincount(index, length=groups),
        lambda index: jnp.bincount(index, length=groups).astype(jnp.int32),
        lambda index: jnp.zeros(groups, jnp.int32).at[index].add(1),
        lambda index: jax.ops.segment_sum(jnp.ones_like(index), index, num_segments=groups),
        lambda index: jax.nn.one_hot(index, groups, dtype=jnp.int32).sum(0),
        lambda index: jnp.sum(index[:, None] == jnp.arange(groups), axis=0, dtype=jnp.int32),
        lambda index: jnp.sum(index[:, None] == jnp.arange(groups)[None], axis=0),
    )
    return tuple(lambda index, form=form: form(index.reshape(-1)) for form in each)


_WRITTEN: tuple[Form, ...] = (
    lambda order, rows: jnp.zeros_like(rows).at[order].set(rows),
    lambda order, rows: jnp.zeros_like(rows).at[order].set(rows, unique_indices=True),
    lambda order, rows: jnp.zeros_like(rows).at[order].add(rows),
)
"""Rows where they were before they were put in an order."""


@functools.lru_cache(maxsize=64)
def _added(each: int, tokens: int) -> tuple[Form, ...]:
    """Rows in an order, added to their tokens."""
    return tuple(
        form
        for part in _parts(each)
        for form in (
            lambda order, rows, part=part: (
                jnp.zeros((tokens, *rows.shape[1:]), rows.dtype).at[part(order)].add(rows)
            ),
            lambda order, rows, part=part: jax.ops.segment_sum(
                rows, part(order), num_segments=tokens
            ),
        )
    )


def _read_by(every: Sequence[Form], made: Value, builder: Builder) -> Value | None:
    """What one of ``every`` form makes ``made`` of, numbers as many."""
    node = builder.maker.get(made)
    for form in every if node is not None else ():
        bound = node and _bound(form, ((made.shape, made.dtype),), node, builder)
        if bound:
            return bound[0]
    return None


def _counts_of(index: Value, sizes: Value, groups: int, builder: Builder) -> bool:
    """Whether ``sizes`` are how many of ``index`` each of so many groups has."""
    node, flat = builder.maker.get(sizes), builder.made_by(index, "reshape")
    if node is None:
        return False
    # where groups were put in one row first, what reads that row may read them as they were
    for given in (index, *(flat.values if flat is not None else ())):
        for form in _counts(groups) if _are_places(index, builder) else _counts(groups)[:2]:
            bound = _bound(form, ((given.shape, given.dtype),), node, builder)
            if bound is not None and bound[0] is given:
                return True
    return False


def _are_places(index: Value, builder: Builder) -> bool:
    """Whether groups come of `top_k` or `argmax`: none is below 0 then, which `bincount` alone
    takes as `grouped_linear` does."""
    made = builder.maker.get(index)
    while made is not None and made.kind in ("reshape", "cast", "slice", "select"):
        made = builder.maker.get(made.values[0]) if made.values else None
    return made is not None and made.kind in ("jax::top_k", "argmax")


def _bound(
    form: Form, operands: tuple[tuple[Shape, str], ...], node: Node, builder: Builder
) -> tuple[Value, ...] | None:
    """The operands of ``form`` where it makes what ``node`` makes."""
    template = _template(form, operands)
    if template is None or template.outputs[0] not in template.makers():
        return None
    bound = Matcher(template, builder.maker).match(node)
    if bound is None:
        return None
    read = (bound.get(name) for name in template.inputs)
    values = tuple(v for v in read if isinstance(v, Value))
    return values if len(values) == len(template.inputs) else None


@functools.lru_cache(maxsize=512)
def _template(form: Form, operands: tuple[tuple[Shape, str], ...]) -> Draft | None:
    if any(jax.dtypes.canonicalize_dtype(dtype) != dtype for _, dtype in operands):
        return None
    given = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in operands]
    closed = jax.make_jaxpr(form)(*given)
    values = tuple(Value(shape, dtype) for shape, dtype in operands)
    return lookups_lifted(simplified(merged(draft_of(closed, values))))
