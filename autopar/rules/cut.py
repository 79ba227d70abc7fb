"""How a batch is cut: where each input is, and what that does to every op.

It follows from the inputs and the rules (`autopar.rules.batch`), so a plan does not say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.nouns.graph import Graph
from autopar.rules.batch import data_choices


@dataclass(frozen=True, slots=True)
class BatchCut:
    """By the axes that split a batch, and by microbatches.

    dims:    of each input that is cut the dim.
    choices: what the axes do, by op key; for inputs of blocks a placement, by tensor key.
    """

    dims: Mapping[str, int]
    choices: Mapping[str, str]


def batch_cut(graph: Graph, batch_dims: Mapping[str, int]) -> BatchCut:
    """``batch_dims``: of each batched input the dim of its samples."""
    return BatchCut(batch_dims, data_choices(graph, batch_dims))
