"""The table of kernels: what run of ops each replaces, what it keeps, how far it may be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOW_AND_SINGLE = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row of the table.

    name:      of the function in ``file`` that runs it; ``reference`` beside it is plain torch.
    replaces:  the run of ops, in the order in which eager code calls them.
    dtypes:    of the tensors that it reads. All arithmetic between reading and writing is float32.
    kept:      what stays from forward until backward.
    tolerance: largest error beside the reference in float32, relative to the largest number of the
               result; 0 where bits are equal. In lower precision the last rounding comes on top,
               and in a loss's gradient that of the log-sum-exp, which counts where all is near 0.
    """

    name: str
    file: str
    replaces: Sequence[str]
    kept: Sequence[str]
    tolerance: float = 1e-6
    dtypes: Sequence[str] = LOW_AND_SINGLE


KERNELS = (
    Kernel(
        "chunk_loss",
        "chunk_loss.py",
        ("mul", "div", "tanh", "mul", "log_softmax", "nll_loss"),
        ("logits", "labels", "log-sum-exp of each row"),
    ),
    Kernel(
        "tile_loss",
        "tile_loss.py",
        ("linear", "mul", "div", "tanh", "mul", "log_softmax", "nll_loss"),
        ("inputs", "weight", "labels", "log-sum-exp of each row"),
    ),
    Kernel("gated_activation", "gated_activation.py", ("silu or gelu", "mul"), ("gate", "up")),
    Kernel("rotary", "rotary.py", ("split", "neg", "cat", "mul", "mul", "add"), ("cos", "sin")),
    Kernel(
        "fp8_cast", "fp8_cast.py", ("abs", "amax", "div", "mul", "clamp", "to"), (), tolerance=0.0
    ),
    Kernel(
        "rms_norm",
        "norm.py",
        ("add", "pow", "mean", "add", "rsqrt", "mul", "mul"),
        ("the sum that is normalized", "weight", "1 / root mean square of each row"),
    ),
    Kernel(
        "layer_norm",
        "norm.py",
        ("add", "layer_norm"),
        ("the sum that is normalized", "weight", "mean and 1 / deviation of each row"),
    ),
)


def kernel(name: str) -> Kernel:
    """The row of this name."""
    return next(row for row in KERNELS if row.name == name)
