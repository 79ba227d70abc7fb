"""How a program executes: op by op as written, or compiled into fused kernels.

eager:    every op is a call of its own: it reads its operands from memory and writes its results.
compiled: chains of pointwise ops, and pointwise ops around a reduction, are one kernel, as
          TorchInductor and XLA make them: what stays inside a kernel is not moved, and one launch
          is paid for each. In the figures of published runs fused kernels written by hand count
          as compiled.
"""

from __future__ import annotations

from typing import Literal, get_args

Style = Literal["eager", "compiled"]
STYLES: tuple[Style, ...] = get_args(Style)


def style_of(framework: str) -> Style:
    """How programs of a framework run where nothing else is asked: JAX always compiles."""
    return "compiled" if framework == "jax" else "eager"
