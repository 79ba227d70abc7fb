"""Where compute is in half precision: float32 values that meet the stream take its dtype.

`local` gives parameters in half precision and inputs come in it. The graph says which values stay
float32 all the same (`autopar.planner.precision`): angles, masks, losses.
"""

from __future__ import annotations

from autopar.lowering import Lowered

HALF = ("bfloat16", "float16")
# These cast for themselves, or want float32.
OWN_CASTS = frozenset({"rotary", "attention", "batch_norm", "cross_entropy"})


def wide_values(lowered: Lowered, precision: str) -> dict[str, bool]:
    """For floating values: True where they are float32 when the program runs, False where half.

    What flows from losses alone is in neither class: it is in float32 and joins nothing else.
    """
    found = {}
    for tensor in lowered.graph.tensors.values():
        if tensor.role == "parameter" or tensor.dtype == precision:
            found[tensor.name] = False
        elif tensor.dtype == "float32" and not tensor.differentiable:
            found[tensor.name] = True
    return found
