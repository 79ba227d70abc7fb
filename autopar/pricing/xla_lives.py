"""What the memory of a JAX program hangs on beside its state: activations under each policy.

A layer keeps the results of products, lookups, attention and collectives that its backward pass
reads or makes other tensors from (`autopar.nouns.costly`); all else is made again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns import costly
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.recompute import policies
from autopar.pricing.units.activations import activation_lives, moved_bytes
from autopar.pricing.units.places import Places, moves
from autopar.pricing.units.unit import Kind
from autopar.pricing.units.walk import Life, Walk

_FUSED = frozenset({"cross_entropy"})
"""What a TPU's compiler fuses with what makes and reads the logits: it writes no wide copies of
them (libtpu 0.0.52, `autopar plan --compile` of `benchmarks.jax_llama3`)."""
_COSTLY = frozenset(kind for row in costly.TABLE for kind in row.kinds)


@dataclass(frozen=True, slots=True)
class Moments:
    """Bytes of activations under one recompute policy: at the loss; what layers keep; of one
    layer's own tensors while its backward pass runs; what all keep for backward, the root too; and
    what is there of that between the two parts of a backward pass, with the gradients that came.
    """

    loss: int
    kept: int
    layer: int
    saved: int
    pending: int


@dataclass(frozen=True, slots=True)
class BodyLives:
    """Of one layer of a block: its own tensors while its backward pass runs; what it keeps, by
    recompute policy; and what is there of it between the two parts of a backward pass."""

    layer: int
    kept: Mapping[str, int]
    pending: int


@dataclass(frozen=True, slots=True)
class XlaLives:
    """What the memory of a program hangs on beside its state.

    by_policy:  `Moments` for each recompute policy.
    bodies:     of each block.
    entries:    names of the batch's entries.
    batch:      bytes of the batch on one device, all microbatches.
    given:      bytes of the largest result of the root's products.
    products:   elements of the root's parameters that products read, by kind.
    largest:    elements of the largest parameter of any layer, by kind.
    is_eager:   whether the compiler is a TPU's: it reduces the gradient of a parameter right behind
                the product that makes it, where a CPU's first has all of a step, and fuses more.
    hoists:     whether reduce-scatters may be all-reduces, as those over several slices are: the
                compiler takes sums of whole gradients out of a loop over microbatches.
    """

    by_policy: Mapping[str, Moments]
    bodies: Mapping[str, BodyLives]
    entries: frozenset[str]
    batch: int
    given: int
    products: Mapping[Kind, int]
    largest: Mapping[Kind, int]
    is_eager: bool = False
    hoists: bool = False


def xla_lives(
    lowered: Lowered, is_eager: bool, known: XlaLives | None = None, hoists: bool = False
) -> XlaLives:
    """One microbatch followed through the root and through one layer of each block; ``known``: of
    the model that ``lowered`` is a stage of."""
    root = Places(lowered)
    if known is None:
        bodies = {name: _body_lives(body) for name, body in lowered.blocks.items()}
        entries = frozenset(lowered.graph.inputs)
    else:
        bodies, entries = {name: known.bodies[name] for name in lowered.blocks}, known.entries
    pending = _pending_bytes(root, bodies)
    by_policy = {}
    walk, inner = Walk.of(root, _FUSED if is_eager else ()), dict.fromkeys(bodies, Life(0, 0, ""))
    for policy in policies("jax"):
        kept = {name: body.kept[policy] for name, body in bodies.items()}
        life = walk.life(inner, kept)
        by_policy[policy] = Moments(
            loss=life.peak,
            kept=_stacks(lowered, root, kept),
            layer=max((body.layer for body in bodies.values()), default=0),
            saved=life.saved,
            pending=_left_bytes(root, life.saved) if pending is None else pending,
        )
    return XlaLives(
        by_policy,
        bodies,
        entries,
        _batch_bytes(lowered, entries),
        max((_given_bytes(op, lowered) for op, _ in _bound(root) if _is_product(op)), default=0),
        _in_products(lowered),
        _largest(lowered),
        is_eager,
        hoists,
    )


def _body_lives(body: Lowered) -> BodyLives:
    places = Places(body)
    read, came = _for_parameters(places)
    return BodyLives(
        # its forward pass runs again, as a whole or in part, before its backward pass
        layer=activation_lives(body)["none"].peak,
        kept={"none": _kept_bytes(places), "compute": moved_bytes(body), "full": 0},
        pending=came + sum(_made_from(places, sorted(read)).values()),
    )


def _kept_bytes(places: Places) -> int:
    """What one layer keeps where nothing is recomputed that costs anything."""
    read = {place for op, reads in _bound(places) for place in _saved_operands(op, reads)}
    rows = {  # a loop over rows keeps no results (`runtime.jax.parallel.attention_rows`)
        places.root[name]
        for op, _ in _bound(places)
        for name in op.op.outputs
        if op.op.kind in costly.ATTENTION.kinds
        and places.lowered.tensors[name].tensor.dtype == "float32"
    }
    saved = [place for place in places.saved if not place.endswith(" keeps")]
    return sum(_made_from(places, [p for p in saved if p in read or p not in rows]).values())


def _pending_bytes(root: Places, bodies: Mapping[str, BodyLives]) -> int | None:
    """What is there of a microbatch until the gradients of parameters are made, where those of
    what the stage was given are already: what the products that make them read. None of a stage
    that is given nothing with a gradient, see `_left_bytes`."""
    tensors = root.lowered.graph.tensors
    if not any(tensors[name].differentiable for name in root.lowered.graph.inputs):
        return None
    read, came = _for_parameters(root)
    kept = {place: root.saved[place] for place in read & root.saved.keys()}
    for op, reads in zip(root.lowered.ops, root.reads, strict=True):
        if op.bound is None:
            came += bodies[op.op.attrs["block"]].pending
            kept.update(reads)
    return came + sum(kept.values())


def _left_bytes(root: Places, saved: int) -> int:
    """The same where all of backward is left to do: what is ``saved``, and the gradients of what
    the stage gives."""
    graph = root.lowered.graph
    given = [name for name in graph.outputs if graph.tensors[name].shape]
    return saved + sum(root.size[root.root[name]] for name in given)


def _for_parameters(places: Places) -> tuple[set[str], int]:
    """Where what the gradients of one layer's parameters are made of lies, and bytes of the
    gradients of results that they are made of."""
    tensors = places.lowered.graph.tensors
    read: set[str] = set()
    came = 0
    for op, reads in _bound(places):
        trained = [n for n in op.op.inputs if tensors[n].role == "parameter"]
        if any(tensors[n].differentiable for n in trained):
            read.update(p for p in _saved_operands(op, reads) if places.is_temporary(p))
            came += _given_bytes(op, places.lowered) * (op.op.kind != "add")  # its operand's, too
    return read, came


def _bound(places: Places) -> Iterator[tuple[LoweredOp, Sequence[tuple[str, int]]]]:
    """The ops that are no blocks, with what they read."""
    for op, reads in zip(places.lowered.ops, places.reads, strict=True):
        if op.bound is not None:
            yield op, reads


def _saved_operands(op: LoweredOp, reads: Sequence[tuple[str, int]]) -> set[str]:
    assert op.bound is not None
    return {reads[i][0] for i in op.bound.rule.saves if i < len(reads)}


def _given_bytes(op: LoweredOp, lowered: Lowered) -> int:
    return sum(
        math.prod(value.produced.local_shape(value.tensor.shape, lowered.mesh))
        * DTYPE_BYTES[value.tensor.dtype]
        for value in (lowered.tensors[name] for name in op.op.outputs)
        if value.tensor.differentiable
    )


def _made_from(places: Places, todo: list[str]) -> dict[str, int]:
    """By place, bytes of the costly results that a layer makes what lies at ``todo`` from."""
    lowered = places.lowered
    maker: dict[str, int] = {}
    for i, made in enumerate(places.makes):
        for root in made:
            maker.setdefault(root, i)  # a view's is that of what it views
    sizes = {place: size for reads in places.reads for place, size in reads}
    kept: dict[str, int] = {}
    seen = set(todo)
    while todo:
        place = todo.pop()
        op = lowered.ops[maker[place]] if place in maker else None
        if _is_moved(lowered, place) or (op is not None and _is_costly(op)):
            kept[place] = sizes.get(place, places.size.get(place, 0))
        elif op is not None:
            read = {p for p, _ in places.reads[maker[place]] if places.is_temporary(p)}
            todo += read - seen
            seen |= read
    return kept


def _is_moved(lowered: Lowered, place: str) -> bool:
    """Whether a collective gave the tensor at ``place``."""
    value = lowered.tensors.get(place)
    return value is None or moves(value.steps)


def _is_product(op: LoweredOp) -> bool:
    return op.bound is not None and op.bound.rule.cost == "matmul"


def _is_costly(op: LoweredOp) -> bool:
    return _is_product(op) or (op.bound is not None and op.op.kind in _COSTLY)


def _stacks(lowered: Lowered, root: Places, kept: Mapping[str, int]) -> int:
    """What the layers keep, together with their inputs."""
    total = 0
    inputs: dict[str, int] = {}
    for op, reads in zip(lowered.ops, root.reads, strict=True):
        if op.bound is None:
            total += kept[op.op.attrs["block"]]
            inputs.update(reads)
    return total + sum(inputs.values())


def _batch_bytes(lowered: Lowered, entries: frozenset[str]) -> int:
    tensors = lowered.tensors
    return lowered.passes * sum(
        math.prod(tensors[n].produced.local_shape(tensors[n].tensor.shape, lowered.mesh))
        * DTYPE_BYTES[tensors[n].tensor.dtype]
        for n in lowered.graph.inputs
        if n in entries
    )


def _parameters(lowered: Lowered) -> Iterator[tuple[str, Kind, int]]:
    """Name, kind and elements on one model rank."""
    for name, value in lowered.tensors.items():
        if value.tensor.role == "parameter":
            local = value.produced.local_shape(value.tensor.shape, lowered.mesh)
            yield name, Kind(value.tensor.dtype), math.prod(local)


def _in_products(lowered: Lowered) -> dict[Kind, int]:
    read = {
        n
        for op in lowered.ops
        if op.bound is not None and _is_costly(op) and op.op.kind != "embedding"
        for n in op.op.inputs
    }
    numel_of: dict[Kind, int] = {}
    for name, kind, numel in _parameters(lowered):
        if name in read:
            numel_of[kind] = numel_of.get(kind, 0) + numel
    return numel_of


def _largest(lowered: Lowered) -> dict[Kind, int]:
    numel_of: dict[Kind, int] = {}
    for body in lowered.blocks.values():
        for _, kind, numel in _parameters(body):
            numel_of[kind] = max(numel_of.get(kind, 0), numel)
    return numel_of
