"""What is costly to make again, so that its results are kept where blocks run again in backward.

One table: prices count what it says of op kinds, and the runtimes keep what it says of calls.
PyTorch keeps these under ``selective-op``; JAX programs wherever nothing else is asked for, since
XLA makes all else again in the kernels that read it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costly:
    """Results that are worth their memory.

    kinds:      of `autopar.nouns.kinds`, by which prices know the op.
    torch:      ops of torch's dispatcher, aten's where no other library is named; none: PyTorch
                makes it again.
    primitives: of JAX.
    """

    kinds: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()
    primitives: tuple[str, ...] = ()


BY_MATRIX = Costly(
    ("linear", "linear_t", "experts", "grouped_linear"),
    ("mm", "addmm", "linear", "_grouped_mm", "autopar::scaled_product"),
    ("dot_general", "ragged_dot"),
)
"""JAX keeps all products, whatever their kind (a rule's cost is ``matmul``). PyTorch keeps a
``matmul`` where one factor is a matrix: batched ones of attention that is written out would keep
the scores."""
CONVOLUTION = Costly(("conv",), ("convolution",), ("conv_general_dilated",))
ATTENTION = Costly(
    ("attention",),
    tuple(
        f"_scaled_dot_product_{name}_attention{of}"
        for name, of in (("flash", ""), ("flash", "_for_cpu"), ("efficient", ""), ("cudnn", ""))
    ),
    ("name", "dot_product_attention_fwd_wrapper"),  # `name`: of the loop that is written out
)
"""Kernels that do not write the scores out. Dropout draws numbers: were it not run again, all that
is drawn after it would differ, so in PyTorch attention with dropout is."""
TABLE = (
    BY_MATRIX,
    CONVOLUTION,
    ATTENTION,
    Costly(("embedding", "gather", "index_select"), (), ("gather",)),
    Costly(("max_pool",), (), ("reduce_window_max",)),
    Costly(("jax::sort", "jax::top_k"), (), ("sort", "top_k")),
    Costly(("cumsum",), (), ("cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod")),
    Costly(("argmax",), (), ("argmax", "argmin")),
)
COLLECTIVES = Costly(
    (),
    (
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "wait_tensor",
    ),
    ("psum", "pmax", "all_gather", "reduce_scatter", "all_to_all"),
)
"""Kept under ``compute`` too; in JAX but for gathered parameters."""
