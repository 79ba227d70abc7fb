"""``autopar estimate`` of a transformer: one layout, the fastest one, or a table of devices."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.cli.progress import progress
from autopar.cost_models.software import Software
from autopar.files.cluster_file import load_cluster
from autopar.frontends.family.arch import Arch
from autopar.nouns.cluster import Cluster, short_dtype
from autopar.nouns.errors import DoesNotFit, UserError
from autopar.nouns.layout import Pins
from autopar.nouns.style import Style
from autopar.nouns.text.cluster import devices_text
from autopar.planner.advice import scaling
from autopar.planner.family.estimate import check_precision
from autopar.planner.family.pins import completed, default_batch, parse_pins
from autopar.report.estimates import render, to_object
from autopar.report.render import to_text
from autopar.report.scaling import (
    WIDTH,
    joined,
    others,
    others_object,
    scaling_object,
    scaling_table,
)


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """What was typed. ``arch`` or ``model``; ``devices``: ``16,32,64``."""

    cluster: str
    arch: str | None = None
    model: str | None = None
    fix: tuple[str, ...] = ()
    devices: str | None = None
    global_batch: int | None = None
    batch_tokens: int | None = None
    seq: int | None = None
    precision: str | None = None
    style: Style | None = None


@dataclass(frozen=True, slots=True)
class Estimated:
    """The report in both forms; ``fits``: some layout of it does."""

    text: str
    data: Mapping[str, Any]
    fits: bool

    def to_json(self) -> str:
        return json.dumps(self.data, indent=1)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A transformer, and what its file says of its training; None: nothing."""

    arch: Arch
    samples: int | None
    precision: str
    style: Style | None
    software: Software | None = None
    notes: tuple[str, ...] = ()


def answer(question: EstimateRequest) -> Estimated:
    """Raises `UserError`, and `DoesNotFit` where the fastest layout is asked and none fits."""
    cluster, pins = load_cluster(question.cluster), parse_pins(question.fix)
    counts = _counts(question.devices)
    sizes = _sizes(question, cluster)
    if question.seq is not None:
        if question.seq < 1:
            raise UserError(f"--seq {question.seq}: give a number of tokens from 1")
        sizes = replace(sizes, arch=replace(sizes.arch, seq=question.seq))
    batch, assumed = _batch(question, sizes, pins), []
    pins = pins.without("global_batch")
    if batch is None:
        batch = default_batch(pins, max(counts, default=cluster.device_count))
        assumed.append(
            f"nothing says the batch, so it is of {batch} sequences, by these degrees; "
            f"--global-batch {batch} prices other layouts with the same one"
        )
    check_precision(sizes.precision, cluster)
    asked = scaling.Asked(sizes.arch, cluster, batch, sizes.precision, sizes.style, sizes.software)
    priced = _answer(asked, counts, pins)
    notes = [*sizes.notes, *_mixed(cluster), *assumed]
    if not notes:
        return priced
    text = "\n".join([priced.text, *(f"note: {note}" for note in notes)])
    return replace(priced, text=text, data={**priced.data, "notes": notes})


def _mixed(cluster: Cluster) -> list[str]:
    if len(cluster.kinds) == 1:
        return []
    return [
        f"{devices_text(cluster.groups)}: all are priced as {cluster.device.name}, the slowest "
        "kind, with the least of each figure; `autopar plan` gives each kind its own share"
    ]


def _answer(asked: scaling.Asked, counts: list[int], pins: Pins) -> Estimated:
    if counts:
        table = scaling.scaling(asked, counts, pins, progress)
        data = {"model": asked.arch.name, "cluster": asked.cluster.name, **scaling_object(table)}
        text = to_text(scaling_table(asked, table), WIDTH).rstrip()
        return Estimated(text, data, any(row.fits for row in table.rows))
    if pins != Pins():
        layout = completed(pins, asked.cluster.device_count, asked.global_batch)
        one = asked.price(layout)
        return Estimated(render(one), to_object(one), one.fits)
    progress(f"searching the layouts of {asked.cluster.device_count} devices")
    searched = scaling.searched(asked)
    if searched.best is None:
        raise DoesNotFit(_nothing(asked, searched.count))
    text = "\n".join([render(searched.best), "", to_text(others(searched), WIDTH).rstrip()])
    data = {
        **to_object(searched.best),
        "layouts": searched.count,
        "others": others_object(searched),
    }
    return Estimated(text, data, True)


