"""The body of one forward: ops as statements, with the variables that a person would choose.

A result that is read once, next to nothing else, is written where it is read; a statement has at
most the weight of two heavy ops (`LIMIT`). Collectives always are statements of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.emit.constants import literal
from autopar.emit.names import identifier, preferred
from autopar.emit.pytorch.bias import FUSED
from autopar.emit.pytorch.expressions import expression
from autopar.emit.pytorch.loops import MANY, Loop, find_loops, single
from autopar.emit.pytorch.operands import Operands
from autopar.emit.pytorch.pieces import IN_PIECES
from autopar.emit.pytorch.reading import count_uses, interface
from autopar.emit.pytorch.rounds import print_calls
from autopar.emit.pytorch.shared_experts import RUN_BESIDE
from autopar.emit.pytorch.site import HEAVY, LIGHT, Site
from autopar.emit.pytorch.values import SPELLED, Surroundings
from autopar.emit.text import ATOM, COLUMNS, Expr
from autopar.lowering.issued import last_moves
from autopar.lowering.lowered import LoweredOp, Operand
from autopar.lowering.precision import OWN_CASTS
from autopar.lowering.scopes import Scope
from autopar.nouns.kinds import CROSS_ENTROPIES
from autopar.nouns.plan import key

LIMIT = 2 * HEAVY + LIGHT
LONGEST = 72  # columns of an expression that is written inside another one
STATED = frozenset({"block", "split", IN_PIECES, *CROSS_ENTROPIES})  # never inside another one
GIVEN = ("input", "parameter", "buffer")
VIEWS = frozenset("reshape transpose expand view".split())
FOLLOWING = frozenset("reshape transpose expand view rotary add mul repeat_heads cast".split())
SHOWN = frozenset(
    "linear linear_t matmul einsum conv embedding attention reshape cat stack split view".split()
) | {IN_PIECES}


class Forward(Operands):
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
        items = find_loops(scope.items, around.lowered)
        printed = [i for i in items if isinstance(i, LoweredOp) and i.op.kind != "block"]
        super().__init__(around, count_uses(items, outputs, around.lowered), printed)
        self.items = items
        self.outputs = outputs
        self.path = scope.path
        self.last_moves = last_moves(around.lowered)
        self.beside = {op.op.inputs[-1] for op in printed if RUN_BESIDE in op.op.attrs}
        self.root = root
        self.returned_comment = ""
        for name, var in inputs.items():
            self.bind(name, var)

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
        for name, value in self.lowered.tensors.items():
            role = value.tensor.role
            if not value.steps or not self.uses.get(name) or role not in GIVEN:
                continue
            if role != "input":
                if name in self.bound:
                    continue
                var = self.variables.pick([identifier(name.split(".")[-1])], name)
                self.bound[name] = var
                reading = self.around.attribute(name)
                self.assign(var, f"local({reading})" if role == "parameter" else reading)
            self.reshard_in_place(name, value.steps, value.produced)

    def _return(self) -> str:
        waiting = [o.name for o in self.outputs if o.name in self.pending]
        while len(waiting) > 1 and sum(len(self.pending[n].text) for n in waiting) > LONGEST:
            self.flush(waiting.pop())
        results = [self.operand(o) for o in self.outputs]
        text = ", ".join(e.text for e in results)
        if self.last and len(results) == 1 and self.last[0] == text and not self.around.probes:
            # ``x = f(x)`` and ``return x`` are one line.
            var, expr, comment = self.last
            kept = len(self.lines.lines)
            self.lines.add(f"{var} = {expr}", comment)
            again = self.lines.lines[kept:]
            del self.lines.lines[kept:]
            if self.lines.lines[-len(again) :] == again:
                del self.lines.lines[-len(again) :]
                self.returned_comment = comment
                return expr
        return text

    # -- ops ---------------------------------------------------------------------------------------

    def _op(self, op: LoweredOp) -> None:
        if op.op.kind == "carry":
            self._carry(op)
            return
        beside = op.op.inputs[-1] if RUN_BESIDE in op.op.attrs else ""
        self._flush_for(op, [o for o in op.operands if o.name != beside])
        if op.op.name in self.last_moves:
            for name in [n for n in self.pending if n != beside]:
                self.flush(name)
        stream = self._stream(op)
        if stream is not None and stream.name in self.pending:
            self.flush(stream.name)
        args = [self.operand(o) for o in op.operands]
        if stream is not None:
            like = args[op.operands.index(stream)].text
            for i, operand in enumerate(op.operands):
                if self.around.wide.get(operand.name):
                    args[i] = replace(args[i], text=f"{args[i].atom}.to({like}.dtype)", level=ATOM)
        bias = args.pop() if op.op.attrs.get(FUSED) else None
        self._result(op, expression(self._site(op, args, bias)), args)

    def _carry(self, op: LoweredOp) -> None:
        """``carry(self.norm, u=value)``"""
        name, given = op.op.name, op.operands[1]
        if given.name in self.pending and (given.steps or self._size(given.name)[1] > LONGEST - 20):
            self.flush(given.name)
        value = self.operand(given)
        owner, _, buffer = self.around.attribute(op.op.inputs[0]).rpartition(".")
        text = f"carry({owner}, {buffer}={value.text})"
        self.end_statement()
        if self.around.probes:
            var = self.variables.pick([identifier(buffer)], name)
            self.mark([name])
            self.assign(var, text)
            self.named(name, var)
            self._after([name])
            self.variables.release(name)
        else:
            self.lines.add(text, f"what {buffer} holds from the next step on")

    def _stream(self, op: LoweredOp) -> Operand | None:
        """Under half precision: an operand whose dtype the float32 ones have to take."""
        wide = self.around.wide
        if op.op.kind in OWN_CASTS or not any(wide.get(n) for n in op.op.inputs):
            return None
        return next((o for o in op.operands if wide.get(o.name) is False), None)

    def _flush_for(self, op: LoweredOp, operands: Sequence[Operand]) -> None:
        """Prints pending operands until what is left makes a statement of bearable size."""
        own = HEAVY if op.op.kind in SHOWN | STATED else LIGHT
        own = LIMIT - LIGHT if op.op.kind in CROSS_ENTROPIES else own
        while True:
            waiting = [o for o in operands if o.name in self.pending]
            if not waiting:
                return
            stepped = [o for o in waiting if o.steps]
            weight = own + sum(self.pending[o.name].weight for o in waiting)
            if not stepped and weight <= LIMIT and self._width(op) <= COLUMNS - 8:
                return
            worst = max(stepped or waiting, key=lambda o: self._size(o.name))
            self.flush(worst.name)

    def _width(self, op: LoweredOp) -> int:
        """Columns of the statement with everything that is pending written into it."""
        args = [self.seen(o) for o in op.operands]
        bias = args.pop() if op.op.attrs.get(FUSED) else None
        text = expression(self._site(op, args, bias)).text
        if any(o.name == op.op.name for o in self.outputs) or op.op.kind in CROSS_ENTROPIES:
            return len(f"return {text}")
        targets = [self._hint(op, name) or "values" for name in op.op.outputs]
        return len(f"{', '.join(targets)} = {text}")

    def _site(self, op: LoweredOp, args: Sequence[Expr], bias: Expr | None) -> Site:
        count = self.around.counts.get(op.op.name, "")
        around = self.around
        given = tuple(args), bias, count, around.half, around.layer, around.sizes, around.define
        return Site(self.lowered, op, *given, attribute=around.attribute)

    def _size(self, name: str) -> tuple[int, int]:
        return self.pending[name].weight, len(self.pending[name].text)

    def _result(self, op: LoweredOp, expr: Expr, args: Sequence[Expr]) -> None:
        names = op.op.outputs
        for name in names:
            self.hints[name] = self._hint(op, name)
        self.end_statement()
        if len(names) == 1 and expr.text in expr.reads and not self.around.probes:
            self.bind(names[0], expr.text)  # a view of nothing new: another name
            self._after(names)
            return
        if len(names) == 1 and self._can_wait(op, names[0], expr):
            self.pending[names[0]] = expr
            self.variables.hold(expr.reads, f"pending {names[0]}")
            return
        if len(names) > MANY and not self.around.probes:
            self._members(names, expr)
            return
        picked = []
        for name in names:
            unread = not self.uses.get(name)
            if unread and len(names) > 1 and not self.around.probes:
                picked.append("_")
                continue
            var = self.variables.pick(self.names_for(name, expr), name)
            self.named(name, var)
            picked.append(var)
            if unread:
                self.variables.release(name)
        shown = self.shown(names[0]) if op.op.kind in SHOWN and len(names) == 1 else ""
        shown = "" if SPELLED.search(expr.text) else shown
        target = ", ".join(picked)
        self.mark(names)
        self.assign(target, expr.text, shown)
        self._after(names)

    def _members(self, names: Sequence[str], expr: Expr) -> None:
        """Many results are members of one variable."""
        first = next(iter(expr.reads), "x")
        var = self.variables.pick([f"{first}s"], self.token())
        self.mark(names)
        self.assign(var, expr.text)
        for place, name in enumerate(names):
            if self.uses.get(name):
                self.named(name, f"{var}[{place}]")
                self.variables.hold((var,), name)
            if self.tensor(name).steps and self.uses.get(name):
                member = self.variables.pick([var.removesuffix("s"), "x", "h"], name)
                self.assign(member, f"{var}[{place}]")
                self.named(name, member)
                self._after([name])

    def _after(self, names: Sequence[str]) -> None:
        """Probes and shared copies of results that just got their variables."""
        for name in names:
            made = self.tensor(name)
            if self.around.probes:
                label = literal(key(self.lowered.block, name))
                var = self.bound[name]
                self.assign(
                    var, f'probe({label}, {var}, "{self.lowered.lie(name, made.produced)}")'
                )
            if made.steps and name in self.bound:
                self.reshard_in_place(name, made.steps, made.produced)

    def _hint(self, op: LoweredOp, name: str) -> str:
        """A name for a result: what its readers see in it, else what the model's source calls it,
        else by kind and module, else that of the value it goes on with."""
        if RUN_BESIDE in op.op.attrs and name == op.op.outputs[-1]:
            return "shared"
        role = self.around.known.roles.get(name) or self.around.known.assigned.get(name)
        role = role or preferred(op.op.name.removeprefix(self.path), op.op.kind)
        if role or not op.op.inputs:
            return role
        tensors = self.lowered.graph.tensors
        given = [n for n in op.op.inputs if tensors[n].role not in ("parameter", "buffer")]
        if not given:
            last = identifier(op.op.inputs[0].split(".")[-1])
            if len(op.op.outputs) == 1:
                return last
            return f"{last.rpartition('_')[2]}{op.op.outputs.index(name)}"  # a piece of it
        if op.op.kind == "not" or (op.op.kind == "add" and len(given) > 1):
            return ""  # the opposite, or of two equals
        if len(op.op.outputs) > 1:
            return ""  # parts
        alike = [n for n in given if tensors[n].differentiable == tensors[name].differentiable]
        first = next((w for n in alike if (w := self.hints.get(n))), "")
        return first if op.op.kind in FOLLOWING or len(op.op.inputs) == 1 else ""

    def _can_wait(self, op: LoweredOp, name: str, expr: Expr) -> bool:
        """Whether the result may be written where it is read."""
        if self.around.probes or op.op.kind in STATED or self.tensor(name).steps:
            return False
        if self.uses.get(name, 0) != 1:
            return False
        longest = LONGEST
        if op.op.kind in VIEWS:  # a chain may fill the line
            longest = COLUMNS - self.lines.indent - len(f"{self.hints[name] or 'values'}2 = ")
        return len(expr.text) <= longest and expr.weight <= LIMIT - LIGHT

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
        expr = Expr(text, reads=reads_all, weight=HEAVY + sum(a.weight for a in args))
        self.end_statement()
        if not outputs:
            self.lines.add(text)
            return
        for name, given in zip(outputs, self.around.returned.get(scope.path, ()), strict=False):
            if given.isidentifier() and given not in ("x", "h"):
                self.hints[name] = given
        once = len(outputs) == 1 and self.uses.get(outputs[0], 0) == 1
        short = len(self.outputs) == 1 and len(text) <= LONGEST and not self.around.probes
        if once and (short or outputs[0] in self.beside):
            self.pending[outputs[0]] = expr
            self.variables.hold(expr.reads, f"pending {outputs[0]}")
            return
        picked = []
        for name in outputs:
            var = self.variables.pick(self.names_for(name, expr), name)
            self.named(name, var)
            picked.append(var)
        self.assign(", ".join(picked), text)


def _needs_counts(scope: Scope, around: Surroundings) -> bool:
    return any(op.op.name in around.counts for op in scope.ops())
