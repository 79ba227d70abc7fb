"""What ``--fix`` pins, and which of it the cluster allows.

The degrees make up the devices: ``dp_replicate x dp_shard x cp x tp x pp = devices``. A microbatch
has ``microbatch`` samples on each data rank: ``batch = dp_replicate x dp_shard x microbatch x
microbatches``. The first is checked here, before any model is captured; the second with the batch
(`autopar.planner.ask.candidates`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.nouns.axes import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR
from autopar.nouns.errors import UserError, did_you_mean
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.recompute import POLICIES, Recompute
from autopar.nouns.zero import ZERO_LEVELS
from autopar.pipeline.actions import Lists
from autopar.pipeline.schedules.table import SCHEDULES
from autopar.pipeline.written import read_schedule

DEGREES = (REPLICATE, SHARD, TENSOR)
LATER = (EXPERT,)
"""Counts that no backend emits above 1; the transformer family prices them."""
CHOICES = (
    *DEGREES,
    CONTEXT,
    PIPELINE,
    "schedule",
    "interleave",
    "zero",
    "microbatch",
    "recompute",
    "offload",
)
FIXABLE = (*CHOICES, *LATER, "sequence_parallel")
DIGITS = 12
"""More of them are a slip of the finger; Python would take up to thousands."""

Split = tuple[int, int, int]
"""(dp_replicate, dp_shard, tp)"""


class FixError(UserError):
    """A pinned choice that the cluster or the batch does not allow."""


def unemitted(pairs: Mapping[str, str], framework: str = "torch") -> tuple[str, ...]:
    """The pinned choices that the framework's backend does not emit, as ``("ep=2",)``.

    Whether tensors between layers are split over tp is decided op by op, so a program cannot be
    held to ``sequence_parallel`` either.
    """

    def emitted(name: str, text: str) -> bool:
        if name in LATER or (name == CONTEXT and framework == "jax"):
            return text.lstrip("0") == "1"
        return name != "sequence_parallel" and (name, text) != ("recompute", "selective")

    return tuple(f"{name}={text}" for name, text in pairs.items() if not emitted(name, text))


@dataclass(frozen=True, slots=True)
class Fixed:
    """Choices that are pinned; None: the search decides.

    microbatch: samples that one microbatch has on one data rank.
    """

    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    cp: int | None = None
    zero: int | None = None
    microbatch: int | None = None
    recompute: Recompute | None = None
    offload: str | None = None
    pp: int | None = None
    schedule: str | None = None
    interleave: int | None = None
    actions: Lists | None = None
    """Of each pipeline rank, where a file of them is pinned as ``schedule``."""

    @staticmethod
    def parse(pairs: Mapping[str, str], devices: int) -> Fixed:
        """Reads ``{"tp": "2", "microbatch": "4"}``.

        Raises:
            FixError: an unknown key, a value that the key does not take, or degrees that cannot
                make up the devices; the text lists what can.
        """
        numbers: dict[str, int] = {}
        for name, text in pairs.items():
            if name not in FIXABLE:
                raise FixError(
                    f"--fix {name}={text}: {name!r} cannot be fixed. "
                    f"{did_you_mean(name, FIXABLE)}Choose among {', '.join(CHOICES)}; "
                    f"{', '.join(FIXABLE[len(CHOICES) :])} and recompute=selective are priced "
                    "alone, without a program"
                )
            if name == "recompute":
                _one_of(name, text, POLICIES)
            elif name == "offload":
                _one_of(name, text, OFFLOAD, " (what is in host memory between steps)")
            elif name == "schedule":
                if not is_file(text):
                    _one_of(name, text, ("none", *SCHEDULES, "found"), ", or a file of actions")
            elif name == "sequence_parallel":
                raise FixError(f"--fix {name}={text}: programs decide it op by op")
            elif name == "zero":
                meant = " (dp_shard splits nothing, optimizer state, and gradients, and parameters)"
                numbers[name] = int(_one_of(name, text, map(str, ZERO_LEVELS), meant))
            else:
                numbers[name] = _count(name, text, devices)
        for name in LATER:
            if numbers.pop(name, 1) != 1:
                raise FixError(
                    f"--fix {name}={pairs[name]}: programs are emitted for {name}=1; "
                    "`autopar plan` and `autopar estimate` price others without a program"
                )
        named = pairs.get("schedule", "none")
        actions = None
        if is_file(named):
            actions = read_schedule(named).lists
            if numbers.setdefault(PIPELINE, len(actions)) != len(actions):
                raise FixError(
                    f"--fix pp={numbers[PIPELINE]}: {named} has actions of {len(actions)} pipeline "
                    f"ranks; leave pp out, or take pp={len(actions)}"
                )
            if "interleave" in numbers:
                raise FixError(
                    f"--fix interleave={numbers['interleave']}: {named} says which stages a rank "
                    "has; leave interleave out"
                )
            named = Path(named).name
        pp, cp = numbers.get(PIPELINE, 1), numbers.get(CONTEXT, 1)
        if devices % pp:
            raise FixError(
                f"--fix pp={pp} makes equal groups of devices, and there are {devices}: pp may "
                f"be {alternatives(divisors(devices))}"
            )
        if devices // pp % cp:
            raise FixError(
                f"--fix cp={cp} takes as many devices for each sample, and there are "
                f"{devices // pp}{' of a stage' if pp > 1 else ''}: cp may be "
                f"{alternatives(divisors(devices // pp))}"
            )
        for name in ("schedule", "interleave"):
            if pp == 1 and pairs.get(name, "none") not in ("none", "1"):
                raise FixError(
                    f"--fix {name}={pairs[name]} orders stages of a pipeline, and there is one: "
                    "give --fix pp=2 or more with it"
                )
        schedule = None if named == "none" else named
        fixed = Fixed(
            recompute=Recompute(pairs["recompute"]) if "recompute" in pairs else None,
            offload=pairs.get("offload"),
            schedule=schedule,
            actions=actions,
            **numbers,
        )
        return fixed._check(devices // pp // cp)

    def pinned(self) -> dict[str, int | str]:
        """The choices that are not free, by the name that ``--fix`` gives them."""
        every = {name: getattr(self, name) for name in self.__slots__ if name != "actions"}
        return {
            name: value if isinstance(value, int) else str(value)
            for name, value in every.items()
            if value is not None
        }

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.pinned().items())

    def allows(self, split: Split) -> bool:
        """Whether these degrees, and the ZeRO level that they leave, are free."""
        pins = (self.dp_replicate, self.dp_shard, self.tp)
        if any(pin not in (None, degree) for pin, degree in zip(pins, split, strict=True)):
            return False
        return self.zero is None or (self.zero > 0) == (split[1] > 1)

    def _check(self, devices: int) -> Fixed:
        if any(self.allows(split) for split in splits(devices)):
            return self
        given = {n: v for n in DEGREES if (v := getattr(self, n)) is not None}
        without_zero = replace(self, zero=None)
        if any(without_zero.allows(split) for split in splits(devices)):
            shards = sorted({s for _, s, _ in self._possible(devices, "zero")})
            only = " or ".join(map(str, shards))
            if self.zero == 0:
                raise FixError(
                    f"--fix zero=0 splits nothing over dp_shard, but --fix {_pairs(given)} leaves "
                    f"dp_shard={only}; choose zero=1, 2 or 3, or dp_replicate in its place"
                )
            raise FixError(
                f"--fix zero={self.zero} splits over dp_shard, but on {devices} devices "
                f"{'--fix ' + _pairs(given) + ' leaves ' if given else ''}dp_shard={only}; choose "
                "zero=0 or other degrees"
            )
        product = math.prod(given.values())
        formula = " x ".join(f"{n}={v}" for n, v in given.items())
        ways = []
        for name in given:
            values = sorted({s[DEGREES.index(name)] for s in self._possible(devices, name, "zero")})
            if values:
                ways.append(f"{name} may be {alternatives(values)}")
        others = "with the others as they are, " if len(given) > 1 else ""
        raise FixError(
            f"--fix {formula} makes {product}, the cluster has {devices} devices: dp_replicate x "
            f"dp_shard x tp must be {devices}{'; ' + others if ways else ''}{', or '.join(ways)}"
        )

    def _possible(self, devices: int, *freed: str) -> list[Split]:
        """The splits that would do if these pins were free."""
        freer = replace(self, **dict.fromkeys(freed))
        return [split for split in splits(devices) if freer.allows(split)]


def is_file(schedule: str) -> bool:
    """Whether ``--fix schedule=`` names a file of actions."""
    known = ("none", "found", *SCHEDULES)
    return schedule not in known and ("/" in schedule or "." in schedule)


def splits(devices: int) -> Iterator[Split]:
    """Every (dp_replicate, dp_shard, tp) whose product is the device count."""
    for tp in divisors(devices):
        for shard in divisors(devices // tp):
            yield devices // tp // shard, shard, tp


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _count(name: str, text: str, devices: int) -> int:
    if text.isascii() and text.isdigit() and len(text) <= DIGITS and int(text) > 0:
        return int(text)
    if name == "microbatch":
        wanted = "the samples that one microbatch has on one data rank, a whole number from 1"
    elif name in LATER:
        wanted = "a whole number from 1"
    else:
        wanted = (
            f"a whole number from 1; on {devices} devices {name} may be "
            f"{alternatives(divisors(devices))}"
        )
    raise FixError(f"--fix {name}={text}: give {wanted}")


def _one_of(name: str, text: str, values: Iterable[str], meaning: str = "") -> str:
    known = list(values)
    if text not in known:
        raise FixError(f"--fix {name}={text}: choose {alternatives(known)}{meaning}")
    return text


def alternatives(values: Iterable[object]) -> str:
    """``1, 2 or 4``"""
    texts = [str(value) for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _pairs(given: Mapping[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in given.items())
