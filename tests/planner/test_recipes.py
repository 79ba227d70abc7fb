"""Layers in 8 bits: what a plan chooses where it is told to, what that costs, what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from autopar.cli.commands import plan_files, plan_object, plan_summary
from autopar.cost_models.kernels.constants import kernel_constants
from autopar.cost_models.kernels.narrow_linear import added, speeds_up
from autopar.cost_models.kernels.products import product_s
from autopar.files import plan_folder
from autopar.files.cluster_file import load_cluster
from autopar.files.plan_checks import BadPlan, from_json
from autopar.lowering.issued import activation_collectives
from autopar.lowering.lowered import LoweringError
from autopar.lowering.of_plan import planned_graph
from autopar.nouns.choices import asides
from autopar.nouns.errors import UserError
from autopar.nouns.grammar import Grammar
from autopar.nouns.layout import Pins
from autopar.nouns.plan import Plan, to_json
from autopar.nouns.recipes import PRODUCTS, RECIPES, Narrow
from autopar.planner import plan
from autopar.planner.family.pins import parse_pins
from autopar.planner.options import Options
from autopar.planner.planning import PlanResult
from autopar.report.diff import decisions
from autopar.report.explained import explained
from autopar.report.revisit import Revisited, revisit
from autopar.runtime.shared.edits import files_of

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.thin = nn.Linear(width, 16, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.up(y))) + self.thin(y).mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, width=4096):
        super().__init__()
        self.words = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def batch(samples=8, tokens=4096):
    return {"ids": torch.zeros(samples, tokens, dtype=torch.long)}


def made(width, tokens, precision):
    return autopar.Workload(
        model=lambda: Model(width), batch=lambda: batch(8, tokens), precision=precision
    )


large = made(4096, 4096, "bfloat16")
tiny = made(128, 16, "bfloat16")
odd = made(20, 16, "bfloat16")
single = made(128, 16, "float32")
double = made(128, 16, "float64")
"""
CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
UP, DOWN, THIN = (f"Layer::{name}/linear" for name in ("up", "down", "thin"))


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "model.py").write_text(MODEL)
    return folder


def planned(where: Path, model: str, cluster: str, **fix: str) -> PlanResult:
    return plan(f"{where / 'model.py'}:{model}", str(CLUSTERS / f"{cluster}.yaml"), fix)


@pytest.fixture(scope="module")
def by_tensor(where: Path) -> PlanResult:
    return planned(where, "large", "h100_8", precision="fp8-tensor")


@pytest.fixture(scope="module")
def split(where: Path) -> PlanResult:
    return planned(where, "large", "h100_8", precision="fp8-tensor", tp="4", dp_shard="2")


def again(result: PlanResult, recipes: Mapping[str, str] | None) -> Revisited:
    """The same plan with other recipes, priced as `explain` does."""
    changed = replace(result.plan, recipes=recipes)
    dims = {e.name: e.batch_dim for e in result.captured.batch if e.batch_dim is not None}
    graph = planned_graph(changed, result.captured.graph)
    return revisit(changed, result.cluster, graph, dims)


# -- what is chosen -------------------------------------------------------------------------------


def test_nothing_unless_it_is_asked(where: Path) -> None:
    made = planned(where, "large", "h100_8").plan
    assert made.recipes is None
    assert "recipes" not in json.loads(to_json(made))


def test_large_products_gain_and_thin_ones_do_not(by_tensor: PlanResult, where: Path) -> None:
    recipes = by_tensor.plan.recipes
    assert recipes is not None
    assert recipes[UP] == recipes[DOWN] == "fp8-tensor"
    assert THIN not in recipes
    plain = planned(where, "large", "h100_8").plan.prediction
    gain = plain.step_time_s / by_tensor.plan.prediction.step_time_s
    assert 1.1 < gain < 1.9  # no product is twice as fast, and there are others


@pytest.mark.parametrize("name", [UP, DOWN, THIN])
@pytest.mark.parametrize("layout", ["by_tensor", "split"])
def test_no_other_choice_of_a_layer_is_faster(
    request: pytest.FixtureRequest, layout: str, name: str
) -> None:
    """Each set of products tried on the plan's own layout, priced in full."""
    result: PlanResult = request.getfixturevalue(layout)
    recipes = dict(result.plan.recipes or {})
    kept_s = again(result, recipes).time.total_s
    assert kept_s == pytest.approx(result.plan.prediction.step_time_s, rel=1e-9)
    tried = 0
    for mask in range(8):
        products = tuple(p for i, p in enumerate(PRODUCTS) if mask >> i & 1)
        other = {n: text for n, text in recipes.items() if n != name}
        if products:
            other[name] = str(Narrow(RECIPES["fp8-tensor"], products))
        if other == recipes or not other:
            continue
        try:
            other_s = again(result, other).time.total_s
        except LoweringError:
            continue
        tried += 1
        assert other_s >= kept_s * (1 - 1e-12), products
    assert tried


