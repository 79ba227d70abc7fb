"""Fits the constants of single kernels: once to all rows, and once without each device's.

Few constants at a time, in the order in which they rest on each other, least squares of arctan of
logarithms of errors (an outlier weighs no more than its count), sweeps weighing alike. A weak pull
toward the prior keeps what a device's rows alone would tell at the prior when they are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.cost_models.kernels.constants import FILE
from benchmarks.kernel_judgement import STREAMS
from benchmarks.kernel_prices import measured_s, priced
from benchmarks.kernel_rows import KernelRow

GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("stream_share", "start_s", "host_forward_s", "host_backward_s", "host_launch_s",
         "read_back_s"),
        STREAMS[1:],
    ),
    (
        ("product_share", "power_loss", "power_loss_sustained", "replayed_s",
         "issued_s", "depth_s"),
        ("product", "fp8_linear", "gated_activation", "chunked_loss"),
    ),
    (
        ("narrow_fp8", "narrow_fp8_block", "narrow_nvfp4", "cast_launch_s", "cast_share",
         "hand_written"),
        ("fp8_linear",),
    ),
    (("grouped", "expert_host_s", "narrow_mxfp8"), ("grouped_gemm",)),
    (("attention_alone", "attention_keys", "attention_narrow"), ("attention",)),
    (
        ("nccl_base_s", "nccl_base_hopper_s", "nccl_hop_s", "nccl_piece_s", "nccl_pieces_most_s",
         "nccl_wire", "switch_wire", "own_copy_bytes_per_s", "direct_s", "direct_wire",
         "nccl_messages_s", "a2a_wire"),
        ("collective", "all_to_all"),
    ),
    (
        ("dispatch_s", "dispatch_processor_bytes_per_s", "combine_processor_bytes_per_s",
         "low_latency_s", "network_wire"),
        ("all_to_all",),
    ),
)  # fmt: skip
"""Constants that are fitted together, and the kinds of rows that they are fitted to."""
WIDE = ("bf16", "fp16")
"""Rows that the share of large products is fitted to; narrow ones have constants of their own."""
PULL = 0.2
"""A prior that is off by a half weighs as a sweep that is off by a tenth."""
STEEP = 4.0


def fit(rows: Sequence[KernelRow], table: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The constants that rest on these rows, from the priors of the table."""
    values = {name: float(row.get("prior", row["value"])) for name, row in table.items()}
    sure = [row for row in rows if row.sure and row.device is not None and measured_s(row)]
    for names, kinds in GROUPS:
        names = tuple(name for name in names if name in values)
        chosen = [row for row in sure if row.kind in kinds]
        if "product_share" in names:
            chosen = [row for row in chosen if row.dtype in WIDE]
        chosen = [row for row in chosen if priced(row, values).time_s is not None]
        if names and chosen:
            _fit_group(names, chosen, values)
    return values


def _fit_group(names: Sequence[str], rows: Sequence[KernelRow], values: dict[str, float]) -> None:
    start = np.log([values[name] for name in names])
    measured = np.log([measured_s(row) or 1.0 for row in rows])
    sweep = [(row.family, row.kind, row.provider, row.way, row.dtype) for row in rows]
    count = Counter(sweep)
    weight = np.array([count[s] ** -0.5 for s in sweep])

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        trial = {**values, **dict(zip(names, np.exp(logs).tolist(), strict=True))}
        predicted = np.log([priced(row, trial).time_s or 1.0 for row in rows])
        errors = np.arctan(STEEP * (predicted - measured)) / STEEP * weight
        return np.concatenate([errors, PULL * (logs - start)])

    best = least_squares(residuals, start, diff_step=[1e-3] * len(start), max_nfev=25)
    values.update(dict(zip(names, np.exp(best.x).tolist(), strict=True)))


def write(rows: Sequence[KernelRow]) -> None:
    """Writes value, prior, and the values without each device into `kernels.yaml`."""
    table: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())
    families = sorted({row.family for row in rows if row.device is not None})
    whole = fit(rows, table)
    left_out = {name: fit([r for r in rows if r.family != name], table) for name in families}
    lines = [HEAD]
    for name, row in table.items():
        prior = float(row.get("prior", row["value"]))
        if row["how"] == "assumed":
            lines.append(
                f"{name}:\n  {{value: {_text(prior)}, how: assumed,\n   basis: {_quoted(row)}}}"
            )
            continue
        others = {d: left_out[d][name] for d in families}
        apart = {d: v for d, v in others.items() if not math.isclose(v, whole[name], rel_tol=1e-3)}
        without = ", ".join(f"{d}: {_text(v)}" for d, v in apart.items())
        lines.append(
            f"{name}:\n  {{value: {_text(whole[name])}, how: fitted, prior: {_text(prior)},\n"
            f"   without: {{{without}}},\n   basis: {_quoted(row)}}}"
        )
    FILE.write_text("\n".join(lines) + "\n")


def _quoted(row: Mapping[str, Any]) -> str:
    text = str(row["basis"]).replace('"', "'")
    return f'"{text}"'


def _text(value: float) -> str:
    return repr(float(f"{value:.4g}"))


HEAD = """\
# Constants of single kernels, from `python -m benchmarks.published_kernels CSV... --fit`: the value
# that rests on all rows whose device is stated, the prior that it was pulled to, and the values
# without each device's rows, which judge that device. Names say the unit; without one it is a
# ratio. What kernels do (products, passes, launches, copies) is counted in their files instead.\
"""
