"""The body of one forward: ops as statements, with the variables that a person would choose.

A result that is read once, next to nothing else, is written where it is read; a statement has at
most the weight of two heavy ops (`LIMIT`). Collectives always are statements of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.lowering import Lowered, LoweredOp, LoweredTensor, Operand
from autopar.nouns.graph import Tensor
from autopar.nouns.plan import key
from autopar.nouns.sharding import Sharding
from autopar.rules.resharding import Step
from autopar.runtime.emit_torch import steps as step_text
from autopar.runtime.emit_torch.bias import FUSED
from autopar.runtime.emit_torch.expressions import expression
from autopar.runtime.emit_torch.loops import Loop, find_loops, single
from autopar.runtime.emit_torch.names import identifier, preferred
from autopar.runtime.emit_torch.precision import OWN_CASTS
from autopar.runtime.emit_torch.rounds import print_calls
from autopar.runtime.emit_torch.scopes import Scope
from autopar.runtime.emit_torch.site import HEAVY, LIGHT, Site, model_part
from autopar.runtime.emit_torch.text import ATOM, COLUMNS, Expr, Lines, literal, variable
from autopar.runtime.emit_torch.variables import Variables

LIMIT = 2 * HEAVY + LIGHT
LONGEST = 72  # columns of an expression that is written inside another one
STATED = frozenset({"block", "split", "cross_entropy", "batch_norm"})  # never inside another one
SPELLED = re.compile(r"\.(reshape|expand)\([-\d, ]+\)$")  # shows the shape itself
GIVEN = ("input", "parameter", "buffer")
VIEWS = frozenset("reshape transpose expand".split())
FOLLOWING = frozenset("reshape transpose expand rotary add mul repeat_heads cast".split())
SHOWN = frozenset(
    "linear linear_t matmul einsum conv embedding attention reshape cat stack split".split()
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a forward needs to know about the class it stands in and the program.

    attribute: text for a tensor or module path of the graph, e.g. ``self.q_proj.weight``.
    iterable:  text for consecutive members of a module list.
    counts:    for a mean over labelled tokens, by op, the text of its count.
    returned:  what the forward of an inner scope returns, by its path.
    wide:      under half precision, see `autopar.runtime.emit_torch.precision`.
    """

    lowered: Lowered
    attribute: Callable[[str], str]
    iterable: Callable[[Sequence[str]], str]
    probes: bool = False
    recompute: str = "none"
    counts: Mapping[str, str] = field(default_factory=dict)
    wide: Mapping[str, bool] = field(default_factory=dict)
    returned: Mapping[str, Sequence[str]] = field(default_factory=dict)


Item = LoweredOp | Scope | Loop


