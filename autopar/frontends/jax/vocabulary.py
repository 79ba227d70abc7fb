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


def _cross_entropy(node: Node, builder: Builder) -> Sequence[Operand] | None:
    """The mean or sum over all rows of the log-likelihood of one label each."""
    if node.kind not in ("mean", "sum") or math.prod(node.out.shape) != 1:
        return None
    x, sign = node.inputs[0], -1
    while (step := builder.made_by(x, "neg", "reshape")) is not None:
        sign = -sign if step.kind == "neg" else sign
        x = step.inputs[0]
    picked = builder.made_by(x, "gather")
    if picked is None or picked.out.numel != node.inputs[0].numel:  # type: ignore[union-attr]
        return None
    likelihood, labels = picked.inputs
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
    )
    if sign < 0:
        loss = builder.op("neg", (loss,), (), node.out.dtype)
    return [builder.reshape(loss, node.out.shape)]
