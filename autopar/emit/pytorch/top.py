"""The class of the top level: the whole model, or what one stage of it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.emit.constants import literal
from autopar.emit.names import first_free, identifier, is_argument
from autopar.emit.pytorch import modules
from autopar.emit.pytorch.classes import Printing, finish, surroundings
from autopar.emit.pytorch.forward import Forward
from autopar.emit.pytorch.original import CapturedModel
from autopar.emit.shares import copies
from autopar.emit.text import Lines, split_items
from autopar.lowering.counts import counted, held_whole, labels_of, labels_only
from autopar.lowering.lowered import Lowered
from autopar.lowering.scopes import Scope
from autopar.nouns.recompute import KEEP_ALL


def model_class(
    lowered: Lowered,
    scope: Scope,
    root: modules.Node,
    captured: CapturedModel | None,
    printing: Printing,
) -> str:
    """The whole model's class, from its bases on."""
    names = batch_names(lowered.graph.inputs)
    loss = lowered.outputs[0].name
    text = top_class(lowered, scope, root, captured, printing, names, loss, by_name=True)
    return documented(text, ["The whole model on one rank; see the top of this file."])


def documented(text: str, about: Sequence[str]) -> str:
    """A class, from its bases on, with lines of a docstring."""
    bases, _, body = text.partition("\n")
    lines = Lines(4)
    lines.document(about)
    return "\n".join([bases, *lines.lines, "", body])


def batch_names(entries: Sequence[str]) -> dict[str, str]:
    """A variable for each batch entry: its own name where a forward can have it."""
    names = {n: n for n in entries if is_argument(n)}
    for entry in entries:
        hint = identifier(entry)
        hint = hint if is_argument(hint) else f"{hint}_"
        names.setdefault(entry, first_free([hint], names.values()))
    return names


def top_class(
    lowered: Lowered,
    scope: Scope,
    root: modules.Node,
    captured: CapturedModel | None,
    printing: Printing,
    names: Mapping[str, str],
    loss: str,
    by_name: bool = False,
) -> str:
    """A class from its bases on, without a docstring.

    names:   the argument for each of the graph's inputs.
    loss:    the output that is the model's loss.
    by_name: its forward is called with the entries of a batch by their own names.
    """
    around = surroundings(scope, lowered, root, printing)
    forward = Forward(scope, around, dict(names), lowered.outputs)
    returned = [
        _share(text, copies(output, lowered) if output.name == loss else 1)
        for text, output in zip(split_items(forward.run()), lowered.outputs, strict=True)
    ]
    lines = Lines(4)
    _init(lowered, root, captured, lines)
    means = bool(counted(lowered))
    if means:
        _counts(lowered, lines, printing, root)
    odd = [n for n in lowered.graph.inputs if by_name and names[n] != n]
    arguments = ["self", *(f"{names[n]}: Tensor" for n in lowered.graph.inputs if n not in odd)]
    if means:
        arguments.append("counts: dict[str, Tensor]")
    others = first_free(["others", "other"], names.values())
    arguments += [f"**{others}: Tensor"] * bool(odd)
    several = f"tuple[{', '.join(['Tensor'] * len(returned))}]"
    result = "Tensor" if len(returned) == 1 else several
    lines.add(f"def forward({', '.join(arguments)}) -> {result}:")
    if lowered.outputs[-1].name == loss:
        lines.add(
            '    """This rank\'s share: summed over data ranks and microbatches, the loss."""'
        )
    renamed = Lines(8)
    for name in odd:
        renamed.add(f"{names[name]} = {others}[{literal(name)}]")
    lines.lines += renamed.lines
    finish(lines, forward, ", ".join(returned))
    return "\n".join([f"({modules.base(root)}):", *lines.lines])


def _share(text: str, copies: int) -> str:
    """One of ``copies`` equal losses."""
    if copies == 1:
        return text
    return f"({text}) / {copies}" if " " in text else f"{text} / {copies}"


def _init(
    lowered: Lowered, root: modules.Node, captured: CapturedModel | None, lines: Lines
) -> None:
    lines.add("def __init__(self) -> None:")
    inner = Lines(8)
    modules.declare(root, inner)
    for name, tensor in {} if captured is None else captured.tensors.items():
        for alias in tensor.shared_with:
            owner = alias.rpartition(".")[0]
            if name in lowered.tensors and owner and _exists(root, owner):
                inner.add(f"{modules.access(root, alias)} = {modules.access(root, name)}  # tied")
    lines.lines += inner.lines
    lines.blank()


def _exists(root: modules.Node, path: str) -> bool:
    for part in path.split("."):
        if part not in root.children:
            return False
        root = root.children[part]
        root = root.inside or root
    return True


def _counts(lowered: Lowered, lines: Lines, printing: Printing, root: modules.Node) -> None:
    """``counts``: labelled tokens of one microbatch, by the name of the mean."""
    ops = counted(lowered)
    part = labels_only(lowered, ops)
    scope = Scope("", [*part.ops])
    plain = Printing(printing.library, False, False, KEEP_ALL, {}, {}, {}, {})
    names = [n for n in part.graph.inputs if any(n in o.op.inputs for o in part.ops)]
    names += [o.name for o in part.outputs if o.name in part.graph.inputs and o.name not in names]
    variables = batch_names(names)
    forward = Forward(
        scope,
        surroundings(scope, part, root, plain),
        variables,
        part.outputs,
    )
    inner = forward.lines
    if part.ops:
        for name in names:
            inner.add(f"{variables[name]} = batch[{literal(name)}]")
    labels: dict[str, str] = {}
    for output, text in zip(part.outputs, split_items(forward.run()), strict=True):
        if not part.ops:
            text = f"batch[{literal(output.name)}]"
        elif not text.isidentifier():
            var = first_free(("labels",), labels.values())
            inner.add(f"{var} = {text}")
            text = var
        labels[output.name] = text
    entries = []
    for op in ops:
        ignored = op.op.attrs.get("ignore_index", -100)
        key = printing.counts[op.op.name].removeprefix("counts[").removesuffix("]")
        name = labels_of(lowered, op)
        count = f"({labels[name]} != {ignored}).sum()"
        for axis in held_whole(part, name):  # labels that the batch does not give
            count = f'keep_first({count}, "{axis}")'
        entries.append(f"{key}: {count}")
    lines.add("@staticmethod")
    lines.add("def counts(batch: dict[str, Tensor]) -> dict[str, Tensor]:")
    lines.add('    """Labelled tokens of one microbatch; the runtime sums them over the batch."""')
    inner.add(f"return {{{', '.join(entries)}}}")
    lines.lines += inner.lines
    lines.blank()
