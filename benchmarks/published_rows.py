"""One row of published measurements as inputs of the estimator.

What a source's software does and what its empty cells mean stands in `published_sources.yaml`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cost_models.catalogue import UnknownDevice, find_device
from autopar.cost_models.software import Software
from autopar.cost_models.units import parse_quantity
from autopar.frontends.family.arch import Arch, LatentAttention
from autopar.nouns.cluster import Cluster, Device, DeviceGroup
from autopar.nouns.layout import Layout
from autopar.nouns.level import Level
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.recompute import ATTENTION, FULL, KEEP_ALL, Recompute
from autopar.planner.family.runs import TrainingRun
from autopar.pricing.software.again import MODULES
from benchmarks.published_declarations import Cells, Knowledge, Row, matching, software_of
from benchmarks.published_guesses import likely_microbatch, that_fits


class Unpriceable(ValueError):
    """A row that cannot be priced; the text is the reason."""


@dataclass(frozen=True)
class Run:
    """One published run, ready to price, with what it measured."""

    id: str
    source: str
    arch: Arch
    layout: Layout
    cluster: Cluster
    software: Software
    precision: str
    measured_s: float | None
    """Step time, from tokens/s, step time, TFLOP/s or MFU, whichever is safest."""
    metric: str
    memory_bytes: float | None
    key: str
    """Equal for rows that repeat one configuration."""
    group: str
    """Equal for rows that differ only in layout."""
    order: float
    """Later software has a larger number."""
    device_class: str
    likely: str
    """The likely reason where the prediction is far off."""
    notes: str = field(default="", repr=False)
    timed: bool = False
    """The row has a step time, whatever else it has."""

    @property
    def priced(self) -> TrainingRun:
        """What of it a price depends on."""
        return TrainingRun(self.arch, self.cluster, self.layout, self.software, self.precision)


def read_run(row: Row, knowledge: Knowledge = "declared", without: Collection[int] = ()) -> Run:
    """The run that `row` describes, of its source no more known than `knowledge` says, and read
    without the rules of the numbers `without`.

    Raises:
        Unpriceable: with the reason.
    """
    source = row.get("source") or ""
    row = Cells(row, knowledge, without)
    if "OUTLIER" in row["notes"] and "OUTLIER TFLOPs" not in row["notes"]:
        raise Unpriceable("the source contradicts itself (OUTLIER in the notes)")
    for entry in matching("unpriced", row):
        raise Unpriceable(entry["reason"])
    software = software_of(row)
    for section in ("sources", "rules"):
        for entry in matching(section, row):
            for cell, value in entry.get("fill", {}).items():
                row[cell] = row[cell] or str(value)
            row.update(entry.get("corrects", {}))
    device = _device(row["device"])
    arch = _arch(row)
    layout = _layout(row, arch)
    precision = row["precision"] or "bf16"
    cluster = _cluster(row, device, max(layout.device_count, _int(row, "num_devices") or 1))
    if not row["recompute"]:
        layout = that_fits(TrainingRun(arch, cluster, layout, software, precision))
    stated = row["micro_batch"] or "local batch size" in row["notes"]
    if not (stated or "TPU" in row["device"]) and row["global_batch"]:
        layout = likely_microbatch(TrainingRun(arch, cluster, layout, software, precision))
    measured_s, metric = _measured(row, arch, layout, device.peak("bf16"))
    memory = _float(row, "metric_peak_mem_gib")
    config = "|".join(
        row[c]
        for c in row
        if not c.startswith("metric") and c not in ("id", "source_location", "notes")
    )
    flags = "|".join(
        re.findall(r"offload=\w+|task=\w+|overlap|natural|forced|Liger|MBridge", row["notes"])
    )
    system = "|".join(re.findall(r"; (Megatron-LM|MegaScale);|date", row["notes"]))
    group = "|".join(
        (row["source"], repr(arch), *(row[c] for c in ("device", "num_devices", "precision")))
    )
    return Run(
        id=row["id"],
        source=source.strip(),
        arch=arch,
        layout=layout,
        cluster=cluster,
        software=software,
        precision=precision,
        measured_s=measured_s,
        metric=metric,
        memory_bytes=None if memory is None else memory * _memory_unit(row),
        key=config + flags + system,
        group=group + "|" + row["global_batch"] + flags,
        order=_order(row["notes"]),
        device_class=_device_class(row["architecture"], device.family),
        likely=next((e["reason"] for e in matching("defying", row)), "no cause found in its cells"),
        notes=row["notes"],
        timed=_float(row, "metric_step_time_s") is not None,
    )


def _device_class(architecture: str, family: str) -> str:
    if architecture != "dense":
        return architecture
    return "dense, A100 and H100" if family in ("ampere", "hopper") else "dense, other devices"


def _device(text: str) -> Device:
    """The catalogue's device for a source's spelling: 'A100-80GB-SXM (paper: ...)' is A100-80GB."""
    words = text.split(" (")[0].split("-")
    sizes = [word for word in words if re.fullmatch(r"\d+GB", word)]
    guesses = ["-".join(words[:n]) for n in range(len(words), 0, -1)]
    if "PCIe" in text:
        guesses = [*(f"{words[0]}-{size}-PCIe" for size in sizes), f"{words[0]}-PCIe", *guesses]
        sizes = []
    for guess in (text, *(f"{words[0]}-{size}" for size in sizes), *guesses):
        try:
            return find_device(guess)
        except UnknownDevice:
            continue
    raise Unpriceable(f"no device {text!r} in the catalogue")


def _arch(row: Cells) -> Arch:
    cells: dict[str, Any] = {
        name: value
        for name, column in (
            ("layers", "layers"),
            ("hidden", "hidden"),
            ("heads", "heads"),
            ("kv_heads", "kv_heads"),
            ("ffn", "ffn_hidden"),
            ("vocab", "vocab"),
            ("experts", "experts"),
            ("top_k", "topk"),
            ("seq", "seq_len"),
        )
        if (value := _int(row, column)) is not None
    }
    implied: dict[str, Any] = {}
    forced: dict[str, Any] = {}
    for entry in matching("models", row):
        implied.update(entry.get("arch", {}))
        forced.update(entry.get("override", {}))
    if "mlp=gelu-2mat" in row["notes"]:
        implied["gated"] = False
    if "latent" in implied:
        implied["latent"] = LatentAttention(*implied["latent"])
    cells = {**implied, **cells, **forced}
    if "hidden" not in cells:
        raise Unpriceable("architecture figures are not published")
    cells.setdefault("vocab", 51200)
    cells.setdefault("seq", 4096 if "TPU" in row["device"] else 2048)
    cells.setdefault("kv_heads", cells.get("heads"))
    params = _float(row, "params_b")
    if "layers" not in cells:
        if params is None:
            raise Unpriceable("the number of layers is not published")
        per = 12 if not cells.get("gated") else 4 + 3 * cells["ffn"] / cells["hidden"]
        cells["layers"] = round(
            (params * 1e9 - cells["vocab"] * cells["hidden"]) / (per * cells["hidden"] ** 2)
        )
    for need in ("heads", "ffn"):
        if need not in cells:
            raise Unpriceable(f"{need} is not published")
    for name, value in cells.items():
        if name in ("layers", "heads", "kv_heads", "ffn", "hidden", "vocab", "seq") and value < 1:
            raise Unpriceable(f"{name} {value} is outside any physical range")
    if row["architecture"] == "moe" and not cells.get("experts"):
        raise Unpriceable("the number of experts is not published")
    if cells.get("experts") and not cells.get("top_k"):
        raise Unpriceable("how many experts a token visits is not published")
    arch = Arch(name=row["model_name"], **cells)
    if params and "gated" not in implied and not arch.is_moe:
        plain = replace(arch, gated=False)
        if abs(plain.parameters / 1e9 - params) < abs(arch.parameters / 1e9 - params):
            arch = plain
    return arch


def _layout(row: Row, arch: Arch) -> Layout:
    devices = _int(row, "num_devices")
    if devices is None:
        raise Unpriceable("the number of devices is not published")
    tp, pp, cp = (_int(row, c) or 1 for c in ("tp", "pp", "cp"))
    ep = _int(row, "ep") or (1 if not arch.is_moe else _largest_ep(arch, devices))
    # Where the cells disagree, rates are a device's: dp is what the others leave of the devices.
    dp, left = divmod(devices, tp * pp * cp)
    if left or dp == 0:
        raise Unpriceable(f"cp {cp} x tp {tp} x pp {pp} does not divide {devices} devices")
    zero_text = row["zero_or_fsdp"]
    micro = _int(row, "micro_batch")
    batch = _int(row, "global_batch")
    tokens = re.search(r"(\d+)k tokens (?:per|/) ?device", row["notes"])
    if micro is None and batch is None and tokens:
        micro = max(1, int(tokens.group(1)) * 1024 // arch.seq)
    local = re.search(r"local batch size (\d+) per DP rank", row["notes"])
    if micro is None and local:  # as many microbatches as pipeline ranks, unless it says so
        micro = max(1, int(local.group(1)) // pp)
    if micro is None:
        is_tpu = "TPU" in row["device"]
        micro = max(1, round(batch / dp)) if is_tpu and batch else 1
    if batch is None:
        accumulated = re.search(r"GBS (?:in recipe )?(\d+)", row["notes"])
        batch = int(accumulated.group(1)) if accumulated else dp * micro * (8 * pp if pp > 1 else 4)
    if min(batch, micro) < 1:
        raise Unpriceable(f"global_batch {batch}, micro_batch {micro}: nothing to train on")
    if batch > 100000:  # BERT counts a step of many accumulations
        batch = dp * micro * 16
    while dp * micro > batch and dp % 2 == 0 and micro == 1:
        dp, cp = dp // 2, cp * 2  # fewer sequences than replicas: the others share a sequence
    zero = 1
    if re.search(r"FSDP(?!=0)|ZeRO-3|Zero-3", zero_text, re.I) and "FSDP=0" not in zero_text:
        zero = 2 if "GRAD_OP" in zero_text else 3
        # Parameters stay gathered from pass to pass, gradients whole until the last.
        if pp > 1 and "FSDP2" in zero_text:
            zero = 1
    elif "ZeRO-2" in zero_text:
        zero = 2
    elif re.search(r"ZeRO-0|^DDP$", zero_text):
        zero = 0
    elif not zero_text and "TPU" in row["device"]:
        zero = 3
    shard, replicate = dp, 1
    inner = re.search(r"group=(\d+)|FSDP (\d+) \(ici|FSDP in node \((\d+)\)|shard=(\d+)", zero_text)
    if inner or "HSDP" in zero_text:
        size = (
            int(next(g for g in inner.groups() if g))
            if inner
            else _int(row, "devices_per_node") or 8
        )
        if dp % size == 0 and size < dp:
            shard, replicate = size, dp // size
    schedule, interleave = _schedule(row, arch, pp)
    return Layout(
        global_batch=batch,
        microbatch=micro,
        dp_replicate=replicate,
        dp_shard=shard,
        tp=tp,
        cp=cp,
        ep=min(ep, tp * cp * dp),
        pp=pp,
        zero=zero,
        schedule=schedule if pp > 1 else "1f1b",
        interleave=interleave if pp > 1 else 1,
        recompute=_recompute(row),
        sequence_parallel=row["sequence_parallel"] != "no",
        offload=OFFLOAD["offload" in zero_text],
        etp=_etp(row, tp, ep),
    )


def _recompute(row: Row) -> Recompute:
    text = row["recompute"]
    if text.startswith("full") or text == "custom":
        return Recompute(FULL)
    if text in ("", "none"):
        return KEEP_ALL
    hardware = re.search(r"HFU=([0-9.]+)(%?)", row["notes"])
    model = _float(row, "metric_mfu")
    if hardware and model:
        share = 3 * (float(hardware.group(1)) / (100 if hardware.group(2) else 1) / model - 1)
        if share > 0.05:  # the source counts whole layers run again
            return Recompute(FULL, share=min(1.0, share))
    return Recompute(ATTENTION, modules=_modules(text))


SCHEDULES = {
    r"zb-?1p|zb-?h1|zbb|zero.?bubble": "zb-h1",
    r"zb-?2p|zb-?h2": "zb-h2",
    r"zb-?v": "zb-v",
    r"dualpipe-?v": "dualpipe-v",
    r"gpipe|afab|all.forward": "gpipe",
    r"breadth|looped.?bfs": "breadth-first",
}
"""What sources write -> the schedule; all else is 1F1B, interleaved where there are chunks."""
UNPLAYED = r"v-?half|v-?min|dualpipe(?!-?v)"
"""Schedules that cannot be played."""


def _schedule(row: Row, arch: Arch, pp: int) -> tuple[str, int]:
    """(schedule, interleave) of a row."""
    text, interleave = row["schedule"], _int(row, "vpp") or 1
    if pp > 1 and re.search(UNPLAYED, text, re.I):
        raise Unpriceable(f"schedule {text} cannot be played")
    name = next((v for k, v in SCHEDULES.items() if re.search(k, text, re.I)), None)
    if name in ("zb-v", "dualpipe-v", "gpipe", "zb-h2"):
        return name, 1
    if name == "zb-h1" and interleave > 1:
        return "zb-interleaved", interleave
    chunk = re.search(r"(\d+) layers? per chunk", row["notes"])
    if interleave == 1 and re.search(r"interleaved|1F1B-I", text) and chunk:
        interleave = max(1, math.ceil(arch.layers / int(chunk.group(1)) / pp))
    if name:
        return name, interleave
    return ("interleaved-1f1b" if interleave > 1 else "1f1b"), interleave


MAXTEXT_KEEPS = {"qkv_proj_offloaded": ("core_attn", "layernorm", "out_proj", "mlp", "moe_act")}
"""Policies by MaxText's names -> what runs again where they keep what they name."""


