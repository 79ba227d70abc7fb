"""The op kinds: what both frontends produce and both backends emit.

One line a kind: operands (``?`` optional), attrs, meaning. Scalars never are operands, they are
attrs. A kind that stands here has a rule in `autopar.rules`; other kinds need one registered by
the user. ``torch`` or ``jax`` in an op's attrs is the original call, see the frontends.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OWN_DERIVATIVE = "custom::"
"""Before the name of a function whose derivative is its own: forward and backward are its graphs as
text, backward maps operands and results' gradients to the gradients of the operands at the
positions ``gradients``; rule, where it can be split, is what `autopar.rules.composite` found."""

SWITCH, LOOP, SCAN = "jax::cond", "jax::while", "jax::scan"
"""A branch, whose first operand is the number of the body that runs; a loop, whose first body says
whether it goes on; and a scan over time, whose body is one step: it maps constants, carries and
rows of stacked operands to carries and rows of stacked results."""
EACH = "each"
"""Of a loop: every sample stops it for itself, and stays as it is then; its first body says whether
any goes on, which a rank may ask of its own samples alone."""
BODIES, TAKES, CARRIED, UNGRADED = "bodies", "takes", "carried", "ungraded"
"""Attrs of these: the bodies' graphs as text; for each the positions of its operands; of a loop and
a scan the positions of the operands that it begins with, one for each of its first results; the
results to which no gradient comes back, as none does through a loop or to integers: one that lacks
an index that is split was made without it, so it is the same on all ranks. Their rule stands
beside, as of functions with a derivative of their own."""
STACKED, LENGTH, REVERSE, AGAIN = "stacked", "length", "reverse", "again"
FLOPS, PRODUCTS, KEEPS, PAIRS = "flops", "products", "keeps", "pairs"
"""Attrs of a scan: the positions of its operands that each step has a row of, as it makes one of
the results behind the carries; how many steps; whether the last comes first; whether backward runs
each step again (`jax.checkpoint`). And, of all steps, as `autopar.rules.body_work` has them:
floating-point operations as `Rule.flop_terms`, whether those of products alone, and what is kept
for backward, as `Kept`, in bytes. Where no dim can be split, which ops of a step stand against
it, in words."""

CROSS_ENTROPIES = frozenset({"cross_entropy", "linear_cross_entropy"})
"""Their second operand has the labels."""

WIDE_LOSSES = CROSS_ENTROPIES | {"ctc_loss"}
"""Kinds that compute in float32 at least, and whose results stay so in half precision."""

OF_ROWS = "_of_rows"
"""Behind the name of a view of logits, that of one of the rows that a loss in chunks takes."""

DRAWS = frozenset({"dropout", "noise"})
"""Kinds that draw random numbers: made again, they would draw others. Attention may too, by its
``dropout_p``; its results are differentiable, and such are never made again elsewhere."""

KINDS: Mapping[str, str] = MappingProxyType(
    {
        # calls
        "block": "inputs of the body; block, instance: one occurrence of a repeated block",
        # matrix products (a bias is a separate add; emitters fuse it back)
        "linear": "x [..., k], weight [n, k]; -> [..., n]",
        "linear_t": "x [..., k], weight [k, n]; -> [..., n] (Conv1D of GPT-2, jnp.dot)",
        "matmul": "a [..., m, k], b [..., k, n]",
        "einsum": "operands; equation",
        "grouped_linear": "x [n, k], index [n] of groups, weight [g, k, m]; -> [n, m], each row by "
        "the matrix of its group",
        "conv": "x [b, c, *s], weight [o, c/groups, *k]; stride, padding, dilation, groups",
        # attention, one op: q [b, h, s, d], k and v [b, g, t, d], h a multiple of g
        "attention": "q, k, v, mask?; causal, scale (float or null), dropout_p, window? (columns "
        "that a row sees at most, its own the last), strip? (rows computed at a time then), "
        "documents? (then numbers of rows [b|1, s] and of columns [b|1, t] stand for the mask, and "
        "a row sees columns of its own number alone), document_tokens? (how long a row's is), "
        "sinks? (then the last operand [h] is one more logit of each row, whose weight is lost), "
        "kernel? (which runs it, `autopar.rules.implementations.kernels`)",
        "rotary": "x [b, h, s, d], cos [b|1, s, d], sin [b|1, s, d]; style (half)",
        "repeat_heads": "x [b, g, t, d]; repeats: -> [b, g*repeats, t, d]",
        # normalisation
        "layer_norm": "x, weight?, bias?; dims (count of trailing dims), eps",
        "rms_norm": "x, weight?; eps, upcast (compute in fp32), scale_offset (0 or 1: gemma), "
        "weight_first? (scaled before the cast back)",
        "group_norm": "x [b, c, *s], weight?, bias?; groups, eps",
        "batch_norm": "x [b, c, *s], weight?, bias?, running_mean?, running_var?; eps, momentum, "
        "affine (weight and bias are there), training, updates_buffers",
        "softmax": "x; dim, dtype?",
        "log_softmax": "x; dim, dtype?",
        # vocabulary
        "embedding": "ids [...], weight [v, d]; padding_idx",
        "cross_entropy": "logits [t, v], labels [t]; ignore_index, reduction (mean|sum), "
        "label_smoothing, upcast? (logits in fp32)",
        "linear_cross_entropy": "x [t, k], labels [t], weight [v, k], bias? [v]; chunks (of rows, "
        "one after the other), ignore_index, reduction (mean|sum), label_smoothing, scale (of the "
        "logits), cap (null, or logits are cap tanh(. / cap)), transposed? (weight is [k, v]), "
        "wide? (logits in float32 at least): `autopar.rules.loss_heads` makes it",
        # sequences without alignment
        "ctc_loss": "log_probs [t, n, c], targets [n, s], input_lengths [n], target_lengths [n]; "
        "blank, zero_infinity: -> [n], not divided by lengths",
        "gated_activation": "gate [...], up [...]; activation (silu, gelu_tanh), kernel: act(gate) "
        "up, `autopar.rules.kernels` makes it",
        # elementwise, broadcasting; a missing second operand is attr `other`
        # (attr `scalar_first` where the scalar stands on the left)
        **{
            kind: "elementwise, two operands or one and `other`"
            for kind in (
                "add",
                "sub",
                "mul",
                "div",
                "pow",
                "maximum",
                "minimum",
                "eq",
                "ne",
                "lt",
                "le",
                "gt",
                "ge",
                "and",
                "or",
                "xor",
                "remainder",
                "floor_divide",
            )
        },
        **{
            kind: "elementwise, one operand"
            for kind in (
                "neg",
                "exp",
                "log",
                "sqrt",
                "rsqrt",
                "tanh",
                "sigmoid",
                "relu",
                "gelu",
                "silu",
                "sin",
                "cos",
                "abs",
                "not",
                "erf",
                "square",
                "softplus",
                "leaky_relu",
                "elu",
                "hardtanh",
                "mish",
                "reciprocal",
                "identity",
                "detach",
                "clamp",
                "isinf",
                "isnan",
                "sign",
                "floor",
            )
        },
        "cast": "x; dtype, own? (of float32, as the loss asks in the plan's half precision)",
        "where": "condition, a?, b?; a, b scalars in attrs where not operands",
        "masked_fill": "x, mask; value",
        "dropout": "x; p, features? (one draw for each feature of x [b, c, *s]), alpha? (SELU's, "
        "Klambauer et al. 2017)",
        # shapes
        "reshape": "x; shape (view, flatten, squeeze, unsqueeze)",
        "transpose": "x; dims (a permutation)",
        "expand": "x; shape",
        "slice": "x; dim, start, stop, step",
        "select": "x; dim, index",
        "split": "x; dim, sizes: -> one result per size (chunk, unbind keeps `squeeze: true`)",
        "cat": "operands; dim",
        "stack": "operands; dim",
        "pad": "x; low_high (pairs, outermost dim first), value",
        "flip": "x; dims",
        "roll": "x; dims, shifts",
        # reductions
        "sum": "x; dims, keepdim",
        "mean": "x; dims, keepdim",
        "amax": "x; dims, keepdim, one? (of equal numbers one has the gradient, as of torch.max "
        "over a dim; else they share it)",
        "amin": "x; dims, keepdim",
        "any": "x; dims, keepdim",
        "all": "x; dims, keepdim",
        "argmax": "x; dim, keepdim",
        "var": "x; dims, keepdim, correction",
        "cumsum": "x; dim",
        # left for the next step
        "carry": "buffer, value: the buffer holds the value when the step has ended; -> the value",
        # made from nothing
        "full": "-; shape, value, dtype",
        "arange": "-; start, stop, step, dtype",
        "constant": "-; value (nested lists), dtype",
        "noise": "-; shape, dtype, distribution, given (uniform: low, high; normal: mean, "
        "deviation; bernoulli: p; exponential: rate; integers: low, high): random numbers",
        "tril": "x; diagonal",
        "triu": "x; diagonal",
        # lookups
        "gather": "x, index; dim",
        "index_select": "x, index; dim",
        "index": "x, index...; dims: advanced indexing with broadcast index tensors",
        "scatter": "x, index, src; dim",
        "scatter_sum": "src, index of its shape; dim, shape: src is added to zeros of the shape at "
        "the places along dim that index names; all other dims are those of src",
        "place_rows": "x [*m, *r], mask [*m], rows [n, *r]: rows in their order at the places "
        "of x where the mask is true; more? (n may be more than there are)",
        "row_places": "mask [b, s]; count: -> [b, count], where each row is true, as often in each",
        "one_hot": "ids; classes",
        # routed layers: a token goes through k of e experts, their results are weighted and added
        "experts": "x [n, d], index [n, k] (of experts), weights [n, k], up [e, g, d], "
        "down [e, d, f], up_bias? [e, g], down_bias? [e, d]; gate (steps between the products: "
        "kind, operands, attrs; the last one's result is [.., f]), reads (all: operand 0 of the "
        "gate is what up gives; halves, pairs: g = 2 f, operands 0 and 1 are its halves, or take "
        "turns in it; apart: two matrices up, operands 0 and 1 are what they give), transposed "
        "(up [e, d, g], down [e, f, d]), bias, stays? (no tokens travel to them)",
        "feed_forward": "x [..., s, k], ups matrices [f, k], matrix [o, f], for each place in "
        "biases one [f]; ups, biases (of which first products), gate (steps between the products, "
        "as of experts; operand i is what first product i gives), transposed (matrices [k, f], "
        "[f, o]), chunks (of s, one after the other): -> [..., s, o], `autopar.rules.feed_forwards`"
        " makes it",
        # pooling, images
        "max_pool": "x [b, c, *s]; kernel, stride, padding, dilation, ceil_mode",
        "avg_pool": "x [b, c, *s]; kernel, stride, padding",
        "adaptive_avg_pool": "x [b, c, *s]; output",
        "interpolate": "x [b, c, *s]; output, mode",
    }
)
