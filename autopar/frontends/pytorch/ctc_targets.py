"""Targets of a CTC loss that a mask has chosen, as transformers writes them: by samples again.

``labels.masked_select(mask)`` lays the targets of all samples one behind another, and the lengths
are ``mask.sum(-1)``. What a mask chooses is all labels here (see `chosen`), so a stable sort of
each sample's row by its mask brings its targets to the front, in their order.
"""

from __future__ import annotations

from autopar.frontends.pytorch.aten_call import torch_call
from autopar.frontends.pytorch.chosen_rows import RowTable
from autopar.frontends.pytorch.ctc import BEHIND
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.ir import Value


def by_samples(table: RowTable, targets: Value, lengths: Value) -> Value:
    """Targets of [samples, longest target]: the ones that a mask has chosen, each sample's at the
    start of its row. Raises `UnsupportedOpError` where the lengths are not what the mask counts."""
    if len(targets.shape) == 2:
        return targets
    rows, mask = table.rows.get(targets), _counted(table, lengths)
    if rows is None or mask is None or (rows.mask, rows.inner) != (table.flattened(mask), 1):
        raise UnsupportedOpError(f"{table.lifter.source}: F.ctc_loss {BEHIND}")
    wide = table.emit("cast", [mask], mask.shape, "int64", dtype="int64")
    order = torch_call("aten.argsort.stable", "%0", stable=True, dim=1, descending=True)
    places = table.emit("aten::argsort", [wide], mask.shape, "int64", torch=order)
    x = table.reshaped(targets, mask.shape)
    return table.emit("gather", [x, places], mask.shape, x.dtype, dim=1)


def _counted(table: RowTable, lengths: Value) -> Value | None:
    """The mask of [samples, longest target] whose entries ``lengths`` counts for each sample."""
    total = table.maker(_in_another_dtype(table, lengths))
    if total is None or total.kind != "sum" or total.attrs["dims"] not in ((1,), (-1,)):
        return None
    mask = _in_another_dtype(table, total.inputs[0])
    return mask if mask.dtype == "bool" and len(mask.shape) == 2 else None


def _in_another_dtype(table: RowTable, counts: Value) -> Value:
    """What ``counts`` is in another dtype, as long as both have every count."""
    while counts.dtype in ("int32", "int64"):
        cast = table.maker(counts)
        if cast is None or cast.kind != "cast":
            return counts
        (counts,) = cast.inputs
    return counts
