"""Sequences that pass the stages of a pipeline in slices, one after the other.

Where steps have few microbatches a pipeline stands still for most of its fill: a microbatch may
then be a slice of its samples' sequences (Li et al. 2021, TeraPipe, section 3.2; Sun et al. 2024,
Seq1F1B). In a causal model a token needs those before it alone, so a slice runs behind the one
before it, whose keys and values its stage keeps; backward comes from the last slice to the first,
and what later ones give to kept keys and values is added to the gradients of their own slice.

Over slices nothing can move: a value of one is not there while another runs. So a tensor is cut by
slices or whole in each, and gradients of what is whole add up as they do over microbatches.
"""

from __future__ import annotations

from autopar.lowering.lowered import Lowered, LoweringError
from autopar.nouns.axes import SLICE
from autopar.rules.resharding import COLLECTIVES, Step


def check_slices(lowered: Lowered) -> None:
    """Raises `LoweringError` where a value would have to pass from slice to slice."""
    moved = [(value.tensor.name, value.steps) for value in lowered.tensors.values()]
    moved += [(o.name, o.steps) for op in lowered.ops for o in op.operands]
    moved += [(o.name, o.steps) for o in lowered.outputs]
    for name, steps in moved:
        for step in steps:
            if step.axis == SLICE and not _stays(step):
                raise LoweringError(
                    f"{_made_at(lowered, name)} is {step.source} over slices, and what reads it "
                    f"needs {step.target}: slices of a sequence pass one after the other, so all "
                    "but causal attention is to treat each token alike; leave seq_slices out"
                )


def _stays(step: Step) -> bool:
    return step.forward not in COLLECTIVES and step.backward not in COLLECTIVES


def _made_at(lowered: Lowered, name: str) -> str:
    maker = next((op.op for op in lowered.ops if name in op.op.outputs), None)
    if maker is None:
        return f"{name!r}"
    return f"the result of {maker.kind!r} at {maker.source}"