def test_scales_are_joined_where_ranks_share_a_tensor(split: PlanResult) -> None:
    every = [p for p in activation_collectives(split.lowered) if p.key in (UP, DOWN)]
    moved = [p for p in every if p.collective.size_bytes < 16]
    assert {p.collective.axis for p in moved} == {"tp"}
    assert {p.collective.size_bytes for p in moved} == {4, 8}
    assert {p.direction for p in moved} == {"forward", "backward"}
    program = plan_files(split, Path("x"))[0]["program/model.py"]
    assert program.count("scaled_linear(") == 2
    assert program.count('="tp"') >= 2


def test_the_search_equals_the_price_of_its_plan(split: PlanResult) -> None:
    priced = again(split, split.plan.recipes)
    assert priced.time.total_s == pytest.approx(split.plan.prediction.step_time_s, rel=1e-9)
    assert split.plan.prediction.lower_bound_s <= split.plan.prediction.step_time_s


def test_on_cpu_all_that_may_is_narrow(where: Path) -> None:
    result = planned(where, "single", "cpu_4", precision="mxfp8", dp_replicate="4")
    assert result.plan.recipes == {UP: "mxfp8", DOWN: "mxfp8", THIN: "mxfp8:output+weight"}
    assert result.plan.prediction.step_time_s == pytest.approx(
        planned(where, "single", "cpu_4", dp_replicate="4").plan.prediction.step_time_s
    )


# -- what it costs --------------------------------------------------------------------------------


def test_a_large_narrow_product_is_priced_as_kernels_are() -> None:
    """Beside the kernels' own formula, whose constants published measurements judge."""
    device, c = load_cluster(str(CLUSTERS / "h100_8.yaml")).device, kernel_constants()
    size = 8192
    wide_s = 3 * product_s(device, size, size, size, c)
    narrow_s = 3 * product_s(device, size, size, size, c, "fp8")
    less = -added(device, size, size, size, "bfloat16", Narrow(RECIPES["fp8-tensor"])).total_s
    assert 0 < less < wide_s - narrow_s  # casts are charged
    assert less > 0.6 * (wide_s - narrow_s)


@pytest.mark.parametrize("recipe", ["fp8-tensor", "fp8-row"])
def test_small_layers_lose_by_their_casts(recipe: str) -> None:
    device = load_cluster(str(CLUSTERS / "h100_8.yaml")).device
    narrow = Narrow(RECIPES[recipe])
    assert added(device, 1024, 1024, 2048, "bfloat16", narrow).total_s > 0  # torchao: 0.80x
    assert added(device, 4096, 16384, 8192, "bfloat16", narrow).total_s < 0  # torchao: 1.39x


def test_devices_that_have_8_bits() -> None:
    names = {name: load_cluster(str(CLUSTERS / f"{name}.yaml")).device for name in (
        "h100_8", "cpu_4", "a100_128x8", "tpu_v5p_64",
    )}  # fmt: skip
    assert {name for name, device in names.items() if speeds_up(device)} == {"h100_8"}


# -- what is refused ------------------------------------------------------------------------------

