"""From a softmax up to the product before it: the scale and the masks between them.

Indices of the product are followed through views as `views.Factor`. What a mask of places says of
rows and columns (`known_places`) is joined: each row sees a band of columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.frontends.jax import views
from autopar.frontends.jax.draft import Builder, Node, Operand, Uniform, Value
from autopar.frontends.jax.known_arrays import HIDDEN
from autopar.frontends.jax.known_places import Places
from autopar.frontends.jax.views import Dims
from autopar.frontends.shared.facts import Test, inverse


@dataclass(frozen=True, slots=True)
class Band:
    """Rows, by their letter, see the columns from ``back`` before their own place to ``ahead``."""

    row: str
    back: float = math.inf
    ahead: float = math.inf

    def within(self, other: Band) -> Band:
        return Band(self.row, min(self.back, other.back), min(self.ahead, other.ahead))


@dataclass(slots=True)
class Logits:
    """What stands between the first product and the softmax.

    masks:  where scores count, or what is added to them.
    band:   what the masks in ``places`` say together, which are not among those.
    """

    product: Node
    scale: float = 1.0
    masks: list[tuple[Operand, Dims]] = field(default_factory=list)
    band: Band | None = None
    places: list[tuple[Operand, Dims]] = field(default_factory=list)


class Climb:
    """From the softmax up to the first product, then the way down again with the indices."""

    def __init__(self, builder: Builder, places: Places) -> None:
        self.builder = builder
        self.places = places
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
                if not isinstance(number, Uniform) or scores.masks or scores.places:
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
            condition, a, b = (bias, bias, bias) if chosen is None else chosen.inputs
            zero = b if isinstance(a, Uniform) and a.value < HIDDEN else a
            fill, keep = (a, False) if zero is b else (b, True)
            hides = isinstance(fill, Uniform) and fill.value <= HIDDEN
            if not hides or not isinstance(zero, Uniform) or zero.value != 0:
                scores.masks.append((bias, dims))
                return not isinstance(bias, Uniform)
        if not isinstance(fill, Uniform) or fill.value > HIDDEN:
            return False
        return self._condition(condition, keep, dims, scores, letters)

    def _condition(
        self, mask: Operand, keep: bool, dims: Dims, scores: Logits, letters: dict[int, str]
    ) -> bool:
        """``mask`` says where logits are kept (or, without ``keep``, where they are not)."""
        band = self._band(mask, keep, dims, letters)
        if band is not None and (scores.band is None or scores.band.row == band.row):
            scores.band = band if scores.band is None else scores.band.within(band)
            scores.places.append((self._kept(mask, keep), dims))
            return True
        negated = self.builder.made_by(mask, "not")
        if negated is not None:
            return self._condition(negated.inputs[0], not keep, dims, scores, letters)
        both = self.builder.made_by(mask, "and") if keep else None
        if both is not None:
            return all(self._condition(m, True, dims, scores, letters) for m in both.inputs)
        scores.masks.append((self._kept(mask, keep), dims))
        return True

    def _kept(self, mask: Operand, keep: bool) -> Operand:
        """Where logits are kept; an op that nothing reads is dropped later."""
        return mask if keep else self.builder.op("not", (mask,), mask.shape, "bool")

    def _band(self, mask: Operand, keep: bool, dims: Dims, letters: dict[int, str]) -> Band | None:
        """What a mask says that compares places of a row and of the column, the last dim."""
        test = self.places.fact(mask, self.builder)
        if isinstance(test, Test) and not keep:
            test = inverse(test)
        if not isinstance(test, Test) or not test.least:
            return None
        rows: set[int] = set()
        back = ahead = math.inf
        for coefficients, const in test.least:
            counting = {d: c for d, c in enumerate(coefficients) if c}
            column = counting.pop(len(coefficients) - 1, 0)
            row = sum(counting.values())
            if len(counting) != 1 or abs(row) != 1 or row != -column:
                return None
            rows.update(counting)
            if row == 1:  # row - column + const >= 0
                ahead = min(ahead, const)
            else:
                back = min(back, const)
        if len(rows) != 1:
            return None
        letter = letter_at(dims[rows.pop() - len(test.shape)], letters)
        return Band(letter, back, ahead) if letter else None


def letters_of(equation: str) -> list[list[str]]:
    left, _, right = equation.partition("->")
    return [*(list(term) for term in left.split(",")), list(right)]


def letter_at(dim: list[views.Factor], letter_of: dict[int, str]) -> str | None:
    """The letter of the first product that ``dim`` is; "" for a dim of size one."""
    if not dim:
        return ""
    return letter_of.get(id(dim[0])) if len(dim) == 1 and dim[0].parts is None else None
