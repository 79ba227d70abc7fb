"""Rules of PyTorch's recurrent layers, of sequences and of one step: samples run side by side."""

from __future__ import annotations

from autopar.nouns.graph import Op, Tensor
from autopar.rules.kept import Kept
from autopar.rules.kept_whole import whole_rule
from autopar.rules.notation import Rule
from autopar.rules.terms import text


def recurrent(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """lstm, gru, rnn over [b, t, i] or [t, b, i]: the samples run side by side, in each state too.

    Operands are the input, the states [l, b, h] and the weights.
    """
    states = len(results) - 1
    batch_first = bool(op.attrs.get("torch", {}).get("args", (False,))[-1])
    sequence = ["b", "t!", "i!"] if batch_first else ["t!", "b", "i!"]
    if len(operands[0].shape) != 3 or len(operands[1].shape) != 3:
        return whole_rule(operands, results)
    weights = [
        [f"w{i}_{j}!" for j in range(len(t.shape))] for i, t in enumerate(operands[1 + states :])
    ]
    given = [[f"l{i}!", "b", f"h{i}!"] for i in range(states)]
    out = [*sequence[:2], "o!"]
    points = float(sum(t.numel for t in operands[1 + states :]))
    layers = operands[1].shape[0]
    return Rule(
        text([sequence, *given, *weights], [out, *given]),
        saves=tuple(range(len(operands))),
        saves_results=(0,),
        keeps=(Kept(("b", "t", "o"), 4 * 4 * layers),),
        flop_terms=((2.0 * points, ("b", "t")),),
        backward=2.0,
        cost="matmul",
    )


def cell(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """lstm_cell, gru_cell, rnn cells: input and states [b, ...], then the weights."""
    del op
    states = len(results)
    given = [["b", f"h{i}!"] for i in range(states)]
    rest = operands[1 + states :]
    weights = [[f"w{i}_{j}!" for j in range(len(t.shape))] for i, t in enumerate(rest)]
    return Rule(
        text([["b", "i!"], *given, *weights], given),
        saves=tuple(range(len(operands))),
        saves_results=tuple(range(states)),
        keeps=(Kept(("b", "h0"), 4 * 4),),
        flop_terms=((2.0 * sum(t.numel for t in rest), ("b",)),),
        backward=2.0,
        cost="matmul",
    )