class Forward:
    """Prints the items of one scope into ``lines``; `returned` is the text after ``return``."""

    def __init__(
        self,
        scope: Scope,
        around: Surroundings,
        inputs: Mapping[str, str],
        outputs: Sequence[Operand],
        root: bool = True,
    ) -> None:
        """``inputs``: variable by tensor name; ``outputs``: with the steps before the return.

        ``root``: the scope is a whole graph, not a part of one.
        """
        self.around = around
        self.lowered = around.lowered
        self.items: list[Item] = find_loops(scope.items, self.lowered)
        self.outputs = outputs
        self.lines = Lines(8)
        self.root = root
        self.variables = Variables()
        self.bound: dict[str, str] = {}
        self.pending: dict[str, Expr] = {}
        self.wishes: dict[str, str] = {}  # what each value would like to be called
        self._flows: dict[str, str] = {}  # by variable
        self._tokens: list[str] = []
        self._last: tuple[str, str, str] | None = None
        self.uses = self._count_uses()
        for name, var in inputs.items():
            self.bind(name, var)

    # -- who reads what ----------------------------------------------------------------------------

    def _count_uses(self) -> dict[str, int]:
        uses: dict[str, int] = {}
        for item in self.items:
            for name in reads(item, self.lowered):
                uses[name] = uses.get(name, 0) + 1
        for output in self.outputs:
            uses[output.name] = uses.get(output.name, 0) + 1
        return uses

    def named(self, name: str, var: str) -> None:
        self.bound[name] = var
        self._flows[var] = _flow(self.lowered.graph.tensors[name])

    def bind(self, name: str, var: str) -> None:
        self.named(name, var)
        if self.uses.get(name, 0) > 0:
            self.variables.hold((var,), name)
        else:
            self.variables.release(name)

    def read(self, name: str) -> None:
        self.uses[name] -= 1
        if self.uses[name] == 0:
            self.variables.release(name)

    # -- statements --------------------------------------------------------------------------------

    def assign(self, var: str, text: str, comment: str = "", above: bool = False) -> None:
        self.lines.add(f"{var} = {text}", comment, above)
        self._last = (var, text, comment)

    def token(self) -> str:
        """A holder for one operand of the statement that is being made."""
        self._tokens.append(f"#{len(self._tokens)}")
        return self._tokens[-1]

    def close(self) -> None:
        """The statement is made: its operands are no longer held."""
        for token in self._tokens:
            self.variables.release(token)
        self._tokens.clear()

    def run(self) -> str:
        """Prints everything; gives the text after ``return``."""
        if self.root:
            self._enter()
        for item in self.items:
            if isinstance(item, Scope):
                self._call(item)
            elif isinstance(item, Loop):
                print_calls(self, item)
            elif item.op.kind == "block":
                print_calls(self, single(item))
            else:
                self._op(item)
        return self._return()

    def _enter(self) -> None:
        """Shared copies of what a graph starts from; only the root of a graph has any to make."""
        for name, found in self.lowered.tensors.items():
            role = found.tensor.role
            if not found.steps or not self.uses.get(name) or role not in GIVEN:
                continue
            if role != "input":
                if name in self.bound:
                    continue
                var = self.variables.pick([identifier(name.split(".")[-1])], name)
                self.bound[name] = var
                reading = self.around.attribute(name)
                self.assign(var, f"local({reading})" if role == "parameter" else reading)
            self.reshard_in_place(name, found.steps, found.produced)

    def _return(self) -> str:
        found = [self._operand(o) for o in self.outputs]
        text = ", ".join(e.text for e in found)
        if self._last and len(found) == 1 and self._last[0] == text and not self.around.probes:
            # ``x = f(x)`` and ``return x`` are one line.
            var, expr, comment = self._last
            kept = len(self.lines.lines)
            self.lines.add(f"{var} = {expr}", comment)
            again = self.lines.lines[kept:]
            del self.lines.lines[kept:]
            if self.lines.lines[-len(again) :] == again:
                del self.lines.lines[-len(again) :]
                self._comment = comment
                return expr
        return text

    _comment = ""

    @property
    def return_comment(self) -> str:
        return self._comment

    def forget_last(self) -> None:
        """What was assigned last cannot be returned in its place."""
        self._last = None

    # -- operands ----------------------------------------------------------------------------------

    def tensor(self, name: str) -> LoweredTensor:
        return self.lowered.tensors[name]

    def _operand(self, operand: Operand) -> Expr:
        """The expression of an operand; its steps are printed."""
        token = self.token()
        found = self.source(operand.name, token)
        if operand.steps:
            found = self.steps(
                found, operand.name, operand.steps, self.tensor(operand.name).shared, token
            )
        return found

    def source(self, name: str, token: str) -> Expr:
        """The shared copy of a tensor."""
        tensor = self.lowered.graph.tensors[name]
        if name in self.bound:
            expr = variable(self.bound[name])
            self.variables.hold(expr.reads, token)
            self.read(name)
            return expr
        if name in self.pending:
            expr = self.pending.pop(name)
            self.variables.hold(expr.reads, token)
            self.variables.release(f"pending {name}")
            self.read(name)
            return expr
        if tensor.role == "parameter":
            return Expr(f"local({self.around.attribute(name)})")
        assert tensor.role == "buffer", name
        return Expr(self.around.attribute(name))

    def steps(
        self, found: Expr, name: str, steps: Sequence[Step], source: Sharding, token: str
    ) -> Expr:
        """``found`` after a resharding, in a variable."""
        tensor = self.lowered.graph.tensors[name]
        if tensor.role == "parameter":
            wishes = [identifier(name.split(".")[-1])[:1], identifier(name.split(".")[-1])]
        else:
            wishes = [found.text] if found.reads == {found.text} else []
            wishes += ["x", "h"] if tensor.differentiable else [f"{(wishes or ['all'])[0]}_here"]
        text, var, state = found.text, "", source
        for step in steps:
            state = state.with_placement(self.lowered.mesh, step.axis, step.target)
            after = state.local_shape(tensor.shape, self.lowered.mesh)
            for call, comment in step_text.calls(step, "%", after):
                if not var:
                    self.variables.release(token)
                    var = self.variables.pick(wishes, token)
                shown = _shape_comment(after, state) + (f", {comment}" if comment else "")
                self.assign(var, call.replace("%", text), shown, above=True)
                text = var
        return variable(var) if var else found

    def reshard_in_place(self, name: str, steps: Sequence[Step], source: Sharding) -> None:
        """After a tensor is made: its shared copy under its variable."""
        var = self.bound[name]
        tensor = self.lowered.graph.tensors[name]
        state = source
        for step in steps:
            state = state.with_placement(self.lowered.mesh, step.axis, step.target)
            after = state.local_shape(tensor.shape, self.lowered.mesh)
            for call, comment in step_text.calls(step, var, after):
                shown = _shape_comment(after, state) + (f", {comment}" if comment else "")
                self.assign(var, call, shown, above=True)

    # -- ops ---------------------------------------------------------------------------------------

    def _op(self, op: LoweredOp) -> None:
        self._flush_for(op, op.operands)
        stream = self._stream(op)
        if stream is not None and stream.name in self.pending:
            self.flush(stream.name)
        args = [self._operand(o) for o in op.operands]
        if stream is not None:
            like = args[op.operands.index(stream)].text
            for i, operand in enumerate(op.operands):
                if self.around.wide.get(operand.name):
                    args[i] = replace(args[i], text=f"{args[i].atom}.to({like}.dtype)", level=ATOM)
        bias = args.pop() if op.op.attrs.get(FUSED) else None
        site = Site(self.lowered, op, tuple(args), bias, self.around.counts.get(op.op.name, ""))
        self._result(op, expression(site), args)

    def _stream(self, op: LoweredOp) -> Operand | None:
        """Under half precision: an operand whose dtype the float32 ones have to take."""
        wide = self.around.wide
        if op.op.kind in OWN_CASTS or not any(wide.get(n) for n in op.op.inputs):
            return None
        return next((o for o in op.operands if wide.get(o.name) is False), None)

    def _flush_for(self, op: LoweredOp, operands: Sequence[Operand]) -> None:
        """Prints pending operands until what is left makes a statement of bearable size."""
        own = HEAVY if op.op.kind in SHOWN | STATED else LIGHT
        own = LIMIT - LIGHT if op.op.kind == "cross_entropy" else own
        while True:
            waiting = [o for o in operands if o.name in self.pending]
            if not waiting:
                return
            stepped = [o for o in waiting if o.steps]
            weight = own + sum(self.pending[o.name].weight for o in waiting)
            if not stepped and weight <= LIMIT and self._width(op, operands) <= COLUMNS - 8:
                return
            worst = max(stepped or waiting, key=lambda o: self._size(o.name))
            self.flush(worst.name)

    def _width(self, op: LoweredOp, operands: Sequence[Operand]) -> int:
        """About how many columns a statement with these operands takes."""
        total = len(f"{self._wish(op)} = ") + 1
        if op.op.kind in VIEWS:
            total += len(f".{op.op.kind}{self.lowered.graph.tensors[op.op.name].shape}")
            total -= 3 if op.op.kind == "transpose" else 0
        elif op.op.kind == "cross_entropy":
            total = COLUMNS - 40  # its other arguments
        else:
            total += len(f"F.{op.op.kind}()") + 3
        for operand in operands:
            if operand.name in self.pending:
                total += len(self.pending[operand.name].text)
            elif operand.name in self.bound:
                total += len(self.bound[operand.name])
            elif not operand.steps:
                total += len(f"local({self.around.attribute(operand.name)})")
        return total + 2 * len(operands)

    def _size(self, name: str) -> tuple[int, int]:
        return self.pending[name].weight, len(self.pending[name].text)

    def flush(self, name: str) -> None:
        expr = self.pending.pop(name)
        self.variables.release(f"pending {name}")
        var = self.variables.pick(self._names(name, expr), name)
        self.named(name, var)
        self.assign(var, expr.text, "" if SPELLED.search(expr.text) else self._shown(name))

    def _names(self, name: str, expr: Expr) -> list[str]:
        """Variables for a value, best first: its own wish, the stream that it continues."""
        wish = self.wishes.get(name, "")
        flow = _flow(self.lowered.graph.tensors[name])
        stream = []
        for var in sorted(expr.reads):
            if re.match(rf"(\w+\.)*\w*\(?{var}\b", expr.text) and self._flows.get(var) == flow:
                stream.append(var)
        if flow == "stream":
            return [wish, *stream, "x", "h", wish or "h"]
        plain = {"bool": "mask", "int": "ids"}.get(flow, "values")
        return [wish, *stream, plain, wish or plain]

    def _shown(self, name: str) -> str:
        """The comment with the local shape of a tensor as produced."""
        found = self.tensor(name)
        shape = found.produced.local_shape(found.tensor.shape, self.lowered.mesh)
        return _shape_comment(shape, found.produced)

    def _result(self, op: LoweredOp, found: Expr, args: Sequence[Expr]) -> None:
        names = op.op.outputs
        for name in names:
            self.wishes[name] = self._wish(op)
        self.close()
        if len(names) == 1 and found.text in found.reads and not self.around.probes:
            self.bind(names[0], found.text)  # a view of nothing new: another name
            self._after(names)
            return
        if len(names) == 1 and self._can_wait(op, names[0], found):
            self.pending[names[0]] = found
            self.variables.hold(found.reads, f"pending {names[0]}")
            return
        picked = []
        for name in names:
            var = self.variables.pick(self._names(name, found), name)
            self.named(name, var)
            picked.append(var)
            if not self.uses.get(name):
                self.variables.release(name)
        shown = self._shown(names[0]) if op.op.kind in SHOWN and len(names) == 1 else ""
        shown = "" if SPELLED.search(found.text) else shown
        target = ", ".join(picked)
        self.assign(target, found.text, shown)
        self._after(names)

    def _after(self, names: Sequence[str]) -> None:
        """Probes and shared copies of results that just got their variables."""
        for name in names:
            made = self.tensor(name)
            if self.around.probes:
                label = literal(key(self.lowered.block, name))
                var = self.bound[name]
                self.assign(var, f'probe({label}, {var}, "{made.produced}")')
            if made.steps:
                self.reshard_in_place(name, made.steps, made.produced)

    def _wish(self, op: LoweredOp) -> str:
        """A name for the result: by kind and module, else that of the value it goes on with."""
        found = preferred(op.op.name, op.op.kind)
        if found or not op.op.inputs:
            return found
        sources = [self.wishes.get(n, "") for n in op.op.inputs]
        first = next((w for w in sources if w), "")
        return first if op.op.kind in FOLLOWING or len(op.op.inputs) == 1 else ""

    def _can_wait(self, op: LoweredOp, name: str, found: Expr) -> bool:
        """Whether the result may be written where it is read."""
        if self.around.probes or op.op.kind in STATED or self.tensor(name).steps:
            return False
        if self.uses.get(name, 0) != 1:
            return False
        if any(o.name == name for o in self.outputs) and len(self.outputs) > 1:
            return False
        longest = LONGEST
        if op.op.kind in VIEWS:  # a chain may fill the line
            longest = COLUMNS - self.lines.indent - len(f"{self.wishes[name] or 'values'}2 = ")
        return len(found.text) <= longest and found.weight <= LIMIT - LIGHT

    # -- calls -------------------------------------------------------------------------------------

    def _call(self, scope: Scope) -> None:
        """``x = self.mlp(x)``"""
        inputs, outputs = interface(scope, self.lowered, self.uses)
        waiting = [n for n in inputs if n in self.pending]
        while sum(self.pending[n].weight for n in waiting) > HEAVY or (
            waiting and sum(len(self.pending[n].text) for n in waiting) > LONGEST - 10
        ):
            self.flush(waiting.pop())
        args = [self.source(n, self.token()) for n in inputs]
        counted = ["counts"] if _needs_counts(scope, self.around) else []
        text = f"{self.around.attribute(scope.path)}({', '.join([a.text for a in args] + counted)})"
        reads_all = frozenset().union(*(a.reads for a in args)) if args else frozenset()
        found = Expr(text, reads=reads_all, weight=HEAVY + sum(a.weight for a in args))
        self.close()
        for name, given in zip(outputs, self.around.returned.get(scope.path, ()), strict=False):
            if given.isidentifier() and given not in ("x", "h"):
                self.wishes[name] = given
        once = len(outputs) == 1 and self.uses.get(outputs[0], 0) == 1
        if once and len(self.outputs) == 1 and len(text) <= LONGEST and not self.around.probes:
            self.pending[outputs[0]] = found
            self.variables.hold(found.reads, f"pending {outputs[0]}")
            return
        picked = []
        for name in outputs:
            var = self.variables.pick(self._names(name, found), name)
            self.named(name, var)
            picked.append(var)
        self.assign(", ".join(picked), text)


