"""How a program executes: op by op as written, or compiled into fused kernels.

eager:    every op is a call of its own: it reads its operands from memory and writes its results.
layers:   each layer that repeats is compiled by itself, what is around them is a call an op: one
          layer is compiled for all, and the loss stays as the plan writes it.
compiled: chains of pointwise ops, and pointwise ops around a reduction, are one kernel, as
          TorchInductor and XLA make them: what stays inside a kernel is not moved, and one launch
          is paid for each. In the figures of published runs fused kernels written by hand count
          as compiled.
"""

from __future__ import annotations

from typing import Literal, get_args

Style = Literal["eager", "layers", "compiled"]
STYLES: tuple[Style, ...] = get_args(Style)
FASTEST = "fastest"
"""Asks for whichever of them gives the fastest plan."""


def style_of(framework: str) -> Style:
    """How programs of a framework run where nothing else is asked: JAX always compiles."""
    return "compiled" if framework == "jax" else "eager"
