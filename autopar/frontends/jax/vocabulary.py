"""Lookups and the loss over a vocabulary: plain indices, and cross-entropy as one op."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.frontends.jax.draft import Builder, Draft, Node, Operand, Uniform, rewrite
from autopar.frontends.jax.simplify import simplified

INDEX_OPERAND = {"embedding": (0, 1, 0), "gather": (1, 0, None), "index_select": (1, 0, None)}


def lookups_lifted(draft: Draft) -> Draft:
    draft = simplified(rewrite(draft, _plain_index))
    return simplified(rewrite(draft, _cross_entropy))


def _plain_index(node: Node, builder: Builder) -> Sequence[Operand] | None:
    """Indices without jnp's wrapping of negative ones, which the ops of the vocabulary imply."""
    if node.kind not in INDEX_OPERAND:
        return None
    position, table, dim = INDEX_OPERAND[node.kind]
    size = node.inputs[table].shape[node.attrs["dim"] if dim is None else dim]
    plain = _unwrapped(node.inputs[position], size, builder)
    if plain is None:
        return None
    inputs = list(node.inputs)
    inputs[position] = plain
    return [builder.op(node.kind, inputs, node.out.shape, node.out.dtype, **node.attrs)]


def _unwrapped(index: Operand, size: int, builder: Builder) -> Operand | None:
    """``i`` where ``index`` is ``where(i < 0, i + size, i)``, perhaps reshaped."""
    view = builder.made_by(index, "reshape", "cast")
    if view is not None:
        inner = _unwrapped(view.inputs[0], size, builder)
        if inner is None:
            return None
        out = view.out
        return builder.op(view.kind, (inner,), out.shape, out.dtype, **view.attrs)
    choice = builder.made_by(index, "where")
    if choice is None:
        return None
    condition, wrapped, plain = choice.inputs
    below = builder.made_by(condition, "lt")
    added = builder.made_by(wrapped, "add")
    if below is None or added is None or below.inputs[0] != plain or added.inputs[0] != plain:
        return None
    zero, whole = below.inputs[1], added.inputs[1]
    right = isinstance(zero, Uniform) and zero.value == 0
    return plain if right and isinstance(whole, Uniform) and whole.value == size else None


def zero_outside(x: Operand, labels: Operand, dim: int, builder: Builder) -> Operand:
    """The entries of x that ``labels`` [..., 1] name along ``dim``, 0 for a label that names none;
    negative ones do not count from the end."""
    shape, dtype = labels.shape, labels.dtype
    inside = builder.op(
        "and",
        (
            builder.op("ge", (labels, Uniform(0, dtype)), shape, "bool"),
            builder.op("lt", (labels, Uniform(x.shape[dim], dtype)), shape, "bool"),
        ),
        shape,
        "bool",
    )
    index = builder.op("where", (inside, labels, Uniform(0, dtype)), shape, dtype)
    picked = builder.op("gather", (x, index), shape, x.dtype, dim=dim)
    return builder.op("where", (inside, picked, Uniform(0.0, x.dtype)), shape, x.dtype)


def _named(x: Operand, builder: Builder) -> tuple[Node, Operand, bool] | None:
    """The gather that made ``x``, its labels, and whether it is one of `zero_outside`."""
    picked = builder.made_by(x, "gather")
    if picked is not None:
        return picked, picked.inputs[1], False
    chosen = builder.made_by(x, "where")
    if chosen is None or not _is_zero(chosen.inputs[2]):
        return None
    picked = builder.made_by(chosen.inputs[1], "gather")
    index = builder.made_by(picked.inputs[1], "where") if picked is not None else None
    if picked is None or index is None or not _is_zero(index.inputs[2]):
        return None
    inside, labels, _ = index.inputs
    width = picked.inputs[0].shape[picked.attrs["dim"]]
    if inside != chosen.inputs[0] or not _is_inside(inside, labels, width, builder):
        return None
    return picked, labels, True


def _is_inside(inside: Operand, labels: Operand, width: int, builder: Builder) -> bool:
    both = builder.made_by(inside, "and")
    if both is None:
        return False
    least, most = (builder.made_by(v, "ge", "lt") for v in both.inputs)
    return (
        least is not None
        and most is not None
        and (least.kind, most.kind) == ("ge", "lt")
        and least.inputs[0] == most.inputs[0] == labels
        and _is_zero(least.inputs[1])
        and isinstance(most.inputs[1], Uniform)
        and most.inputs[1].value == width
    )


def _is_zero(x: Operand) -> bool:
    return isinstance(x, Uniform) and x.value == 0


def _cross_entropy(node: Node, builder: Builder) -> Sequence[Operand] | None:
    """The mean or sum over all rows of the log-likelihood of one label each."""
    if node.kind not in ("mean", "sum") or math.prod(node.out.shape) != 1:
        return None
    x, sign = node.inputs[0], -1
    while (step := builder.made_by(x, "neg", "reshape")) is not None:
        sign = -sign if step.kind == "neg" else sign
        x = step.inputs[0]
    named = _named(x, builder)
    if named is None or named[0].out.numel != node.inputs[0].numel:  # type: ignore[union-attr]
        return None
    picked, labels, zero = named
    likelihood = picked.inputs[0]
    made = builder.made_by(likelihood, "log_softmax")
    last = len(likelihood.shape) - 1
    if made is None or picked.attrs["dim"] != last or made.attrs["dim"] != last:
        return None
    if labels.shape[-1] != 1:
        return None
    rows, width = math.prod(labels.shape), likelihood.shape[-1]
    logits = builder.reshape(made.inputs[0], (rows, width))
    loss: Operand = builder.op(
        "cross_entropy",
        (logits, builder.reshape(labels, (rows,))),
        (),
        node.out.dtype,
        ignore_index=None,
        reduction=node.kind,
        label_smoothing=0.0,
        **({"zero_outside": True} if zero else {}),
    )
    if sign < 0:
        loss = builder.op("neg", (loss,), (), node.out.dtype)
    return [builder.reshape(loss, node.out.shape)]
