"""Today's table of single measurements as rows of kernels: products, attention, grouped products.

Its rates count a causal attention as if nothing were masked; products are bf16 in and out.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.kernel_rows import KernelRow, device_of

KINDS = {"gemm": "product", "attention_fwd": "attention", "attention_bwd": "attention",
         "grouped_gemm": "grouped_gemm"}  # fmt: skip


def read_microbench(path: Path) -> list[KernelRow]:
    """The rows that name a shape, each called after its line."""
    rows = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for cells in reader:
            row = _row(f"line-{reader.line_num}", cells)
            if row is not None:
                rows.append(row)
    return rows


def _row(name: str, cells: Mapping[str, str]) -> KernelRow | None:
    if cells["kind"] not in KINDS or not cells["unit"].startswith("TFLOP/s"):
        return None
    kind = KINDS[cells["kind"]]
    pairs = re.findall(r"([A-Za-z_]+)=?(\d+)", cells["size"])
    sizes = {key.lower(): int(value) for key, value in pairs}
    flops = _flops(cells["kind"], sizes)
    if flops is None or "fp8" in cells["details"][:40]:
        return None
    text = cells["device"].removeprefix("NVIDIA ").removeprefix("AMD ")
    shape = {key: str(value) for key, value in sizes.items()}
    if kind == "attention":
        shape["causal"] = "1"
        sizes = {"batch": sizes["batch"], "seq": sizes["seq_len"], "heads": sizes["head_num"],
                 "kv_heads": sizes["kv_head_num"], "headdim": sizes["qk_head_dim"],
                 "value_dim": sizes["v_head_dim"]}  # fmt: skip
    if kind == "grouped_gemm":
        sizes = {"m": sizes["m"] * sizes["ng"], "n": sizes["n"], "k": sizes["k"],
                 "groups": sizes["ng"]}  # fmt: skip
    return KernelRow(
        id=name,
        kind=kind,
        device_text=text,
        device=device_of(text),
        dtype="bf16",
        shape=shape,
        provider=cells["source"].split(":")[1].split("/")[0] if ":" in cells["source"] else "",
        way="bwd" if cells["kind"].endswith("_bwd") else "fwd",
        baseline_id="",
        time_s=flops / (float(cells["value"]) * 1e12),
        memory_bytes=None,
        rate=None,
        unit=cells["unit"],
        source=cells["source"],
        sizes=sizes,
    )


def _flops(kind: str, sizes: Mapping[str, int]) -> float | None:
    """As the source counts them; None: the shape is not all there."""
    if kind == "gemm" and {"m", "n", "k"} <= sizes.keys():
        return 2.0 * sizes.get("b", 1) * sizes["m"] * sizes["n"] * sizes["k"]
    if kind == "grouped_gemm" and {"ng", "m", "n", "k"} <= sizes.keys():
        return 2.0 * sizes["ng"] * sizes["m"] * sizes["n"] * sizes["k"]
    if kind.startswith("attention") and sizes.get("seq_len"):
        whole = 2.0 * sizes["batch"] * sizes["seq_len"] ** 2 * sizes["head_num"]
        whole *= sizes["qk_head_dim"] + sizes["v_head_dim"]
        return whole * (2.5 if kind == "attention_bwd" else 1.0)
    return None
