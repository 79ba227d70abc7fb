"""Layouts of a model that no backend emits: priced by the transformer family, never written.

The model is captured and read as figures of the family (`autopar.frontends.family.read`); the
layout that ``--fix`` names, and nothing beside it, is then priced as `autopar estimate --arch`
prices it, in the precision, batch and execution style of the model.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from autopar.cost_models.precision import stream_bytes
from autopar.cost_models.software import Software, States, default_software
from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.frontends.family.read import NotOfFamily, arch_of
from autopar.frontends.loading import load_workload
from autopar.frontends.shared.captured import Captured
from autopar.nouns.axes import PIPELINE
from autopar.nouns.cluster import Cluster, short_dtype
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph
from autopar.nouns.layout import DEGREES, NAMES, Pins
from autopar.nouns.recompute import COMPUTE, SELECTIVE
from autopar.nouns.style import Style, style_of
from autopar.nouns.workload import Workload
from autopar.planner.ask.checks import check_style
from autopar.planner.ask.pins import unemitted
from autopar.planner.family.estimate import Estimate, estimate
from autopar.planner.family.pins import completed, read_pins
from autopar.planner.search.layouts import Progress
from autopar.pricing.software.states import STATE_BYTES
from autopar.report.estimates import render, to_object

PRICED_BY = "transformer family"


@dataclass(frozen=True, slots=True)
class Unemitted:
    """One layout priced; ``choices`` are what no backend emits of it, as ``pp=2``."""

    estimate: Estimate
    choices: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def why(self) -> str:
        """One sentence for whoever expects a program."""
        return f"no backend emits {','.join(self.choices)} yet, so no program is written"

    def to_text(self) -> str:
        """The report as plain text."""
        lines = [render(self.estimate), f"priced by the {PRICED_BY}; {self.why}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> str:
        """The report as one JSON object."""
        data = {
            **to_object(self.estimate),
            "priced_by": PRICED_BY,
            "not_emitted": list(self.choices),
            "architecture": asdict(self.estimate.arch),
            "notes": list(self.notes),
        }
        return json.dumps(data, indent=1)


def price(
    model: str,
    cluster_ref: str,
    fix: Mapping[str, str],
    style: Style | None = None,
    progress: Progress = lambda _: None,
) -> Unemitted:
    """The layout that ``fix`` names for ``"model.py:Name"``; some of it must be `unemitted`.

    Raises:
        UserError: a file that cannot be used, a model outside the family, an illegal layout.
    """
    workload = load_workload(model)
    choices = unemitted(fix)
    cluster = load_cluster(cluster_ref)
    pinned = _parsed(fix, choices)
    degrees = pinned.without(*(name for name in NAMES if name not in DEGREES))
    completed(degrees, cluster.device_count, 1)  # refused before the long work
    check_style(workload.framework, style)
    progress(f"capturing {model}")
    captured = capture(workload)
    samples = captured.samples
    if pinned.global_batch not in (None, samples):
        raise UserError(
            f"--fix global_batch={pinned.global_batch}: the batch of {model} has {samples} "
            "samples; leave global_batch out, or change the model's file"
        )
    try:
        derived = arch_of(captured.graph, samples, model)
    except NotOfFamily as error:
        raise NotOfFamily(
            f"--fix {','.join(choices)}: no backend emits that yet, and {model} cannot be priced "
            f"as a transformer: {error}. Leave {','.join(choices)} out, or price figures of your "
            "own with `autopar estimate --arch`"
        ) from None
    layout = completed(pinned, cluster.device_count, samples)
    software = software_of(captured, workload, cluster, style)
    precision = short_dtype(workload.precision)
    priced = estimate(derived.arch, cluster, layout, software, precision)
    # The batch stands in the model's file, so --fix of a program does not take it.
    advice = priced.advice.replace(f",global_batch={samples}", "")
    notes = (*derived.notes, *_state_notes(captured, software, precision, workload.optimizer))
    return Unemitted(replace(priced, advice=advice), choices, notes)


def without_effect(options: Mapping[str, object], choices: tuple[str, ...]) -> str:
    """What to say of options that are given and that no layout priced alone reads."""
    given = [name for name, value in options.items() if value]
    if not given:
        return ""
    return (
        f"{given[0]} has no effect with --fix {','.join(choices)}, which no backend emits yet: the "
        f"{PRICED_BY} prices that layout alone; leave {given[0]} out"
    )


def _parsed(fix: Mapping[str, str], choices: tuple[str, ...]) -> Pins:
    """Pins of figures; ``schedule=none`` is one stage's."""
    if (recompute := fix.get("recompute")) in (COMPUTE, SELECTIVE):
        raise UserError(
            f"--fix recompute={recompute}: with {','.join(choices)}, which no backend emits yet, "
            "there is recompute none, selective or full"
        )
    kept = {
        n: v
        for n, v in fix.items()
        if n != "schedule" or v != "none" or fix.get(PIPELINE, "1") != "1"
    }
    return read_pins(kept)


def software_of(
    captured: Captured, workload: Workload, cluster: Cluster, style: Style | None
) -> Software:
    """What is usual on the devices, with the state, dropout and style of the model."""
    device = cluster.device
    numbers = Counter[str]()
    for tensor in captured.parameters:
        numbers[tensor.dtype] += math.prod(tensor.shape)
    stored = numbers.most_common(1)[0][0]
    states: States = "bf16" if stored in ("bfloat16", "float16") else "fsdp"
    return replace(
        default_software(device.family, device.kind, zero=1),
        style=style or style_of(workload.framework),
        states=states,
        dropout=_drops(captured.graph),
    )


def _drops(graph: Graph) -> bool:
    bodies = [graph, *(block.body for block in graph.blocks.values())]
    return any(
        op.attrs.get("p", 0) > 0 if op.kind == "dropout" else op.attrs.get("dropout_p", 0) > 0
        for body in bodies
        for op in body.ops
        if op.kind in ("dropout", "attention")
    )


def _state_notes(
    captured: Captured, software: Software, precision: str, optimizer: str
) -> tuple[str, ...]:
    """What is held for each parameter, and where the model needs less than is priced."""
    weight, gradient, rest = STATE_BYTES[software.states]
    if (wide := stream_bytes(precision)) > 2:
        weight, gradient, rest = wide, wide, 2 * wide
    notes = [
        f"of a parameter, {weight} bytes are the weight, {gradient} the gradient and {rest} what "
        "the optimizer keeps"
    ]
    if optimizer != "adamw":
        notes.append(f"AdamW is priced; {optimizer} keeps less")
    frozen = sum(math.prod(t.shape) for t in captured.parameters if not t.trainable)
    if frozen:
        notes.append(f"{frozen:,} frozen parameters are priced as trained")
    return tuple(notes)