def _modules(text: str) -> tuple[str, ...]:
    """The modules that 'selective(norm, act)' names."""
    if text in MAXTEXT_KEEPS:
        return MAXTEXT_KEEPS[text]
    named = re.search(r"\((.*)\)", text)
    words = re.split(r"[,\s]+", named.group(1)) if named else []
    spelled = {"norm": "layernorm", "act": "moe_act"}
    return tuple(m for word in words if (m := spelled.get(word, word)) in MODULES)


def _largest_ep(arch: Arch, devices: int) -> int:
    ep = 1
    while arch.experts % (2 * ep) == 0 and devices % (2 * ep) == 0 and ep < 64:
        ep *= 2
    return ep


def _etp(row: Row, tp: int, ep: int) -> int:
    """What the row says; recipes with expert parallelism leave each expert whole (0: as tp)."""
    match = re.search(r"\bETP=(\d+)", row["notes"])
    if match and tp % int(match.group(1)) == 0:
        return int(match.group(1))
    return 1 if ep > 1 else 0


def _cluster(row: Cells, device: Any, count: int) -> Cluster:
    entry = matching("clusters", row)[0]
    levels: list[Level] = []
    inner = 1
    for name, span, bandwidth, *ports in entry["levels"]:
        size = count if span == 0 else min(span, count)
        if size <= inner and levels:
            continue
        levels.append(
            Level(
                name=name,
                span=size,
                bandwidth_bytes_per_s=parse_quantity(bandwidth, "bandwidth_bytes_per_s"),
                latency_s=2e-6 if inner == 1 else 5e-6,
                ports=min(ports[0] if ports else inner, inner),
                in_network_reduction=device.family in ("hopper", "blackwell") and inner == 1,
            )
        )
        inner = size
    return Cluster("published", (DeviceGroup(device, count),), tuple(levels))


