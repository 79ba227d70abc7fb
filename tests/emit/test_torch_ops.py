"""Ops of PyTorch's own database that were refused or wrong when all of it was run for the first
time (`tests.emit.torch_ops`), on what the database calls them with."""

from __future__ import annotations

import pytest
import torch

from tests.emit.as_models import STAGES
from tests.emit.torch_ops import outcomes

MENDED = (
    *"logical_and logical_or logical_xor logical_not complex polar real".split(),
    *"div:floor_rounding addbmm addmv dist var_mean take searchsorted".split(),
    *"index_reduce:amax narrow_copy unbind_copy diagonal_scatter atleast_1d atleast_3d".split(),
    *"cholesky cholesky_inverse cholesky_solve triangular_solve linalg.pinv".split(),
    *"lu lu_unpack linalg.lu linalg.lu_solve linalg.householder_product".split(),
    *"fft.irfft fft.hfft fft.hfftn grid_sampler_3d polygamma:polygamma_n_1".split(),
    *"normal log_normal special.log_ndtr _upsample_bilinear2d_aa".split(),
    *(
        f"nn.functional.{name}"
        for name in (
            "prelu alpha_dropout rrelu feature_alpha_dropout:with_train conv2d conv_transpose2d "
            "adaptive_avg_pool2d adaptive_max_pool2d max_pool1d fractional_max_pool2d "
            "multilabel_margin_loss linear_cross_entropy:chunked linear_cross_entropy:chunked_none"
        ).split()
    ),
)


OF_INTEGERS = "logical_and logical_or logical_xor logical_not masked.logsumexp fft.irfft2".split()
CASES = [(name, torch.float32) for name in MENDED] + [(name, torch.int64) for name in OF_INTEGERS]


@pytest.mark.filterwarnings("ignore")  # the database calls what is deprecated, too
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
@pytest.mark.some(24)
def test_it_is_planned_and_exact(name: str, dtype: torch.dtype) -> None:
    rows = [r for r in outcomes(name, dtype, stages=STAGES[:1]) if r.outcome != "not run"]
    assert rows
    assert {row.outcome for row in rows} == {"right"}, rows
