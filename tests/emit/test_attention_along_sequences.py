"""Attention whose sequences are split, by every implementation: gathered keys and values, heads in
the place of rows, a ring, and mixes of them on two axes."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.emit.pytorch import emit
from autopar.files.cluster_file import load_cluster
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.shared.captured import Captured
from autopar.lowering.lowered import LoweringError
from autopar.nouns.errors import UserError
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread, key
from autopar.nouns.workload import Workload
from autopar.planner.planning import plan_captured
from tests.emit.harness import Emitted, capture_of, check, emitted

CLUSTER = load_cluster("examples/clusters/cpu_4.yaml")

BATCH, LENGTH, WIDTH, HEADS, WORDS = 2, 16, 16, 4, 11
WAYS = {
    "cp=2": ("whole", "cp:g", "cp:ring"),
    "cp=4": ("whole", "cp:ring"),
    "dp_shard=2 x cp=2": ("cp:g", "cp:ring"),
    "cp=2 x tp=2": ("tp:g", "cp:g", "cp:ring tp:g", "cp:ring"),
    "cp=2 x cp_head=2": ("cp_head:g", "cp:ring cp_head:g"),
    "cp_outer=2 x cp=2": ("whole", "cp_outer:ring cp:ring"),
    "cp_outer=2 x cp=2 x cp_head=2": ("cp_outer:ring cp:ring cp_head:g",),
}
"""What the plan says of attention, by mesh; nothing: keys and values are gathered."""


class Model(nn.Module):
    """tokens, labels [b, s] -> a mean over labels."""

    def __init__(self, kv_heads: int, **options: Any) -> None:
        super().__init__()
        self.options, self.kv_heads = options, kv_heads
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS * kv_heads) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (p(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for p in (self.k, self.v))
        options = dict(self.options)
        if window := options.pop("window", None):
            back = places[:, None] - places
            options["attn_mask"] = (back >= 0) & (back < window)
        grouped = self.kv_heads != HEADS
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(WORDS, (BATCH, LENGTH), generator=generator) for _ in range(2))
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return {"tokens": tokens, "labels": labels}


def near() -> Tensor:
    """Rows see the four columns up to their own."""
    rows = torch.arange(LENGTH)
    return (rows[:, None] >= rows) & (rows[:, None] - rows < 4)


MODELS = {
    "causal": partial(Model, HEADS, is_causal=True),
    "not causal": partial(Model, HEADS),
    "grouped": partial(Model, 2, is_causal=True),
    "masked": partial(Model, HEADS, attn_mask=near()),
}


@cache
def captured_as(name: str) -> Captured:
    return capture_of(MODELS[name], batch)


@cache
def captured_with(window: int) -> Captured:
    return capture_of(partial(Model, 2, window=window), batch)


@cache
def captured_packed(window: int | None) -> Captured:
    return capture_of(partial(Packed, 2, window=window), packed)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("mesh", "way"), [(m, w) for m, ways in WAYS.items() for w in ways])
@pytest.mark.some(32)
def test_right_and_priced_as_issued(name: str, mesh: str, way: str) -> None:
    captured = captured_as(name)
    graph = captured.graph
    (at,) = (op for op in graph.ops if op.kind == "attention")
    if at.attrs.get("causal"):
        way = way.replace("ring", "zigzag_ring")
    made = emitted(captured, Spread(Mesh.parse(mesh), {key(None, at.name): way}))
    torch.manual_seed(0)
    check(made, MODELS[name](), batch())


@pytest.mark.parametrize("window", [1, 3, 5, 9])
@pytest.mark.parametrize(
    ("mesh", "way"),
    [
        ("cp=2", "whole"),
        ("cp=2", "cp:ring"),
        ("cp=4", "whole"),
        ("cp=4", "cp:ring"),
        ("cp=2 x cp_head=2", "cp:ring cp_head:g"),
        ("cp_outer=2 x cp=2", "cp_outer:ring cp:ring"),
        ("cp_outer=4 x cp=2", "cp_outer:ring cp:ring"),
    ],
)
def test_windows(mesh: str, way: str, window: int) -> None:
    """Wide ones are in zigzag. A ring of pieces one behind the other is as long as the window
    reaches."""
    model = partial(Model, 2, window=window)
    captured = captured_with(window)
    (at,) = (op for op in captured.graph.ops if op.kind == "attention")
    assert at.attrs["window"] == window
    wide = window == 9 or (window == 5 and mesh == "cp=2")
    way = way.replace("ring", "zigzag_ring" if wide else "causal_ring")
    made = emitted(captured, Spread(Mesh.parse(mesh), {key(None, at.name): way}))
    assert f"window={window}" in made.text
    assert ("zigzag" in made.text) == wide
    torch.manual_seed(0)
    check(made, model(), batch())


class Packed(Model):
    """Documents are numbered, from a number that differs; rows see the columns of their own."""

    def forward(self, tokens: Tensor, labels: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        same = numbers[:, None, :, None] == numbers[:, None, None, :]
        places = torch.arange(LENGTH)
        if window := self.options.get("window"):
            back = places[:, None] - places
            same = same & (back >= 0) & (back < window)
        x = self.words(tokens) + self.places(places)
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (p(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for p in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, same, enable_gqa=self.kv_heads != HEADS)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def packed() -> dict[str, Tensor]:
    """Documents that end inside of pieces, on their edges, and that are as long as several."""
    lengths = [(1, 4, 10, 1), (8, 4, 1, 3)]
    numbers = [[i + 3 for i, length in enumerate(each) for _ in range(length)] for each in lengths]
    return {**batch(), "numbers": torch.tensor(numbers)}


@pytest.mark.parametrize("window", [None, 3, LENGTH])
@pytest.mark.parametrize(
    ("mesh", "way"),
    [
        ("cp=2", "whole"),
        ("cp=2", "cp:g"),
        ("cp=2", "cp:ring"),
        ("cp=4", "whole"),
        ("cp=4", "cp:ring"),
        ("dp_shard=2 x cp=2", "cp:ring"),
        ("cp=2 x cp_head=2", "cp:ring cp_head:g"),
        ("tp=2 x cp=2", "tp:g"),
    ],
)
def test_documents(mesh: str, way: str, window: int | None) -> None:
    model = partial(Packed, 2, window=window)
    captured = captured_packed(window)
    (at,) = (op for op in captured.graph.ops if op.kind == "attention")
    assert at.attrs["documents"]
    assert at.attrs.get("window") == (3 if window == 3 else None)
    order = {None: "ring", 3: "causal_ring", LENGTH: "zigzag_ring"}[window]
    made = emitted(
        captured, Spread(Mesh.parse(mesh), {key(None, at.name): way.replace("ring", order)})
    )
    assert "documents=(" in made.text
    torch.manual_seed(0)
    check(made, model(), packed())


@pytest.mark.parametrize("name", ["causal", "grouped"])
def test_heads_that_ranks_do_not_divide_are_named(name: str) -> None:
    workload = Workload(model=MODELS[name], batch=batch)
    captured = captured_as(name)
    if name == "causal":
        made = plan_captured(captured, workload, CLUSTER, "m.py", {"cp_head": "4"})
        assert made.plan.program_mesh.size("cp_head") == HEADS
        return
    says = "--fix cp_head=4 does not divide the 2 heads of keys and values .*: cp_head may be 1 or"
    with pytest.raises(UserError, match=says):
        plan_captured(captured, workload, CLUSTER, "m.py", {"cp_head": "4"})


def test_a_choice_that_the_rule_does_not_have_is_named() -> None:
    """Scores that are dropped cannot go around a ring."""
    captured = capture_of(partial(Model, HEADS, dropout_p=0.1), batch)
    (at,) = (op for op in captured.graph.ops if op.kind == "attention")
    says = re.escape(f"{key(None, at.name)}: cp:ring is nothing that an axis may do to it")
    with pytest.raises(LoweringError, match=says):
        emitted(captured, Spread(Mesh.parse("cp=2"), {key(None, at.name): "cp:ring"}))


@pytest.mark.parametrize(
    ("options", "way"),
    [({"is_causal": True}, "cp:s"), ({"is_causal": True}, "cp:causal_ring"),
     ({"window": 2}, "cp:zigzag_rows"), ({"window": 2}, "cp:zigzag_ring")],
)  # fmt: skip
def test_an_implementation_for_pieces_in_another_order_is_named(
    options: dict[str, Any], way: str
) -> None:
    """Their rows would be computed at each other's places."""
    captured = capture_of(partial(Model, HEADS, **options), batch)
    (at,) = (op for op in captured.graph.ops if op.kind == "attention")
    with pytest.raises(LoweringError, match=f"{way} takes pieces that lie .* this batch's lie"):
        emitted(captured, Spread(Mesh.parse("cp=4"), {key(None, at.name): way}))


