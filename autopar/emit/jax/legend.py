"""What the words of a JAX program mean."""

from __future__ import annotations

from autopar.emit.legend import MOVES, PARTIAL, SPLIT, Word

WORDS = (
    SPLIT,
    PARTIAL,
    Word(
        r'Parameter\([^)]*\), (P\([^)]*"\w+"\))',
        "Parameter(..., {})",
        "the shape of the whole; tp splits the dim where it stands in P",
    ),
    Word(
        r'Parameter\(.*(deferred=\("\w+",?)',
        "{})",
        "whole on every rank; train.py adds up its gradients over tp",
    ),
    Word(
        r"\blayers\(",
        "layers(f, stack, x)",
        "x = f(p, *shared, x) for each layer's p; the layers are stacked",
    ),
    Word(r"\beach=\(", "each=(y,)", "f(p, *shared, y[i], x): a row of y for each layer"),
    Word(r"\blayer\(", "layer(f, stack, i, x)", "the same for the layer at i alone"),
    Word(r"\bcopy_to\(", "copy_to", "itself; the gradients of the ranks are summed"),
    Word(r"\bwhole\(", "whole", "itself; the gradient is kept on the first rank alone"),
    Word(r"\bkeep_first\(", "keep_first", "itself on the first rank, zeros on the others"),
    Word(
        r'order="zigzag"',
        'order="zigzag"',
        "rank i of n has pieces i and 2 n - 1 - i of 2 n",
    ),
    Word(r"\bzigzag=(\d)", "zigzag={}", "the pieces of dim {} lie so"),
    Word(
        r'"\w+"[^)]*, first=(\d+)',
        "first={}",
        "{} ranks evenly apart add up first, then the neighbours that are left",
    ),
    Word(
        r'\bring="(\w+)"',
        "ring_attention",
        "keys and values go around the ranks of {} while scores are made",
    ),
    Word(
        r"\bexperts\(",
        "experts(x, e, ...)",
        "each token by its experts e, whose rows are sorted for it",
    ),
    Word(r'\bheld=("\w+"|\()', "held={}", "own experts' share of what all make of these tokens"),
    Word(r"\bgrouped_linear\(", "grouped_linear(x, e)", "each row by the matrix of its group e"),
    *MOVES,
)
