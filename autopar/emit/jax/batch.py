"""How axes that split the batch hold its entries, parameters and what a loss returns beside."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.emit.constants import literal
from autopar.emit.jax.errors import JaxEmitError
from autopar.lowering.lowered import BATCH_AXES, Lowered
from autopar.nouns.axes import SAMPLES, SEQUENCES
from autopar.nouns.batch import BatchEntry
from autopar.nouns.mesh import Mesh


def batch_table(entries: Sequence[BatchEntry], lowered: Lowered, microbatches: int) -> list[str]:
    """How axes cut each entry of the batch."""
    lines = ["# the first dim counts microbatches: shapes of all devices", "BATCH = {"]
    for entry in entries:
        dims = ["None"] * (2 if entry.batch_dim is not None else 1)
        if entry.batch_dim is not None and (samples := _over(lowered.mesh, SAMPLES)):
            dims[1] = samples
        along = _along(lowered, entry)
        if along is not None:
            dims += ["None"] * (along + 2 - len(dims))
            dims[along + 1] = _over(lowered.mesh, SEQUENCES)
        shape = entry.shape
        if entry.batch_dim is not None:
            shape = (shape[0] // microbatches, *shape[1:])
        spec = f"P({', '.join(dims)})"
        lines.append(f"    {literal(entry.name)}: {spec},  # {[microbatches, *shape]}")
    return [*lines, "}"]


def outputs_table(lowered: Lowered) -> list[str]:
    """How data axes and microbatches hold what `loss` returns beside the loss."""
    kinds = output_kinds(lowered)
    if not kinds:
        return []
    rest = "," if len(kinds) == 1 else ""
    about = "# what `loss` returns beside the loss: split along a dim, or shares to add up"
    return ["", about, f"OUTPUTS = ({', '.join(kinds.values())}{rest})"]


def output_kinds(lowered: Lowered) -> dict[str, str]:
    """The same by name, as text: a dim, "sum", or None for what every device has whole."""
    kinds = {}
    others = lowered.outputs[1:]
    along = [a for a in SEQUENCES if lowered.mesh.size(a) > 1]
    for output in others:
        placements = [output.wanted.on(a) for a in lowered.mesh.axes if a in BATCH_AXES]
        if along and any(placed.kind == "S" for placed in placements):
            shape = list(lowered.graph.tensors[output.name].shape)
            raise JaxEmitError(
                f"the loss returns {output.name} {shape} beside the loss, of which ranks along "
                f"{' and '.join(along)} have parts of each sample: return sums over the batch, or "
                "plan without cp",
                dict.fromkeys(along, "1"),
            )
        first = placements[0] if placements else None
        kind = "None" if first is None else str(first.dim) if first.kind == "S" else '"sum"'
        kinds[output.name] = kind
    return kinds


def in_pieces(lowered: Lowered) -> bool:
    """Whether axes that split the batch split parameters, too."""
    held = (v.produced for v in lowered.tensors.values() if v.tensor.role == "parameter")
    return any(a in BATCH_AXES and p.kind == "S" for one in held for a, p in one.placements)


def _over(mesh: Mesh, names: tuple[str, ...]) -> str:
    """The axes of these names, as a dim of a spec has them; empty: the mesh has none."""
    axes = tuple(a for a in names if a in mesh.axes)
    return literal(axes[0] if len(axes) == 1 else axes) if axes else ""


def _along(lowered: Lowered, entry: BatchEntry) -> int | None:
    """The dim of an entry that ranks along its sequences cut."""
    if entry.name not in lowered.tensors:
        return None
    placed = lowered.tensors[entry.name].produced
    held = {placed.on(a).dim for a in SEQUENCES if placed.on(a).kind == "S"}
    return next(iter(held), None)
