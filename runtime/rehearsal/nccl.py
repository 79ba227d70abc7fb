"""What NCCL takes: the reasons for which torch's NCCL group, or NCCL, refuses a collective.

Of ``getNcclDataType`` (torch's ``NCCLUtils.cpp``; int16 is refused: pytorch issue 42519, and
complex numbers go as pairs of real ones) and of what ``ProcessGroupNCCL.cpp`` checks of layout and
sizes. Nothing here was held against a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

DTYPES = frozenset(
    {
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e5m2, torch.float8_e4m3fn),
    }
)
POINT_TO_POINT = ("send", "recv_", "recv_any_source_")


def refusal(op: str, tensors: Sequence[torch.Tensor], ranks: int) -> str:
    """Why NCCL refuses the collective ``op`` (as in ``torch.ops.c10d``) of ``tensors`` on a device,
    over so many ranks; empty where it takes it."""
    for tensor in tensors:
        dtype = tensor.dtype
        if dtype.is_complex and op in ("allreduce_", "broadcast_", "send", "recv_"):
            dtype = torch.view_as_real(tensor).dtype
        if dtype not in DTYPES:
            return f"NCCL has no {str(tensor.dtype).removeprefix('torch.')}"
        if tensor.is_sparse:
            return "NCCL takes dense tensors"
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return "NCCL takes tensors without gaps or overlaps"
        if op in POINT_TO_POINT and not tensor.is_contiguous():
            return "NCCL sends and receives contiguous tensors"
    if len({tensor.dtype for tensor in tensors}) > 1:
        return "one collective has one dtype"
    return _sizes(op, tensors, ranks)


def _sizes(op: str, tensors: Sequence[torch.Tensor], ranks: int) -> str:
    if op == "_allgather_base_":
        whole, part = tensors
        if whole.numel() != part.numel() * ranks:
            return (
                f"an output of {whole.numel()} elements for {ranks} pieces of {part.numel()}: it "
                "must hold one of every rank"
            )
    if op == "_reduce_scatter_base_":
        part, whole = tensors
        if whole.numel() != part.numel() * ranks:
            return (
                f"an input of {whole.numel()} elements for {ranks} pieces of {part.numel()}: every "
                "rank gets as many"
            )
    return ""
