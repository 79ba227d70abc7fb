"""What is known of the values of a program whose every element follows from its place.

Libraries build causal masks and position ids from `arange` by dozens of ops. Each such tensor gets
a formula (`autopar.frontends.shared.facts`) by running the ops on formulas.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.shared.facts import Fact
from autopar.frontends.shared.index_shapes import Made
from autopar.frontends.shared.indices import fact_of

Facts = dict[Value, Fact]


def find_facts(nodes: list[Node], known: Mapping[Value, Fact] | None = None) -> Facts:
    """Facts of all values that have one, given those of inputs."""
    facts: Facts = dict(known or {})
    for node in nodes:
        if len(node.outputs) != 1:
            continue
        made = Made(node.output.shape, node.output.dtype, node.attrs)
        fact = fact_of(node.kind, made, [facts.get(v) for v in node.inputs])
        if fact is not None:
            facts[node.output] = fact
    return facts
