"""The values of one forward: which variable each is in, which are not printed yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.emit.marks import RESHARDED, mark
from autopar.emit.names import identifier
from autopar.emit.pytorch import steps as step_text
from autopar.emit.pytorch.shared_experts import given_name
from autopar.emit.pytorch.site import Layer, model_part
from autopar.emit.pytorch.variables import Variables
from autopar.emit.roles import Known
from autopar.emit.sizes import NONE, Sizes
from autopar.emit.text import Expr, Lines, variable
from autopar.lowering.lowered import Lowered, LoweredOp, LoweredTensor
from autopar.nouns.graph import Tensor
from autopar.nouns.plan import key
from autopar.nouns.recompute import KEEP_ALL, Recompute
from autopar.nouns.sharding import Sharding
from autopar.rules.resharding import Step

SPELLED = re.compile(r"\.(reshape|expand)\([-\d, ]+\)$")  # shows the shape itself


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a forward needs to know about the class it stands in and the program.

    known:     what names the values of the graph.
    attribute: text for a tensor or module path of the graph, e.g. ``self.q_proj.weight``.
    iterable:  text for consecutive members of a module list.
    layer, define: see `Site`.
    counts:    for a mean over labelled tokens, by op, the text of its count.
    returned:  what the forward of an inner scope returns, by its path.
    given:     what the forward of a block returns, by its name.
    sizes:     what sizes that follow from the batch are called.
    wide:      under half precision, see `autopar.emit.pytorch.precision`.
    half:      the dtype of compute where it is a half precision.
    """

    lowered: Lowered
    known: Known
    attribute: Callable[[str], str]
    iterable: Callable[[Sequence[str]], str]
    layer: Callable[[str, Layer], bool]
    define: Callable[[str, str], str]
    probes: bool = False
    marks: bool = False
    recompute: Recompute = KEEP_ALL
    counts: Mapping[str, str] = field(default_factory=dict)
    wide: Mapping[str, bool] = field(default_factory=dict)
    half: str = ""
    returned: Mapping[str, Sequence[str]] = field(default_factory=dict)
    given: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sizes: Sizes = NONE

    def policies(self, calls: Sequence[LoweredOp]) -> list[str]:
        """What the calls of blocks recompute, in order."""
        every = [op.op.name for op in self.lowered.ops if op.bound is None]
        each = dict(zip(every, self.recompute.by_call(len(every)), strict=True))
        return [each[call.op.name] for call in calls]


