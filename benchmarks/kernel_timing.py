"""Kernels on a device beside torch eager, torch.compile and Liger, at shapes of published models.

Imports torch, triton and the kernels alone. A call that fails is a row with its error, and the
others go on; torch.compile comes last, as far as the seconds go.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import relative
from benchmarks.kernel_shapes import Shape, arguments, shapes

Call = Callable[[], Any]
WAYS = ("ours", "eager", "compile", "liger")
ROUNDING = 2.0**-8
"""Of bfloat16, relative."""


def cuda_milliseconds(call: Call) -> float:
    """Median, each run with a cold L2 cache."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=50, return_mode="median"))


def timed(device: torch.device, seconds: float, clock: Callable[[Call], float]) -> dict[str, Any]:
    """Rows, targets and the machine. ``seconds``: after which no other call is begun."""
    stop = time.monotonic() + seconds
    rows = []
    every = shapes()
    for shape in every:
        rows.append({"kernel": shape.kernel, "shape": shape.name, "failed": {}})
        if time.monotonic() < stop:
            compare(shape, device, rows[-1])
            for way in ("ours", "eager", "liger"):
                time_way(shape, way, device, clock, rows[-1])
    # One shape of each kernel, then a second of each, ...: so that all are seen.
    order = [list(same) for _, same in groupby(range(len(every)), lambda n: every[n].kernel)]
    for nth in range(max(map(len, order))):
        for same in order:
            if nth < len(same) and time.monotonic() < stop:
                time_way(every[same[nth]], "compile", device, clock, rows[same[nth]])
    return {
        "rows": rows,
        "means": means(rows),
        "targets": targets(rows),
        "seconds": round(time.monotonic() - stop + seconds, 1),
        "machine": _machine(device),
    }


def function(shape: Shape, way: str) -> Callable[..., Any] | None:
    """None where there is none; ImportError where Liger is not installed."""
    if way == "liger":
        return shape.liger() if shape.liger else None
    if way == "compile":
        torch.compiler.reset()
        return torch.compile(shape.eager, dynamic=False)
    return shape.ours if way == "ours" else shape.eager


def time_way(
    shape: Shape,
    way: str,
    device: torch.device,
    clock: Callable[[Call], float],
    row: dict[str, Any],
) -> None:
    """Milliseconds of forward, and of forward and backward with the MiB that these take on top."""
    try:
        called = function(shape, way)
        if called is None:
            return
        forward, both = _calls(called, shape, device)
        forward()
        row[f"{way}_forward_ms"] = clock(forward)
        if both is not None:
            both()
            row[f"{way}_mib"] = _peak(both, device)
            row[f"{way}_both_ms"] = clock(both)
    except ImportError:
        return
    except Exception as error:  # a row of its own: the others go on
        row["failed"][way] = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        _clear(device)


def _calls(
    called: Callable[..., Any], shape: Shape, device: torch.device
) -> tuple[Call, Call | None]:
    """(forward, forward and backward) on inputs of their own."""
    leaves, every = arguments(shape, device)
    if not shape.differentiable:
        return lambda: called(*every), None
    grads = [torch.randn_like(t) for t in _results(called(*every))]

    def both() -> Sequence[Tensor]:
        return torch.autograd.grad(_results(called(*every)), leaves, grads)

    return lambda: called(*every), both


def compare(shape: Shape, device: torch.device, row: dict[str, Any]) -> None:
    """Errors of ours and of eager beside float32, and whether a second backward is the same."""
    try:
        leaves, every = arguments(shape, device)
        results, row["repeated"] = _outcome(shape.ours, leaves, every)
        if not shape.differentiable:
            plain = _results(shape.eager(*every))
            row["error"] = max(relative(a, b) for a, b in zip(results, plain, strict=True))
            row["eager_error"] = 0.0
            return
        eager, _ = _outcome(shape.eager, leaves, every)
        wide = [t.float() if _is_float(t) else t for t in every]
        wide_leaves = [t.detach().requires_grad_() for t in wide[: len(leaves)]]
        wanted, _ = _outcome(shape.eager, wide_leaves, [*wide_leaves, *wide[len(leaves) :]])
        for name, values in (("error", results), ("eager_error", eager)):
            pairs = zip(values, wanted, strict=True)
            row[name] = max(_off(a, b) for a, b in pairs)
    except Exception as error:  # a row of its own: the others go on
        row["failed"]["compared"] = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        _clear(device)


def _outcome(
    called: Callable[..., Any], leaves: Sequence[Tensor], every: Sequence[Any]
) -> tuple[list[Tensor], bool]:
    """(results and gradients, whether a second backward gave the same)."""
    results = _results(called(*every))
    if not leaves:
        return results, True
    generator = torch.Generator(results[0].device).manual_seed(1)
    grads = [
        torch.randn(t.shape, generator=generator, device=t.device).bfloat16().to(t.dtype)
        for t in results
    ]
    first = torch.autograd.grad(results, leaves, grads, retain_graph=True)
    second = torch.autograd.grad(results, leaves, grads)
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return [t.detach() for t in (*results, *first)], same


def _results(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _off(result: Tensor, wanted: Tensor) -> float:
    """In float32 and in place: the largest of these tensors have 4 GB."""
    off = result.float().sub_(wanted).abs_().amax()
    return (off / wanted.abs().amax().clamp(min=1e-30)).item()


def _peak(call: Call, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _clear(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def means(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each kernel and each other way: the geometric mean of its time over ours."""
    result: dict[str, dict[str, float]] = {}
    for row in rows:
        result.setdefault(row["kernel"], {})
    for kernel, of in result.items():
        mine = [row for row in rows if row["kernel"] == kernel]
        for way in WAYS[1:]:
            for part in ("forward", "both"):
                keys = f"{way}_{part}_ms", f"ours_{part}_ms"
                pairs = [
                    (row[keys[0]], row[keys[1]]) for row in mine if all(k in row for k in keys)
                ]
                if pairs:
                    logs = [math.log(other / ours) for other, ours in pairs]
                    of[f"{way} {part} / ours"] = math.exp(sum(logs) / len(logs))
    return result


def targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As of ``benchmarks/figures.py``, whose imports a device may lack."""
    broken = sum(way in row["failed"] for row in rows for way in ("ours", "compared"))
    far = sum(
        row["error"] > 2 * max(row["eager_error"], ROUNDING if row["eager_error"] else 0.0)
        for row in rows
        if "error" in row and "eager_error" in row
    )
    values = {
        "calls of ours that failed": broken,
        "shapes not timed": sum("ours_forward_ms" not in row for row in rows),
        "shapes more than twice as far off as eager": far,
        "second backwards that differ": sum(not row.get("repeated", True) for row in rows),
    }
    return [
        {"name": name, "value": value, "limit": 0, "met": value == 0}
        for name, value in values.items()
    ]


def _machine(device: torch.device) -> dict[str, Any]:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__}
