"""Which linear layers of a plan run in 8 bits: none, unless a recipe is pinned.

8 bits change what a program computes, so the search takes them where it is told to alone. Then an
op's price under each strategy is that with the products that gain at its local shape, casts and
joined scales included (`autopar.pricing.narrow`), and layouts are compared by that. On CPU, which
has no faster products in 8 bits, all that may run so do, emulated, so that a recipe can be tried;
that is not priced.
"""

from __future__ import annotations

from autopar.cost_models.kernels.narrow_linear import speeds_up
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns.cluster import Cluster, Device
from autopar.nouns.errors import first_of
from autopar.nouns.graph import Graph
from autopar.nouns.layout import PRECISION, LayoutError
from autopar.nouns.plan import key
from autopar.nouns.recipes import ALIGNED, RECIPES
from autopar.planner.ask.question import Decided, Question
from autopar.planner.solve.solved import lowered_of, unsettled_of
from autopar.pricing.narrow import Choice, chosen, recipes_of
from autopar.pricing.prices import Prices
from autopar.rules.narrow import OPEN, opened
from autopar.rules.narrow_layers import narrow_layers

ON_DEVICES = ("fp8-tensor", "fp8-row")
"""Whose kernels programs call there; those of blocks are not compared with any device's yet."""
NAMED = 3


def asked_recipe(
    graph: Graph, recipe: str | None, framework: str, style: str, precision: str, cluster: Cluster
) -> Graph:
    """The graph whose layers may run by the pinned recipe; itself where none is.

    Raises `LayoutError` where none can; says what is against it, with the numbers.
    """
    if recipe is None:
        return graph
    text = f"--fix {PRECISION}={recipe}"
    if framework != "torch":
        raise LayoutError(f"{text}: JAX programs have no products in 8 bits so far; leave it out")
    if style != "eager":
        raise LayoutError(
            f"{text}: compiled programs have no products in 8 bits so far; leave it out, or say "
            "--style eager"
        )
    kinds = [group.device for group in cluster.groups]
    for device in kinds:
        _check_device(text, recipe, device, precision)
    if len({device.name for device in kinds}) > 1:
        names = " and ".join(sorted({device.name for device in kinds}))
        raise LayoutError(
            f"{text}: what gains in 8 bits is chosen for one kind of devices, and the cluster has "
            f"{names}; leave it out, or plan for one of them"
        )
    made, stay = opened(graph, recipe)
    if not any(OPEN in op.attrs for part in _parts(made) for op in part.ops):
        raise LayoutError(f"{text}: {_none_may(graph, stay)}; leave it out")
    return made


def _check_device(text: str, recipe: str, device: Device, precision: str) -> None:
    if precision == "float64":
        raise LayoutError(f"{text}: the model computes in float64, which nothing is scaled from")
    if device.kind == "cpu":
        return
    if not speeds_up(device):
        raise LayoutError(
            f"{text}: {device.name} does not multiply 8-bit floats as torch has them; leave it out,"
            " or plan for Ada, Hopper or Blackwell"
        )
    if recipe not in ON_DEVICES:
        raise LayoutError(
            f"{text}: programs run scales of {RECIPES[recipe].block} numbers on CPU only so far, "
            f"and the cluster has {device.name}; take {' or '.join(ON_DEVICES)}"
        )
    if precision != "bfloat16":
        raise LayoutError(
            f"{text}: scaled products on {device.name} give bfloat16, and the model computes in "
            f'{precision}; say precision="bfloat16" in its workload'
        )


def _parts(graph: Graph) -> tuple[Graph, ...]:
    return (graph, *(block.body for block in graph.blocks.values()))


def _none_may(graph: Graph, stay: dict[str, str]) -> str:
    """Why no layer may, most telling first."""
    if not stay:
        return "the model has no linear layer"
    sizes = [(name, s.sizes) for name, s in narrow_layers(graph) if s is not None and s.sizes]
    for name, (n, k) in sizes:
        return (
            f"{ALIGNED} divides both dims of no layer's weight, {name} has {n} x {k}; pad sizes to "
            f"multiples of {ALIGNED}"
        )
    return f"none of {len(stay)} linear layers may: {first_of(map(_why, stay.items()), NAMED)}"


def _why(pair: tuple[str, str]) -> str:
    return f"{pair[0]} ({pair[1]})"


def taken_recipes(question: Question, decided: Decided) -> dict[str, str] | None:
    """What the decided layout runs by which recipe, by op key; None: no recipe is pinned.

    Raises `LayoutError` where nothing gains at any local shape; says the shape and the price.
    """
    if question.pins.precision is None:
        return None
    recipes = recipes_of(lowered_of(question, decided))
    if not recipes:
        raise LayoutError(_nothing(question, decided))
    return recipes


def _nothing(question: Question, decided: Decided) -> str:
    """The layer that comes nearest."""
    lowered = unsettled_of(question, decided)
    prices = question.prices(lowered.mesh)
    choices = [
        (name, _choice(op, part, prices))
        for part in (*lowered.blocks.values(), lowered)
        for name, op in ((key(part.block, op.op.name), op) for op in part.ops)
        if OPEN in op.op.attrs
    ]
    text = f"--fix {PRECISION}={question.pins.precision}"
    priced = [(choice.least_s, name, choice) for name, choice in choices if choice.least_s]
    if not priced:
        name, choice = choices[0]
        recipe = RECIPES[question.pins.precision or ""]
        return (
            f"{text}: no layer's pieces are multiples of {max(ALIGNED, recipe.block)} on this "
            f"layout, {name} is {choice.local} on a rank; leave it out, or split less"
        )
    extra_s, name, choice = min(priced, key=lambda row: row[:2])
    return (
        f"{text} gains nothing on this layout: nearest is {name}, {choice.local} on a rank, which "
        f"takes {extra_s * 1e6:.1f} us more with its casts; leave it out, or give ranks more rows"
    )


def _choice(op: LoweredOp, part: Lowered, prices: Prices) -> Choice:
    device = prices.cluster.device
    return chosen(op, part.graph.tensors, part.mesh, device, prices.collective_s)
