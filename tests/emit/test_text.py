"""The text of programs: golden, formatted, quick to make."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.emit import text as layout
from autopar.emit.marks import instrumented
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.runtime.shared.edits import edits
from tests.emit import models
from tests.emit.following import following
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage
from tests.emit.test_numbers import CASES, MEGATRON, MESHES, captured

GATED_MLP = '''\
class GatedMLP(nn.Module):
    """x [4, 8, 16] -> [4, 8, 16] tp:P"""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = Linear(weight=Parameter((32, 16), "tp:S0"))
        self.up_proj = Linear(weight=Parameter((32, 16), "tp:S0"))
        self.down_proj = Linear(weight=Parameter((16, 32), "tp:S1"))

    def forward(self, x: Tensor) -> Tensor:
        h = copy_to(x, "tp")  # [4, 8, 16], backward: all_reduce
        x = copy_to(x, "tp")  # [4, 8, 16], backward: all_reduce
        gate = F.silu(self.gate_proj(h))  # [4, 8, 16] tp:S2
        return self.down_proj(gate * self.up_proj(x))  # [4, 8, 16] tp:P
'''

LAYER = """\
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = self.self_attn(self.input_layernorm(x), cos, sin)  # [4, 8, 16] tp:P
        x = whole(x, "tp")  # [4, 8, 16], backward: keep on the first rank
        out = all_reduce(out, "tp")  # [4, 8, 16]
        x = x + out
        out = self.mlp(self.post_attention_layernorm(x))  # [4, 8, 16] tp:P
        out = all_reduce(out, "tp")  # [4, 8, 16]
        return x + out
"""

LOOP = """\
        x = all_reduce(x, "tp")  # [4, 8, 16]
        for layer in self.layers:
            x = copy_to(x, "tp")  # [4, 8, 16], backward: all_reduce
            x = layer(x, cos, sin)
"""


def test_golden_megatron() -> None:
    spread = following(captured("llama"), Mesh.parse("dp_shard=2 x tp=2"), MEGATRON, stream="D")
    text = emitted(captured("llama"), spread).text
    for part in (GATED_MLP, LAYER, LOOP):
        assert part in text, text
    assert "self.layers = nn.ModuleList(Layer() for _ in range(2))\n" in text
    assert 'MESH = {"dp_shard": 2, "tp": 2}\n' in text


LEGEND = """\
    `tp:S1`                     split over the ranks of tp along dim 1
    `tp:P`                      a partial sum on each rank of tp
    `Parameter(..., "tp:S0")`   the shape is that of the whole, of which each rank holds a piece
    `Parameter(..., "tp:D")`    whole on every rank; the runtime adds up its gradient over tp
    `Linear(...)`               the layer of that name on this rank's pieces; it moves nothing
    `counts`                    labelled tokens of the whole batch: what a mean loss divides by
"""


def test_the_header_explains_what_the_file_has_and_nothing_else() -> None:
    spread = following(captured("llama"), Mesh.parse("dp_shard=2 x tp=2"), MEGATRON, stream="D")
    text = emitted(captured("llama"), spread).text
    header, _, body = text[3:].partition('"""')
    assert LEGEND in header
    alone = emitted(captured("llama"), Spread(Mesh((), ()))).text
    assert "tp:" not in alone
    assert "`Linear(...)`" in alone
    for case in CASES:
        for seed in range(3):
            spread = random_stage(captured(case), Mesh.parse("tp=3"), 1, seed)
            header, _, body = emitted(captured(case), spread).text[3:].partition('"""')
            for word in re.findall(r'backward="\w+"|:[DP]\b', body):
                assert word in header, word
            for word in re.findall(r'`(backward="\w+")`', header):
                assert word in body, word


def header(spread: Spread, zero: int = 0) -> str:
    return emitted(captured("llama"), spread, zero=zero).text[3:].partition('"""')[0]


