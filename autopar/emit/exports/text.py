"""What exports share: their result, comments, and refusals."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.emit.exports.setup import Setup
from autopar.nouns.axes import TENSOR
from autopar.nouns.errors import UserError
from autopar.nouns.recompute import ATTENTION, COMPUTE, FULL, NONE, SELECTIVE, Recompute

WIDTH = 96


class Refused(UserError):
    """A layout that the target would refuse: what and why, and the next thing to try."""


@dataclass(frozen=True, slots=True)
class Export:
    """files: relative path -> text. left_out: what the target cannot carry, one sentence each.
    start: the command that starts the job."""

    files: Mapping[str, str]
    left_out: tuple[str, ...]
    start: str


def refuse(target: str, what: str, why: str, instead: str) -> Refused:
    """``megatron refuses pp 3: it does not divide 32 layers. Try pp 2 or 4``"""
    return Refused(f"{target} refuses {what}: {why}. {instead}; nothing was written")


def header(setup: Setup, target: str, left_out: Iterable[str], sign: str = "#") -> str:
    """The comment that opens a file: for what it is, and what it could not say."""
    texts = list(left_out)
    lines = [
        f"{setup.name} on {setup.layout.device_count} devices: {setup.degrees()}. For {target}."
    ]
    if texts:
        lines.append("Not carried:")
        lines += [f"- {text}" for text in texts]
    wrapped = [
        part
        for line in lines
        for part in textwrap.wrap(
            line, WIDTH - len(sign), subsequent_indent="  " if line.startswith("-") else ""
        )
    ]
    return "\n".join(f"{sign} {line}".rstrip() for line in wrapped) + "\n"


def comment(text: str, sign: str = "#") -> str:
    return "".join(f"{sign} {line}\n" for line in textwrap.wrap(text, WIDTH - len(sign)))


def not_carried(
    setup: Setup,
    *more: str,
    per_op: bool = True,
    offloads: bool = False,
    selects_ops: bool = False,
) -> tuple[str, ...]:
    """What no other trainer takes of this setup, and ``more`` that this one does not. ``offloads``:
    it takes where the optimizer's state is; ``selects_ops``: as of `recomputes`."""
    notes = []
    if setup.layout.offloads and not offloads:
        notes.append(
            "offload=optimizer (its state in host memory): a device's memory may be short without"
        )
    if setup.layout.recompute.count is not None:
        notes.append(f"recompute={setup.layout.recompute}: full for all layers takes its place")
    if setup.layout.recompute == Recompute(COMPUTE):
        notes.append(
            "recompute=compute (all but what collectives gave runs again): full takes its place"
        )
    if setup.layout.recompute == Recompute(SELECTIVE) and not selects_ops:
        notes.append(
            f"recompute={SELECTIVE} (all but products, attention and what collectives gave runs "
            "again): full takes its place"
        )
    if per_op and any(p.sharding.on(TENSOR).kind == "S" for p in setup.parameters):
        notes.append("which parameters the plan splits over tp: the trainer has its own rule")
    return (*notes, *(text for text in more if text))


def recomputes(setup: Setup, selects_ops: bool = False) -> str:
    """none, selective or full. ``selects_ops``: the trainer's selective goes op by op and keeps
    products; else it is that of attention alone."""
    policy = setup.layout.recompute.policy
    if policy == SELECTIVE:
        return ATTENTION if selects_ops else FULL
    return policy if policy in (NONE, ATTENTION) else FULL
