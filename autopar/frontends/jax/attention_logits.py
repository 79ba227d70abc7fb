"""From a softmax up to the product before it: the scale and the masks between them.

Indices of the product are followed through views as `views.Factor`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.frontends.jax import views
from autopar.frontends.jax.draft import Builder, Node, Operand, Uniform, Value
from autopar.frontends.jax.views import Dims

MASKED = -1e4  # a fill below this is a mask


@dataclass(slots=True)
class Logits:
    """What stands between the first product and the softmax."""

    product: Node
    scale: float = 1.0
    causal: bool = False
    masks: list[tuple[Operand, Dims]] = field(default_factory=list)


class Climb:
    """From the softmax up to the first product, then the way down again with the indices."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.chain: list[Node] = []
        self.product: Node | None = None
        self.end: Dims = []
        self.key_letter = ""

    def climb(self, x: Operand) -> bool:
        while isinstance(x, Value) and x in self.builder.maker:
            node = self.builder.maker[x]
            if node.kind == "einsum":
                self.product = node
                return len(letters_of(node.attrs["equation"])) == 3
            below = self._operand(node)
            if below is None:
                return False
            self.chain.insert(0, node)
            x = below
        return False

    @staticmethod
    def _operand(node: Node) -> Operand | None:
        """The operand that carries the logits."""
        if node.kind in (*views.VIEWS, "cast"):
            return node.inputs[0]
        if node.kind in ("mul", "div", "add"):
            first, second = node.inputs
            if isinstance(second, Uniform) or node.kind == "add":
                whole = isinstance(first, Value) and first.shape == node.out.shape
                return first if whole else second
            return None
        if node.kind == "where":
            _, a, b = node.inputs
            return a if isinstance(b, Uniform) else b if isinstance(a, Uniform) else None
        return None

    def settle(self, dims: Dims, letter_of: dict[int, str]) -> Logits | None:
        """What the chain does; None where it is not scaling and masking."""
        assert self.product is not None
        scores = Logits(self.product)
        now: Dims | None = dims
        for node in self.chain:
            assert now is not None
            if node.kind in views.VIEWS:
                now = views.followed(now, node)
                if now is None:
                    return None
            elif node.kind in ("mul", "div"):
                number = node.inputs[1]
                if not isinstance(number, Uniform) or scores.masks or scores.causal:
                    return None
                scores.scale *= number.value if node.kind == "mul" else 1 / number.value
            elif node.kind in ("add", "where") and not self._mask(node, now, scores, letter_of):
                return None
        assert now is not None
        self.end = now
        key = letter_at(now[-1], letter_of)
        if not key:
            return None
        self.key_letter = key
        return scores

    def _mask(self, node: Node, dims: Dims, scores: Logits, letters: dict[int, str]) -> bool:
        if node.kind == "where":
            condition, a, b = node.inputs
            fill, keep = (b, True) if isinstance(b, Uniform) else (a, False)
        else:
            logits = self._operand(node)
            bias = node.inputs[1] if node.inputs[0] is logits else node.inputs[0]
            chosen = self.builder.made_by(bias, "where")
            if chosen is None:
                if isinstance(bias, Uniform):
                    return False
                scores.masks.append((bias, dims))
                return True
            condition, a, b = chosen.inputs
            zero = b if isinstance(a, Uniform) and a.value < MASKED else a
            fill, keep = (a, False) if zero is b else (b, True)
            if not isinstance(zero, Uniform) or zero.value != 0:
                return False
        if not isinstance(fill, Uniform) or fill.value > MASKED:
            return False
        return self._condition(condition, keep, dims, scores, letters)

    def _condition(
        self, mask: Operand, keep: bool, dims: Dims, scores: Logits, letters: dict[int, str]
    ) -> bool:
        """``mask`` says where logits are kept (or, without ``keep``, where they are not)."""
        negated = self.builder.made_by(mask, "not")
        if negated is not None:
            return self._condition(negated.inputs[0], not keep, dims, scores, letters)
        both = self.builder.made_by(mask, "and") if keep else None
        if both is not None:
            return all(self._condition(m, True, dims, scores, letters) for m in both.inputs)
        if self._is_causal(mask, keep, dims, letters):
            scores.causal = True
        elif keep:
            scores.masks.append((mask, dims))
        else:
            assert isinstance(mask, Value)
            kept = self.builder.op("not", (mask,), mask.shape, "bool")
            scores.masks.append((kept, dims))
        return True

    def _is_causal(self, mask: Operand, keep: bool, dims: Dims, letters: dict[int, str]) -> bool:
        """``row >= column`` over positions 0, 1, ... of the last dim and of one before it."""
        expanded = self.builder.made_by(mask, "expand", "reshape")
        while expanded is not None:
            mask = expanded.inputs[0]
            expanded = self.builder.made_by(mask, "expand", "reshape")
        node = self.builder.made_by(mask, *(("ge", "le") if keep else ("lt", "gt")))
        if node is None:
            return False
        row, column = node.inputs
        if node.kind in ("le", "gt"):
            row, column = column, row
        sizes = [self._positions(row), self._positions(column)]
        if sizes[0] is None or sizes[0] != sizes[1]:
            return False
        shape = row.shape
        where = [i - len(shape) for i, n in enumerate(shape) if n != 1]
        at_end = column.shape[-1:] == (sizes[1],) and len(where) == 1 and where[0] == -2
        return at_end and letter_at(dims[-2], letters) is not None

    def _positions(self, x: Operand) -> int | None:
        node = self.builder.made_by(x, "reshape", "arange")
        if node is not None and node.kind == "reshape":
            node = self.builder.made_by(node.inputs[0], "arange")
        if node is None or (node.attrs["start"], node.attrs["step"]) != (0, 1):
            return None
        return int(node.attrs["stop"])


def letters_of(equation: str) -> list[list[str]]:
    left, _, right = equation.partition("->")
    return [*(list(term) for term in left.split(",")), list(right)]


def letter_at(dim: list[views.Factor], letter_of: dict[int, str]) -> str | None:
    """The letter of the first product that ``dim`` is; "" for a dim of size one."""
    if not dim:
        return ""
    return letter_of.get(id(dim[0])) if len(dim) == 1 and dim[0].parts is None else None
