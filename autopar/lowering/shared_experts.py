"""A layer's shared experts beside its routed ones: they run while tokens travel.

What every token goes through, whichever experts it is routed to, is a module of its own next to
them (DeepSeek-V3, Qwen2-MoE, Llama 4, GLM-4). It needs no routes and no rows of other ranks, so it
may run between `Routes.set_out` and `Routes.arrive` of the first piece of the tokens, and in
backward while the gradients of these are on their way home (`autopar.runtime.pytorch.experts`'s
``beside``; Megatron-LM's ``--moe-shared-expert-overlap`` does so on a stream of its own).

A plan names the layers that do, with the module (`autopar.nouns.plan.Spread.beside`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autopar.lowering.lowered import Lowered, LoweredOp, LoweringError
from autopar.lowering.routed_pieces import sites as routed_sites
from autopar.lowering.scopes import LONG_LEAF, Scope, prefixes, scopes, under
from autopar.nouns.graph import Graph, Op
from autopar.nouns.kinds import DRAWS
from autopar.nouns.plan import key

EXPERTS = "experts"


def modules_beside(graph: Graph) -> dict[str, str]:
    """By the name of an op of routed experts, the path of the module that may run beside it: of
    those next to it in the module around both the one with most ops. A module runs beside one."""
    paths: dict[str, str] = {}
    for op in graph.ops:
        around = _around(graph, op) if op.kind == EXPERTS else None
        children = set() if around is None else _children(graph.ops, around)
        free = sorted(children - {*paths.values()})
        may = [path for path in free if _may_run_beside(graph, path, op)]
        if may:
            paths[op.name] = max(may, key=lambda path: len(_inside(graph, path)))
    return paths


def may_have_beside(graph: Graph) -> frozenset[str]:
    """Keys of the ops of a graph and of its blocks that have such a module next to them."""
    parts = [(None, graph), *((name, block.body) for name, block in graph.blocks.items())]
    return frozenset(key(n, name) for n, part in parts for name in modules_beside(part))


def _path(op: Op) -> str:
    return op.name.rpartition("/")[0]


def _children(ops: Iterable[Op], of: str) -> set[str]:
    """The modules directly inside of one that ``ops`` are in."""
    paths = {path for op in ops for path in prefixes(_path(op))}
    return {path for path in paths if path.rpartition(".")[0] == of}


def _inside(graph: Graph, path: str) -> list[Op]:
    return [op for op in graph.ops if under(_path(op), path)]


def _around(graph: Graph, op: Op) -> str | None:
    """The module whose forward calls the experts of ``op``; None where they have one of their own,
    in which others would have no place."""
    path = _path(op)
    own = _inside(graph, path)
    if any(_path(other) != path for other in own):
        return path
    return path.rpartition(".")[0] if len(own) < LONG_LEAF else None


def _may_run_beside(graph: Graph, path: str, experts: Op) -> bool:
    """Whether a module has a forward of its own that gives one tensor and draws no random numbers;
    what it reads is there before the experts, and nothing up to them reads what it gives."""
    inside = _inside(graph, path)
    names = {op.name for op in inside}
    places = [i for i, op in enumerate(graph.ops) if op.name in names]
    read = {name for op in inside for name in op.inputs}
    held = [name for name in read if graph.tensors[name].role in ("parameter", "buffer")]
    if len(_children(inside, path)) < 2 or places[-1] - places[0] + 1 != len(places):
        return False
    if any(op.kind in {EXPERTS, "block", *DRAWS} or op.attrs.get("dropout_p") for op in inside):
        return False
    if not held or not all(under(name, path) for name in held):
        return False
    made = {name for op in inside for name in op.outputs}
    others = [op for op in graph.ops if op.name not in names]
    given = made & ({n for op in others for n in op.inputs} | {*graph.outputs})
    if len(given) != 1 or given & {*graph.outputs}:
        return False
    first = others.index(experts)
    late = {name for op in others[first:] for name in op.outputs}
    return not late & read and not any(given & {*op.inputs} for op in others[: first + 1])


def sites(lowered: Lowered) -> Iterator[tuple[str, LoweredOp, str, Lowered]]:
    """The ops of a graph and of its blocks whose tokens travel along one axis, next to a module
    that may run beside: each with its key, the module's path, and the graph that it is of."""
    parts = (lowered, *lowered.blocks.values())
    paths = {part.block: modules_beside(part.graph) for part in parts}
    for where, op, part in routed_sites(lowered):
        path = paths[part.block].get(op.op.name)
        if path is not None and _called_beside(scopes(part), op, path):
            yield where, op, path, part


def _called_beside(scope: Scope, op: LoweredOp, path: str) -> bool:
    """Whether one forward of the program calls both the module and the experts."""
    if op in scope.items:
        return any(child.path == path for child in scope.children())
    return any(_called_beside(child, op, path) for child in scope.children())


def beside_of(lowered: Lowered, op: LoweredOp) -> list[LoweredOp]:
    """What the plan has run while the tokens of ``op`` travel; nothing where a stage of a pipeline
    has one of the two without the other."""
    path = lowered.beside.get(key(lowered.block, op.op.name))
    if path is None or modules_beside(lowered.graph).get(op.op.name) != path:
        return []
    return [other for other in lowered.ops if under(_path(other.op), path)]


def with_beside(lowered: Lowered, beside: Mapping[str, str]) -> Lowered:
    """The same, with these modules beside the ops that are named by key."""
    blocks = {name: with_beside(body, beside) for name, body in lowered.blocks.items()}
    return replace(lowered, beside=beside, blocks=blocks)


def check_beside(lowered: Lowered) -> None:
    """Raises `LoweringError` where a plan has a module beside an op that cannot be."""
    there = {where: path for where, _, path, _ in sites(lowered)}
    for where, path in lowered.beside.items():
        if there.get(where) != path:
            may = f"; {where} may have {there[where]!r}" if where in there else ""
            may = may or f"; it may be {', '.join(sorted(there))}" if there else may
            raise LoweringError(
                f"{where} with {path!r} beside it: a module of one result may be that stands next "
                f"to experts whose tokens travel along one axis{may}"
            )
