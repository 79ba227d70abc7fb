"""Trained parameters of one unit in several dtypes: FSDP2 reduces one dtype a unit."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.frontends.captured import Captured


def mixed_unit(captured: Captured) -> str:
    """Why ZeRO cannot split the model's parameters over data ranks; empty where it can."""
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
    return f"FSDP2 reduces gradients of one dtype at once, and {where} has {shown}"
