"""What the four processes of `test_played_collectives` do: every case in one start."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from autopar.collectives import known
from autopar.collectives.algorithm import Algorithm, AlgorithmError, Kind
from autopar.collectives.synthesis import Instance, synthesise
from autopar.collectives.topology import torus
from autopar.nouns.axes import REPLICATE
from autopar.runtime.pytorch import played_collective
from autopar.runtime.pytorch.bucket_sums import BucketSums
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.two_level import TwoLevelError, two_level_all_reduce
from autopar.runtime.shared.settings import ProgramError
from tests.runtime.checks_on_ranks import run_checks

RANKS = 4
SIZES = (0, 1, 3, 4, 7, 64, 1001)
Make = Callable[[int, Kind], Algorithm]
ALGORITHMS: dict[str, Make] = {
    "ring": known.ring,
    "both rings": known.both_rings,
    "halving-doubling": known.halving_doubling,
    "two levels": lambda n, kind: known.two_level(2, 2, kind),
    "torus": lambda n, kind: known.torus(2, 2, kind),
}
SWAP = Algorithm.parse(
    "swap all_gather of 4 ranks in 4 chunks\n"
    "1: 0:0>1 1:1>0 2:2>3 3:3>2\n"
    "1: 0:0>2 1:1>3 2:2>0 3:3>1 0:1>0\n"  # rank 0 gets back what it sends away meanwhile
    "1: 0:2>3 1:3>2 2:0>1 3:1>0"
)
Check = Callable[[], None]


def draw(size: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-50, 50, (size,), generator=generator).to(dtype)


def total(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([draw(size, rank, dtype) for rank in range(RANKS)]).sum(0).to(dtype)


def reduced(run: Callable[[Tensor], None], dtype: torch.dtype = torch.float32) -> None:
    """In a buffer amid others, which stay."""
    for size in SIZES:
        around = torch.full((size + 8,), 7.0).to(dtype)
        around[4 : 4 + size] = draw(size, dist.get_rank(), dtype)
        run(around[4 : 4 + size])
        assert torch.equal(around[4 : 4 + size], total(size, dtype)), size
        assert around[:4].eq(7).all()
        assert around[4 + size :].eq(7).all()


def same_bits(run: Callable[[Tensor], None]) -> None:
    """Of sums that rounding makes depend on their order: on all ranks, and twice."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(1001, generator=generator)
    results = []
    for _ in range(2):
        y = x.clone()
        run(y)
        results.append(y)
    every = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(every, results[0])
    assert all(torch.equal(results[0], other) for other in [results[1], *every])


def gathered(algorithm: Algorithm) -> None:
    x = draw(6, dist.get_rank()).view(3, 2)
    kept = x.clone()
    out = played_collective.all_gather(x, algorithm, world())
    right = torch.cat([draw(6, rank).view(3, 2) for rank in range(RANKS)])
    assert torch.equal(out, right)
    assert torch.equal(x, kept)


def scattered(algorithm: Algorithm) -> None:
    x = draw(24, dist.get_rank()).view(12, 2)
    kept = x.clone()
    out = played_collective.reduce_scatter(x, algorithm, world())
    assert torch.equal(out, total(24).view(12, 2).chunk(RANKS)[dist.get_rank()])
    assert torch.equal(x, kept)


def sent_down() -> None:
    x = draw(9, dist.get_rank())
    played_collective.broadcast(x, known.tree(RANKS, 2, "broadcast"), world())
    assert torch.equal(x, draw(9, 0))


