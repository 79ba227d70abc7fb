"""Planted errors of ring attention show in its results; what it cannot do is named."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch import ring_attention as ring
from autopar.runtime.pytorch import ring_blocks, ring_kernels, ring_masks, ring_passing
from autopar.runtime.pytorch.ring_attention import ring_attention
from autopar.runtime.shared.settings import ProgramError
from tests.runtime.ring_cases import CASES
from tests.runtime.ring_ranks import around, farthest, operands, whole
from tests.runtime.test_pieces import Alone

WATCHED = ("causal", "zigzag", "window of a piece", "dead rows, zigzag", "trained")
"""Cases that see the errors below."""

EDITED: dict[str, tuple[ModuleType, str, str, str]] = {
    "the gradients of a hop are lost": (
        ring_passing, "_there_and_back",
        "part = part + transport.wait(behind)", "transport.wait(behind)",
    ),
    "gradients go home to the neighbour": (
        ring_passing, "_there_and_back", "1 if more else -back", "1 if more else 1 - back",
    ),
    "the own part of gradients is forgotten": (
        ring_passing, "_there_and_back", "else own + transport", "else transport",
    ),
    "a piece is seen twice": (ring_passing, "_around", "pair = transport.wait", "transport.wait"),
    "the mask of the first piece for all": (
        ring_masks, "of_mask", "first + block.columns[0] : first + block.columns[1]",
        "block.columns[0] : block.columns[1]",
    ),
    "rows that see nothing count as if they saw": (
        ring_kernels, "forward", "lse = lse.masked_fill(", "lse.masked_fill(",
    ),
    "a window is one row wider": (
        ring_kernels, "_seen", "columns > rows - block", "columns >= rows - block",
    ),
    "scores are scaled once in backward": (
        ring_kernels, "_written_out_backward", "view_as(here) * scale", "view_as(here)",
    ),
    "zigzag halves the wrong way round": (
        ring_blocks, "visible", "if source < rank else", "if source > rank else",
    ),
    "each piece is seen like the own": (ring_blocks, "_chunk", "None if gap else 0", "0"),
}  # fmt: skip


@pytest.mark.parametrize("planted", list(EDITED))
def test_a_planted_error_shows(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, right, wrong = EDITED[planted]
    text = inspect.getsource(getattr(module, name))
    assert text.count(right) == 1
    before = getattr(module, name)
    exec(text.replace(right, wrong), vars(module))  # its own globals, so that it calls itself
    edited = getattr(module, name)
    setattr(module, name, before)
    for user in (ring, ring_kernels, ring_blocks, ring_masks, ring_passing):
        if getattr(user, name, None) is before:
            monkeypatch.setattr(user, name, edited)
    worst = 0.0
    for case in (replace(CASES[name], s=24) for name in WATCHED):
        given = operands(case)
        distances = farthest(around(case, given)[0], whole(case, given)).values()
        worst = max(worst, *(d if math.isfinite(d) else math.inf for d in distances))
    assert worst > 1e-3


def unscaled(self: Any, rows: Any, part: Any) -> None:
    """`Softmax.add` that leaves what it has as it is when a larger score comes."""
    here = (slice(None), slice(None), slice(*rows))
    first = self.total[here] == 0
    self.top[here] = torch.where(first, part.top, self.top[here])
    now = (part.top - self.top[here]).clamp(max=0).exp()
    self.summed[here] += part.summed * now[..., None]
    self.total[here] += part.total * now


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("add", unscaled), ("normalizer", lambda self, apart: (self.top, None))],
)
def test_an_error_in_the_merge_shows(
    name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_kernels.Softmax, name, wrong)
    case = CASES["zigzag"]
    given = operands(case)
    assert max(farthest(around(case, given)[0], whole(case, given)).values()) > 1e-3


REFUSED = {
    "dropout": ({"dropout": 0.1}, (4, 4), "train with dropout 0"),
    "odd": (
        {"causal": True, "order": "zigzag"},
        (5, 5),
        "5 is odd; take a sequence that 8 divides",
    ),
    "order": ({"order": "striped"}, (4, 4), "write one of contiguous, zigzag"),
    "window": ({"window": 3}, (4, 4), "a window has causal=True"),
    "no window": ({"window": 0, "causal": True}, (4, 4), "1 row or more"),
    "lengths": ({"causal": True}, (4, 6), "pieces of queries and keys of one length"),
    "mask": ({"mask": torch.zeros(4, 12)}, (4, 4), r"\[1, 2, 4, 16\] or of 1 in their place"),
    "mask of too many dims": ({"mask": torch.zeros(1, 1, 1, 4, 16)}, (4, 4), "is not one of"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_it_cannot_do_is_named(name: str) -> None:
    options, (s, t), message = REFUSED[name]
    with rank_state.using(Alone(Mesh.parse("cp=4"))):
        q, k = torch.zeros(1, 2, s, 4), torch.zeros(1, 2, t, 4)
        with pytest.raises(ProgramError, match=message):
            ring_attention(q, k, k, ring="cp", **options)  # type: ignore[arg-type]


def test_pieces_that_do_not_fit_are_named() -> None:
    x = torch.zeros(1, 2, 4, 4)
    with rank_state.using(Alone(Mesh.parse("cp=4"))):
        for q, k, v, message in (
            (x, x, x[:, :, :3], "pieces of equal length"),
            (x, x[..., :3], x, "as wide as queries"),
            (torch.zeros(1, 3, 4, 4), x, x, "a multiple of those of keys"),
            (x.double(), x, x, "cast them to one dtype"),
        ):
            with pytest.raises(ProgramError, match=message):
                ring_attention(q, k, v, ring="cp")
