"""The feed-forward part of a layer: an MLP, or experts beside it."""

from __future__ import annotations

from autopar.frontends.family.arch import Arch
from autopar.frontends.family.draft import Draft

TOP_K = "aten::topk"
_STORED = {"bias": False, "transposed": False}
GATED = {"reads": "pairs", "gate": (("silu", (0,), {}), ("mul", (2, 1), {})), **_STORED}
PLAIN = {"reads": "all", "gate": (("gelu", (0,), {"approximate": "none"}),), **_STORED}
"""How experts read what their first product gives, and what they make of it."""


def mlp(g: Draft, arch: Arch, normed: str, width: int, module: str = "mlp", names: str = "") -> str:
    """``names``: what stands before those of its products."""
    *rows, _ = g.tensors[normed].shape
    between = (*rows, width)
    biases = arch.has_biases
    if arch.gated:
        gate = g.op("silu", module, (g.product(f"{names}gate", normed, width, biases),), between)
        up = g.product(f"{names}up", normed, width, biases)
        y = g.op("mul", module, (gate, up), between)
    else:
        up = g.product(f"{names}up", normed, width, biases)
        y = g.op("gelu", module, (up,), between, approximate="none")
    return g.product(f"{names}down", y, arch.hidden, biases)


def experts(g: Draft, arch: Arch, normed: str) -> str:
    """``top_k`` of the experts for each token, and those that all tokens visit as one MLP.

    A router's scores are normalised over the experts, then over those that are taken. Gate and
    gated values take turns in the matrices, which tensor parallelism can so split.
    """
    *outer, hidden = g.tensors[normed].shape
    count = outer[0] * outer[1]
    rows = g.op("reshape", "routed", (normed,), (count, hidden), shape=(count, hidden))
    every, taken = (count, arch.experts), (count, arch.top_k)
    scores = g.product("router", rows, arch.experts, False)
    scores = g.op("softmax", "router", (scores,), every, dim=1, dtype="float32")
    call = {
        "target": "aten.topk.default",
        "args": ("%0", arch.top_k),
        "kwargs": {},
        "public": {"function": "torch.topk", "args": ("%0",), "settings": {"k": arch.top_k}},
    }
    results = ((taken, "float32"), (taken, "int64"))
    best, index = g.several(TOP_K, "router", (scores,), results, torch=call)
    total = g.op("sum", "router", (best,), (count, 1), dims=(1,), keepdim=True)
    weights = g.op("div", "router", (best, total), taken)
    wide = 2 * arch.ffn if arch.gated else arch.ffn
    up = g.parameter("experts.up", arch.experts, wide, hidden)
    down = g.parameter("experts.down", arch.experts, hidden, arch.ffn)
    inputs = (rows, index, weights, up, down)
    y = g.op("experts", "experts", inputs, (count, hidden), **(GATED if arch.gated else PLAIN))
    y = g.op("reshape", "routed", (y,), (*outer, hidden), shape=(*outer, hidden))
    if not arch.shared_experts:
        return y
    beside = mlp(g, arch, normed, arch.ffn * arch.shared_experts, "shared", "shared_")
    return g.op("add", "routed", (y, beside), (*outer, hidden))
