"""Arrays that a loss function closes over, as frozen tensors of the model.

A LoRA base or a lookup table is data: its numbers are held by the devices, not written into the
program. Each has a name, ``constants.`` and where the function has it: the variable, then keys and
indices in it; ``constants.1``, ``constants.2``, ... by order where it has none.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.frontends.jax.draft import Builder, Draft, Node, Operand, Value, rewrite
from autopar.frontends.jax.inputs import paths_of
from autopar.frontends.shared.captured import digest
from autopar.nouns.errors import first_of

WRITTEN = 64
"""Most elements of an array that is written into the program."""
LIFTED = 1 << 16
"""Most elements of one whose numbers are looked at, as those of a mask are."""
PREFIX = "constants"
NAMED = 4
"""How many names stand in a note."""
VIEWS = frozenset(("transpose", "reshape", "slice", "select", "expand", "cast"))
PRODUCTS = frozenset(("linear", "linear_t", "matmul", "einsum", "embedding", "conv"))


class Constants:
    """The arrays that become tensors: ``arrays`` by path, ``values`` of a draft by path."""

    def __init__(self, loss: Callable[..., Any], taken: Sequence[str] = ()) -> None:
        self.arrays: dict[str, Any] = {}
        self.values: dict[str, Value] = {}
        self._taken = set(taken)
        self._by_id: dict[int, tuple[Any, Value]] = {}
        self._by_digest: dict[str, Value] = {}
        self._names: dict[str, str] = {}
        self._names_by_id: dict[int, str] = {}
        for path, leaf in _held_by(loss):
            if isinstance(leaf, np.ndarray):
                self._names.setdefault(digest(leaf), path)
            else:
                self._names_by_id.setdefault(id(leaf), path)

    def value(self, array: Any) -> Value:
        """The tensor for ``array``; the same for the same array."""
        known = self._by_id.get(id(array))
        if known is not None:
            return known[1]
        name = self._names_by_id.get(id(array))
        text = digest(array)
        if name is None and text in self._by_digest:
            return self._by_digest[text]
        name = name or self._names.get(text) or f"{PREFIX}.{len(self.arrays) + 1}"
        while name in self.arrays or name in self._taken:
            name += "_"
        shape, dtype = tuple(map(int, array.shape)), str(array.dtype)
        made = Value(shape, dtype, "parameter", name, frozen=True)
        self.arrays[name] = array
        self.values[name] = made
        self._by_id[id(array)] = (array, made)
        self._by_digest.setdefault(text, made)
        return made


def is_data(array: np.ndarray) -> bool:
    """Whether no pass reads the numbers of ``array``: floats that are no mask, or too many."""
    if array.size <= WRITTEN:
        return False
    if array.size > LIFTED:
        return True
    floats = "float" in str(array.dtype)
    return floats and len(np.unique(array.astype("float64").ravel()[:LIFTED])) > 2


def stored(draft: Draft, constants: Constants) -> Draft:
    """Literals that are still in the draft as tensors, those of a body as operands of its block;
    tensors that nothing reads left out."""
    moved = rewrite(draft, lambda node, _: _stored(node, constants))
    moved = rewrite(moved, _handed)
    read = {v for node in moved.nodes for v in node.values}
    given = tuple(v for v in moved.inputs if not v.frozen or v in read)
    frozen = tuple(v for v in constants.values.values() if v in read)
    return replace(moved, inputs=(*given, *frozen))


def _stored(node: Node, constants: Constants) -> Sequence[Operand] | None:
    if node.kind != "constant" or node.out.numel <= WRITTEN:
        return None
    return [constants.value(np.asarray(node.attrs["value"], _dtype(node.out.dtype)))]


def _handed(node: Node, builder: Builder) -> Sequence[Operand] | None:
    if node.kind != "scan":
        return None
    body: Draft = node.attrs["body"]
    known = set(body.inputs)
    inner: dict[Value, Value] = {}

    def own(x: Operand) -> Operand:
        if not isinstance(x, Value) or not x.frozen or x in known:
            return x
        return inner.setdefault(x, Value(x.shape, x.dtype))

    nodes = tuple(replace(n, inputs=tuple(map(own, n.inputs))) for n in body.nodes)
    outputs = tuple(map(own, body.outputs))
    if not inner:
        return None
    made = Draft((*inner.values(), *body.inputs), nodes, outputs)
    attrs = {**node.attrs, "body": made, "consts": node.attrs["consts"] + len(inner)}
    outs = tuple(replace(o) for o in node.outputs)
    builder.append(replace(node, inputs=(*inner, *node.inputs), outputs=outs, attrs=attrs))
    return list(outs)


def held_note(arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """What is to be known of arrays by the name of their tensor; nothing where there are none."""
    if not arrays:
        return ()
    size = sum(int(a.size) * a.dtype.itemsize for a in arrays.values())
    return (
        f"Arrays that the loss closes over are held as frozen tensors, {size / 1e6:.2f} MB: "
        f"{first_of(arrays, NAMED)}. They are taken from the loss whenever the plan is loaded; "
        "checkpoints are without them.",
    )


def beside_products(draft: Draft) -> set[Value]:
    """Frozen tensors that no product reads: angles and tables, which keep their dtype until they
    meet the stream, as a module's buffers do."""
    return {v for v in draft.inputs if v.frozen and not _in_product(draft, v)}


def _in_product(draft: Draft, value: Value) -> bool:
    for node in draft.nodes:
        if value not in node.values:
            continue
        if node.kind in PRODUCTS:
            return True
        if node.kind in VIEWS and any(_in_product(draft, out) for out in node.outputs):
            return True
        if node.kind == "scan":
            split = node.attrs["consts"] + node.attrs["carries"]
            body: Draft = node.attrs["body"]
            for i, (x, own) in enumerate(zip(node.inputs, body.inputs, strict=True)):
                if x is value and (i >= split or _in_product(body, own)):
                    return True
    return False


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(name)


def _held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """(name, array) of what ``function`` and the functions that it calls by name close over."""
    seen: set[int] = set()
    todo = [function]
    while todo:
        callee = todo.pop()
        callee = getattr(callee, "func", None) or inspect.unwrap(callee)
        callee = getattr(callee, "__func__", callee)
        if id(callee) in seen or not isinstance(callee, types.FunctionType):
            continue
        seen.add(id(callee))
        for name, held in _variables(callee).items():
            if isinstance(held, types.FunctionType):
                todo.append(held)
            elif isinstance(held, (dict, list, tuple)) or hasattr(held, "dtype"):
                try:
                    leaves = paths_of(held)
                except ValueError:  # a dict whose keys have no order is no tree of JAX
                    continue
                for path, leaf in leaves:
                    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
                        yield ".".join(p for p in (PREFIX, name, path) if p), leaf


def _variables(function: types.FunctionType) -> Mapping[str, Any]:
    """Globals that the code names, and what its cells hold."""
    variables = {n: function.__globals__[n] for n in function.__code__.co_names
             if n in function.__globals__}  # fmt: skip
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # a name without a value yet
            continue
    return variables
