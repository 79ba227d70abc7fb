"""One class of the program: its modules, its forward, printed once however often it occurs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.emit.constants import holding, literal
from autopar.emit.marks import unmarked
from autopar.emit.names import BUILTINS, FUNCTIONS, LAYERS, class_name, class_of
from autopar.emit.pytorch import modules
from autopar.emit.pytorch.alike import Alike, Printed
from autopar.emit.pytorch.forward import Forward
from autopar.emit.pytorch.reading import interface, reads
from autopar.emit.pytorch.signatures import argument_names, shapes
from autopar.emit.pytorch.values import Surroundings
from autopar.emit.roles import Known
from autopar.emit.sizes import NONE, Sizes
from autopar.emit.text import Lines, split_items
from autopar.lowering.lowered import Lowered, Operand, stored
from autopar.lowering.scopes import Scope, under
from autopar.nouns.graph import Tensor
from autopar.nouns.plan import key
from autopar.nouns.recompute import Recompute

TAKEN = (
    LAYERS
    | FUNCTIONS
    | BUILTINS
    | frozenset("Buffer F FP32 MESH Model Module Modules Parameter SETTINGS STAGES".split())
    | frozenset("Settings Stage Tensor VALUES Value Weights nn probe torch".split())
)
CONTAINERS = frozenset(("", "Module", "ModuleDict", "ModuleList", "Sequential"))
"""Classes that say nothing of what they hold."""


@dataclass(slots=True)
class Library:
    """Classes in the order in which they must stand, from their bases on; equal text is one.

    hints: what each would have liked to be called.
    functions: what stands before the classes, each from its arguments on.
    """

    texts: dict[str, str] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)

    def define(self, hint: str, text: str) -> str:
        """The name under which a function is known, from its arguments on ``text``."""
        number, name = 1, hint
        while self.functions.setdefault(name, text) != text:
            number += 1
            name = f"{hint}{number}"
        return name

    def add(self, hint: str, text: str) -> str:
        """The name under which ``text`` (a class from its bases on) is known.

        Classes that differ in marks alone are one, without marks: what it makes has several names.
        """
        number = 1 + (hint in TAKEN)
        while True:
            name = hint if number == 1 else f"{hint}{number}"
            known = self.texts.setdefault(name, text)
            self.hints.setdefault(name, hint)
            if known != text and unmarked(known) == unmarked(text):
                known = self.texts[name] = text = unmarked(text)
            if known == text:
                return name
            number += 1


@dataclass(frozen=True, slots=True)
class Printing:
    """What all classes of a program have in common.

    persistent: for buffers by full name, whether they are part of the state.
    counts:     for each mean over labelled tokens, the expression of its count.
    wide:       by block ("" for the top), see `autopar.emit.pytorch.precision`.
    original:   names of the model's own classes, by module path.
    returned:   what the forwards printed so far return, by block and path.
    known:      what names the values of a block, of those that were asked for so far.
    declared:   what the classes printed so far declare, by their names.
    alike:      what named the values of the forwards printed so far.
    sizes:      what sizes that follow from the batch are called.
    """

    library: Library
    probes: bool
    marks: bool
    recompute: Recompute
    persistent: Mapping[str, bool]
    counts: Mapping[str, str]
    wide: Mapping[str, Mapping[str, bool]]
    original: Mapping[str, str]
    half: str = ""
    returned: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)
    declared: dict[str, modules.Node] = field(default_factory=dict)
    alike: Alike = field(default_factory=Alike)
    sizes: Sizes = NONE
    placed: frozenset[str] = frozenset()

    def built(self, name: str) -> modules.Built:
        return modules.Built(f"{name}()", self.declared[name])


def declaration(tensor: Tensor, lowered: Lowered, path: str, printing: Printing) -> str:
    """``Parameter((8, 8), "tp:S0")``; only what is not float32 says its dtype."""
    kind = "Parameter" if tensor.role == "parameter" else "Buffer"
    held = stored(lowered.tensors[tensor.name].produced)
    more = {
        literal(str(held)): held.placements,
        f"dtype={literal(tensor.dtype)}": tensor.dtype != "float32",
        "placed=True": key(lowered.block, tensor.name) in printing.placed,
        "trainable=False": kind == "Parameter" and not tensor.differentiable,
        "persistent=False": kind == "Buffer" and not printing.persistent.get(path, True),
    }
    return f"{kind}({', '.join([literal(tensor.shape), *holding(more)])})"


def scope_class(
    scope: Scope,
    lowered: Lowered,
    instance: str,
    hint: str,
    inputs: Sequence[str],
    outputs: Sequence[Operand],
    printing: Printing,
    blocks: Mapping[str, str] | None = None,
) -> str:
    """Adds the class of ``scope`` to the library and gives its name.

    instance: the full path of one module that the graph is the forward of.
    blocks:   the class of every block instance, by path.
    """
    root = module_tree(scope, lowered, instance, printing, blocks or {})
    around = surroundings(scope, lowered, root, printing)
    arguments = argument_names(scope, lowered, inputs, around.known)
    own = Printed((), dict(zip(inputs, arguments, strict=True)), around.known)
    printed = printing.alike.names(scope, lowered, inputs, outputs, own)
    around = replace(around, known=printed.known)
    names = [printed.arguments[name] for name in inputs]
    whole = not scope.path
    forward = Forward(scope, around, dict(zip(inputs, names, strict=True)), outputs, whole)
    returned = forward.run()
    printing.returned.setdefault(lowered.block or "", {})[scope.path] = [
        text if text.isidentifier() else forward.hints.get(output.name, "")
        for text, output in zip(split_items(returned), outputs, strict=True)
    ]
    lines = Lines(4)
    made = printing.returned[lowered.block or ""][scope.path]
    lines.document(shapes(lowered, inputs, names, outputs, made))
    lines.blank()
    _init(root, lines)
    counted = [n for n in ("counts",) if any(o.op.name in printing.counts for o in scope.ops())]
    given = ["self", *(f"{n}: Tensor" for n in names)]
    given += [f"{n}: dict[str, Tensor]" for n in counted]
    lines.add(f"def forward({', '.join(given)}) -> {_result(len(outputs))}:")
    finish(lines, forward, returned)
    text = "\n".join([f"({modules.base(root)}):", *lines.lines])
    name = printing.library.add(hint, text)
    printing.declared.setdefault(name, root)
    return name


def _result(count: int) -> str:
    """What a forward returns; nothing where it only writes buffers."""
    if not count:
        return "None"
    return "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"


def finish(lines: Lines, forward: Forward, returned: str) -> None:
    """The statements of a forward and its return, after its ``def``."""
    if returned:
        forward.lines.add(f"return {returned}", forward.returned_comment)
    lines.lines += forward.lines.lines


def _init(root: modules.Node, lines: Lines) -> None:
    if not root.tensors and not root.children:
        return
    lines.add("def __init__(self) -> None:")
    inner = Lines(8)
    modules.declare(root, inner)
    lines.lines += inner.lines
    lines.blank()


def surroundings(
    scope: Scope, lowered: Lowered, root: modules.Node, printing: Printing
) -> Surroundings:
    start = len(scope.path) + 1 if scope.path else 0
    block = lowered.block or ""
    if block not in printing.known:
        printing.known[block] = Known.of(lowered)
    return Surroundings(
        lowered,
        printing.known[block],
        attribute=lambda path: modules.access(root, path[start:]),
        iterable=lambda paths: modules.iterable(root, [p[start:] for p in paths]),
        layer=lambda path, layer: modules.become(root, path[start:], layer),
        define=printing.library.define,
        probes=printing.probes,
        marks=printing.marks,
        recompute=printing.recompute,
        counts=printing.counts,
        wide=printing.wide.get(block, {}),
        half=printing.half,
        returned=printing.returned.get(block, {}),
        sizes=printing.sizes,
        given={block: paths[""] for block, paths in printing.returned.items() if "" in paths},
    )


def module_tree(
    scope: Scope,
    lowered: Lowered,
    instance: str,
    printing: Printing,
    blocks: Mapping[str, str],
) -> modules.Node:
    """The modules below a scope's; classes of inner scopes are printed on the way.

    ``blocks`` gives the class of every block instance, by path.
    """
    start = len(scope.path) + 1 if scope.path else 0
    inside = [child.path for child in scope.children()]
    classes = {
        path[start:]: printing.built(name)
        for path, name in blocks.items()
        if under(path, scope.path) and not any(under(path, child) for child in inside)
    }
    uses = _outer_uses(scope, lowered)
    for child in scope.children():
        inner, made = interface(child, lowered, uses)
        outputs = [Operand(n, lowered.tensors[n].shared, (), True) for n in made]
        full = f"{instance}.{child.path}" if instance else child.path
        hint = printing.original.get(full, "")
        hint = class_of(hint) if hint not in CONTAINERS else class_name(child.path)
        below = scope_class(child, lowered, instance, hint, inner, outputs, printing, blocks)
        classes[child.path[start:]] = printing.built(below)
    tensors = {}
    for tensor in lowered.graph.tensors.values():
        if tensor.role not in ("parameter", "buffer") or not under(tensor.name, scope.path):
            continue
        if any(under(tensor.name, path) for path in inside):
            continue
        full = f"{instance}.{tensor.name}" if instance else tensor.name
        tensors[tensor.name[start:]] = declaration(tensor, lowered, full, printing)
    order = [path[start:] for path in _reading_order(scope)]
    return modules.tree(tensors, classes, order)


def _reading_order(scope: Scope) -> list[str]:
    """Paths of tensors and block instances in the order in which ops come to them."""
    order = []
    for op in scope.ops():
        if op.op.kind == "block":
            order.append(op.op.attrs["instance"])
        order += op.op.inputs
    return list(dict.fromkeys(order))


def _outer_uses(scope: Scope, lowered: Lowered) -> dict[str, int]:
    """How often a tensor is read outside of the child of ``scope`` that makes it."""
    uses: dict[str, int] = {}
    items = [*scope.items]
    for item in items:
        for name in reads(item, lowered):
            uses[name] = uses.get(name, 0) + 1
    inside = {id(op) for op in scope.ops()}
    for op in lowered.ops:
        if id(op) not in inside:
            for name in op.op.inputs:
                uses[name] = uses.get(name, 0) + 1
    for output in lowered.outputs:
        uses[output.name] = uses.get(output.name, 0) + 1
    return uses


def block_class(
    lowered: Lowered, scope: Scope, instance: str, hint: str, printing: Printing
) -> str:
    """The class of a repeated block."""
    return scope_class(
        scope, lowered, instance, hint, lowered.graph.inputs, lowered.outputs, printing
    )
