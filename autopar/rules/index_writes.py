"""Rules of PyTorch calls that write to places of a tensor which another one names."""

from __future__ import annotations

from dataclasses import replace

from autopar.nouns.graph import Op, Tensor
from autopar.rules.kept_whole import whole_rule
from autopar.rules.notation import Rule
from autopar.rules.terms import letters, positive, text
from autopar.rules.torch_arguments import argument


def index_put(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """index_put(x, indices, values): what is written to, and from where, stays whole.

    ``indices`` has a tensor for each leading dim of x, or None. Their dims stand in the values
    where the indexed dims stood if those adjoin, else first.
    """
    x, *indices, values = operands
    given = [i for i, v in enumerate(argument(op, 1, "indices", ())) if v is not None]
    if len(given) != len(indices) or any(i.dtype == "bool" for i in indices):
        return whole_rule(operands, results)
    names = letters(len(x.shape))
    target = [f"{n}!" if d in given else n for d, n in enumerate(names)]
    rest = [n for d, n in enumerate(names) if d not in given]
    deep = max(len(i.shape) for i in indices)
    looked = [f"j{d}!" for d in range(deep)]
    at = given[0] if given == list(range(given[0], given[0] + len(given))) else 0
    written = [*rest[:at], *looked, *rest[at:]]
    sizes = dict(zip(names, x.shape, strict=True))
    for tensor in indices:
        for name, n in zip(looked[deep - len(tensor.shape) :], tensor.shape, strict=True):
            sizes[name] = max(sizes.get(name, 1), n)

    def broadcast(term: list[str], tensor: Tensor) -> list[str]:
        own = term[len(term) - len(tensor.shape) :]
        return ["1" if n == 1 else name for name, n in zip(own, tensor.shape, strict=True)]

    terms = [target, *(broadcast(looked, i) for i in indices), broadcast(written, values)]
    saves = tuple(range(1, len(operands) - 1))
    return Rule(text(terms, [target]), saves=saves, flops=0.0, cost="gather")


def add_at(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """index_add(x, dim, index, source): ``dim`` stays whole in x, as index and source do there."""
    del results
    rank = len(operands[0].shape)
    dim, names = positive(int(argument(op, 1, "dim", 0)), rank), letters(rank)
    target = [f"{n}!" if d == dim else n for d, n in enumerate(names)]
    source = ["i!" if d == dim else n for d, n in enumerate(names)]
    index = ["i!"] if operands[1].shape else []
    # Of the source backward wants the shape alone, and torch keeps it whole for that.
    saves = (1, 2) if operands[2].differentiable else ()
    return Rule(text([target, index, source], [target]), saves=saves, cost="gather")


def reduce_at(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """index_reduce(x, dim, index, source, reduce): as `add_at`, of any reduction."""
    return replace(add_at(op, operands, results), saves=(0, 1, 2), saves_results=(0,))


def scatter_add(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """scatter_add(x, dim, index, source): dims of one size are one factor, others stay whole."""
    del results
    rank = len(operands[0].shape)
    dim = positive(int(argument(op, 1, "dim", 0)), rank) if rank else 0
    terms: list[list[str]] = [[], [], []]
    for d, name in enumerate(letters(rank)):
        same = d != dim and len({t.shape[d] for t in operands}) == 1
        for k, term in enumerate(terms):
            term.append(name if same else f"{name}_{k}!")
    saves = (1,) if operands[2].differentiable else ()
    return Rule(text(terms, [terms[0]]), saves=saves, cost="gather")


def scatter_reduce(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """scatter_reduce(x, dim, index, source, reduce): as `scatter_add`, of any reduction."""
    rule = scatter_add(op, operands, results)
    return replace(rule, saves=(0, 1, 2), saves_results=(0,))
