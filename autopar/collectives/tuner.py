"""What a library is to choose, as the file or the environment that it takes.

    allreduce,0,65536,tree,ll,-1,4,32

A line of NCCL's tuner: for an all-reduce of up to 64 KiB on 4 nodes of 32 ranks together, a tree by
the protocol LL, with as many channels as NCCL likes. The fields are those of the example tuner in
NCCL's sources (ext-tuner/example): kind, least and most bytes, algorithm, protocol, channels,
nodes, ranks; -1 is any. gloo and XLA take neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from autopar.collectives.algorithm import AlgorithmError, Kind

ANY = -1
ALGORITHMS = ("ring", "tree", "nvls", "nvls_tree", "collnet_direct", "collnet_chain", "pat")
"""NCCL's; nvls and collnet add in the switch."""
PROTOCOLS = ("ll", "ll128", "simple")
_KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        "all_reduce": "allreduce",
        "all_gather": "allgather",
        "reduce_scatter": "reducescatter",
        "broadcast": "broadcast",
    }
)
_FIELDS = 8


@dataclass(frozen=True, slots=True)
class Rule:
    """A choice for sizes from ``least_bytes`` to ``most_bytes``, both among them."""

    kind: Kind
    least_bytes: int
    most_bytes: int
    algorithm: str
    protocol: str
    nodes: int = ANY
    ranks: int = ANY

    def __post_init__(self) -> None:
        for name, value, may in (
            ("collective", self.kind, tuple(_KINDS)),
            ("algorithm", self.algorithm, ALGORITHMS),
            ("protocol", self.protocol, PROTOCOLS),
        ):
            if value not in may:
                raise AlgorithmError(f"no {name} {value!r} of NCCL; there are {', '.join(may)}")
        if not 0 <= self.least_bytes <= self.most_bytes:
            raise AlgorithmError(
                f"a rule for {self.least_bytes} to {self.most_bytes} bytes: give the fewer first"
            )

    def __str__(self) -> str:
        """What `parse` reads, and NCCL's tuner."""
        sizes = f"{self.least_bytes},{self.most_bytes}"
        how = f"{self.algorithm},{self.protocol},{ANY}"
        return f"{_KINDS[self.kind]},{sizes},{how},{self.nodes},{self.ranks}"

    @staticmethod
    def parse(line: str) -> Rule:
        """The inverse of ``str``. Raises `AlgorithmError`."""
        words = [word.strip() for word in line.split(",")]
        try:
            name, least, most, algorithm, protocol, channels, nodes, ranks = words
            kinds = {theirs: kind for kind, theirs in _KINDS.items()}
            kind = cast(Kind, kinds.get(name, name))
            counts = [int(least), int(most), int(channels), int(nodes), int(ranks)]
        except ValueError:
            raise AlgorithmError(
                f"{line!r} is no line of a tuner file: write {_FIELDS} fields, as in "
                "allreduce,0,65536,tree,ll,-1,4,32"
            ) from None
        if counts[2] != ANY:
            raise AlgorithmError(f"{line!r} has {channels} channels: only {ANY} is read, any")
        return Rule(kind, counts[0], counts[1], algorithm, protocol, counts[3], counts[4])


def to_text(rules: Sequence[Rule]) -> str:
    """The file. Sizes of rules for one collective should not overlap."""
    return "".join(f"{rule}\n" for rule in rules)


def from_text(text: str) -> tuple[Rule, ...]:
    """The inverse of `to_text`; lines that begin with ``#`` are comments. Raises
    `AlgorithmError`."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(Rule.parse(line) for line in lines if line and not line.startswith("#"))


def environment(file: str) -> dict[str, str]:
    """Under which NCCL reads the file; its example tuner must be installed as a plugin."""
    return {"NCCL_TUNER_PLUGIN": "example", "NCCL_TUNER_CONFIG_FILE": file}
