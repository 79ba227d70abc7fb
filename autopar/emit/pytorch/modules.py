"""The ``__init__`` of a class: submodules under their original names, and how to reach them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.emit.constants import literal
from autopar.emit.names import is_attribute
from autopar.emit.pytorch.site import Layer
from autopar.emit.text import Lines

DICT = frozenset(
    "clear copy extra_repr fromkeys get items keys pop popitem setdefault update values".split()
)
"""What `nn.ModuleDict` and `nn.ParameterDict` have of their own."""


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
        """Some child has a name that cannot be an attribute, and none one that a dict has."""
        odd = any(not is_attribute(n) for n in self.children)
        return odd and not self.listed and not DICT & {*self.children, *self.tensors}

    @property
    def row(self) -> bool:
        """A list of parameters."""
        return self._parameters_alone and [*self.tensors] == [
            str(i) for i in range(len(self.tensors))
        ]

    @property
    def table(self) -> bool:
        """Parameters by names of which some cannot be attributes."""
        odd = any(not is_attribute(n) for n in self.tensors)
        return odd and self._parameters_alone and not self.row and not DICT & {*self.tensors}

    @property
    def _parameters_alone(self) -> bool:
        texts = self.tensors.values()
        alone = bool(texts) and not self.children and self.layer is None
        return alone and all(text.startswith("Parameter(") for text in texts)


@dataclass(frozen=True, slots=True)
class Built:
    """An instance of a class of the program: its constructor's text and what the class declares."""

    text: str
    inside: Node


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


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


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
    if node.children and all(map(_is_number, node.children)):
        node.children = dict(sorted(node.children.items(), key=lambda item: int(item[0])))
    for child in node.children.values():
        _sort(child)


def access(root: Node, path: str) -> str:
    """``self.layers[3].q_proj.weight``"""
    text, node, of_class = "self", root, True
    for part in path.split(".") if path else ():
        if part in node.tensors:
            if of_class or not (node.row or node.table):
                return _member(text, part)
            return f"{text}[{part if node.row else literal(part)}]"
        if node.listed:
            text += f"[{part}]"
        elif node.keyed:
            text += f"[{literal(part)}]"
        else:
            text = _member(text, part)
        node = node.children.get(part, Node())
        of_class = node.inside is not None
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
        _set("self", name, text, lines)
    for name, child in root.children.items():
        _declare("self", name, child, lines)


def _member(owner: str, name: str) -> str:
    return f"{owner}.{name}" if is_attribute(name) else f"getattr({owner}, {literal(name)})"


def _set(owner: str, name: str, text: str, lines: Lines) -> None:
    """``self.weight = ...``"""
    plain = is_attribute(name)
    lines.add(f"{owner}.{name} = {text}" if plain else f"setattr({owner}, {literal(name)}, {text})")


def _declare(owner: str, name: str, node: Node, lines: Lines) -> None:
    """A child, and below it what is no one expression."""
    simple = _simple(node)
    if simple is not None:
        _set(owner, name, simple, lines)
        return
    target = _member(owner, name)
    if node.listed or node.keyed:
        _set(owner, name, _gathered(node, "nn.Module()"), lines)
        _fill(target, node, lines)
        return
    _set(owner, name, _weights(node), lines)
    for inner, child in node.children.items():
        _declare(target, inner, child, lines)


def _fill(target: str, node: Node, lines: Lines) -> None:
    """What a list or dict holds beside the children that are one expression."""
    for name, text in node.tensors.items():
        _set(target, name, text, lines)
    for name, child in node.children.items():
        place = f"{target}[{name}]" if node.listed else f"{target}[{literal(name)}]"
        if _simple(child) is not None:
            continue
        if child.listed or child.keyed:
            lines.add(f"{place} = {_gathered(child, 'nn.Module()')}")
            _fill(place, child, lines)
            continue
        for inner, text in child.tensors.items():
            _set(place, inner, text, lines)
        for inner, below in child.children.items():
            _declare(place, inner, below, lines)


def _gathered(node: Node, unknown: str) -> str:
    """A list or dict of the children; ``unknown`` stands for those that are no expression."""
    return f"{base(node)}({_members(node, unknown)})"


def _members(node: Node, unknown: str) -> str:
    made = {name: _simple(child) or unknown for name, child in node.children.items()}
    if node.listed:
        return f"[{', '.join(made.values())}]"
    numbers = [int(name) for name in made if _is_number(name)]
    run = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
    if len(run) > 1 and [*made] == [str(i) for i in run] and len({*made.values()}) == 1:
        return f"{{str(i): {made[str(run[0])]} for i in range({run.start}, {run.stop})}}"
    return _dict(made)


def _dict(texts: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{literal(name)}: {text}' for name, text in texts.items())}}}"


def _keywords(texts: Mapping[str, str]) -> str:
    """Arguments by name; those whose names cannot be written as such come last, in a dict."""
    plain = [f"{name}={text}" for name, text in texts.items() if is_attribute(name)]
    odd = {name: text for name, text in texts.items() if not is_attribute(name)}
    return ", ".join([*plain, f"**{_dict(odd)}"] if odd else plain)


def _weights(node: Node) -> str:
    if not node.tensors:
        return "nn.Module()"
    if node.row:
        return _parameter_list([*node.tensors.values()])
    if node.table:
        return f"nn.ParameterDict({_dict(node.tensors)})"
    if node.layer is None:
        return f"Weights({_keywords(node.tensors)})"
    held = _keywords({name: node.tensors[name] for name in node.layer.held})
    return f"{node.layer.kind}({', '.join([held, *node.layer.options])})"


def _parameter_list(texts: Sequence[str]) -> str:
    if len({*texts}) == 1 and len(texts) > 1:
        return f"nn.ParameterList({texts[0]} for _ in range({len(texts)}))"
    return f"nn.ParameterList([{', '.join(texts)}])"


def _simple(node: Node) -> str | None:
    """One expression for the whole module, if there is one."""
    if node.built:
        return node.built
    if not node.children:
        return _weights(node)
    members = {name: _simple(child) for name, child in node.children.items()}
    texts = {name: text for name, text in members.items() if text is not None}
    if len(texts) < len(members) or (node.keyed and node.tensors):
        return None
    if node.keyed:
        return _gathered(node, "")
    if not node.listed:
        return f"Modules({_keywords({**node.tensors, **texts})})"
    runs = list(_runs([*texts.values()]))
    if len(runs) == 1 and runs[0][1] > 1:
        return f"nn.ModuleList({runs[0][0]} for _ in range({runs[0][1]}))"
    if max(count for _, count in runs) > 3 and len(runs) < len(texts) / 2:
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
