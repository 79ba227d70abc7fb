"""Every kernel compiled for devices that are not here: registers, spills and shared memory.

Triton compiles to PTX without a driver, and the assembler of its wheel tells what a device would be
asked for. What is compiled is recorded from the same calls as on a device, on meta tensors.
"""

from __future__ import annotations

import importlib
import re
import resource
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.pytorch.kernels import launch
from autopar.runtime.pytorch.kernels.launch import Launch
from benchmarks.kernel_shapes import Shape, arguments, shapes

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may take (CUDA C++ programming guide, table of technical
specifications by compute capability: 163 KB of 8.0, 227 KB of 9.0 and 10.0)."""
FIRST_WITH_FP8 = 89
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def compiled(kernels: Sequence[str], targets: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each kernel function on each target, of its variants the most that one takes."""
    variants: dict[tuple[str, str], list[Launch]] = {}
    for shape in shapes():
        if shape.kernel not in kernels:
            continue
        for launched in launches(shape):
            kind = variants.setdefault((shape.kernel, launched.name), [])
            if all(launched.options != other.options for other in kind):
                kind.append(launched)
    for target in targets:
        for (kernel, name), kind in variants.items():
            taken = [assembled(launched, target) for launched in kind]
            yield {
                "kernel": kernel,
                "function": name,
                "target": f"sm_{target}",
                "variants": len(kind),
                **{key: max(one[key] for one in taken) for key in taken[0]},
                "limit": SHARED[target],
            }


def launches(shape: Shape) -> list[Launch]:
    """Of forward and backward at a shape."""
    with launch.recorded() as recorded:
        leaves, every = arguments(shape, torch.device("meta"))
        outputs = shape.ours(*every)
        results = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if shape.differentiable:
            torch.autograd.grad(results, leaves, [torch.empty_like(t) for t in results])
    return recorded


def assembled(launched: Launch, target: int) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, bytes of shared memory of a block."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    file, function = launched.name.split(".")
    module = importlib.import_module(f"autopar.runtime.pytorch.kernels.device.{file}")
    source = ASTSource(getattr(module, function), **_signature(launched, module, target))
    options = {k: v for k, v in launched.options.items() if k in ("num_warps", "num_stages")}
    kernel = triton.compile(
        source, target=GPUTarget("cuda", target, 32), options={**options, "enable_fp_fusion": True}
    )
    ptx = kernel.asm["ptx"]
    match = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert match, "PTX without a target"
    report = _ptxas(Path(triton.__file__).parent, ptx, match[1])
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", report))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report))),
        "shared": int(kernel.metadata.shared),
    }


def _signature(launched: Launch, module: Any, target: int) -> dict[str, Any]:
    """As triton makes it from a call: 1 is a constant, multiples of 16 are known as such."""
    names: Sequence[str] = getattr(module, launched.name.split(".")[1]).arg_names
    constants = {k: v for k, v in launched.options.items() if k in names}
    if "HARDWARE" in constants:
        constants["HARDWARE"] = target >= FIRST_WITH_FP8
    signature: dict[str, str] = {}
    divisible: Mapping[tuple[int], Any] = {}
    for index, (name, value) in enumerate(zip(names, launched.arguments, strict=False)):
        if isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
        if isinstance(value, Tensor) or (signature[name] == "i32" and value % 16 == 0):
            divisible = {**divisible, (index,): [["tt.divisibility", 16]]}
    signature |= dict.fromkeys(constants, "constexpr")
    return {"signature": signature, "constexprs": constants, "attrs": divisible}


def _ptxas(triton: Path, ptx: str, architecture: str) -> str:
    """What the wheel's newer assembler says; its older one refuses this PTX."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        program = str(triton / "backends" / "nvidia" / "bin" / "ptxas-blackwell")
        command = [program, "-v", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return done.stderr
