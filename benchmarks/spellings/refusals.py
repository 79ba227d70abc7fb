"""Spellings that are refused under some layout, and why their authors must write them otherwise."""

from __future__ import annotations

from collections.abc import Mapping

REFUSALS: Mapping[str, str] = {
    "torch/kept buffers/flag that the first forward sets when it fills the parameters": "a branch "
    "by the state: the first step is another program; fill them before training",
    "torch/normalised weights/normalised by hand and the parameter written back while training": (
        "the optimizer owns the parameter: normalise a copy (a parametrisation)"
    ),
    "torch/document mask/squares between cumulative lengths set in a loop": "slices whose ends are "
    "numbers of the batch: compare document ids, which repeat_interleave makes of the lengths",
    "torch/stochastic depth/a random subset of the samples and index_add": "all data ranks would "
    "have to draw one permutation: draw it with the batch",
    "torch/stochastic depth/a module list that leaves layers out": "each step would be another "
    "program: multiply by a mask of 0 and 1",
    "torch/routing by top k/words sorted by expert and split by counts in a list": "sizes are "
    "numbers of the batch: choose each expert's words by a mask",
    "torch/routing with capacity/places by exclusive cumsum and a one-hot dispatch einsum": "the "
    "number of classes is a number of the batch: compare with torch.arange(capacity)",
}
"""By the spelling's name."""
