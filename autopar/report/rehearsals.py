"""What a rehearsal found, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

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
        what = f"Two steps and an evaluation, {one} {ranks} of {made.devices}, without a GPU"
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
    meant = [finding for finding in made.findings if finding.reason]
    if meant:
        parts.append(Text("waits of the host that are meant:"))
        parts += [Text(f"  {f.what}, at {f.where}: {f.reason}") for f in meant]
    return Group(*parts)


def _told(finding: Finding) -> str:
    times = f", {finding.times} times" if finding.times > 1 else ""
    return f"{_WORDS[finding.kind]}: {finding.what}{times}\n  at {finding.where}"
