"""Which shardings a node of the folded graph chooses among."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.nouns.sharding import Sharding
from autopar.planner.problem.codes import PARTIAL_DIGIT, SPLIT_DIGIT, WHOLE_DIGIT, Codes, Ints
from autopar.planner.problem.nodes import Node
from autopar.rules.strategies import Strategy


def in_order(codes: Codes, options: Ints) -> Ints:
    """Different options without partial sums on model axes, in the order of their texts."""
    different = np.unique(options[~codes.has_model(options, PARTIAL_DIGIT)])
    texts = [str(codes.sharding(c)) for c in different.tolist()]
    return different[sorted(range(len(texts)), key=texts.__getitem__)]


def distinct(codes: Codes, among: Ints) -> tuple[list[Sharding], Ints]:
    """The different shardings among the codes, and which of them each is."""
    different, option_of = codes.distinct(among)
    return [codes.sharding(c) for c in different.tolist()], option_of


def stored_for(codes: Codes, node: Node, wants: Ints) -> Ints:
    """How a parameter is stored that the op of ``node`` alone reads, as ``wants`` has it.

    One that joins a partial sum is stored whole and counts on the first rank alone. An axis of
    the batch cuts it in storage where the op decides so, as experts are; one that has a dim of
    the batch is whole, and a rank takes its piece.
    """
    usual = _usual(codes, node)
    digits = codes.digits(wants)
    digits = np.where(codes.batch & (usual | (digits < SPLIT_DIGIT)), WHOLE_DIGIT, digits)
    return codes.pack(np.where(digits == PARTIAL_DIGIT, WHOLE_DIGIT, digits))


def _usual(codes: Codes, node: Node) -> npt.NDArray[np.bool_]:
    """Of each strategy and axis whether it does there what follows from the batch."""
    axes = codes.mesh.axes
    return np.array(
        [
            [isinstance(s, Strategy) and s.on(a) == node.usual.get(a, "") for a in axes]
            for s in node.decisions
        ],
        bool,
    ).reshape(len(node.decisions), len(axes))
