"""The ops of one graph as the body of a Python function, one statement for an op or a few."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.emit.constants import literal
from autopar.emit.jax import loops
from autopar.emit.jax.block_calls import between, block_call, body_call, targets
from autopar.emit.jax.expressions import expression
from autopar.emit.jax.hints import by_module, is_centred_square
from autopar.emit.jax.printing import Printing
from autopar.emit.jax.shapes import check_even, grouped, shown
from autopar.emit.jax.steps import call
from autopar.emit.marks import RESHARDED, mark
from autopar.emit.names import identifier
from autopar.emit.roles import Known
from autopar.emit.shares import copies
from autopar.emit.text import ATOM, PRODUCT, Expr, Lines
from autopar.emit.text import variable as variable_of
from autopar.lowering.lowered import Lowered, LoweredOp, Operand
from autopar.nouns.kinds import BODIES, OWN_DERIVATIVE
from autopar.nouns.plan import key
from autopar.nouns.sharding import Sharding

INLINED = frozenset(("linear", "linear_t", "matmul", "einsum", "reshape", "transpose", "neg"))
SIMPLE = frozenset(
    "add sub mul div neg cast exp log sqrt rsqrt square silu gelu relu tanh sigmoid sin cos pow "
    "abs maximum minimum eq ne lt le gt ge and or not where clamp arange full".split()
)
MOST_WEIGHT = 2  # ops in one statement
MOST_SIMPLE, LONGEST = 4, 56  # of those above; columns of an expression inside of another one
KEEPS_NAME = frozenset(
    ("reshape", "transpose", "add", "sub", "mul", "div", "gelu", "silu", "relu", "cast", "expand")
)


@dataclass(slots=True)
class _Held:
    """Where a tensor is: its expression, the variable that it occupies ("" for none), and the one
    that it was made from. What has no variable is written where it is read."""

    text: Expr
    variable: str = ""
    origin: str = ""


def body(
    lowered: Lowered,
    parameters: str,
    printing: Printing,
    loss: str = "",
) -> tuple[list[str], list[str]]:
    """(argument names, lines) of the function of a graph.

    parameters: the name of the dict of parameters.
    loss:       the output of which a rank gives its share.
    """
    writer = _Writer(lowered, parameters, printing, loss)
    return writer.arguments, writer.run()


class _Writer:
    def __init__(
        self,
        lowered: Lowered,
        parameters: str,
        printing: Printing,
        loss: str,
    ) -> None:
        self.loss = loss
        self.marks = printing.marks
        self.scatters = printing.scatters
        self.sizes = printing.sizes
        self.carries = printing.carries
        self.renamed = printing.arguments.get(lowered.block or "", {})
        self.lowered = lowered
        self.parameters = parameters
        self.functions = printing.functions
        self.reserved = {parameters, *printing.reserved}
        self.lines = Lines(4)
        self.held: dict[str, _Held] = {}
        self.taken: dict[str, str] = {}  # variable -> the tensor in it
        self.left = Counter(name for op in lowered.ops for name in (o.name for o in op.operands))
        self.left.update(lowered.graph.outputs)
        self.readers = {
            o.name: (op, o) for op in lowered.ops for o in op.operands if self.left[o.name] == 1
        }
        self.makers = {name: op.op for op in lowered.ops for name in op.op.outputs}
        self.known = Known.of(lowered)
        self.holds: Counter[str] = Counter()  # variables in what is not written yet
        self.read: set[str] = set()  # by the statement that is being made
        self.arguments = [self._argument(name) for name in lowered.graph.inputs]

    def run(self) -> list[str]:
        for value in self.lowered.tensors.values():
            tensor = value.tensor
            check_even(tensor, value.produced, self.lowered)
            check_even(tensor, value.shared, self.lowered)
            if tensor.role in ("parameter", "buffer"):
                self.held[tensor.name] = _Held(Expr(f"{self.parameters}[{literal(tensor.name)}]"))
                self._shared(tensor.name)
            elif tensor.name in self.lowered.graph.inputs:
                self._shared(tensor.name)
        runs = loops.runs(self.lowered)
        index = 0
        while index < len(self.lowered.ops):
            op = self.lowered.ops[index]
            if index in runs:
                self._loop(runs[index])
                index += len(runs[index].ops)
                continue
            self._op(op, index)
            index += 1
        results = [self._share(o) for o in self.lowered.outputs]
        self.lines.add(f"return {grouped([r.text for r in results], self.carries)}")
        return self.lines.lines

    def _share(self, output: Operand) -> Expr:
        """An output; of a loss that several ranks have whole a share."""
        held = self._brought(output)
        count = copies(output, self.lowered) if output.name == self.loss else 1
        return held if count == 1 else Expr(f"{held.within(PRODUCT)} / {count}", PRODUCT)

    # -- ops -------------------------------------------------------------------------------------

    def _op(self, op: LoweredOp, index: int) -> None:
        inputs = [self._brought(o) for o in op.operands]
        for result, name in zip(op.results, op.op.outputs, strict=True):
            check_even(self.lowered.graph.tensors[name], result, self.lowered)
        if op.op.kind == "block":
            made = block_call(op, inputs, self.lowered, self.functions, self.parameters)
        elif op.op.kind.startswith(OWN_DERIVATIVE):
            function = self.functions[key(self.lowered.block, op.op.name)]
            made = Expr(f"{function}({', '.join(x.text for x in inputs)})")
        elif BODIES in op.op.attrs:
            made = body_call(op, inputs, self.lowered.block, self.functions)
        else:
            made = expression(op, inputs, self.lowered, self.sizes)
        if len(op.op.outputs) > 1:
            self._settle()
            names = [self._bind(name, op) for name in op.op.outputs]
            self._mark(op)
            self.lines.add(f"{targets(op.op, names)} = {made.text}")
        elif self._inlines(op, index, made):
            hint = by_module(op.op, self.lowered.graph.tensors)
            origin = self._origin(op) if hint in ("", "x") else hint
            reads = frozenset().union(*(x.reads for x in inputs))
            self.holds.update(reads)
            self._settle()
            self.held[op.op.name] = _Held(replace(made, reads=reads), origin=origin)
            return
        else:
            self._settle()
            self._assign(op.op.name, made, op)
        for name in op.op.outputs:
            self._shared(name)

    def _mark(self, op: LoweredOp) -> None:
        """Says above the next statement which results it makes, where marks are asked for."""
        if self.marks != "none" and op.op.kind != "block":
            made = [
                (key(self.lowered.block, name), self.lowered.lie(name, result))
                for name, result in zip(op.op.outputs, op.results, strict=True)
            ]
            self.lines.lines.append(" " * self.lines.indent + mark(made))

    def _inlines(self, op: LoweredOp, index: int, made: Expr) -> bool:
        """Whether the next op alone reads the result, as it is."""
        if self.marks == "each":
            return False
        name = op.op.name
        last = index + 1 == len(self.lowered.ops) and self.lowered.graph.outputs == (name,)
        if last and not self.lowered.tensors[name].steps:
            return True
        if self.left[name] != 1 or self.lowered.tensors[name].steps:
            return False
        if op.op.kind in SIMPLE:
            return self._is_part(op, made)
        if op.op.kind not in INLINED or made.weight >= MOST_WEIGHT:
            return False
        following = self.lowered.ops[index + 1 : index + 2]
        return any(
            o.name == name and not o.steps and f.op.kind != "block"
            for f in following
            for o in f.operands
        )

    def _is_part(self, op: LoweredOp, made: Expr) -> bool:
        """Whether a result is a part of what reads it: short, and without a name of its own."""
        reader, operand = self.readers.get(op.op.name, (None, None))
        if reader is None or operand is None or operand.steps or reader.op.kind == "block":
            return False
        if any(o.steps for o in op.operands):  # what collectives gave is seen, and verified, first
            return False
        own = self._name(op.op.name)
        named = own and own not in {self._name(n) for n in reader.op.outputs}
        return not named and made.weight < MOST_SIMPLE and len(made.text) <= LONGEST

    def _name(self, name: str) -> str:
        """What its readers see in a value, or what the model's source calls it."""
        return self.known.roles.get(name) or self.known.assigned.get(name, "")

    def _loop(self, run: loops.Run) -> None:
        """Consecutive layers of one block as one call."""
        first, last = run.ops[0], run.ops[-1]
        inputs = [self._brought(o).text for o in first.operands]
        block = self.lowered.graph.blocks[first.op.attrs["block"]]
        fixed = [inputs[i] for i in run.fixed]
        carry = ", ".join(inputs[i] for i in run.carried)
        function = self.functions[block.name]
        stack = f"{self.parameters}[{literal(block.name)}]"
        shared = f", shared=({', '.join(fixed)}{',' * (len(fixed) == 1)})" if fixed else ""
        looped = len(run.ops) - run.parts
        extra = shared + self._each(run.ops[:looped], run.each)
        extra += between(run, self.lowered, self.scatters)
        text = f"layers({function}, {stack}, {carry}{extra})"
        for op in run.ops[1:]:
            for operand in op.operands:
                self._read(operand.name)
        again = {v for name in run.again for v in self.held[name].text.reads}
        self.read -= again  # a layer behind the loop, of a statement of its own, reads them too
        self._settle()
        self.read |= again
        names = [self._bind(name, first) for name in last.op.outputs]
        shape = self._comment(last.op.outputs[0], last.results[0])
        self.lines.add(f"{', '.join(names)} = {text}", f"{looped} layers: {shape}")
        if run.parts:
            alone = f"{self.parameters}[{literal(loops.last_stack(block.name))}]"
            own = [self._brought(last.operands[i]).text for i in run.each]
            given = ", ".join([*fixed, *own, *names])
            made = f"layer({function}, {alone}, 0, {given})"
            self.lines.add(f"{', '.join(names)} = {made}", shape)
        for name in last.op.outputs:
            self._shared(name)

    def _each(self, ops: Sequence[LoweredOp], places: Sequence[int]) -> str:
        """What each of the layers has of its own of the batch, stacked."""
        rows = [", ".join(self._brought(op.operands[i]).text for op in ops) for i in places]
        stacks = ", ".join(f"jnp.stack(({row}{',' * (len(ops) == 1)}))" for row in rows)
        return f", each=({stacks}{',' * (len(rows) == 1)})" if rows else ""

    # -- tensors ---------------------------------------------------------------------------------

    def _argument(self, name: str) -> str:
        variable = identifier(self.renamed.get(name, name))
        while variable in self.reserved or variable in self.taken:
            variable += "_"
        self.taken[variable] = name
        self.held[name] = _Held(variable_of(variable), variable)
        return variable

    def _shared(self, name: str) -> None:
        """The steps from how a tensor is produced to the copy that its readers start from."""
        steps = self.lowered.tensors[name].steps
        if not steps:
            return
        held = self.held[name]
        text = held.text.text
        for step in steps:
            text = call(step, text, self.lowered, name, self.scatters)
        if self.marks != "none":
            label = key(self.lowered.block, name) + RESHARDED
            shared = self.lowered.lie(name, self.lowered.tensors[name].shared)
            made = mark([(label, shared)])
            self.lines.lines.append(" " * self.lines.indent + made)
        self._assign(name, Expr(text), None, shared=True)

    def _brought(self, operand: Operand) -> Expr:
        """An operand as its reader wants it."""
        held = self.held[operand.name]
        text = held.text
        check_even(self.lowered.graph.tensors[operand.name], operand.wanted, self.lowered)
        for step in operand.steps:
            made = call(step, text.text, self.lowered, operand.name, self.scatters)
            text = replace(text, text=made, level=ATOM, weight=text.weight + 1)
        self._read(operand.name)
        if not held.variable:
            self.holds.subtract(text.reads)
        return text

    def _read(self, name: str) -> None:
        self.left[name] -= 1
        held = self.held.get(name)
        if held is not None:
            self.read.update(held.text.reads)

    def _settle(self) -> None:
        """Others may have the variables of the statement that nothing still to be written reads."""
        for variable in self.read:
            name = self.taken.get(variable)
            if name is not None and self.left[name] <= 0 and self.holds[variable] <= 0:
                del self.taken[variable]
        self.read.clear()

    def _assign(self, name: str, made: Expr, op: LoweredOp | None, shared: bool = False) -> None:
        if shared:
            held = self.held[name]
            self.taken.pop(held.variable, None)
            sharding = self.lowered.tensors[name].shared
            variable = held.variable or identifier(name.rpartition(".")[0] or name)
            variable = self._take(name, [variable])
        else:
            assert op is not None
            sharding = op.results[0]
            variable = self._bind(name, op)
        comment = self._comment(name, sharding)
        if op is not None and comment == self._first_shown(op):
            comment = ""
        if op is not None:
            self._mark(op)
        self.lines.add(f"{variable} = {made.text}", comment)

    def _bind(self, name: str, op: LoweredOp) -> str:
        """A variable for ``name``: that of an operand that is gone, or one of its own."""
        hints = [self._name(name)]
        kind, tensor = op.op.kind, self.lowered.graph.tensors[name]
        if kind in KEEPS_NAME or kind == "block":
            hints.append(self._origin(op))
        hint = by_module(op.op, self.lowered.graph.tensors)
        hints.append(hint if hint != "x" or kind == "embedding" else "h")
        if kind == "mean":
            hints.append("variance" if is_centred_square(op.op.inputs[0], self.makers) else "mean")
        hints.append(self.known.statements.get(name, ""))
        given = [self.lowered.graph.tensors[n] for n in op.op.inputs]
        if given and all(t.role in ("parameter", "buffer") for t in given):
            hints.append(identifier(given[0].name.rpartition(".")[2]))
        if any(t.differentiable == tensor.differentiable for t in given[:1]):
            hints.append(self._origin(op))
        plain = {"bool": "mask", "int": "ids"}.get(tensor.dtype.rstrip("0123456789"), "values")
        hints.append("h" if tensor.differentiable else plain)
        return self._take(name, [w for w in hints if w])

    def _origin(self, op: LoweredOp) -> str:
        """The variable that the first operand with one is in, or was made from."""
        held = [self.held[o.name] for o in op.operands]
        if op.op.kind == "block":  # what goes from layer to layer comes last
            held.reverse()
        return next((h.variable or h.origin for h in held if h.variable or h.origin), "")

    def _take(self, name: str, hints: Sequence[str]) -> str:
        free = [w for w in hints if w not in self.taken and w not in self.reserved]
        variable = free[0] if free else hints[-1]
        number = 2
        while variable in self.taken or variable in self.reserved:
            variable = f"{re.sub(r'[0-9]+$', '', hints[-1])}{number}"
            number += 1
        self.taken[variable] = name
        self.held[name] = _Held(variable_of(variable), variable)
        return variable

    def _first_shown(self, op: LoweredOp) -> str:
        """The first operand as the op reads it, in the words of a comment."""
        for o in op.operands:
            return shown(self.lowered.graph.tensors[o.name], o.wanted, self.lowered)
        return ""

    def _comment(self, name: str, sharding: Sharding) -> str:
        return shown(self.lowered.graph.tensors[name], sharding, self.lowered)