def trained(run: Callable[[Tensor], None]) -> None:
    """DDP with hooked buckets, several of them: gradients are the sums of all ranks'."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(37, 41), torch.nn.Tanh(), torch.nn.Linear(41, 3))
    plain = plain.double()
    model = DistributedDataParallel(
        copy.deepcopy(plain), bucket_cap_mb=0.004, gradient_as_bucket_view=True
    )
    BucketSums(run).register(model)
    for step in range(3):
        data = [
            torch.randn(5, 37, generator=torch.Generator().manual_seed(4 * step + r)).double()
            for r in range(RANKS)
        ]
        model(data[dist.get_rank()]).sum().backward()
        plain(torch.cat(data)).sum().backward()
        for own, right in zip(model.parameters(), plain.parameters(), strict=True):
            assert own.grad is not None
            assert right.grad is not None
            torch.testing.assert_close(own.grad, right.grad, rtol=1e-12, atol=1e-12)
            own.grad = right.grad = None


def lost() -> None:
    """What an all-reduce raises on its thread comes to whoever waits."""

    def fails(_: Tensor) -> None:
        raise RuntimeError("the wire is cut")

    with pytest.raises(RuntimeError, match="the wire is cut"):
        BucketSums(fails).start(torch.zeros(2)).wait()


def refused(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def refusals() -> None:
    x, ring = torch.zeros(4, 4), known.ring(RANKS)
    inside, across = hosts_of(2)
    reduce, scatter = played_collective.all_reduce, played_collective.reduce_scatter
    wrong = Algorithm.parse(str(ring).replace("+", ">", 1))
    refused(lambda: reduce(x.T[:2], ring, world()), AlgorithmError, "contiguous")
    refused(lambda: reduce(x, known.ring(3), world()), AlgorithmError, "of 3 ranks")
    refused(lambda: reduce(x, wrong, world()), AlgorithmError, "in the end")
    small = known.ring(RANKS, "reduce_scatter")
    refused(lambda: scatter(x[:3], small, world()), AlgorithmError, "do not divide 3")
    ranks = Ranks({REPLICATE: RANKS})
    for inside_each in (1, 3, RANKS):
        with pytest.raises(ProgramError, match="several runs"):
            ranks.two_level_groups((REPLICATE,), inside_each)
    refused(lambda: two_level_all_reduce(x.T, inside, across), TwoLevelError, "contiguous")


def hosts_of(size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(inside, across) of this rank; one rank a host, or one host, are cases of their own."""
    first = range(0, RANKS, size)
    inside, _ = dist.new_subgroups_by_enumeration([[*range(f, f + size)] for f in first])  # type: ignore[no-untyped-call]
    across, _ = dist.new_subgroups_by_enumeration([[*range(i, RANKS, size)] for i in range(size)])  # type: ignore[no-untyped-call]
    return inside, across


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def checks() -> dict[str, Check]:
    made = {name: make(RANKS, "all_reduce") for name, make in ALGORITHMS.items()}
    made["tree"] = known.tree(RANKS, 3)
    solved = synthesise(torus(2, 2), Instance(2, 2, 3), "all_reduce").algorithm
    assert solved is not None
    made["synthesised"] = solved
    runs: dict[str, Callable[[Tensor], None]] = {
        name: lambda x, a=each: played_collective.all_reduce(x, a, world())  # type: ignore[misc]
        for name, each in made.items()
    }
    for per_host in (1, 2, 4):
        groups = hosts_of(per_host)
        runs[f"hosts of {per_host}"] = lambda x, g=groups: two_level_all_reduce(x, *g)  # type: ignore[misc]
    every: dict[str, Check] = {}
    for name, run in runs.items():
        every[f"sums of {name}"] = lambda r=run: reduced(r)  # type: ignore[misc]
        every[f"bits of {name}"] = lambda r=run: same_bits(r)  # type: ignore[misc]
    for dtype in (torch.int64, torch.bfloat16):
        every[f"sums in {dtype}"] = lambda d=dtype: reduced(runs["hosts of 2"], d)  # type: ignore[misc]
    for name, make in ALGORITHMS.items():
        every[f"gather by {name}"] = lambda m=make: gathered(m(RANKS, "all_gather"))  # type: ignore[misc]
        every[f"scatter by {name}"] = lambda m=make: scattered(m(RANKS, "reduce_scatter"))  # type: ignore[misc]
    every["trained by hosts of 2"] = lambda: trained(runs["hosts of 2"])
    every["trained by synthesised"] = lambda: trained(runs["synthesised"])
    every["lost"] = lost
    every["gather by swap"] = lambda: gathered(SWAP)
    every["broadcast by tree"] = sent_down
    every["refusals"] = refusals
    return every


def main() -> None:
    run_checks(checks)


if __name__ == "__main__":
    main()
