"""What a linear layer's products in 8 bits take beside those in the dtype of compute.

    added(p) = narrow(p) - wide(p) + casts(p)

Both products are at the rate that all products of a plan are priced by (`compute.op_rate`), the
narrow one as much faster as large ones are measured to be (`kernels.products`: peak over peak times
`narrow_...`). Casts are those of `kernels.narrow`: an operand that two narrow products read is
written in two layouts. On CPU they are emulated, to try what they do to numbers: that is not
priced, and plans say so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.compute import op_rate, op_time_s
from autopar.cost_models.kernels.constants import kernel_constants
from autopar.cost_models.kernels.narrow import cast_s
from autopar.cost_models.kernels.products import WIDTH
from autopar.nouns.cluster import Device, short_dtype
from autopar.nouns.recipes import SUMMED, Narrow, Product
from autopar.rules.work_shape import thinness

KERNELS = {"fp8-tensor": "fp8", "fp8-row": "fp8_block", "fp8-block": "fp8_block", "mxfp8": "mxfp8"}
"""The kernels that a recipe's products and casts are priced as; rowwise ones reach what blockwise
ones do (`benchmarks.kernel_gains`: torchao's rowwise runs)."""
READS = {"output": ("x", "w"), "input": ("g", "w"), "weight": ("g", "x")}


@dataclass(frozen=True, slots=True)
class Added:
    """Seconds, less than nothing where a narrow layer is faster."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def speeds_up(device: Device) -> bool:
    """Whether the device multiplies 8-bit floats as torch has them: NVIDIA's from sm_89 on; other
    makers' have other bits for the same numbers, or no kernel behind `_scaled_mm`."""
    ours = device.family in ("ada", "hopper", "blackwell")
    return ours and "fp8" in dict(device.peak_flops_per_s)


def added(device: Device, rows: int, n: int, k: int, dtype: str, narrow: Narrow) -> Added:
    """Of x [rows, k] by weight [n, k]; ``dtype``: of compute."""
    if not speeds_up(device):
        return Added()
    forward_s = backward_s = 0.0
    elements = {"x": rows * k, "w": n * k, "g": rows * n}
    for product in narrow.products:
        casts_s = sum(_cast_s(device, elements[name], narrow, name) for name in READS[product])
        extra_s = _product_s(device, rows, n, k, dtype, narrow, product) + casts_s
        if product == "output":
            forward_s = extra_s
        else:
            backward_s += extra_s
    return Added(forward_s, backward_s)


def magnitudes_s(device: Device, rows: int, n: int, k: int, dtype: str) -> float:
    """Seconds of finding the largest magnitudes of a forward's operands by themselves."""
    if not speeds_up(device):
        return 0.0
    return op_time_s(device, 0.0, WIDTH[short_dtype(dtype)] * (rows + n) * k, dtype, "reduction")


def _product_s(
    device: Device, rows: int, n: int, k: int, dtype: str, narrow: Narrow, product: Product
) -> float:
    """The narrow product less the wide one."""
    way = "forward" if product == "output" else "backward"
    rate = op_rate(device, dtype, "matmul", "linear", way)
    kind = KERNELS[narrow.recipe.name]
    share = kernel_constants()[f"narrow_{kind}"] * device.peak("fp8") / device.peak(dtype)
    quick = replace(rate, s_per_flop=rate.s_per_flop / max(share, 1.0))
    summed = {"rows": rows, "n": n, "k": k}[SUMMED[product]]
    sizes = {"rows": rows, "n": n, "k": k}
    inputs = sum(rows * n * k // size for dim, size in sizes.items() if dim != SUMMED[product])
    out = rows * n * k // summed
    wide = WIDTH[short_dtype(dtype)]
    flops, thin = 2.0 * rows * n * k, thinness((rows, n, k))
    before_s = rate.time_s(flops, wide * (inputs + out), False, thin)
    return quick.time_s(flops, WIDTH[kind] * inputs + wide * out, False, thin) - before_s


def _cast_s(device: Device, elements: int, narrow: Narrow, name: str) -> float:
    """Of one product's operand; half of the cast where another narrow product has the rest."""
    layouts = sum(name in READS[product] for product in narrow.products)
    constants = kernel_constants()
    return cast_s(device, elements, KERNELS[narrow.recipe.name], constants, layouts) / layouts
