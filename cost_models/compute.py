"""Time of one op on one device: a roofline with an efficiency by kind of op and device.

    time = launch + max(flops / (e_c * peak), bytes / (e_m * memory bandwidth))

(Williams, Waterman, Patterson 2009.) `e_c` and `e_m` are shares of the datasheet's peak that ops of
a class reach. On GPUs and TPUs those of matrix products, attention and streams are the fitted
constants that the transformer family has too (`rates`), so that a captured model and an
architecture file are priced alike; all others are in `efficiency.yaml`, with how each was found.
Odd shapes reach less:

    e_c = e / (1 + half_size * thinness)

with the thinness 1/m + 1/n + 1/k of a product of m x k and k x n, and 1/t of attention over t keys,
which loses as much again by `half_rows` / rows: its blocks of rows come in waves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from autopar.cost_models.constants import How
from autopar.cost_models.rates import (
    attention_share,
    family_constant,
    fitted,
    fitted_table,
    product_share,
)
from autopar.cost_models.software import default_software
from autopar.nouns.cluster import Cluster, Device, short_dtype
from autopar.nouns.optimizer import is_own
from autopar.rules.work import PRODUCTS

OpClass = Literal["matmul", "attention", "elementwise", "reduction", "gather", "conv"]
OP_CLASSES: tuple[OpClass, ...] = (
    "matmul",
    "attention",
    "elementwise",
    "reduction",
    "gather",
    "conv",
)

KERNEL = "flash"
"""What `scaled_dot_product_attention` and its like run on accelerators, as `Software` names it."""

USUAL_HEAD_DIM = 128
"""Of Llama 2 and 3, Mistral, Qwen 2 and most models since; taken where no shape is known."""

_FILE = Path(__file__).with_name("efficiency.yaml")


@dataclass(frozen=True)
class Efficiency:
    """The share of the datasheet's peaks that a class of ops reaches on a device."""

    compute: float
    memory: float
    half_s: float
    """Time that a product takes besides."""
    how: How
    basis: str
    half_size: float = 0.0
    """An op of thinness 1 / `half_size` reaches half of `compute`."""
    half_rows: float = 0.0
    """As an attention of so many rows does."""


@dataclass(frozen=True)
class OpRate:
    """A device's rates for one class of ops in one dtype, ready to price."""

    launch_s: float
    s_per_flop: float
    s_per_byte: float
    half_s: float
    how: How
    far_after_bytes: float = float("inf")
    far_extra_s_per_byte: float = 0.0
    """What a byte past `far_after_bytes` costs more: it misses the caches."""
    half_size: float = 0.0
    """Thinness at which an op runs at half rate, inverted."""
    half_rows: float = 0.0
    """Rows at which an attention does."""

    def times(self, factor: float) -> OpRate:
        """The rate of ops that take `factor` times as long."""
        if factor == 1.0:
            return self
        return replace(
            self,
            launch_s=self.launch_s * factor,
            s_per_flop=self.s_per_flop * factor,
            s_per_byte=self.s_per_byte * factor,
            half_s=self.half_s * factor,
            how="fitted",
            far_extra_s_per_byte=self.far_extra_s_per_byte * factor,
        )

    def time_s(
        self,
        flops: float,
        moved_bytes: float,
        launches: bool = True,
        thinness: float = 0.0,
        rows: float = 0.0,
    ) -> float:
        """Seconds of one op; an op that does nothing takes no time.

        ``launches``: it is not part of a kernel whose launch another op pays. ``rows``: of an
        attention.
        """
        if flops <= 0 and moved_bytes <= 0:
            return 0.0
        idle = self.half_size * thinness + (self.half_rows / rows if rows else 0.0)
        full_s = flops * self.s_per_flop * (1.0 + idle)
        compute_s = full_s + self.half_s if flops > 0 else 0.0
        memory_s = moved_bytes * self.s_per_byte
        if moved_bytes > self.far_after_bytes:
            memory_s += (moved_bytes - self.far_after_bytes) * self.far_extra_s_per_byte
        return (self.launch_s if launches else 0.0) + max(compute_s, memory_s)


def op_time_s(
    where: Cluster | Device,
    flops: float,
    bytes_moved: float,
    dtype: str,
    op_class: OpClass,
    kind: str = "",
    direction: str = "",
) -> float:
    """Seconds of one op on a device, or on a cluster's slowest one.

    `bytes_moved` is what the op reads and writes in device memory, `dtype` what it computes in.
    `kind` and `direction` ("forward", "backward") say more than the class where it was measured.

    Raises:
        ValueError: an unknown class of ops.
    """
    device = where.device if isinstance(where, Cluster) else where
    return op_rate(device, dtype, op_class, kind, direction).time_s(flops, bytes_moved)


