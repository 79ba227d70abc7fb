"""A spread from a few chosen strategies: all other ops follow, with the least communication."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.frontends.shared.captured import Captured
from autopar.lowering.lowered import BATCH_AXES
from autopar.nouns.axes import MICROBATCH
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread, key
from autopar.nouns.sharding import Placement, Sharding, split
from autopar.rules.batch import batch_flow
from autopar.rules.registry import bind
from autopar.rules.reshard import reshard
from autopar.rules.resharding import collectives
from autopar.rules.strategies import Strategy, flows, shardings, strategies


def following(
    captured: Captured, mesh: Mesh, given: Mapping[str, str], stream: str = "R", micro: int = 1
) -> Spread:
    """``given``: choice on ``tp`` by the end of an op's key. ``stream``: how blocks are entered."""
    dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    flow = batch_flow(captured.graph, dims)
    whole = Mesh((MICROBATCH, *mesh.axes), (micro, *mesh.sizes)).trimmed()
    tp = Mesh(("tp",), (mesh.size("tp"),))
    ops: dict[str, str] = {}
    shared: dict[str, str] = {}
    parameters: dict[str, str] = {}
    made: dict[str, list[Sharding]] = {}

    def graph(body: Graph, block: str | None) -> None:
        here: dict[str, Sharding] = {}
        for tensor in body.tensors.values():
            if block is not None and tensor.name in body.inputs:
                data = flow.choices.get(key(block, tensor.name), "")
                batch = Placement.parse(data or "R")
                if batch.kind == "D" and not tensor.differentiable:
                    batch = Placement("R")
                model = Placement.parse(stream if tensor.differentiable else "R")
                shared[key(block, tensor.name)] = str(Sharding.of([("tp", model)]))
                here[tensor.name] = Sharding.of(
                    (a, batch if a in BATCH_AXES else model) for a in whole.axes
                )
            elif tensor.role == "input":
                dim = dims.get(tensor.name)
                batch = Placement("R") if dim is None else split(dim)
                here[tensor.name] = Sharding.of((a, batch) for a in whole.axes if a in BATCH_AXES)
        for op in body.ops:
            if op.kind == "block":
                here.update(zip(op.outputs, made[op.attrs["block"]], strict=True))
                continue
            bound = bind(op, body.tensors)
            into, out = flows(op, body.tensors)
            data = flow.choices[key(block, op.name)]
            asked = next((c for end, c in given.items() if key(block, op.name).endswith(end)), None)
            best: tuple[float, str] | None = None
            options = strategies(bound, tp, any(out), None if asked is None else {"tp": (asked,)})
            assert options, f"{op.name}: {asked} is not legal for {bound}"
            held = {here[n].on("tp").kind for n in op.inputs if n in here}
            for option in options:
                if asked is None and option.on("tp") not in ("", "D") and "S" not in held:
                    continue  # nothing is split unless it comes so
                strategy = Strategy(
                    tuple(
                        (a, c)
                        for a in whole.axes
                        if (c := data if a in BATCH_AXES else option.on(a))
                    )
                )
                wants, gives = shardings(bound, strategy, whole, into, out)
                cost = 0.5 if option.on("tp") in ("", "P") else 0.0
                for name, want, grad in zip(op.inputs, wants, into, strict=True):
                    tensor = body.tensors[name]
                    if tensor.role in ("parameter", "buffer"):
                        cost += 0.25 if want.on("tp").kind == "D" else 0
                        continue
                    steps = reshard(here[name], want, tensor.shape, whole, grad)
                    if steps is None:
                        cost = float("inf")
                        break
                    for direction in ("forward", "backward") if grad else ("forward",):
                        moved = collectives(steps, tensor.dtype, whole, direction)
                        cost += sum(2 + m.size_bytes for m in moved)
                    cost += 0.1 * len(steps)
                if best is None or cost < best[0]:
                    best = (cost, str(option))
                    chosen = (wants, gives)
            assert best is not None
            ops[key(block, op.name)] = best[1]
            for name, want in zip(op.inputs, chosen[0], strict=True):
                if body.tensors[name].role == "parameter":
                    stored = Sharding.of([("tp", want.on("tp"))])
                    parameters.setdefault(key(block, name), str(stored))
            here.update(zip(op.outputs, chosen[1], strict=True))
        if block is not None:
            made[block] = [here[n] for n in body.outputs]

    for name, repeated in captured.graph.blocks.items():
        graph(repeated.body, name)
    graph(captured.graph, None)
    return Spread(mesh, ops, shared, parameters)
