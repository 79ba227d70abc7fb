"""What each kind of row is priced by, and why a row is not priced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.cost_models.kernels.streams import Constants
from benchmarks.kernel_collectives import price_all_to_all, price_collective
from benchmarks.kernel_gains import price_step
from benchmarks.kernel_losses import price_loss
from benchmarks.kernel_overlap import price_gather_beside, price_overlap
from benchmarks.kernel_products import price_attention, price_grouped, price_product
from benchmarks.kernel_rows import KernelRow, Unpriceable
from benchmarks.kernel_streams import price_gated, price_stream

Price = Callable[[KernelRow, Constants], float]
PRICES: dict[str, Price] = {
    "cross_entropy": price_stream,
    "fused_norm": price_stream,
    "rope": price_stream,
    "gated_activation": price_gated,
    "product": price_product,
    "fp8_linear": price_product,
    "grouped_gemm": price_grouped,
    "attention": price_attention,
    "collective": price_collective,
    "all_to_all": price_all_to_all,
    "tp_overlap": price_overlap,
    "fsdp_overlap": price_gather_beside,
    "end_to_end": price_step,
}


@dataclass(frozen=True)
class Priced:
    """What a formula says of a row, or why none does."""

    time_s: float | None = None
    memory_bytes: float | None = None
    reason: str = ""


def priced(row: KernelRow, c: Constants) -> Priced:
    """Seconds and bytes at the peak of a row; memory of loss heads alone."""
    if row.device is None:
        return Priced(reason=f"no device {row.device_text!r} in the catalogue")
    if "OUTLIER" in row.notes:
        return Priced(reason="contradicts itself in its source")
    try:
        if row.kind == "chunked_loss":
            return Priced(*price_loss(row, c))
        price = PRICES.get(row.kind)
        if price is None:
            return Priced(reason=f"no formula for {row.kind}")
        return Priced(price(row, c))
    except Unpriceable as error:
        return Priced(reason=f"{row.kind}: {error}")
    except (KeyError, ZeroDivisionError) as error:
        return Priced(reason=f"{row.kind}: no formula is for {error}")


def measured_s(row: KernelRow) -> float | None:
    """Seconds of a row, from its rate where only that was published."""
    if row.time_s is not None:
        return row.time_s
    if not row.rate or not row.unit.startswith("TFLOP"):
        return None
    if row.kind == "fp8_linear":
        flops = 2.0 * row.size("M") * row.size("N") * row.size("K")
    elif row.kind == "attention":
        flops = 4.0 * row.size("batch") * row.size("seq") ** 2 * row.size("heads")
        flops *= row.size("headdim") * {"fwd": 1.0, "bwd": 2.5, "full": 3.5}[row.way]
        flops *= 0.5 if row.shape.get("causal", "") in ("1", "true", "True") else 1.0
    else:
        return None
    return flops / (row.rate * 1e12)