def _measured(row: Cells, arch: Arch, layout: Layout, peak: float) -> tuple[float | None, str]:
    """Step seconds and the metric that they come from."""
    devices = layout.device_count
    tokens = layout.global_batch * arch.seq
    step = _float(row, "metric_step_time_s")
    rate = _float(row, "metric_tokens_per_s_per_gpu")
    if rate and not (step and row["seq_len"] and row["global_batch"]):
        return tokens / devices / rate, "tokens/s"
    if step and row["seq_len"] and row["global_batch"] and not rate:
        return step, "step time"
    if rate:
        return tokens / devices / rate, "tokens/s"
    tflops, mfu = _float(row, "metric_tflops_per_gpu"), _float(row, "metric_mfu")
    if step and "ViT" in row["model_name"]:
        return step, "step time"
    if tflops is None and mfu is None:
        return None, ""
    reached = tflops * 1e12 if tflops else (mfu or 0) * peak
    notes = row["notes"]
    entries = [*matching("sources", row), *matching("rules", row)]
    counted = next((e["flops"] for e in entries if "flops" in e), "whole")
    if "causal" in notes.lower():
        counted = "whole" if "non-causal" in notes else "causal"
    flops = arch.flops_per_token(causal_counted=counted == "causal")
    if "hardware" in notes:
        flops *= 4 / 3
    return tokens * flops / devices / reached, "TFLOP/s" if tflops else "MFU"


def _memory_unit(row: Row) -> float:
    return 1e9 if re.search(r"printed (as |\")?GB\b|printed \"GB\"", row["notes"]) else 2.0**30


def _order(notes: str) -> float:
    match = re.search(r"container=\D*([0-9.]+)", notes)
    if not match:
        return 0.0
    parts = [float(p) for p in match.group(1).strip(".").split(".")]
    return sum(p / 1000.0**i for i, p in enumerate(parts))


def _float(row: Row, column: str) -> float | None:
    """The cell as a number; None where it is empty.

    Raises:
        Unpriceable: no number, or one that counts and rates cannot be.
    """
    text = row.get(column) or ""
    try:
        value = float(text) if text else None
    except ValueError:
        raise Unpriceable(f"{column} cannot be read: {text!r}") from None
    if value is not None and not 0 <= value < 1e18:
        raise Unpriceable(f"{column} {text} is outside any physical range")
    return value


def _int(row: Row, column: str) -> int | None:
    value = _float(row, column)
    if value is not None and value != int(value):
        raise Unpriceable(f"{column} {row[column]} is not a whole number")
    return None if value is None else int(value)
