"""Names of variables, attributes and classes in the program."""

from __future__ import annotations

import builtins
import keyword
import re
import unicodedata
from collections.abc import Iterable

_SUFFIX = re.compile(r"(_proj|_projection|_lin|_linear|_layer)$")
# Projections whose result goes back into the stream.
_OUTGOING = frozenset(
    "o out down c_proj dense proj fc2 w2 wo output out_proj o_proj down_proj lin2".split()
)
_HEADS = frozenset("lm_head head classifier score fc_out embed_out".split())
_BY_KIND = {
    "attention": "mixed",
    "cross_entropy": "loss",
    "linear_cross_entropy": "loss",
    "ctc_loss": "losses",
    "cos": "cos",
    "sin": "sin",
    "embedding": "x",
    "arange": "positions",
    "noise": "noise",
    "row_places": "places",
    "softmax": "weights",
    "log_softmax": "logits",
}
_STREAM = frozenset({"linear", "linear_t", "conv", "layer_norm", "rms_norm", "batch_norm"})
# What programs import from the runtime; variables leave these names alone.
FUNCTIONS = frozenset(
    "all_reduce all_to_all attention batch_norm carry copied_linear copied_linears copy_to"
    " cross_entropy ctc_loss device dropout embedding experts feed_forward gated_activation gather"
    " gathered_linear gathered_linears keep_first linear_cross_entropy linear_reduced"
    " linear_scattered local own_function pad place_rows recompute reduce_scatter repeat_heads"
    " ring_attention rms_norm rotary row_places scaled_linear scatter_sum shard sliced_attention"
    " whole".split()
)
# Python's own functions, which variables do not hide.
BUILTINS = frozenset(name for name in dir(builtins) if name.islower())
# Those that forwards call.
CALLED = frozenset("complex enumerate float range zip".split())
# Layers of the runtime that hold local pieces.
LAYERS = frozenset("BatchNorm Conv Embedding GroupNorm LayerNorm Linear RMSNorm".split())
RESERVED = frozenset(keyword.kwlist) | {"F", "self", "nn", "torch", "local", "counts", "batch"}


def is_attribute(name: str) -> bool:
    """Whether ``self.<name>`` is what is called ``name``: Python has a normal form of names, and in
    classes hides those that begin with two underscores."""
    hidden = name.startswith("__") and not name.endswith("__")
    plain = name.isascii() or unicodedata.is_normalized("NFKC", name)
    return name.isidentifier() and not keyword.iskeyword(name) and plain and not hidden


def identifier(text: str) -> str:
    """``text`` as a lower-case Python name."""
    name = _letters(text).strip("_").lower()
    if not name.isidentifier():
        name = f"x{name}"
    return f"{name}_" if name in RESERVED else name


def is_argument(name: str) -> bool:
    """Whether a forward may call its argument so, and still reach what its body is written with."""
    constant = name.isupper() and len(name) > 1  # SEQUENCE, FP32
    return is_attribute(name) and not constant and name not in RESERVED | FUNCTIONS | CALLED


def _letters(text: str) -> str:
    """``text`` in the form in which Python reads names; what no name has is ``_``."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).lower())
        text = "".join(c if f"x{c}".isidentifier() else "." for c in text)
    return re.sub(r"\W+", "_", text)


def class_name(path: str) -> str:
    """``self_attn`` -> ``SelfAttn``, ``layers.3`` -> ``Layer``."""
    parts = [p for p in path.split(".") if p and not p.isdigit() and p != "*"]
    last = parts[-1] if parts else "block"
    if path.split(".")[-1].isdigit() or path.endswith("*"):
        last = last[:-1] if last.endswith("s") and not last.endswith("ss") else last
        last = "block" if last == "h" else last
    return class_of("".join(p[:1].upper() + p[1:] for p in re.split(r"\W|_", last) if p))


def class_of(name: str) -> str:
    """``name`` as that of a class, as it is where it can be: ``Module0``, ``MyLinear``."""
    if name and is_attribute(name):
        return name
    parts = re.split(r"\W", unicodedata.normalize("NFKC", name))
    spelled = "".join(p[:1].upper() + p[1:] for p in parts if f"x{p}".isidentifier())
    return spelled if is_attribute(spelled) else f"Module{spelled}"


def preferred(name: str, kind: str) -> str:
    """What the result of an op would like to be called; "" for no hint."""
    if kind == "embedding" and re.match("pos|wpe$", name.rpartition("/")[0].split(".")[-1]):
        return "positions"
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    if kind not in _STREAM:
        return ""
    module = name.rpartition("/")[0].split(".")[-1]
    if module in _HEADS:
        return "logits"
    if not module or module.isdigit() or module in _OUTGOING or "norm" in kind:
        return "x"
    if re.fullmatch(
        r"(c_)?fc\d*|w\d|lin\d|intermediate|conv\d*|shortcut|downsample|dense\w*", module
    ):
        return "x"
    return identifier(_SUFFIX.sub("", module)) or "x"


def first_free(hints: Iterable[str], taken: Iterable[str]) -> str:
    """The first hint that is not taken and no keyword, else the last with a number."""
    used = {*taken, *keyword.kwlist}
    last = "x"
    for hint in hints:
        if hint and hint not in used:
            return hint
        last = hint or last
    number = 2
    while f"{last}{number}" in used:
        number += 1
    return f"{last}{number}"
