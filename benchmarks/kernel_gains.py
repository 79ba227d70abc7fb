"""Rows of whole steps in two precisions: what the narrow one gains."""

from __future__ import annotations

import re

from autopar.cost_models.kernels.decoder_step import Decoder, Narrowed, decoder_step_s
from autopar.cost_models.kernels.streams import Constants
from benchmarks.kernel_rows import KernelRow, Unpriceable

MODELS = {
    "llama3_8b": Decoder(32, 4096, 14336, 32, 8, 128, 128256),
    "qwen3_8b": Decoder(36, 4096, 12288, 32, 8, 128, 151936),
    "llama4_scout": Decoder(48, 5120, 8192, 40, 8, 128, 202048, experts=16, visits=1),
    "llama3_70b": Decoder(80, 8192, 28672, 64, 8, 128, 128256),
    "qwen3_32b": Decoder(64, 5120, 25600, 64, 8, 128, 151936),
}
"""Figures of the models' own configurations."""
USUAL_SEQ = 8192
"""Of the runs' repository, where a row says none."""


def model_of(name: str) -> Decoder:
    """The decoder called `name`, cut to `..._2layers` where it says so.

    Raises:
        KeyError: none is known by this name.
    """
    cut = re.fullmatch(r"(.+)_(\d+)layers", name)
    if cut is None:
        return MODELS[name]
    whole = MODELS[cut.group(1)]
    return Decoder(int(cut.group(2)), *[getattr(whole, f) for f in FIGURES])


FIGURES = ("width", "inner", "heads", "kv_heads", "head_dim", "vocab", "experts", "visits")


def narrowed_of(provider: str) -> Narrowed:
    """What a trainer's recipe makes narrow.

    Raises:
        Unpriceable: a recipe that changes something else.
    """
    recipe = provider.split(";")[-1]
    kind = next((k for k in ("nvfp4", "mxfp8", "float8", "fp8", "bf16") if k in recipe), "")
    dtype = {"float8": "fp8_block" if "rowwise" in recipe else "fp8"}.get(kind, kind)
    if not dtype:
        raise Unpriceable(f"recipe {recipe} narrows nothing")
    layers = re.search(r"layers0-(\d+)", recipe)
    many = int(layers.group(1)) + 1 if layers else 0
    if recipe.endswith("_linears"):
        return Narrowed(dtype, "bf16", many)
    if recipe.endswith("_grouped"):
        return Narrowed("bf16", dtype, many)
    return Narrowed(dtype, dtype, many)


def price_step(row: KernelRow, c: Constants) -> float:
    """Seconds of a step's kernels on one device."""
    assert row.device is not None
    model = model_of(row.shape["model"])
    batch, seq = row.size("local_batch", default=1), row.size("seq", default=USUAL_SEQ)
    ranks = row.size("tp", default=1)
    narrowed = narrowed_of(row.provider)
    return decoder_step_s(row.device, model, batch, seq, narrowed, c, ranks)