@pytest.mark.parametrize(
    ("mesh", "zero", "expected"),
    [
        ("dp_shard=2", 3, "train.py gathers parameters and reduce-scatters gradients (FSDP2)"),
        ("dp_replicate=2 x dp_shard=2", 0, "adds up gradients over dp_replicate and dp_shard (DDP"),
        ("tp=2", 0, ""),
    ],
)
def test_the_header_says_what_train_py_moves(mesh: str, zero: int, expected: str) -> None:
    text = header(Spread(Mesh.parse(mesh)), zero)
    assert expected in text
    assert ("           train.py " in text) == bool(expected)


def test_the_header_says_where_tp_splits_results_and_no_weights() -> None:
    split = following(captured("llama"), Mesh.parse("tp=2"), MEGATRON, stream="D")
    assert "tp splits no parameter" not in header(split)
    whole = following(captured("llama"), Mesh.parse("tp=2"), {}, stream="S1")
    assert "tp splits no parameter here, only results" in header(whole)
    assert "tp splits no parameter" not in header(Spread(Mesh.parse("tp=2")))


def test_the_header_says_where_pieces_differ_in_size() -> None:
    """The vocabulary of 27."""
    for ways, uneven in ((1, False), (2, True)):
        mesh = Mesh.parse(f"tp={ways}")
        spread = following(captured("llama"), mesh, MEGATRON, stream="D")
        assert ("the last ranks" in emitted(captured("llama"), spread).text) == uneven


def test_marks_leave_every_statement_as_it_is() -> None:
    for case in CASES:
        for seed, mesh in enumerate(MESHES):
            spread = random_stage(captured(case), Mesh.parse(mesh), 1, seed)
            plain = emitted(captured(case), spread).text
            marked = emitted(captured(case), spread, marks=True).text
            assert edits(marked, plain) == []
            assert "# makes [[" in marked
            ast.parse(instrumented(plain, marked, "autopar.runtime.pytorch.probe.probe"))