class Values:
    """Statements so far, and what the values that are still to be read are called.

    bound:   variable by tensor. pending: expressions that will be written where they are read.
    uses:    how often each tensor is still to be read. hints: what each would like to be called.
    """

    def __init__(self, around: Surroundings, uses: Mapping[str, int]) -> None:
        self.around = around
        self.lowered = around.lowered
        self.lines = Lines(8)
        self.variables = Variables()
        self.bound: dict[str, str] = {}
        self.pending: dict[str, Expr] = {}
        self.hints: dict[str, str] = {}
        self.uses = dict(uses)
        self.last: tuple[str, str, str] | None = None
        self._flows: dict[str, str] = {}  # by variable
        self._tokens: list[str] = []

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

    def assign(self, var: str, text: str, comment: str = "", above: bool = False) -> None:
        self.lines.add(f"{var} = {text}", comment, above)
        self.last = (var, text, comment)

    def mark(self, names: Sequence[str]) -> None:
        """Says above the next statement which tensors it makes, where marks are asked for and
        their pieces, one behind the other, are the whole."""
        if self.around.marks and not self.lowered.apart.intersection(names):
            lies = self.lowered.lie
            made = [
                (key(self.lowered.block, given_name(n)), lies(n, self.tensor(n).produced))
                for n in names
            ]
            self.lines.lines.append(" " * self.lines.indent + mark(made))

    def mark_resharded(self, name: str, sharding: Sharding) -> None:
        if self.around.marks and name not in self.lowered.apart:
            label = key(self.lowered.block, given_name(name)) + RESHARDED
            lies = self.lowered.lie(name, sharding)
            self.lines.lines.append(" " * self.lines.indent + mark([(label, lies)]))

    def _readers(self, name: str) -> int:
        read = [o.name for op in self.lowered.ops for o in op.operands]
        return [*read, *(o.name for o in self.lowered.outputs)].count(name)

    def token(self) -> str:
        """A holder for one operand of the statement that is being made."""
        self._tokens.append(f"#{len(self._tokens)}")
        return self._tokens[-1]

    def end_statement(self) -> None:
        """The statement is made: its operands are no longer held."""
        for token in self._tokens:
            self.variables.release(token)
        self._tokens.clear()

    def forget_last(self) -> None:
        """What was assigned last cannot be returned in its place."""
        self.last = None

    def tensor(self, name: str) -> LoweredTensor:
        return self.lowered.tensors[name]

    def source(self, name: str, token: str) -> Expr:
        """The shared copy of a tensor."""
        tensor = self.lowered.graph.tensors[name]
        if name in self.bound:
            expr = bound(self.bound[name])
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
        self, expr: Expr, name: str, steps: Sequence[Step], source: Sharding, token: str
    ) -> Expr:
        """``found`` after a resharding, in a variable."""
        tensor = self.lowered.graph.tensors[name]
        if tensor.role == "parameter":
            hints = [identifier(name.split(".")[-1])[:1], identifier(name.split(".")[-1])]
        elif tensor.role == "buffer":
            hints = [identifier(name.split(".")[-1])]
        else:
            hints = [expr.text] if expr.reads == {expr.text} else []
            hints += ["x", "h"] if tensor.differentiable else [f"{(hints or ['all'])[0]}_here"]
        text, var, state = expr.text, "", source
        for step in steps:
            state = state.with_placement(self.lowered.mesh, step.axis, step.target)
            after = self.around.sizes.local(self.lowered, name, state)
            ways = self.lowered.mesh.size(step.axis)
            if not var:
                self.variables.release(token)
                var = self.variables.pick(hints, token)
            for call, comment in step_text.calls(self._lies(name, step), text, var, after, ways):
                shown = self._shown(name, after, state) + (f", {comment}" if comment else "")
                if (
                    self.around.marks and step is steps[-1] and self._readers(name) == 1
                ):  # else it has part of the gradient
                    self.mark_resharded(name, state)
                self.assign(var, call, shown, above=True)
            text = var
        return variable(var) if var else expr

    def reshard_in_place(self, name: str, steps: Sequence[Step], source: Sharding) -> None:
        """After a tensor is made: its shared copy under its variable."""
        var = self.bound[name]
        state = source
        made = self.lowered.tensors[name]
        for step in steps:
            state = state.with_placement(self.lowered.mesh, step.axis, step.target)
            after = self.around.sizes.local(self.lowered, name, state)
            ways = self.lowered.mesh.size(step.axis)
            for call, comment in step_text.calls(self._lies(name, step), var, var, after, ways):
                if state == made.shared:
                    self.mark_resharded(name, state)
                shown = self._shown(name, after, state) + (f", {comment}" if comment else "")
                self.assign(var, call, shown, above=True)

    def _lies(self, name: str, step: Step) -> Step:
        """With its placements marked where pieces lie in zigzag."""
        source, target = (self.lowered.lies(name, step.axis, p) for p in (step.source, step.target))
        return replace(step, source=source, target=target)

    def _shown(self, name: str, shape: Sequence[int], sharding: Sharding) -> str:
        return shape_comment(shape, self.lowered.lie(name, sharding))

    def flush(self, name: str) -> None:
        expr = self.pending.pop(name)
        self.variables.release(f"pending {name}")
        var = self.variables.pick(self.names_for(name, expr), name)
        self.named(name, var)
        self.mark([name])
        self.assign(var, expr.text, "" if SPELLED.search(expr.text) else self.shown(name))

    def names_for(self, name: str, expr: Expr) -> list[str]:
        """Variables for a value, best first: its own hint, the stream that it continues."""
        hint = self.hints.get(name, "")
        flow = _flow(self.lowered.graph.tensors[name])
        statement = self.around.known.statements.get(name, "")
        stream = []
        for var in sorted(expr.reads):
            if re.match(rf"(\w+\.)*\w*\(?{var}\b", expr.text) and self._flows.get(var) == flow:
                stream.append(var)
        if hint == "loss":
            return [hint]  # a second one is loss2, not what it was made of
        if flow == "stream":
            return [hint, *stream, "x", "h", statement, hint or "h"]
        plain = {"bool": "mask", "int": "ids"}.get(flow, "values")
        return [hint, *stream, plain, statement, hint or plain]

    def shown(self, name: str) -> str:
        """The comment with the local shape of a tensor as produced."""
        value = self.tensor(name)
        shape = value.produced.local_shape(value.tensor.shape, self.lowered.mesh)
        return self._shown(name, shape, value.produced)


def bound(text: str) -> Expr:
    """A variable, or a member of one: ``xs[3]``."""
    return Expr(text, reads=frozenset((text.partition("[")[0],)))


def shape_comment(shape: Sequence[int], sharding: Sharding) -> str:
    """``[4, 512, 256] tp:S2``; gradients' placements are left out."""
    shown = Sharding(tuple((a, p) for a, p in model_part(sharding).placements if p.kind != "D"))
    return f"{[*map(int, shape)]}" + (f" {shown}" if shown.placements else "")


def _flow(tensor: Tensor) -> str:
    """What may follow one another under one variable."""
    if tensor.differentiable:
        return "stream"
    return tensor.dtype.rstrip("0123456789")
