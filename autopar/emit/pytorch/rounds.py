"""Calls of repeated blocks as statements: one call, or a loop over consecutive blocks."""

from __future__ import annotations

from autopar.emit.pytorch.loops import Loop, Slice
from autopar.emit.pytorch.values import Values
from autopar.emit.text import Expr, Lines, variable
from autopar.lowering.lowered import Operand
from autopar.lowering.stages import updated_buffers
from autopar.nouns.recompute import COMPUTE, FULL, SELECTIVE, keeps_routes

KEPT = {COMPUTE: ["keep_collectives=True"], SELECTIVE: ["keep_products=True"], FULL: []}


def print_calls(forward: Values, loop: Loop) -> None:
    """``for layer in self.layers: x = layer(x)``, or ``x = self.layers[0](x)``."""
    Rounds(forward, loop).run()


class Rounds:
    """``names`` are the variables that the operands are in when a round starts."""

    def __init__(self, forward: Values, loop: Loop) -> None:
        self.forward = forward
        self.loop = loop
        self.single = len(loop.calls) == 1
        self.first, self.last = loop.calls[0], loop.calls[-1]
        self.names: list[str] = []
        self.tokens: list[str] = []
        self.counter = ""  # the variable that counts the rounds, where something depends on it
        self.policies = forward.around.policies(loop.calls)
        rest = self.policies.count(self.policies[-1])
        self.recomputing = len(self.policies) - rest
        """Rounds that come first and recompute more than those that follow."""

    def run(self) -> None:
        forward = self.forward
        for operand, cut in zip(self.first.operands, self.loop.slices, strict=True):
            name = cut.op.op.inputs[0] if cut and cut.alone else operand.name
            if name in forward.pending:
                forward.flush(name)
        if any(self.loop.slices) or self.recomputing:
            names = ["t", "i", "t"] if any(self.loop.slices) else ["i", "n"]
            self.counter = forward.variables.pick(names, forward.token())
        for place, operand in enumerate(self.first.operands):
            self._enter(place, operand)
        outside = forward.lines
        forward.lines = Lines(outside.indent + (0 if self.single else 4))
        arguments = [self._argument(place) for place in range(len(self.names))]
        call = self._call(arguments)
        forward.end_statement()
        targets = self._targets()
        forward.assign(", ".join(targets), call)
        for name in self.last.op.outputs:
            steps = forward.tensor(name).steps
            if steps and name in forward.bound:
                forward.reshard_in_place(name, steps, forward.tensor(name).produced)
        pick, token = forward.variables.pick, forward.token()
        lists = [pick([f"{targets[i]}s"], token) for i in self.loop.listed]
        for i, name in zip(self.loop.listed, lists, strict=True):
            forward.lines.add(f"{name}.append({targets[i]})")
        body, forward.lines = forward.lines, outside
        for name in lists:
            outside.add(f"{name} = []")
        if not self.single:
            outside.add(self._header())
            forward.forget_last()
        outside.lines += body.lines
        self._list(lists)

    def _list(self, lists: list[str]) -> None:
        """Results of every call are members of a list."""
        calls = self.loop.calls
        for i, var in zip(self.loop.listed, lists, strict=True):
            for place, call in enumerate(calls):
                index = place if call is not self.last else -1
                name = call.op.outputs[i]
                self.forward.bind(name, f"{var}[{index}]")
                if self.forward.uses.get(name):
                    self.forward.variables.hold((var,), name)

    def _enter(self, place: int, operand: Operand) -> None:
        """The variable of an operand before the first round, with the steps only that one has."""
        forward, name = self.forward, operand.name
        token = forward.token()
        cut = self.loop.slices[place]
        if cut is not None:
            self.names.append(self._slice(cut, [c.operands[place].name for c in self.loop.calls]))
            self.tokens.append(token)
            return
        expr = forward.source(name, token)
        carried = self.loop.carried[place] is not None
        if not carried and name in forward.uses:  # no parameter or buffer, which every call reads
            for _ in self.loop.calls[1:]:
                forward.read(name)
        ahead = self.loop.ahead[place]
        if ahead:
            shared = forward.tensor(name).shared
            expr = forward.steps(expr, name, ahead, shared, token)
        elif carried and forward.uses.get(name, 0) > 0:
            fresh = forward.variables.pick(["x", "h"], token)
            forward.assign(fresh, expr.text)
            expr = variable(fresh)
        self.names.append(expr.text)
        self.tokens.append(token)

    def _slice(self, cut: Slice, names: list[str]) -> str:
        """``x[:, t]``; ``xs[t]`` of results that are ``xs[0]``, ``xs[1]`` and so on."""
        token = self.forward.token()
        if cut.alone:
            whole = self.forward.source(cut.op.op.inputs[0], token).text
            return f"{whole}[{':, ' * cut.op.op.attrs['dim']}{self.counter}]"
        parts = [self.forward.source(name, token).text for name in names]
        return f"{parts[0].rpartition('[')[0]}[{self.counter}]"

    def _argument(self, place: int) -> str:
        """The operand of a round after the steps of every round."""
        operand, name = self.first.operands[place], self.names[place]
        steps = self.loop.each[place]
        if not steps:
            return name
        forward = self.forward
        again = self.loop.carried[place] is not None
        if self.single:
            again = forward.uses.get(operand.name, 0) == 0
        token = forward.token()
        if again and self.names.count(name) == 1:  # bound again before the next round
            forward.variables.release(self.tokens[place])
            token = self.tokens[place]
        source = forward.tensor(operand.name).shared
        for step in self.loop.ahead[place]:
            source = source.with_placement(forward.lowered.mesh, step.axis, step.target)
        expr = (
            variable(name) if name.isidentifier() else Expr(name)
        )  # as self.table: not assigned to
        return forward.steps(expr, operand.name, steps, source, token).text

    def _call(self, arguments: list[str]) -> str:
        around = self.forward.around
        member = "layer"
        if len(set(self.loop.instances)) == 1:
            member = around.attribute(self.loop.instances[0])
        if not around.recompute.runs_again:
            return f"{member}({', '.join(arguments)})"
        return f"recompute({', '.join([member, *arguments, *self._kept()])})"

    def _kept(self) -> list[str]:
        """What does not run again; see `autopar.runtime.pytorch.recomputing`."""
        kept = [*KEPT[self.policies[0]]]
        if self.recomputing:
            start = next((s.index for s in self.loop.slices if s is not None), 0)
            kept.append(f"keep_products={self.counter} >= {start + self.recomputing}")
        graph = self.forward.lowered.blocks[self.first.op.attrs["block"]].graph
        written = updated_buffers(graph.ops)
        places = tuple(i for i, name in enumerate(graph.inputs) if name in written)
        kept += [f"updated={places}"] if places else []
        return [*kept, "keep_routes=True"] if keeps_routes(graph) else kept

    def _targets(self) -> list[str]:
        forward = self.forward
        carried = {
            result: name
            for name, result in zip(self.names, self.loop.carried, strict=True)
            if result is not None
        }
        targets = []
        for i, name in enumerate(self.last.op.outputs):
            if i in carried:
                forward.bind(name, carried[i])
                targets.append(carried[i])
            elif forward.uses.get(name):
                given = forward.around.given.get(self.last.op.attrs["block"], ())
                hint = given[i] if i < len(given) and given[i] not in ("x", "h") else ""
                first_operand = [n for n in self.names[:1] if n.isidentifier()]
                var = forward.variables.pick([hint, *first_operand, "x", "h", hint or "h"], name)
                forward.named(name, var)
                targets.append(var)
            else:
                targets.append("_")
        return targets

    def _header(self) -> str:
        instances = self.loop.instances
        start = next((s.index for s in self.loop.slices if s is not None), 0)
        numbers = f"{start}, {start + len(instances)}" if start else f"{len(instances)}"
        if len(set(instances)) == 1:
            return f"for {self.counter or '_'} in range({numbers}):"
        if self.counter:
            members = self.forward.around.iterable(instances)
            after = f", {start}" if start else ""
            return f"for {self.counter}, layer in enumerate({members}{after}):"
        return f"for layer in {self.forward.around.iterable(instances)}:"
