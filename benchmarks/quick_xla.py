"""How JAX programs that run a few times are compiled: badly, which is fast, and equal ones once."""

from __future__ import annotations

import tempfile
from collections.abc import MutableMapping

FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_experimental_ynn_fusion_type=",
)
CACHE = "JAX_COMPILATION_CACHE_DIR"


def compile_quickly(
    environment: MutableMapping[str, str], *more: str
) -> tempfile.TemporaryDirectory[str] | None:
    """Sets what JAX reads when it is imported, here and in processes that inherit it; ``more``:
    flags beside `FLAGS`. Gives the folder that keeps modules, gone with it; None: another does."""
    flags = [environment.get("XLA_FLAGS", ""), *more, *FLAGS]
    environment["XLA_FLAGS"] = " ".join(filter(None, flags))
    environment["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # lines that nobody reads in a program
    if CACHE in environment:
        return None
    folder = tempfile.TemporaryDirectory(prefix="autopar-compiled-", ignore_cleanup_errors=True)
    environment.update(
        {
            CACHE: folder.name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    )
    return folder