REFUSED = {
    "a recipe that is none": (
        ("large", "h100_8", {"precision": "fp8"}),
        r"choose fp8-tensor, fp8-row, fp8-block or mxfp8",
    ),
    "a device without": (
        ("large", "a100_128x8", {"precision": "fp8-row"}),
        r"A100.* does not multiply 8-bit floats",
    ),
    "a device in part": (
        ("large", "a100_8_h100_8", {"precision": "fp8-row"}),
        r"A100.* does not multiply 8-bit floats",
    ),
    "a TPU": (("large", "tpu_v5p_64", {"precision": "fp8-row"}), "TPU.* does not multiply"),
    "blocks on a device": (
        ("large", "h100_8", {"precision": "mxfp8"}),
        r"scales of 32 numbers on CPU only so far, and the cluster has H100",
    ),
    "odd sizes": (
        ("odd", "h100_8", {"precision": "fp8-row"}),
        r"16 divides both dims of no layer's weight, Layer::up/linear has 80 x 20",
    ),
    "nothing gains": (
        ("tiny", "h100_8", {"precision": "fp8-row"}),
        r"gains nothing on this layout: nearest is Layer::\w+/linear, \d+ x \d+ by \d+ x \d+ on a "
        r"rank, which takes [\d.]+ us more",
    ),
    "float32 on a device": (
        ("single", "h100_8", {"precision": "fp8-row"}),
        r"give bfloat16, and the model computes in float32",
    ),
    "float64": (("double", "cpu_4", {"precision": "fp8-row"}), "float64, which nothing is scaled"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_an_error(where: Path, name: str) -> None:
    (model, cluster, fix), reason = REFUSED[name]
    with pytest.raises(UserError, match=reason):
        planned(where, model, cluster, **fix)


def test_devices_of_two_kinds_and_figures_of_an_architecture(where: Path, tmp_path: Path) -> None:
    text = (CLUSTERS / "a100_8_h100_8.yaml").read_text().replace("A100-80GB", "B200")
    (tmp_path / "two.yaml").write_text(text)
    with pytest.raises(UserError, match="one kind of devices, and the cluster has B200 and H100"):
        plan(f"{where / 'model.py'}:large", str(tmp_path / "two.yaml"), {"precision": "fp8-row"})
    with pytest.raises(UserError, match="compute all layers alike; say `--precision fp8`"):
        parse_pins(["precision=fp8-row"])


def test_compiled_programs_and_jax_have_none(where: Path) -> None:
    with pytest.raises(UserError, match="compiled programs have no products in 8 bits"):
        plan(
            f"{where / 'model.py'}:large",
            str(CLUSTERS / "h100_8.yaml"),
            {"precision": "fp8-row"},
            Options(style="compiled"),
        )
    with pytest.raises(UserError, match="JAX programs have no products in 8 bits"):
        plan("examples/05_gpt_jax.py", str(CLUSTERS / "cpu_4.yaml"), {"precision": "fp8-row"})


# -- what is said of it ---------------------------------------------------------------------------


def test_pins_read_back() -> None:
    pins = Pins(precision="fp8-row")
    assert str(pins) == "precision=fp8-row"
    assert Grammar().read(pins.texts()) == pins


def test_plans_read_back_and_are_checked(by_tensor: PlanResult) -> None:
    text = to_json(by_tensor.plan)
    assert from_json(text) == by_tensor.plan
    wrong = text.replace('"fp8-tensor"', '"fp9"', 1)
    with pytest.raises(BadPlan, match=r"recipes.*no recipe 'fp9'; there are fp8-tensor"):
        from_json(wrong)


@pytest.mark.parametrize(
    ("recipes", "reason"),
    [
        ({"head/linear": "fp8-row"}, "head/linear.*no linear layer of that name that may"),
        ({THIN: "fp8-block"}, r"Layer::thin/linear.*cannot be narrow.*multiples of 128"),
    ],
)
def test_recipes_that_cannot_be_are_no_program(
    by_tensor: PlanResult, recipes: dict[str, str], reason: str
) -> None:
    with pytest.raises(LoweringError, match=reason):
        files_of(replace(by_tensor.plan, recipes=recipes), by_tensor.captured)
    with pytest.raises(LoweringError, match=reason):
        again(by_tensor, recipes)


def test_plans_that_split_views_of_rows_are_opened(where: Path, tmp_path: Path) -> None:
    """A loss in chunks takes views of rows, whose names no captured graph has."""
    result = planned(where, "large", "h100_8", precision="fp8-tensor", tp="8", loss_chunks="4")
    (name,) = (n for n in result.lowered.tensors if n.endswith("_of_rows"))
    spread = result.plan.spreads[0]
    shared = {**spread.shared, name: str(result.lowered.tensors[name].shared)}
    made = replace(result.plan, spreads=(replace(spread, shared=shared),))
    result = replace(result, plan=made)
    plan_folder.write(tmp_path / "plan", plan_files(result, tmp_path / "plan")[0])
    assert plan_folder.read_plan(tmp_path / "plan").spreads == made.spreads
    text = (tmp_path / "plan" / "plan.json").read_text()
    (tmp_path / "plan" / "plan.json").write_text(text.replace("up/linear", "across/linear"))
    with pytest.raises(UserError, match=r"names 'Layer::across/linear', which graph"):
        plan_folder.read_plan(tmp_path / "plan")


def printed(result: PlanResult) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        for part in plan_summary(result):
            console.print(part)
    return captured.get()


def test_summary_says_how_many_and_which_stay(by_tensor: PlanResult) -> None:
    text = printed(by_tensor)
    assert "8-bit layers" in text
    assert "2 by fp8-tensor" in text
    assert "8 bits: 6 of 12 products of 2 of 4 kinds of linear layers" in text
    assert "head/linear keep bfloat16: the head" in text
    assert "output and input and weight of Layer::thin/linear keep bfloat16: nothing gains" in text
    assert plan_object(by_tensor, None)["recipes"] == by_tensor.plan.recipes


def test_explain_diff_and_exports_say_it(by_tensor: PlanResult, where: Path) -> None:
    priced = again(by_tensor, by_tensor.plan.recipes)
    ways = {row.key: row.way for row in explained(priced.lowered, priced.prices)}
    assert ways[UP].endswith(", fp8-tensor")
    assert "fp8" not in ways[THIN]
    plain: Plan = replace(by_tensor.plan, recipes=None)
    changes = {change.what: change for change in decisions(plain, by_tensor.plan)}
    assert (changes["8-bit layers"].before, changes["8-bit layers"].after) == (
        "none", "2 by fp8-tensor",
    )  # fmt: skip
    assert [note for note in asides(by_tensor.plan) if "8 bits" in note]
    assert not [note for note in asides(plain) if "8 bits" in note]
