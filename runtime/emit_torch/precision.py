"""Where compute is in half precision: which values are float32 all the same.

`local` gives parameters in half precision and inputs come in it, so that whatever flows from them
is. Angles and masks that are made from nothing or from buffers stay float32; where one of them
meets the stream it is cast to the stream's dtype.
"""

from __future__ import annotations

from autopar.lowering import Lowered

HALF = ("bfloat16", "float16")
MADE = frozenset({"full", "arange", "constant", "cast"})
# These cast for themselves, or want float32.
OWN_CASTS = frozenset({"rotary", "attention", "batch_norm", "cross_entropy"})


def wide_values(lowered: Lowered, entering: frozenset[str] = frozenset()) -> dict[str, bool]:
    """For values of float32 in the graph: True if they stay float32, False if they become half.

    ``entering``: inputs of a block that are wide in some call. Losses are in neither class.
    """
    found: dict[str, bool] = {}
    for tensor in lowered.graph.tensors.values():
        if tensor.dtype == "float32" and tensor.role in ("input", "parameter", "buffer"):
            found[tensor.name] = tensor.role == "buffer" or tensor.name in entering
    for op in lowered.ops:
        given = [found[n] for n in op.op.inputs if n in found]
        for name in op.op.outputs:
            if lowered.graph.tensors[name].dtype != "float32" or op.op.kind == "cross_entropy":
                continue
            if op.op.kind in MADE and not given:
                found[name] = True
            elif given and op.op.kind == "batch_norm":
                found[name] = given[0]
            elif given:
                found[name] = all(given)
            elif op.op.kind == "block":
                found[name] = False
    return found


def entering_blocks(lowered: Lowered, wide: dict[str, bool]) -> dict[str, frozenset[str]]:
    """For each block the inputs that are wide where it is called."""
    found: dict[str, set[str]] = {name: set() for name in lowered.blocks}
    for op in lowered.ops:
        if op.op.kind == "block":
            block = op.op.attrs["block"]
            inner = lowered.blocks[block].graph.inputs
            found[block] |= {
                i for i, o in zip(inner, op.op.inputs, strict=True) if wide.get(o, False)
            }
    return {name: frozenset(names) for name, names in found.items()}
