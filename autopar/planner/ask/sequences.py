"""The batch cut along its sequences as well, where ``--fix cp`` asks for it."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.axes import CONTEXT
from autopar.nouns.graph import Graph
from autopar.planner.ask.fixed import FixError
from autopar.rules.cut import BatchCut, batch_cut
from autopar.rules.pieces import BatchMixed

WITHOUT = {CONTEXT: "1"}


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
    try:
        return batch_cut(graph, batch_dims, cp)
    except BatchMixed as error:
        raise FixError(f"--fix cp={cp}: {error}", WITHOUT) from error
