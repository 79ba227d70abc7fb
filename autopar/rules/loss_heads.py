"""Loss heads: the last product of a model with the cross-entropy that reads its logits, as one op.

    linear -> (views, casts, scale, tanh cap, bias)* -> cross_entropy

becomes ``linear_cross_entropy`` of the rows that the logits were of, so that only a chunk of them
is there at a time. What stands between must leave the vocabulary as the last dim, and nobody else
may read it: then a view of the logits is the same view of what the product reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.kinds import OF_ROWS

KIND = "linear_cross_entropy"
AS_MANY_AS_IT_TAKES = 0
"""Chunks, to the search: as `autopar.rules.vocabulary` prices them."""
_VIEWS = ("reshape", "slice", "transpose")
_BETWEEN = (*_VIEWS, "cast", "add", "mul", "div", "tanh")
_ROUNDED = 1e-12
"""Of factors that multiply to one again: a cap is divided by and multiplied with."""


@dataclass(frozen=True, slots=True)
class LossHead:
    """``path``: by the name of each op from the product to before the loss, the dim of the
    vocabulary in what it gives; ``rows``: that the loss is taken of; logits are
    ``cap`` tanh(``scale`` z / ``cap``) of the product z and its bias."""

    linear: Op
    path: Mapping[str, int]
    loss: Op
    rows: int
    bias: str = ""
    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, slots=True)
class NoHead:
    """A cross-entropy that is none, and why."""

    loss: Op
    reason: str


def loss_heads(graph: Graph) -> list[LossHead | NoHead]:
    """Of every cross-entropy at the top of the graph; in bodies of blocks there are none."""
    readers = graph.consumers()
    makers = {name: op for op in graph.ops for name in op.outputs}
    return [_head(graph, op, makers, readers) for op in graph.ops if op.kind == "cross_entropy"]


def in_chunks(graph: Graph, chunks: int | None, rows: int | None = None) -> Graph:
    """The graph with every loss head in so many chunks of rows; itself where that is None.

    rows: of a chunk at least, where these are as many as it takes.
    """
    if chunks is None:
        return graph
    for head in loss_heads(graph):
        if isinstance(head, LossHead):
            graph = _joined(graph, head, chunks, rows)
    return graph


def _head(
    graph: Graph,
    loss: Op,
    makers: Mapping[str, Op],
    readers: Mapping[str, list[tuple[Op, int]]],
) -> LossHead | NoHead:
    tensors = graph.tensors
    if loss.attrs.get("reduction", "mean") == "none":
        return NoHead(loss, "it gives a loss for each row, and what reads these is not known")
    if len(tensors[loss.inputs[1]].shape) != 1:
        return NoHead(loss, "its labels are probabilities")
    path: list[Op] = []
    name = loss.inputs[0]
    while True:
        others = [op for op, _ in readers[name]]
        if len(others) > 1 or name in graph.outputs:
            what = f"at {others[0].source}" if len(others) > 1 else "as a result of the model"
            return NoHead(loss, f"its logits are read elsewhere too, {what}")
        made = makers.get(name)
        if made is None:
            return NoHead(loss, f"its logits are {name}, which no op makes")
        if made.kind == "linear" or (made.kind == "linear_t" and _is_of_jax(loss)):
            break
        if made.kind not in _BETWEEN:
            return NoHead(loss, f"between its product and it {made.kind} stands, at {made.source}")
        path.insert(0, made)
        name = made.inputs[0]
    places, against = _followed(path, tensors)
    if against:
        return NoHead(loss, f"between its product and it {against}")
    numbers = _numbers(path)
    if numbers is None:
        return NoHead(loss, "what is done to its logits is no bias, scale and tanh in that order")
    bias = next((op.inputs[1] for op in path if op.kind == "add"), "")
    rows = tensors[loss.inputs[0]].shape[0]
    views = {op.name: at for op, at in zip(path, places, strict=True)}
    return LossHead(made, views, loss, rows, bias, *numbers)


def _is_of_jax(loss: Op) -> bool:
    """Whose losses ignore no label, and whose matrices stand either way."""
    return loss.attrs.get("ignore_index", -100) is None


def _followed(path: Sequence[Op], tensors: Mapping[str, Tensor]) -> tuple[list[int], str]:
    """The dim of the vocabulary in what each op gives; why they may not stand between a product and
    its loss, empty: they may."""
    places: list[int] = []
    for op in path:
        at = places[-1] if places else len(tensors[op.inputs[0]].shape) - 1
        before, after = tensors[op.inputs[0]].shape, tensors[op.outputs[0]].shape
        moved = f"{op.kind} moves the vocabulary, at {op.source}"
        if op.kind == "transpose":
            at = [d % len(before) for d in op.attrs["dims"]].index(at)
        elif op.kind == "slice":
            if op.attrs["dim"] % len(before) == at:
                return places, moved
        elif op.kind == "reshape":
            if at != len(before) - 1 or before[-1:] != after[-1:]:
                return places, moved
            at = len(after) - 1
        elif at != len(before) - 1 or not _keeps_columns(op, tensors):
            return places, f"{op.kind} stands, at {op.source}"
        places.append(at)
    if places and places[-1] != len(tensors[path[-1].outputs[0]].shape) - 1:
        return places, f"{path[-1].kind} moves the vocabulary, at {path[-1].source}"
    return places, ""


def _keeps_columns(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a cast, a bias, a number or tanh is what it does."""
    if op.kind == "cast":
        return op.attrs["dtype"] in ("float32", "float64")
    if op.kind == "add":
        shift = tensors[op.inputs[1]] if len(op.inputs) == 2 else None
        columns = tensors[op.inputs[0]].shape[-1:]
        return shift is not None and shift.role == "parameter" and shift.shape == columns
    if op.kind in ("mul", "div"):
        number, first = op.attrs.get("other"), op.attrs.get("scalar_first")
        return bool(isinstance(number, int | float) and number and not (op.kind == "div" and first))
    return op.kind == "tanh"