def test_formatted(tmp_path: Path) -> None:
    """Neither formatter nor linter has anything to say, with probes and without."""
    for case in CASES:
        for seed, mesh in enumerate(MESHES):
            spread = random_stage(captured(case), Mesh.parse(mesh), 1, seed)
            for probes in (False, True):
                name = f"{case}_{seed}_{probes}.py"
                (tmp_path / name).write_text(emitted(captured(case), spread, probes=probes).text)
    wide = capture_of(_Wide, lambda: {"x": torch.zeros(8, 123456)})
    (tmp_path / "wide.py").write_text(emitted(wide, Spread(Mesh.parse("dp_shard=2"))).text)
    settings = ["--config", str(Path(__file__).parents[2] / "pyproject.toml")]
    for command in (["format", "--check"], ["check"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *settings, str(tmp_path)],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_equal_decisions_give_equal_text() -> None:
    spread = random_stage(captured("llama"), Mesh.parse("tp=2"), 1, 3)
    again = capture_of(*CASES["llama"])
    assert emitted(captured("llama"), spread).text == emitted(again, spread).text


def test_depth_does_not_lengthen_the_text() -> None:
    """126 layers, as many as Llama-3.1-405B has."""

    def text(layers: int) -> str:
        model = capture_of(lambda: models.Llama(layers=layers), models.llama_batch)
        spread = following(model, Mesh.parse("tp=2"), MEGATRON, stream="D")
        return emitted(model, spread).text

    deep = text(126)
    assert "nn.ModuleList(Layer() for _ in range(126))" in deep
    assert len(deep.splitlines()) == len(text(4).splitlines())


class _Wide(nn.Module):
    """Names and shapes that a line cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        size = 123456
        self.feed_forward_projections = nn.ModuleList(nn.Linear(size, size) for _ in range(6))
        self.embeddings_of_what_is_read = nn.ModuleDict({"a b": nn.Linear(size, size)})
        self.head = nn.Linear(size, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.feed_forward_projections:
            x = layer(x).relu()
        x = self.embeddings_of_what_is_read["a b"](x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


def _statements(program: str) -> str:
    """What Python makes of the text, without its docstrings."""
    tree = ast.parse(program)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            del node.body[0]
    return ast.dump(tree)


def test_breaking_lines_changes_no_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the page; the wide model is broken at the usual width already."""
    made = {case: captured(case) for case in CASES}
    with torch.device("meta"):
        made["wide"] = capture_of(_Wide, lambda: {"x": torch.zeros(8, 123456)})
    for seed, (case, model) in enumerate(made.items()):
        spread = random_stage(model, Mesh.parse(MESHES[seed]), 1, seed)
        monkeypatch.setattr(layout, "COLUMNS", 10**6)
        unbroken = _statements(emitted(model, spread).text)
        for columns in (1, 20, 33, 47, 60, 80, 100):
            monkeypatch.setattr(layout, "COLUMNS", columns)
            assert _statements(emitted(model, spread).text) == unbroken, (case, columns)


@pytest.mark.parametrize(
    "text",
    [
        "x = values[index_of_the_first]",
        "x = function(values)[0]",
        "return (first + second)",
        'f(key["a \\" b, c"])',
        "x = [first_value]",
        "x = {first_value}",
        "x = (first_value,)",
        "x = f(a for a in values if a for b in a)",
        "x = {a: b for a, b in values}",
        "x = f()",
        "x = -(first + second)",
        "x = f(*(a(b, c) for a in range(5)), d)",
    ],
)
def test_a_broken_line_is_the_same_statement(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "COLUMNS", 1)
    body = "def f():\n    {}"
    broken = "\n".join(layout.wrap(text, 4))
    assert ast.dump(ast.parse(f"def f():\n{broken}")) == ast.dump(ast.parse(body.format(text)))


class _Shifted(nn.Module):
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = self.fc(x) + self.shift
        return shifted.square().mean()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_buffers_join_the_stream_in_its_precision(precision: str) -> None:
    shifted = capture_of(_Shifted, lambda: {"x": torch.zeros(8, 4)})
    text = emitted(shifted, Spread(Mesh.parse("tp=2")), precision=precision).text
    assert ("+ self.shift.to(shifted.dtype)" in text) == (precision == "bfloat16"), text


def test_ties_are_one_object() -> None:
    text = emitted(captured("tied"), Spread(Mesh.parse("tp=2"))).text
    assert "self.lm_head" not in text
    assert "x = self.embed_tokens(input_ids" in text
    assert text.count("local(self.embed_tokens.weight)") == 1


class Residual(models.GatedMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Decoder(nn.Module):
    """Layers with what stands around them; two of its products share a weight."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Residual(8, 16) for _ in range(layers))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.rows(ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.second(self.first(x).relu())
        return out


class Inside(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.inner = Decoder(layers)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.inner(ids)).square().mean()
        return loss


@pytest.mark.parametrize("mesh", ["1", "dp_shard=2 x tp=2"])
def test_a_module_around_layers_is_a_class_that_calls_them(mesh: str) -> None:
    model = Inside()
    captured = capture_of(Inside, lambda: {"ids": torch.zeros(4, 6, dtype=torch.long)})
    made = emitted(captured, Spread(Mesh.parse(mesh)))
    decoder, _, whole = made.text.partition("class Model(")
    assert "        for layer in self.layers:\n" in decoder.partition("class Decoder(")[2]
    assert "self.inner(ids)" in whole
    assert "self.inner.second.weight = self.inner.first.weight  # tied" in whole
    check(made, model, {"ids": torch.randint(0, 11, (4, 6))})


def test_its_text_is_as_long_for_any_number_of_layers() -> None:
    def text(layers: int) -> str:
        batch = {"ids": torch.zeros(4, 6, dtype=torch.long)}
        made = capture_of(lambda: Inside(layers), lambda: batch)
        return emitted(made, Spread(Mesh((), ()))).text

    assert text(2).replace("range(2)", "range(9)") == text(9)


def test_blocks_of_two_kinds() -> None:
    """Layers that differ have classes of their own and stand in the list in order."""

    class Mixed(models.Llama):
        def __init__(self) -> None:
            super().__init__(layers=4)
            self.layers[2] = models.Layer(16, 4, 4)

    text = emitted(capture_of(Mixed, models.llama_batch), Spread(Mesh.parse("tp=2"))).text
    assert "self.layers = nn.ModuleList([Layer(), Layer(), Layer2(), Layer()])" in text
