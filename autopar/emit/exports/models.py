"""Published transformers by their sizes, and what trainers call them."""

from __future__ import annotations

from autopar.emit.exports.setup import Figures, Setup

LLAMA3_8B = Figures(32, 4096, 14336, 128256)
LLAMA3_70B = Figures(80, 8192, 28672, 128256)
LLAMA3_405B = Figures(126, 16384, 53248, 128256)
QWEN3_14B = Figures(40, 5120, 17408, 151936)
QWEN3_32B = Figures(64, 5120, 25600, 151936)
QWEN3_30B_A3B = Figures(48, 2048, 768, 151936, 128)
MIXTRAL_8X7B = Figures(32, 4096, 14336, 32000, 8)
DEEPSEEK_V3 = Figures(61, 7168, 2048, 129280, 256)


def named(setup: Setup, names: dict[Figures, str], example: str) -> tuple[str, bool]:
    """(the trainer's name of the model, True), or (``example``, False) where it has none."""
    known = None if setup.figures is None else names.get(setup.figures)
    return (example, False) if known is None else (known, True)


def stand_in(present: bool, name: str, what: str) -> str:
    """The sentence for a model that stands in for the user's; empty where the model is known."""
    if present:
        return ""
    return (
        f"the model: put {what} in the place of {name}; a trainer of its own models runs no other"
    )
