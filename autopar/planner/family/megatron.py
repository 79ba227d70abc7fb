"""The sharding of a transformer's graph that published software writes by hand.

Megatron-LM (Shoeybi et al. 2019, section 3): the first products of attention and of the MLP are
split by columns, the last by rows, attention by heads, table, head and loss over the vocabulary.
Under sequence parallelism (Korthikanti et al. 2022, section 4.2.2) what lies between them is split
along the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.cost_models.software import Context
from autopar.nouns.axes import CONTEXT, TENSOR
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread, key
from autopar.planner.family.sequences import along_sequence
from autopar.rules.registry import bind
from autopar.rules.strategies import PASS_PARTIAL, operand_placement

NORMS = ("layer_norm", "rms_norm")
_COLUMNS, _ROWS = ("q", "k", "v", "kv", "gate", "up"), ("out", "down")

INSIDE: Mapping[str, str | int] = {
    **{f"{name}/linear": "n" for name in (*_COLUMNS, "shared_gate", "shared_up", "head")},
    **{f"{name}/add": 2 for name in _COLUMNS},
    **{f"{name}/linear": "k" for name in (*_ROWS, "shared_down")},
    "attention/attention": "g",
    **{f"{part}/{kind}": 2 for part in ("mlp", "shared") for kind in ("silu", "mul", "gelu")},
    "experts/experts": "f",
    **{name: PASS_PARTIAL for name in ("routed/reshape_1", "routed/add")},
    "tokens/embedding": "v",
    "reshape": 1,
    "cross_entropy": "v",
}
"""Op -> the factor of its rule that ``tp`` splits, or the dim of its result."""

GROUPED: Mapping[str, int] = {
    **{f"attention/reshape{i}": 2 for i in ("", "_1", "_2", "_3")},
    **{f"attention/transpose{i}": 1 for i in ("", "_1", "_2")},
    **{f"attention/rotary{i}": 1 for i in ("", "_1")},
    "attention/transpose_3": 2,
}
"""Between the products of grouped heads."""

LATENT: Mapping[str, int] = {
    **{f"attention/reshape{i}": 2 for i in ("", "_1", "_3")},
    **{f"attention/transpose{i}": 1 for i in ("", "_1")},
    **{f"attention/{kind}": 1 for kind in ("split.0", "split_2.0", "rotary", "expand")},
    **{f"attention/cat{i}": 1 for i in ("", "_1")},
    "attention/transpose_2": 2,
}
"""Between those of latent attention; what is one for all heads is whole."""

BETWEEN: Mapping[str, str | int] = {
    **{f"{name}/{kind}": 1 for name in ("attention_norm", "mlp_norm", "norm") for kind in NORMS},
    **{f"{name}/{kind}": 1 for name in _ROWS for kind in ("add", "dropout")},
    **{name: 1 for name in ("add", "add_1", "dropout")},
    **{name: 1 for name in ("q_down/linear", "q_norm/rms_norm", "kv_down/linear")},
    **{name: 1 for name in ("attention/split_1.0", "kv_norm/rms_norm")},
    "positions/embedding": 0,
}
"""The same under sequence parallelism; without it every rank does all of these."""


def spread_of(
    graph: Graph, mesh: Mesh, sequence_parallel: bool, context: Context = "ring"
) -> Spread:
    """How ``mesh`` runs a graph of `graph_of`, whose key heads tp must divide. context: what ranks
    that share a sequence do in attention. Raises as `along_sequence`."""
    spread = _tensor_parallel(graph, mesh, sequence_parallel)
    cp = mesh.size(CONTEXT)
    ops = dict(spread.ops)
    for name, block in graph.blocks.items() if cp > 1 else ():
        for op in block.body.ops:
            if op.kind == "attention":
                ahead = along_sequence(op, bind(op, block.body.tensors), context, cp)
                inside = ops.get(key(name, op.name), "")
                if ahead:
                    ops[key(name, op.name)] = f"{ahead} {inside}".strip()
    return replace(spread, ops=ops)


def _tensor_parallel(graph: Graph, mesh: Mesh, sequence_parallel: bool) -> Spread:
    if mesh.size(TENSOR) == 1:
        return Spread(mesh)
    stream = "tp:S1" if sequence_parallel else "R"
    ops: dict[str, str] = {}
    parameters: dict[str, str] = {}
    shared = {key(name, "x"): stream for name in graph.blocks}
    bodies = [(name, block.body) for name, block in graph.blocks.items()]
    for scope, part in (*bodies, (None, graph)):
        readers = part.consumers()
        latent = any(op.name == "kv_down/linear" for op in part.ops)
        choices: dict[str, str | int] = {**INSIDE, **(LATENT if latent else GROUPED)}
        choices |= BETWEEN if sequence_parallel else {}
        for op in part.ops:
            if len(readers[op.name]) > 1 and op.name in BETWEEN:
                # What several products read is whole, and its gradient a partial sum.
                splits = all(reader.name in BETWEEN for reader, _ in readers[op.name])
                whole = op.kind in NORMS and not splits
                shared[key(scope, op.name)] = "tp:D" if whole else stream
            choice = choices.get(op.name)
            if choice is None:
                continue
            bound = bind(op, part.tensors)
            if isinstance(choice, int):
                choice = bound.results[0][choice][0]
            ops[key(scope, op.name)] = f"tp:{choice}"
            for i, name in enumerate(op.inputs):
                if part.tensors[name].role == "parameter":
                    stored = operand_placement(bound, i, choice, differentiable=True)
                    parameters[key(scope, name)] = f"tp:{stored}"
    return Spread(mesh, ops, shared, parameters)
