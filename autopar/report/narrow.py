"""Which products of a plan run in 8 bits, which stay, and why: sentences for the summary."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost_models.kernels.narrow_linear import speeds_up
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import first_of
from autopar.nouns.plan import Plan, key
from autopar.nouns.recipes import PRODUCTS, Narrow
from autopar.rules.narrow import local_of, possible
from autopar.rules.narrow_layers import LINEAR, narrow_layers

NAMED = 3
"""How many layers stand in a sentence before "and N more"."""


def narrow_notes(lowered: Lowered, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Nothing where no recipe is taken."""
    if not plan.recipes:
        return
    layers = [
        (key(part.block, op.op.name), op, part)
        for part in (*lowered.blocks.values(), lowered)
        for op in part.ops
        if op.op.kind in LINEAR
    ]
    wanted = sum(len(_wanted(op)) for _, op, _ in layers)
    narrow = sum(len(Narrow.parse(text).products) for text in plan.recipes.values())
    where = "" if speeds_up(cluster.device) else (
        f"; {cluster.device.name} has no products in 8 bits, so they are emulated, which is not "
        "priced"
    )  # fmt: skip
    yield (
        f"8 bits: {narrow} of {wanted} products of {len(plan.recipes)} of {len(layers)} kinds of "
        f"linear layers{where}. The head, embeddings, norms, routers and attention keep "
        f"{plan.precision}."
    )
    reasons: dict[str, list[str]] = {}
    stay = dict(narrow_layers(lowered.graph))
    (recipe,) = {Narrow.parse(text).recipe.name for text in plan.recipes.values()}
    for name, op, part in layers:
        stays = stay.get(name)
        if name not in plan.recipes and stays is not None:
            reasons.setdefault(f"{stays}", []).append(name)
            continue
        for why, products in _left(op, part, recipe, plan.recipes.get(name)).items():
            reasons.setdefault(why, []).append(f"{' and '.join(products)} of {name}")
    for why, names in reasons.items():
        yield f"8 bits: {first_of(names, NAMED)} keep {plan.precision}: {why}."


def _wanted(op: LoweredOp) -> list[str]:
    """The products that there are."""
    into = [operand.differentiable for operand in op.operands[:2]]
    return [p for p, there in zip(PRODUCTS, (True, *into), strict=True) if there]


def _left(op: LoweredOp, part: Lowered, recipe: str, text: str | None) -> dict[str, list[str]]:
    """Products of a layer that could be narrow elsewhere, by why they are not here."""
    assert op.bound is not None
    taken = Narrow.parse(text).products if text else ()
    local = local_of(op.op, op.bound, op.strategy, part.mesh)
    flags = op.operands[0].differentiable, op.operands[1].differentiable
    may = possible(local, Narrow.parse(recipe), op.strategy, flags)
    left: dict[str, list[str]] = {}
    for product in _wanted(op):
        if product in taken:
            continue
        if product in may:
            why = f"nothing gains at {local} on a rank"
        else:
            why = f"{op.strategy} leaves partial sums or sizes that no scale covers, {local}"
        left.setdefault(why, []).append(product)
    return left