def _nothing(asked: scaling.Asked, count: int) -> str:
    devices = asked.cluster.device_count
    why = f"none of {count:,} layouts of {asked.arch.name} fits on {devices} devices"
    if not count:
        why = (
            f"no layout of {asked.arch.name} on {devices} devices divides a batch of "
            f"{asked.global_batch} sequences, the heads and the layers"
        )
    least = scaling.fewest(asked, [scaling.Scaled(devices, None)])
    if least is None:
        return f"{why}; give larger devices, or another --global-batch"
    return f"{why}; {least.devices} would do{joined(asked, [least])}: see --devices {least.devices}"


def _counts(text: str | None) -> list[int]:
    """Of ``16,32,64``. Raises `UserError`."""
    if text is None:
        return []
    parts = text.replace(",", " ").split()
    if not parts or not all(re.fullmatch("[1-9][0-9]{0,6}", part) for part in parts):
        raise UserError(f"--devices {text}: give numbers of devices, as in --devices 16,32,64")
    return [int(part) for part in parts]


def _batch(question: EstimateRequest, sizes: _Sizes, pins: Pins) -> int | None:
    """Sequences in a step; None where nothing says so. Raises `UserError`."""
    if question.batch_tokens is not None:
        if question.global_batch is not None or pins.global_batch is not None:
            raise UserError("--batch-tokens and a global batch both say the batch; give one")
        return _sequences(question.batch_tokens, sizes.arch.seq)
    if question.global_batch is not None:
        if question.global_batch < 1:
            raise UserError(
                f"--global-batch {question.global_batch}: give a whole number of sequences from 1"
            )
        return question.global_batch
    return pins.global_batch or sizes.samples


def _sequences(tokens: int, seq: int) -> int:
    """Raises `UserError` where they are no whole number."""
    count, left = divmod(max(0, tokens), seq)
    if left or not count:
        near = [f"{n * seq} ({n} sequences)" for n in (count, count + 1) if n]
        raise UserError(
            f"--batch-tokens {tokens} are no whole number of sequences of {seq} tokens; give "
            f"{' or '.join(near)}"
        )
    return count


def _sizes(question: EstimateRequest, cluster: Cluster) -> _Sizes:
    """Of ``--arch``, or of a model that is captured. Raises `UserError`."""
    if question.model is None:
        from autopar.frontends.family.arch_file import load_arch

        arch = load_arch(question.arch or "")
        return _Sizes(arch, None, question.precision or "bf16", question.style)
    from autopar.cli.unemitted import PRICED_BY, software_of
    from autopar.frontends.dispatch import capture
    from autopar.frontends.family.read import NotOfFamily, arch_of
    from autopar.frontends.loading import load_workload
    from autopar.planner.ask.checks import check_style

    workload = load_workload(question.model)
    check_style(workload.framework, question.style)
    progress(f"capturing {question.model}")
    captured = capture(workload)
    try:
        derived = arch_of(captured.graph, captured.samples, question.model)
    except NotOfFamily as error:
        raise NotOfFamily(
            f"{question.model} cannot be priced as a transformer, as --devices, --batch-tokens and "
            f"--seq do: {error}. Plan it on a cluster file of each size instead"
        ) from None
    software = software_of(captured, workload, cluster, question.style)
    return _Sizes(
        arch=derived.arch,
        samples=captured.samples,
        precision=short_dtype(workload.precision),
        style=software.style,
        software=software,
        notes=(f"priced by the {PRICED_BY}", *derived.notes),
    )
