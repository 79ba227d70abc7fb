"""What a forward says of its arguments and results: their names, their local shapes."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.emit.names import FUNCTIONS, first_free, identifier
from autopar.emit.pytorch.site import model_part
from autopar.emit.roles import Known
from autopar.emit.text import COLUMNS
from autopar.lowering.lowered import Lowered, Operand
from autopar.lowering.scopes import Scope
from autopar.nouns.graph import Tensor
from autopar.nouns.sharding import Sharding

_HINTS = {("rotary", 1): "cos", ("rotary", 2): "sin", ("attention", 3): "mask"}


def argument_names(
    scope: Scope, lowered: Lowered, inputs: Sequence[str], known: Known
) -> list[str]:
    """Names of a forward's arguments: the stream is ``x``, others by what reads them."""
    roles: dict[str, str] = {}
    for op in scope.ops():
        for place, name in enumerate(op.op.inputs):
            hint = _HINTS.get((op.op.kind, place))
            hint = "documents" if hint == "mask" and op.op.attrs.get("documents") else hint
            if hint is not None:
                roles.setdefault(name, hint)
    roles |= {n: role for n in inputs if (role := known.roles.get(n, "")) and n not in roles}
    tensors = lowered.graph.tensors
    plain = [n for n in inputs if n not in roles and "float" in tensors[n].dtype]
    made = next((o for op in reversed([*scope.ops()]) for o in op.op.outputs), "")
    goes_on = plain[:1] if made and plain else []
    goes_on = [n for n in goes_on if tensors[n].shape == tensors[made].shape]
    streams = goes_on or [n for n in plain if tensors[n].differentiable]
    streams = streams or plain[: len(inputs) == 1]
    names: list[str] = []
    for name in inputs:
        hint = roles.get(name) or ("x" if name == next(iter(streams), None) else "")
        hints = [hint, _plain_name(lowered.graph.tensors[name])]
        names.append(first_free(hints, [*names, *FUNCTIONS]))
    return names


# Names under which Hugging Face hands the angles to every layer.
_ANGLES = {"position_embeddings.0": "cos", "position_embeddings.1": "sin"}


def _plain_name(tensor: Tensor) -> str:
    """An argument's name where its use does not say one: its own, or one for its dtype."""
    if tensor.name in _ANGLES:
        return _ANGLES[tensor.name]
    if "/" not in tensor.name and tensor.role == "input":
        return identifier(tensor.name)
    if tensor.differentiable:
        return "h"
    return {"bool": "mask", "int64": "ids"}.get(tensor.dtype, "values")


def shapes(
    lowered: Lowered,
    inputs: Sequence[str],
    names: Sequence[str],
    outputs: Sequence[Operand],
    made: Sequence[str],
) -> list[str]:
    """Lines of local shapes: ``x [4, 512, 64], cos [1, 512, 8] -> [4, 512, 64]``.

    names: the variables of ``inputs``. made: names of ``outputs``, shown where there are several.
    """
    mesh = lowered.mesh

    def shown(name: str, variable: str) -> str:
        value = lowered.tensors[name]
        lies = model_part(lowered.lie(name, value.shared)).placements
        placed = Sharding(tuple((a, p) for a, p in lies if p.kind in "SP"))
        text = str(list(value.shared.local_shape(value.tensor.shape, mesh)))
        return " ".join(filter(None, (variable, text, str(placed) if placed.placements else "")))

    given = [shown(t, n) for n, t in zip(names, inputs, strict=True)]
    named = made if len(outputs) > 1 else [""] * len(outputs)
    results = [shown(o.name, n) for n, o in zip(named, outputs, strict=True)]
    line = f"{', '.join(given)} -> {', '.join(results)}".strip()
    if len(line) <= COLUMNS - 10:
        return [line]
    return [*_filled(given, ""), *_filled([f"-> {results[0]}", *results[1:]], "")]


def _filled(items: Sequence[str], end: str) -> list[str]:
    """``items`` with commas between them, as many a line as fit; ``end`` after the last."""
    lines: list[str] = []
    for i, item in enumerate(items):
        item += "," if i + 1 < len(items) else end
        if lines and len(f"{lines[-1]} {item}") <= COLUMNS - 8:
            lines[-1] += f" {item}"
        else:
            lines.append(item)
    return lines
