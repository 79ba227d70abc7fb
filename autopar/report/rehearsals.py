"""What a rehearsal found, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.report.units import size
from autopar.runtime.rehearsal.findings import Finding
from autopar.runtime.rehearsal.rehearse import PLATFORMS, Rehearsal

_WORDS = {
    "mixes": "tensors of two devices in one op",
    "waits": "the host waits for the device",
    "races": "a stream does not wait for another",
    "refused": "refused",
    "fails": "fails",
}


def rehearsal_summary(made: Rehearsal) -> RenderableType:
    """What was rehearsed, each finding with its line, and the waits that are meant."""
    if made.framework == "jax":
        what = f"The step on {made.devices} devices, lowered for {' and '.join(PLATFORMS)}"
    else:
        ranks = ", ".join(map(str, made.ranks))
        one = "rank" if len(made.ranks) == 1 else "ranks"
        what = (
            f"Steps, an evaluation and a checkpoint, {one} {ranks} of {made.devices}, without a GPU"
        )
    parts: list[RenderableType] = [Text(what)]
    parts += [Text(_told(finding)) for finding in made.wrong]
    if not made.wrong:
        parts.append(
            Text(
                "nothing mixes devices, waits, races, or is refused by NCCL"
                if made.framework == "torch"
                else "nothing is refused"
            )
        )
    if made.peak_bytes and all(finding.kind != "fails" for finding in made.wrong):
        rank, held = max(made.peak_bytes.items(), key=lambda one: one[1])
        parts.append(
            Text(
                f"tensors hold at most {size(held)} on a device, on rank {rank} "
                f"(the plan: {size(made.planned_bytes)})"
            )
        )
    meant = [finding for finding in made.findings if finding.reason]
    if meant:
        parts.append(Text("waits of the host that are meant:"))
        parts += [Text(line) for line in _lines_of(meant)]
    return Group(*parts)


def _lines_of(meant: Sequence[Finding]) -> Iterator[str]:
    """A line for each place: a checkpoint moves many tensors from one."""
    alike: dict[str, list[Finding]] = {}
    for finding in meant:
        alike.setdefault(finding.where, []).append(finding)
    for where, findings in alike.items():
        more = f" and {len(findings) - 1} more like it" if len(findings) > 1 else ""
        yield f"  {findings[0].what}{more}, at {where}: {findings[0].reason}"


def _told(finding: Finding) -> str:
    times = f", {finding.times} times" if finding.times > 1 else ""
    return f"{_WORDS[finding.kind]}: {finding.what}{times}\n  at {finding.where}"
