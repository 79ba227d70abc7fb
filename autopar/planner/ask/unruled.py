"""Ops without a rule, and rules that users registered or JAX's compiler gave.

Ops without one are named, and refused unless the user lets them run whole on every device. A rule
that is shown as an example, every rule that a user registered, and every one of the compiler is
tried by execution first (`autopar.rules.trial`): one of the compiler that is not confirmed is none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from autopar.nouns.errors import UserError, did_you_mean
from autopar.nouns.graph import Graph, Op, Tensor
from autopar.rules.advice import is_random, no_rule, suggestion, unwritable
from autopar.rules.binding import bind_rule
from autopar.rules.bodies import bodies_in
from autopar.rules.called import RULE, given_rule
from autopar.rules.kept_whole import MARK
from autopar.rules.notation import BoundRule, Rule, RuleError
from autopar.rules.registry import UnruledOp, bind, registered_kinds, rule_for
from autopar.rules.trial import Execute, try_rule

Place = tuple[Op, Mapping[str, Tensor]]


def unruled(graph: Graph, execute: Execute) -> dict[str, str]:
    """Kinds without a rule, each with what to say of its first occurrence."""
    by_kind: dict[str, list[Place]] = {}
    for op, tensors in _ops(graph):
        try:
            rule_for(op, tensors)
        except UnruledOp:
            by_kind.setdefault(op.kind, []).append((op, tensors))
    missing = {kind: _unruled(places, execute) for kind, places in by_kind.items()}
    return {**_unconfirmed(graph, execute), **missing}


def _unconfirmed(graph: Graph, execute: Execute) -> dict[str, str]:
    """Kinds of which the compiler's rule did not hold for some op, each with what to say of it."""
    texts: dict[str, str] = {}
    tried: dict[str, str] = {}  # by the op in full, what stood against its rule
    for outer, op, tensors in _with_bodies(graph):
        if given_rule(op) is None or op.attrs.get(MARK) or {outer, op.kind} & {*registered_kinds()}:
            continue
        full = _in_full(op, tensors)
        if full not in tried:
            verdict = try_rule(op, tensors, bind(op, tensors), execute)
            tried[full] = "" if verdict.holds else verdict.reason or "it cannot be run"
        if tried[full] and outer not in texts:
            operands, results = ([tensors[n] for n in names] for names in (op.inputs, op.outputs))
            texts[outer] = (
                f"the rule that JAX's compiler gives, {op.attrs[RULE]!r}, was run on drawn numbers "
                f"and not confirmed: {tried[full]}. So {no_rule(op, operands, results)}"
            )
    return texts


def _with_bodies(graph: Graph) -> Iterator[tuple[str, Op, Mapping[str, Tensor]]]:
    """The ops of ``graph`` and of the graphs that stand among the attrs of some, each with the kind
    of the op of ``graph`` that it belongs to."""
    for op, tensors in _ops(graph):
        yield op.kind, op, tensors
        for body in bodies_in(op):
            for _, inner, around in _with_bodies(body):
                yield op.kind, inner, around


def check_registered(graph: Graph, execute: Execute) -> list[str]:
    """Tries every registered rule on the ops that it is for; notes on what could not be tried.

    Raises:
        RuleError: a rule says something else than its op does: where, and by how much.
    """
    notes: list[str] = []
    kinds = sorted({op.kind for op, _ in _ops(graph)})
    for kind in registered_kinds():
        places = [(op, tensors) for op, tensors in _ops(graph) if op.kind == kind]
        if not places:
            hint = did_you_mean(kind, kinds, 0.5)
            notes.append(f"The registered rule {kind!r} is for no op of this model. {hint}".strip())
        for op, tensors in _distinct(places):
            bound = bind(op, tensors)
            verdict = try_rule(op, tensors, bound, execute)
            if verdict.holds is None:
                notes.append(
                    f"The registered rule {kind!r} was not tried on the op at {op.source} "
                    f"({verdict.reason}); `autopar verify` compares what the plan computes."
                )
            elif not verdict.holds:
                raise RuleError(
                    f"the rule {bound.rule.text!r} registered for {kind!r} is not what the op at "
                    f"{op.source} does: run on drawn numbers and {verdict.reason}. Mark the index "
                    "with ! where its entries need one another, with + where results are sums "
                    "over it"
                )
    return list(dict.fromkeys(notes))