class Placed(Model):
    """Positions are a parameter of as many rows as there are tokens."""

    def __init__(self) -> None:
        super().__init__(HEADS, is_causal=True)
        self.rows = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.rows
        q, k, v = (
            p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def placed() -> tuple[Workload, Captured]:
    workload = Workload(model=Placed, batch=batch)
    return workload, capture(workload)


@pytest.mark.parametrize("fix", ["cp=2", "cp=4", "cp_ring=2,cp_head=2", "cp=2,tp=2"])
def test_a_parameter_of_tokens_is_whole_where_these_are_cut(fix: str) -> None:
    workload, captured = placed()
    pins = dict(pair.split("=") for pair in fix.split(","))
    planned = plan_captured(captured, workload, CLUSTER, "m.py", pins)
    text = emit(planned.lowered, planned.plan, captured)["model.py"]
    torch.manual_seed(0)
    check(Emitted(captured, planned.plan, planned.lowered, text), Placed(), batch())


class Crossed(Model):
    """Behind its own causal attention one to what another part of the batch has."""

    def forward(self, tokens: Tensor, labels: Tensor, source: Tensor) -> Tensor:  # type: ignore[override]
        def heads(x: Tensor) -> Tensor:
            return x.view(x.shape[0], -1, HEADS, WIDTH // HEADS).transpose(1, 2)

        x, seen = self.words(tokens), self.words(source)
        q, k, v = (heads(p(x)) for p in (self.q, self.k, self.v))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        q, k, v = heads(self.q(x)), heads(self.k(seen)), heads(self.v(seen))
        mixed = F.scaled_dot_product_attention(q, k, v, **self.options)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def crossed() -> dict[str, Tensor]:
    source = torch.randint(WORDS, (BATCH, 8), generator=torch.Generator().manual_seed(1))
    return {**batch(), "source": source}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mesh", ["cp_head=4", "cp=2 x cp_head=2"])
def test_heads_of_what_all_ranks_have_lie_in_order(mesh: str, masked: bool) -> None:
    """Rows lie in zigzag, for the sake of the causal one."""
    hidden = torch.linspace(-2, 1, HEADS * 8).view(HEADS, 1, 8) if masked else None
    model = partial(Crossed, HEADS, attn_mask=hidden)
    captured = capture_of(model, crossed)
    own, other = (op for op in captured.graph.ops if op.kind == "attention")
    ring = "cp:zigzag_ring " if "cp=2" in mesh else ""
    ways = {key(None, own.name): f"{ring}cp_head:g", key(None, other.name): "cp_head:g"}
    made = emitted(captured, Spread(Mesh.parse(mesh), ways))
    assert "zigzag" in made.text
    torch.manual_seed(0)
    check(made, model(), crossed())
