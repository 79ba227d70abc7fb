"""The ``__init__`` of a class: submodules under their original names, and how to reach them."""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.emit.constants import literal
from autopar.emit.pytorch.site import Layer
from autopar.emit.text import Lines


@dataclass(slots=True)
class Node:
    """A module. ``built`` is the class that it is an instance of, with its constructor's text, and
    ``inside`` what that class declares; ``layer`` the layer of the runtime that it is."""

    built: str = ""
    layer: Layer | None = None
    inside: Node | None = None
    tensors: dict[str, str] = field(default_factory=dict)
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def listed(self) -> bool:
        """A list: children are numbered from 0."""
        names = [*self.children]
        return bool(names) and names == [str(i) for i in range(len(names))] and not self.tensors

    @property
    def keyed(self) -> bool:
        """Some child has a name that cannot be an attribute."""
        return not self.listed and any(not _is_attribute(n) for n in self.children)


@dataclass(frozen=True, slots=True)
class Built:
    """An instance of a class of the program: its constructor's text and what the class declares."""

    text: str
    inside: Node


def _is_attribute(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def tree(
    tensors: Mapping[str, str], classes: Mapping[str, Built], order: Sequence[str] = ()
) -> Node:
    """Modules below one class.

    tensors: declaration by path, ``{"q_proj.weight": 'Parameter((8, 8))'}``.
    classes: class by module path; what such a module holds is its own affair.
    order:   paths in the order in which the forward comes to them.
    """
    root = Node()
    known = [*tensors, *(f"{path}." for path in classes)]
    heads = {prefix for path in known for prefix in _prefixes(path)}
    for path in order:
        parts = path.split(".")
        while parts and ".".join(parts) not in heads:
            parts.pop()
        _reach(root, parts)
    for path, made in classes.items():
        node = _reach(root, path.split("."))
        node.built, node.inside = made.text, made.inside
    for path, text in tensors.items():
        *parents, name = path.split(".")
        _reach(root, parents).tensors[name] = text
    _sort(root)
    return root


def _reach(root: Node, parts: Sequence[str]) -> Node:
    for part in parts:
        root = root.children.setdefault(part, Node())
    return root


def _prefixes(path: str) -> Iterator[str]:
    """The modules that lead to a tensor."""
    parts = path.split(".")[:-1]
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _sort(node: Node) -> None:
    """Numbered children in order; others as they came."""
    if node.children and all(n.isdigit() for n in node.children):
        node.children = dict(sorted(node.children.items(), key=lambda item: int(item[0])))
    for child in node.children.values():
        _sort(child)


def access(root: Node, path: str) -> str:
    """``self.layers[3].q_proj.weight``"""
    text, node = "self", root
    for part in path.split(".") if path else ():
        if part in node.tensors:
            return f"{text}.{part}" if _is_attribute(part) else f"getattr({text}, {literal(part)})"
        if node.listed:
            text += f"[{part}]"
        elif node.keyed:
            text += f"[{literal(part)}]"
        else:
            text += f".{part}"
        node = node.children.get(part, Node())
        node = node.inside or node
    return text


def become(root: Node, path: str, layer: Layer) -> bool:
    """Whether the module at ``path`` is ``layer``, from here on: it holds that layer's tensors and
    nothing else, and is no other layer already."""
    node = root
    for part in path.split(".") if path else ():
        if node.inside is not None or part not in node.children:
            return False
        node = node.children[part]
    if node is root or node.built or node.children or {*node.tensors} != {*layer.held}:
        return False
    node.layer = node.layer or layer
    return node.layer == layer


def iterable(root: Node, paths: Sequence[str]) -> str:
    """Text for consecutive members of a list, ``self.layers`` where it is all of them."""
    head, _, first = paths[0].rpartition(".")
    node = root
    for part in head.split(".") if head else ():
        node = node.children[part]
        node = node.inside or node
    text = access(root, head)
    if node.keyed and [p.rpartition(".")[2] for p in paths] == [*node.children]:
        return f"{text}.values()"
    if not node.listed:
        members = [access(root, p) for p in paths]
        return f"({', '.join(members)})"
    start, stop = int(first), int(paths[-1].rpartition(".")[2]) + 1
    if (start, stop) == (0, len(node.children)):
        return text
    return f"{text}[{start or ''}:{stop if stop < len(node.children) else ''}]"


def base(root: Node) -> str:
    """What a class inherits from: a list or dict where its children's names are no attributes."""
    return "nn.ModuleList" if root.listed else "nn.ModuleDict" if root.keyed else "nn.Module"


def declare(root: Node, lines: Lines) -> None:
    """The statements of ``__init__``."""
    if root.listed or root.keyed:
        lines.add(f"super().__init__({_members(root, 'nn.Module()')})")
        _fill("self", root, lines)
        return
    lines.add("super().__init__()")
    for name, text in root.tensors.items():
        lines.add(f"self.{name} = {text}")
    for name, child in root.children.items():
        _declare(f"self.{name}", child, lines)


def _declare(target: str, node: Node, lines: Lines) -> None:
    simple = _simple(node)
    if simple is not None:
        lines.add(f"{target} = {simple}")
        return
    if node.listed or node.keyed:
        lines.add(f"{target} = {_gathered(node, 'nn.Module()')}")
        _fill(target, node, lines)
        return
    lines.add(f"{target} = {_weights(node)}")
    for name, child in node.children.items():
        _declare(f"{target}.{name}", child, lines)


def _fill(target: str, node: Node, lines: Lines) -> None:
    """What a list or dict holds beside the children that are one expression."""
    for name, text in node.tensors.items():
        lines.add(f"{target}.{name} = {text}")
    for name, child in node.children.items():
        place = f"{target}[{name}]" if node.listed else f"{target}[{literal(name)}]"
        if _simple(child) is not None:
            continue
        if child.listed or child.keyed:
            _declare(place, child, lines)
            continue
        for inner, text in child.tensors.items():
            lines.add(f"{place}.{inner} = {text}")
        for inner, below in child.children.items():
            _declare(f"{place}.{inner}", below, lines)


def _gathered(node: Node, unknown: str) -> str:
    """A list or dict of the children; ``unknown`` stands for those that are no expression."""
    return f"{base(node)}({_members(node, unknown)})"


def _members(node: Node, unknown: str) -> str:
    made = {name: _simple(child) or unknown for name, child in node.children.items()}
    if node.listed:
        return f"[{', '.join(made.values())}]"
    numbers = [int(name) for name in made if name.isdigit()]
    run = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
    if len(run) > 1 and [*made] == [str(i) for i in run] and len({*made.values()}) == 1:
        return f"{{str(i): {made[str(run[0])]} for i in range({run.start}, {run.stop})}}"
    pairs = ", ".join(f"{literal(name)}: {text}" for name, text in made.items())
    return f"{{{pairs}}}"


def _weights(node: Node) -> str:
    if not node.tensors:
        return "nn.Module()"
    names = node.layer.held if node.layer is not None else (*node.tensors,)
    held = [f"{name}={node.tensors[name]}" for name in names]
    if node.layer is None:
        return f"Weights({', '.join(held)})"
    return f"{node.layer.kind}({', '.join([*held, *node.layer.options])})"


def _simple(node: Node) -> str | None:
    """One expression for the whole module, if there is one."""
    if node.built:
        return node.built
    if not node.children:
        return _weights(node)
    members = [_simple(child) for child in node.children.values()]
    if None in members or (node.keyed and node.tensors):
        return None
    if node.keyed:
        return _gathered(node, "")
    if not node.listed:
        held = [*node.tensors.items(), *zip(node.children, members, strict=True)]
        return f"Modules({', '.join(f'{name}={text}' for name, text in held)})"
    runs = list(_runs([m for m in members if m is not None]))
    if len(runs) == 1 and runs[0][1] > 1:
        return f"nn.ModuleList({runs[0][0]} for _ in range({runs[0][1]}))"
    if max(count for _, count in runs) > 3 and len(runs) < len(members) / 2:
        parts = [f"*({text} for _ in range({n}))" if n > 1 else text for text, n in runs]
        return f"nn.ModuleList([{', '.join(parts)}])"
    return _gathered(node, "")


def _runs(texts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(text, how many in a row)"""
    start = 0
    for i in range(1, len(texts) + 1):
        if i == len(texts) or texts[i] != texts[start]:
            yield texts[start], i - start
            start = i