def check_allowed(graph: Graph, missing: Mapping[str, str], allowed: Collection[str]) -> None:
    """Refuses kinds without a rule that the user does not let run whole.

    Raises:
        UnruledOp: names every such kind, its source, and the two ways out where there are two.
        UserError: what is allowed is no kind of op that ``graph`` has.
    """
    kinds = sorted({op.kind for op, _ in _ops(graph)})
    for kind in allowed:
        if kind not in kinds:
            hint = did_you_mean(kind, kinds, 0.5)
            raise UserError(
                f"--allow-replicated {kind}: the model has no op of that kind. {hint}"
                + (f"Without a rule are {', '.join(missing)}" if missing else "All have rules")
                + f". Its kinds are {', '.join(kinds)}"
            )
        if kind in missing and is_random(kind):
            raise UserError(
                f"--allow-replicated {kind}: ranks that run it whole draw numbers of their own, "
                f"and each would compute with others: {missing[kind]}"
            )
    refused = {kind: text for kind, text in missing.items() if kind not in allowed}
    if refused:
        text = "\n".join(refused.values())
        no_way = any(op.kind in refused and unwritable(op) for op, _ in _ops(graph))
        if not no_way and not any(map(is_random, refused)):
            flags = " ".join(f"--allow-replicated {kind}" for kind in refused)
            whole = "it" if len(refused) == 1 else "them"
            text += f"\nOr let {whole} run whole on every device: {flags}"
        raise UnruledOp(text)


def _unruled(places: Sequence[Place], execute: Execute) -> str:
    op, tensors = places[0]
    operands = [tensors[n] for n in op.inputs]
    results = [tensors[n] for n in op.outputs]
    return no_rule(op, operands, results, _example(_distinct(places), execute))


def _example(places: Sequence[Place], execute: Execute) -> str:
    """A rule that held for every op of a kind, with as many indices free as held; else empty."""
    op, tensors = places[0]
    text = suggestion([tensors[n].shape for n in op.inputs], [tensors[n].shape for n in op.outputs])
    if not text or not _holds(text, places, execute):
        return ""
    for name in sorted({w.strip("(),") for w in text.split() if "!" in w}):
        freer = text.replace(name, name.rstrip("!"))
        if _holds(freer, places, execute):
            text = freer
    return text


def _holds(text: str, places: Sequence[Place], execute: Execute) -> bool:
    for op, tensors in places:
        try:
            bound = _bound(text, op, tensors)
        except RuleError:
            return False
        if not try_rule(op, tensors, bound, execute).holds:
            return False
    return True


def _bound(text: str, op: Op, tensors: Mapping[str, Tensor]) -> BoundRule:
    return bind_rule(
        Rule(text), [tensors[n].shape for n in op.inputs], [tensors[n].shape for n in op.outputs]
    )


def _distinct(places: Sequence[Place]) -> list[Place]:
    """Ops that differ in their settings, their tensors or the flow of gradients, each once."""
    seen: dict[str, Place] = {}
    for op, tensors in places:
        seen.setdefault(_in_full(op, tensors), (op, tensors))
    return list(seen.values())


def _in_full(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """What its trial hangs on."""
    named = [tensors[n] for n in (*op.inputs, *op.outputs)]
    shown = [(t.shape, t.dtype, t.differentiable) for t in named]
    return repr((op.kind, dict(op.attrs), shown))


def _ops(graph: Graph) -> Iterator[Place]:
    for part in (graph, *(block.body for block in graph.blocks.values())):
        for op in part.ops:
            if op.kind != "block":
                yield op, part.tensors
