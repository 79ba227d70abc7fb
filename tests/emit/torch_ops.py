"""Every op of PyTorch's own test database as a model (`as_models`), with two samples of what it is
called with there.

    python -m tests.emit.torch_ops [--only NAME]... [--part 0/2] [--dtype float32] [--in-place]
"""

from __future__ import annotations

import argparse
import sys
import unittest
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.nouns.mesh import Mesh
from tests.emit.as_models import RANKS, STAGES, quietly, tried, workload_of
from tests.outcomes import Outcome, report

EXTENT = RANKS
"""What the database calls S; its M is twice that, its L three times."""
UNDEFINED = {
    "empty_like": "what lies in memory that nobody has written",
    "new_empty": "the same",
    **dict.fromkeys(
        ("svd_lowrank", "pca_lowrank"),
        "bases of random products, which have one direction where one number stands for all draws",
    ),
}
"""Ops whose results are not the same twice."""
_ALONE = ("conv", "linear", "bilinear", "prelu", "embedding")
"""Functions of which no tensor but the first has samples."""


@cache
def database() -> dict[str, Any]:
    """`OpInfo` by name and variant."""
    # What stands there tests with a package that these do not need.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.testing._internal.common_methods_invocations as ops
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and isinstance(getattr(module, "S", 0), int):
            for times, extent in enumerate("SML", 1):
                if hasattr(module, extent):
                    setattr(module, extent, times * EXTENT)
    # Those that draw are called through it.
    vars(ops)["wrapper_set_seed"] = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {
        f"{op.name}:{op.variant_test_name}" if op.variant_test_name else op.name: op
        for op in ops.op_db
    }


def samples(name: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Two of the database's of that dtype, if the op takes it, that have many dims and settings."""
    op = database()[name]
    if dtype not in op.dtypes:
        return []
    torch.manual_seed(0)
    grad = op.supports_autograd and dtype.is_floating_point
    made: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in _until_it_fails(op.sample_inputs("cpu", dtype, requires_grad=grad)):
            tensors = _tensors(sample)
            if _is_flat(op, tensors):
                sample.input, sample.args, sample.kwargs = pytree.tree_map_only(
                    Tensor,
                    lambda t: t.detach().reshape(EXTENT, -1),
                    (sample.input, sample.args, sample.kwargs),
                )
                tensors = _tensors(sample)
            dense = all(t.layout == torch.strided for t in tensors)
            if dense and tensors and tensors[0].dim() and tensors[0].numel():
                made.setdefault(str(_plain(sample)), sample)
    ordered = sorted(
        made.values(),
        key=lambda s: (-min(_tensors(s)[0].dim(), 3), -len(s.args) - len(s.kwargs)),
    )
    return [ordered[0], ordered[len(ordered) // 2]] if len(ordered) > 2 else ordered


def _until_it_fails(made: Iterable[Any]) -> Iterator[Any]:
    """Some samples have extents of their own, which those of `EXTENT` do not suffice for."""
    left = iter(made)
    while True:
        try:
            yield next(left)
        except (RuntimeError, IndexError, StopIteration):
            return


def outcomes(
    name: str,
    dtype: torch.dtype = torch.float32,
    in_place: bool = False,
    stages: Sequence[tuple[Mesh, int]] = STAGES,
) -> Iterator[Outcome]:
    op = database()[name]
    if name in UNDEFINED or (in_place and op.inplace_variant is None):
        return
    called = _in_place(op) if in_place else op.op
    alone = name.removeprefix("nn.functional.").startswith(_ALONE)
    for number, sample in enumerate(samples(name, dtype)):
        arguments = ((sample.input, *sample.args), sample.kwargs)
        yield from tried(name, number, workload_of(lambda: called, arguments, alone), stages)


def _in_place(op: Any) -> Any:
    return lambda first, *args, **kwargs: op.inplace_variant(first.clone(), *args, **kwargs)


def _tensors(sample: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [t for t in leaves if isinstance(t, Tensor)]


def _is_flat(op: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether the sample is one dim that may be cut into samples: of ops element by element."""
    if type(op).__name__ not in ("UnaryUfuncInfo", "BinaryUfuncInfo"):
        return False
    lengths = {t.shape for t in tensors}
    return len(lengths) == 1 and all(
        len(shape) == 1 and shape[0] > 0 and shape[0] % EXTENT == 0 for shape in lengths
    )


def _plain(sample: Any) -> Any:
    """The sample with shapes for tensors, by which equal ones are told."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.shape, (sample.input, sample.args, sample.kwargs)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--part", default="0/1", help="of all ops, as 0/2 and 1/2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--in-place", action="store_true", help="of each op that form")
    given = parser.parse_args()
    first, step = map(int, given.part.split("/"))
    dtype = getattr(torch, given.dtype)
    names = given.only or [*database()][first::step]
    quietly()
    report(row for name in names for row in outcomes(name, dtype, given.in_place))


if __name__ == "__main__":
    main()
