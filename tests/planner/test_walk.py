"""Live bytes of all policies by one walk are those of a walk for each."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.lowering.lowered import Lowered
from autopar.nouns.graph import Op
from autopar.nouns.recompute import POLICIES
from autopar.planner.planning import plan_captured
from autopar.pricing.units.activations import activation_lives, kept_by_policy
from autopar.pricing.units.places import Places
from autopar.pricing.units.walk import Life, Walk
from autopar.rules.held_bytes import workspace_back_bytes, workspace_bytes
from benchmarks.zoo_models import ZOO


class Slow:
    """One policy alone, tensor by tensor."""

    def __init__(self, places: Places, bodies: Mapping[str, Life], kept: Mapping[str, int]) -> None:
        self.places, self.lowered, self.bodies, self.kept = places, places.lowered, bodies, kept
        self.peak, self.where, self.worst = 0, "", {True: 0, False: 0}

    def life(self) -> Life:
        calls = (op.op.attrs["block"] for op in self.lowered.ops if op.bound is None)
        saved = sum(self.places.saved.values()) + sum(self.kept[name] for name in calls)
        self.forward()
        self.backward(saved)
        return Life(saved, self.peak, self.where, self.worst[False], self.worst[True])

    def note(self, live: int, op: Op) -> None:
        runs = op.kind == "block"
        self.worst[runs] = max(self.worst[runs], live)
        if live > self.peak:
            self.peak, self.where = live, str(op.source)

    def forward(self) -> None:
        places, saved = self.places, self.places.saved
        last = {place: i for i, reads in enumerate(places.reads) for place, _ in reads}
        held, temporary, seen = 0, dict[str, int](), set[str]()
        for i, op in enumerate(self.lowered.ops):
            made = [(root, places.size[root]) for root in places.makes[i]]
            for place, size in (*places.reads[i], *made):
                if place in saved:
                    held += size if place not in seen else 0
                    seen.add(place)
                elif places.is_temporary(place):
                    temporary.setdefault(place, size)
            held += saved.get(f"{op.op.name} keeps", 0)
            if op.bound is None:
                inner = self.bodies[op.op.attrs["block"]].peak
            else:
                inner = workspace_bytes(op.bound, op.strategy, self.lowered.mesh)
            self.note(held + sum(temporary.values()) + inner, op.op)
            if op.bound is None:
                held += self.kept[op.op.attrs["block"]]
            for place in [p for p in temporary if last.get(p, i) <= i]:
                del temporary[place]

    def backward(self, held: int) -> None:
        places, ops = self.places, self.lowered.ops
        tensors = self.lowered.graph.tensors
        gradients: dict[str, int] = {}
        for i in reversed(range(len(ops))):
            op = ops[i].op
            if any(tensors[n].differentiable for n in op.outputs):
                for name in op.inputs:
                    if tensors[name].differentiable and places.is_activation(name):
                        gradients[places.root[name]] = places.size[places.root[name]]
            inner = 0
            if ops[i].bound is None:
                held -= self.kept[op.attrs["block"]]
                inner = self.bodies[op.attrs["block"]].peak
            else:
                bound = ops[i].bound
                assert bound is not None
                inner = workspace_back_bytes(bound, ops[i].strategy, self.lowered.mesh)
            self.note(held + sum(gradients.values()) + inner, op)
            held -= sum(size for p, size in places.saved.items() if self.first(p) == i)
            for name in op.outputs:
                if places.root[name] == name:
                    gradients.pop(name, None)

    def first(self, place: str) -> int:
        for i, op in enumerate(self.lowered.ops):
            read = [p for p, _ in self.places.reads[i]]
            if place in (*read, *self.places.makes[i], f"{op.op.name} keeps"):
                return i
        return 0


def lowered(name: str, fix: Mapping[str, str]) -> Lowered:
    workload = ZOO[name]()
    cluster = load_cluster("examples/clusters/cpu_4.yaml")
    return plan_captured(capture(workload), workload, cluster, f"{name}.py", fix).lowered


@pytest.mark.parametrize("name", ["llama", "t5", "convnext"])
def test_every_policy_is_as_walked_alone(name: str) -> None:
    whole = lowered(name, {"dp_shard": "2", "tp": "2"})
    for graph in (whole, *whole.blocks.values()):
        inner = {block: activation_lives(body) for block, body in graph.blocks.items()}
        kept = {block: kept_by_policy(graph.blocks[block], of) for block, of in inner.items()}
        places = Places(graph)
        walk = Walk.of(places)
        for policy in POLICIES:
            bodies = {block: of[policy] for block, of in inner.items()}
            left = {block: of[policy] for block, of in kept.items()}
            assert walk.life(bodies, left) == Slow(places, bodies, left).life()