def _shape_comment(shape: Sequence[int], sharding: Sharding) -> str:
    """``[4, 512, 256] tp:S2``; gradients' placements are left out."""
    shown = Sharding(tuple((a, p) for a, p in model_part(sharding).placements if p.kind != "D"))
    return f"{list(shape)}" + (f" {shown}" if shown.placements else "")


def _flow(tensor: Tensor) -> str:
    """What may follow one another under one variable."""
    if tensor.differentiable:
        return "stream"
    return tensor.dtype.rstrip("0123456789")


def _needs_counts(scope: Scope, around: Surroundings) -> bool:
    return any(op.op.name in around.counts for op in scope.ops())


def reads(item: Item, lowered: Lowered) -> list[str]:
    """Values that an item reads from its surroundings, once for each time it asks for them."""
    if isinstance(item, Loop):
        found = []
        for i, call in enumerate(item.calls):
            for operand, result in zip(call.operands, item.carried, strict=True):
                if i == 0 or result is None:
                    found.append(operand.name)
        return [n for n in found if is_value(lowered, n)]
    if isinstance(item, Scope):
        made = {n for op in item.ops() for n in op.op.outputs}
        wanted = (n for op in item.ops() for n in op.op.inputs)
        return [n for n in dict.fromkeys(wanted) if n not in made and is_value(lowered, n)]
    return [o.name for o in item.operands if is_value(lowered, o.name)]


def is_value(lowered: Lowered, name: str) -> bool:
    """Whether a tensor lives in a variable: no parameter that is read where it is used."""
    found = lowered.tensors[name]
    return found.tensor.role not in ("parameter", "buffer") or bool(found.steps)


def interface(
    scope: Scope, lowered: Lowered, uses: Mapping[str, int]
) -> tuple[list[str], list[str]]:
    """(tensors that a scope reads from outside, tensors made inside and read outside)."""
    made = [n for op in scope.ops() for n in op.op.outputs]
    inputs = reads(scope, lowered)
    found = [n for n in made if uses.get(n, 0) > 0]
    return inputs, found


__all__ = ["Forward", "Surroundings", "interface", "is_value", "reads"]
