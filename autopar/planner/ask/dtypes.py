"""Trained parameters of one unit in several dtypes, which FSDP2 reduces in one: that of compute.

Where compute keeps to the dtypes that parameters are stored in, each is reduced in its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.frontends.shared.captured import Captured
from autopar.nouns.workload import Workload


def mixed_unit(captured: Captured, workload: Workload) -> str:
    """Why ZeRO cannot split the model's parameters over data ranks; empty where it can."""
    if workload.framework != "torch" or workload.precision == "float32":
        return ""
    owners = {unit: block.name for block in captured.graph.blocks.values() for unit in block.units}
    dtypes: dict[str, dict[str, str]] = {}
    for name, tensor in captured.tensors.items():
        if tensor.role == "parameter" and tensor.trainable and tensor.shape:
            unit = next((u for u in owners if name.startswith(f"{u}.")), "")
            dtypes.setdefault(unit, {}).setdefault(tensor.dtype, name)
    return next((_text(unit, each) for unit, each in dtypes.items() if len(each) > 1), "")


def _text(unit: str, dtypes: Mapping[str, str]) -> str:
    shown = " and ".join(f"{name} ({dtype})" for dtype, name in list(dtypes.items())[:2])
    where = f"unit {unit}" if unit else "the model outside of its repeated layers"
    return (
        f"FSDP2 reduces gradients of one dtype at once where it computes in another, and {where} "
        f"has {shown}"
    )
