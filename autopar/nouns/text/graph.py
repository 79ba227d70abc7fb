"""A `Graph` as text, one line an op, and back::

    graph tokens, targets -> cross_entropy
      block Block x 4, blocks.{0..3}: x -> add_1
        input x : float32[16, 128, 128] grad
        parameter up.weight : float32[512, 128] grad
        up/linear = linear(x, up.weight) : float32[16, 128, 512] grad @ up (Linear) model.py:78
        ...
      input tokens : int64[16, 128]
      blocks.0/block = block(embedding; block="Block", instance="blocks.0") : ...
      for i in 1..3
        blocks.{i}/block = block(blocks.{i-1}/block; block="Block", instance="blocks.{i}") : ...

An op's line is ``results = kind(operands; attrs) : their types @ source ~ the original call``. A
source is ``module (class of the module) file:line``. Attrs are JSON values; one that is a text of
several lines (a function's own derivative) stands below its op. A value that no op makes is
declared by its role before the ops that read it. ``grad``: the loss's gradient flows through it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from autopar.nouns.graph import Graph, without_sources
from autopar.nouns.text.reading import read
from autopar.nouns.text.writing import Notes, written


def to_text(graph: Graph) -> str:
    """The graph as text; `from_text` reads it back."""
    return written(graph, "graph", Notes())


@lru_cache(maxsize=2)  # whoever opens a plan reads its graph for each thing that is asked of it
def from_text(text: str) -> Graph:
    """The inverse of `to_text`; lists come back as tuples. Raises `TextError`."""
    return read(text, "graph").graph


def fingerprint(graph: Graph) -> str:
    """SHA-256 of the text without sources: moving a file does not change the model."""
    return hashlib.sha256(to_text(without_sources(graph)).encode()).hexdigest()[:16]