def _numbers(path: list[Op]) -> tuple[float, float | None] | None:
    """(scale, cap) of the ops that are no views, where the bias stands first of them."""
    scale, tanhs, cap = 1.0, 0, 1.0
    numeric = [op for op in path if op.kind not in (*_VIEWS, "cast")]
    for place, op in enumerate(numeric):
        if op.kind == "add":
            if place:
                return None
        elif op.kind == "tanh":
            tanhs += 1
        else:
            number = float(op.attrs["other"])
            factor = number if op.kind == "mul" else 1 / number
            scale, cap = (scale, cap * factor) if tanhs else (scale * factor, cap)
    if not tanhs:
        return scale, None
    if tanhs > 1 or cap <= 0:
        return None
    whole = scale * cap
    return (1.0 if math.isclose(whole, 1.0, rel_tol=_ROUNDED) else whole), cap


def _joined(graph: Graph, head: LossHead, chunks: int, rows: int | None) -> Graph:
    x, weight = head.linear.inputs
    width = graph.tensors[x].shape[-1]
    tensors, ops = dict(graph.tensors), list[Op]()
    tensors.pop(head.linear.name)
    named = {head.linear.name: x}
    """What is read in the place of a tensor of logits."""
    for op in graph.ops:
        if op is head.linear:
            continue
        if op is head.loss:
            inputs = (named[op.inputs[0]], op.inputs[1], weight)
            numbers = {"chunks": chunks} if rows is None else {"chunks": chunks, "rows": rows}
            wide = tensors[x].dtype != graph.tensors[head.linear.name].dtype
            ops.append(_loss(head, inputs, {**numbers, **({"wide": True} if wide else {})}))
        elif op.name not in head.path:
            ops.append(op)
        elif op.kind in _VIEWS:
            made, at = tensors.pop(op.name), head.path[op.name]
            name = f"{op.name}{OF_ROWS}"  # another value, so another name
            shape = (*made.shape[:at], width, *made.shape[at + 1 :])
            tensors[name] = replace(made, name=name, shape=shape, dtype=tensors[x].dtype)
            ops.append(_of_rows(op, name, named[op.inputs[0]], width))
            named[op.name] = name
        else:
            tensors.pop(op.name)
            named[op.name] = named[op.inputs[0]]
    return replace(graph, tensors=tensors, ops=tuple(ops))


def _loss(head: LossHead, inputs: tuple[str, ...], more: Mapping[str, int]) -> Op:
    kept = ("ignore_index", "reduction", "label_smoothing", "zero_outside", "kernel")
    attrs = {name: head.loss.attrs[name] for name in kept if name in head.loss.attrs}
    inputs = (*inputs, head.bias) if head.bias else inputs
    numbers = {"scale": head.scale, "cap": head.cap, **more}
    turned = {"transposed": True} if head.linear.kind == "linear_t" else {}
    return replace(head.loss, kind=KIND, inputs=inputs, attrs={**attrs, **numbers, **turned})


def _of_rows(op: Op, name: str, read: str, width: int) -> Op:
    """A view of logits as one of what they are made of, by its name."""
    attrs = dict(op.attrs)
    if op.kind == "reshape":
        attrs["shape"] = (*attrs["shape"][:-1], width)
    return replace(op, inputs=(read,), outputs=(name,), attrs=attrs)