@lru_cache(maxsize=4096)
def op_rate(
    device: Device,
    dtype: str,
    op_class: OpClass,
    kind: str = "",
    direction: str = "",
    head_dim: int = 0,
    kernel: str = "",
) -> OpRate:
    """The rates that price ops of `op_class` in `dtype`, measured ones first; cached.

    Of the measured ones that of the op's own `kind` in its `direction` goes before that of the
    class. `head_dim` is that of attention; 0 stands for `USUAL_HEAD_DIM`; `kernel` is that which it
    names, as `Software.attention` does; empty: `KERNEL`.
    """
    slower = device.slower(direction)
    measured = _measured(device, short_dtype(dtype), op_class, kind, direction)
    if measured is not None:
        rate = measured.times(slower)
    else:
        reached = efficiency(device, dtype, op_class, head_dim, kernel)
        rate = OpRate(
            launch_s=device.launch_overhead_s,
            s_per_flop=1 / (reached.compute * device.peak(dtype)),
            s_per_byte=1 / (reached.memory * device.memory_bandwidth_bytes_per_s),
            half_s=reached.half_s,
            how=reached.how,
            half_size=reached.half_size,
            half_rows=reached.half_rows,
        ).times(slower)
    if op_class in PRODUCTS:  # whatever runs said: no device is above its own peak
        return replace(rate, s_per_flop=max(rate.s_per_flop, 1 / device.peak(dtype)))
    return rate


def update_time_s(device: Device, moved_bytes: float, optimizer: str) -> float:
    """Seconds of an optimizer's step that reads and writes `moved_bytes`; one of the user's own
    takes AdamW's time for each."""
    kind = "adamw" if is_own(optimizer) else optimizer
    rate = _measured(device, "fp32", "update", kind, "forward")
    slower = device.slower("optimizer")
    if rate is not None:
        return slower * rate.time_s(0.0, moved_bytes)
    return slower * _streamed_s(device, moved_bytes)


def added_time_s(device: Device, gradient_bytes: float) -> float:
    """Seconds of adding gradients to those of the microbatches before: read and written. Measured
    backward passes have it in them."""
    if _in_measured_steps(device):
        return 0.0
    return _streamed_s(device, 2 * gradient_bytes)


def beside_product_s(device: Device) -> float:
    """Seconds that a matrix product takes in a step beside its kernel, for its launch and tail and
    what small work surrounds it. Measured products have it in them."""
    if _in_measured_steps(device):
        return 0.0
    whole = default_software(device.family, device.kind, zero=0).graphs
    return fitted()["product_graph_s" if whole else "product_s"]


def _in_measured_steps(device: Device) -> bool:
    return device.kind == "cpu" or bool(device.rates)


def _streamed_s(device: Device, moved_bytes: float) -> float:
    share = 1.0 if device.kind == "cpu" else fitted()["memory"]
    return moved_bytes / (share * device.memory_bandwidth_bytes_per_s)


def _measured(
    device: Device, dtype: str, op_class: str, kind: str, direction: str
) -> OpRate | None:
    """The most special measured rate: of the kind, then of the class."""
    same = [r for r in device.rates if r.op_class == op_class and r.dtype == dtype]
    same = [r for r in same if r.direction in ("", direction or "forward")]
    for wanted in (kind, ""):
        for rate in same:
            if rate.kind == wanted:
                return OpRate(
                    rate.launch_s,
                    rate.s_per_flop,
                    rate.s_per_byte,
                    0.0,
                    "measured",
                    rate.far_after_bytes or float("inf"),
                    max(0.0, rate.far_s_per_byte - rate.s_per_byte),
                )
    return None


def efficiency(
    device: Device, dtype: str, op_class: OpClass, head_dim: int = 0, kernel: str = ""
) -> Efficiency:
    """What a class of ops reaches on a device: fitted constants, or the most special entry of
    `efficiency.yaml`.

    Raises:
        ValueError: an unknown class of ops.
    """
    if op_class not in OP_CLASSES:
        raise ValueError(f"no op class {op_class!r}; there are {', '.join(OP_CLASSES)}")
    table = _table()
    name = short_dtype(dtype)
    entry: dict[str, Any] = dict(table["general"][op_class])
    for key in (device.kind, device.family, device.name):
        for wanted in (op_class, f"{op_class} {name}"):
            entry.update(table.get(key, {}).get(wanted, {}))
    assumed = Efficiency(
        compute=float(entry["compute"]),
        memory=float(entry["memory"]),
        half_s=float(entry["half_s"]),
        how=entry["how"],
        basis=entry["basis"],
    )
    if device.kind == "cpu" or op_class in ("gather", "conv"):
        return assumed
    return _fitted(assumed, device, op_class, head_dim, kernel or KERNEL)


def _fitted(
    general: Efficiency, device: Device, op_class: OpClass, head_dim: int, kernel: str
) -> Efficiency:
    constants = fitted()
    if op_class in ("elementwise", "reduction"):
        origin = fitted_table()["memory"]
        return replace(general, memory=origin.value, how=origin.how, basis=origin.basis)
    if op_class == "matmul":
        share = product_share(device, constants)
        size, rows = constants[family_constant("thin_size", device, constants)], 0.0
        name = family_constant("matmul", device, constants)
    else:
        share = attention_share(device, kernel, head_dim or USUAL_HEAD_DIM, constants)
        size = constants[family_constant("attention_seq", device, constants)]
        rows = constants[family_constant("attention_rows", device, constants)]
        named = "flash_new" if kernel == "flash_4" else kernel
        name = family_constant(f"attention_{named}", device, constants)
    origin = fitted_table()[name]
    reached = replace(general, compute=share, how=origin.how, basis=origin.basis)
    return replace(reached, half_size=size, half_rows=rows)


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loaded: dict[str, dict[str, dict[str, Any]]] = yaml.load(_FILE.read_text(), Loader=loader)
    return loaded
