"""Which layouts there are to choose from, and what the user has pinned.

A candidate is a tensor-parallel degree and a number of microbatches: these decide what a rank
computes. How the data axes are split and what ZeRO shards over them comes after (`layouts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.errors import UserError
from autopar.nouns.mesh import Mesh

ZERO_LEVELS = (0, 1, 2, 3)
RECOMPUTE = ("none", "compute", "full")


class FixError(UserError):
    """A pinned choice that the cluster or the batch does not allow."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """What ``--fix`` pins; None: the search decides."""

    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    zero: int | None = None
    microbatches: int | None = None
    recompute: str | None = None

    @staticmethod
    def parse(pairs: Mapping[str, str], batch: int, devices: int) -> Fixed:
        """Reads ``{"tp": "2", "microbatch": "4"}``; ``microbatch`` is samples per rank.

        Raises:
            FixError: an unknown key, no number, or degrees that cannot make up the devices.
        """
        numbers: dict[str, int] = {}
        recompute = None
        for name, text in pairs.items():
            if name == "recompute":
                if text not in RECOMPUTE:
                    raise FixError(f"--fix recompute={text}: choose {', '.join(RECOMPUTE)}")
                recompute = text
                continue
            if name == "schedule":
                if text != "none":
                    raise FixError(f"--fix schedule={text}: one stage has no schedule but none")
                continue
            if not text.isdigit() or (int(text) < 1 and name != "zero"):
                raise FixError(f"--fix {name}={text}: give a whole number of at least 1")
            numbers[name] = int(text)
        for name in ("pp", "cp", "ep"):
            if numbers.pop(name, 1) != 1:
                raise FixError(
                    f"--fix {name}={pairs[name]}: programs are emitted for {name}=1; "
                    "`autopar estimate --arch` prices other degrees"
                )
        if numbers.get("zero", 0) not in ZERO_LEVELS:
            raise FixError(f"--fix zero={numbers['zero']}: choose 0, 1, 2 or 3")
        fixed = Fixed(
            numbers.get("dp_replicate"),
            numbers.get("dp_shard"),
            numbers.get("tp"),
            numbers.get("zero"),
            None,
            recompute,
        )
        fixed = fixed._check(devices)
        if "microbatch" in numbers:
            fixed = fixed._with_microbatch(numbers["microbatch"], batch, devices)
        return fixed

    def _check(self, devices: int) -> Fixed:
        given = {
            n: v for n in ("dp_replicate", "dp_shard", "tp") if (v := getattr(self, n)) is not None
        }
        product = 1
        for value in given.values():
            product *= value
        formula = " x ".join(f"{n}={v}" for n, v in given.items())
        if devices % product or (len(given) == 3 and product != devices):
            raise FixError(
                f"--fix {formula} makes {product}, the cluster has {devices} devices: the product "
                f"of dp_replicate, dp_shard and tp must be {devices}"
            )
        if (self.zero or 0) > 0 and self.dp_shard == 1:
            raise FixError(f"--fix zero={self.zero} shards over dp_shard, but dp_shard=1")
        if self.zero == 0 and (self.dp_shard or 1) > 1:
            raise FixError(f"--fix zero=0 shards nothing, but dp_shard={self.dp_shard}")
        return self

    def _with_microbatch(self, samples: int, batch: int, devices: int) -> Fixed:
        tp = self.tp
        if tp is None and self.dp_replicate is not None and self.dp_shard is not None:
            tp = devices // (self.dp_replicate * self.dp_shard)
        if tp is None:
            raise FixError(f"--fix microbatch={samples} needs tp (or both dp degrees) as well")
        ranks = devices // tp
        if batch % (ranks * samples):
            raise FixError(
                f"--fix microbatch={samples}: {ranks} data ranks x {samples} samples does not "
                f"divide the batch of {batch}"
            )
        return Fixed(
            self.dp_replicate,
            self.dp_shard,
            tp,
            self.zero,
            batch // (ranks * samples),
            self.recompute,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """``data`` ranks times ``tp`` ranks; the batch is cut into ``microbatches`` first."""

    data: int
    tp: int
    microbatches: int

    @property
    def name(self) -> str:
        """For people who wait."""
        return f"tp={self.tp} data={self.data} microbatches={self.microbatches}"

    def mesh(self) -> Mesh:
        return Mesh(("dp_replicate", "dp_shard", "tp"), (1, self.data, self.tp))


def candidates(devices: int, batch: int, fixed: Fixed) -> list[Candidate]:
    """Every candidate that the device count and the batch allow.

    Raises:
        FixError: none is left; the message says which numbers do not divide.
    """
    found = []
    for tp in _divisors(devices):
        data = devices // tp
        if not _matches(tp, data, fixed) or batch % data:
            continue
        found += [
            Candidate(data, tp, m)
            for m in _divisors(batch // data)
            if fixed.microbatches in (None, m)
        ]
    if not found:
        pinned = {n: getattr(fixed, n) for n in ("tp", "dp_replicate", "dp_shard", "microbatches")}
        said = ", ".join(f"{n}={v}" for n, v in pinned.items() if v is not None)
        raise FixError(
            f"a batch of {batch} samples cannot be split over {devices} devices"
            + (f" with {said}" if said else "")
            + ": the data-parallel ranks (devices / tp) must divide the batch; make the batch a "
            f"multiple of {devices}, or tp a multiple of {devices // math.gcd(devices, batch)}"
        )
    return found


def _matches(tp: int, data: int, fixed: Fixed) -> bool:
    if fixed.tp not in (None, tp):
        return False
    wanted = (fixed.dp_replicate or 1) * (fixed.dp_shard or 1)
    if data % wanted:
        return False
    both = fixed.dp_replicate is not None and fixed.dp_shard is not None
    return not both or data == wanted


@dataclass(frozen=True, slots=True)
class Layout:
    """How the data ranks keep model state, and whether blocks run forward twice."""

    dp_replicate: int
    dp_shard: int
    zero: int
    recompute: str

    def mesh(self, tp: int) -> Mesh:
        return Mesh(("dp_replicate", "dp_shard", "tp"), (self.dp_replicate, self.dp_shard, tp))


def layouts(data: int, fixed: Fixed) -> Iterator[Layout]:
    """Every state sharding of ``data`` ranks, the least sharded first."""
    for recompute in RECOMPUTE if fixed.recompute is None else (fixed.recompute,):
        for shard in _divisors(data):
            replicate = data // shard
            if fixed.dp_shard not in (None, shard) or fixed.dp_replicate not in (None, replicate):
                continue
            for zero in (0,) if shard == 1 else ZERO_LEVELS[1:]:
                if fixed.zero in (None, zero):
                    yield Layout(replicate, shard, zero, recompute)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
