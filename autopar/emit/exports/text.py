"""What exports share: their result, comments, and refusals."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

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


class Limit(NamedTuple):
    """What a target does not take: whether it is asked for, and in the words of a refusal what
    (``pp 3``), why (``it does not divide 32 layers``), and the next thing to try."""

    asked: bool
    what: str
    why: str
    instead: str


def refuse_beyond(target: str, limits: Iterable[Limit]) -> None:
    """Raises `Refused` for the first of the limits that is asked for."""
    for limit in limits:
        if limit.asked:
            raise Refused(
                f"{target} refuses {limit.what}: {limit.why}. {limit.instead}; nothing was written"
            )


def no_jax(setup: Setup, why: str = "it trains PyTorch modules") -> Limit:
    """Of a trainer of PyTorch models."""
    instead = "Export to maxtext, levanter, axlearn or partition-specs"
    return Limit(setup.framework == "jax", "a JAX model", why, instead)


def no_degrees(setup: Setup, why: Mapping[str, str], targets: str) -> Iterator[Limit]:
    """``why``: by the name of each degree that the target has not; ``targets`` have it."""
    for name, reason in why.items():
        size = getattr(setup.layout, name)
        instead = f"Give {name}=1, or export to {targets}"
        yield Limit(size > 1, f"{name} {size}", reason, instead)


def no_heads(setup: Setup, why: str, targets: str) -> Limit:
    """Of a trainer whose ranks of a sequence split rows of attention alone."""
    x = setup.layout
    instead = f"Plan with cp_ring={x.cp}, or export to {targets}"
    return Limit(x.cp_head > 1, f"cp_head {x.cp_head}", why, instead)


def no_matrices(setup: Setup, why: str) -> Limit:
    """Of a trainer that splits no matrices of experts over tp beside ep."""
    etp = setup.layout.etp
    return Limit(etp > 1, f"etp {etp}", why, "Plan with etp=1, or export to megatron")


def no_float64(setup: Setup, why: str, instead: str = "float32") -> Limit:
    asked = setup.precision == "float64"
    return Limit(asked, "precision float64", why, f"Plan with precision='{instead}'")


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


def not_carried(
    setup: Setup,
    *more: str,
    per_op: bool = True,
    offloads: bool = False,
    selects_ops: bool = False,
) -> tuple[str, ...]:
    """What no other trainer takes of this setup, and ``more`` that this one does not. ``offloads``:
    it takes where the optimizer's state is; ``selects_ops``: as of `recomputes`."""
    recompute = setup.layout.recompute
    splits = any(p.sharding.on(TENSOR).kind == "S" for p in setup.parameters)
    notes = {
        "offload=optimizer (its state in host memory): a device's memory may be short without": (
            setup.layout.offloads and not offloads
        ),
        f"recompute={recompute}: full for all layers takes its place": recompute.count is not None,
        "recompute=compute (all but what collectives gave runs again): full takes its place": (
            recompute == Recompute(COMPUTE)
        ),
        f"recompute={SELECTIVE} (all but products, attention and what collectives gave runs "
        "again): full takes its place": recompute == Recompute(SELECTIVE) and not selects_ops,
        "which parameters the plan splits over tp: the trainer has its own rule": (
            per_op and splits
        ),
    }
    own = (*(note for note, holds in notes.items() if holds), *setup.aside)
    return (*own, *(text for text in more if text))


def recomputes(setup: Setup, selects_ops: bool = False) -> str:
    """none, selective or full. ``selects_ops``: the trainer's selective goes op by op and keeps
    products; else it is that of attention alone."""
    policy = setup.layout.recompute.policy
    if policy == SELECTIVE:
        return ATTENTION if selects_ops else FULL
    return policy if policy in (NONE, ATTENTION) else FULL
