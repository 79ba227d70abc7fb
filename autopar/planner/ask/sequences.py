"""The batch cut along its sequences as well, where ``--fix cp`` asks for it."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import Graph
from autopar.planner.ask.fixed import FixError, alternatives, divisors
from autopar.rules.batch import BatchMixed
from autopar.rules.cut import BatchCut, batch_cut, sequence_dims

WITHOUT = {"cp": "1"}


def cut_along(graph: Graph, batch_dims: Mapping[str, int], cp: int, framework: str) -> BatchCut:
    """For ``cp`` ranks to a sample.

    Raises:
        FixError: programs of the framework, the batch or an op of the model do not allow it.
    """
    if framework != "torch":
        raise FixError(
            f"--fix cp={cp}: JAX programs keep sequences whole so far; leave cp out, or price the "
            "layout without a program by `autopar estimate --arch`",
            WITHOUT,
        )
    dims = sequence_dims(graph, batch_dims)
    if not dims:
        raise FixError(
            f"--fix cp={cp} splits sequences, and no entry of the batch has a dim of tokens behind "
            "that of its samples; leave cp out",
            WITHOUT,
        )
    name, dim = next(iter(dims.items()))
    length = graph.tensors[name].shape[dim]
    if length % cp:
        raise FixError(
            f"--fix cp={cp} does not divide the {length} tokens of {name}: cp may be "
            f"{alternatives(divisors(length))}",
            WITHOUT,
        )
    try:
        return batch_cut(graph, batch_dims, sequences=True)
    except BatchMixed as error:
        raise FixError(f"--fix cp={cp}: {error}", WITHOUT) from error
