"""What holds for all tests: those that start real processes stand in one line, and start warm; all
programs of JAX in a process are lowered in one context.

Under pytest-xdist every test marked ``gloo`` goes to the same worker, because two jobs of four
processes at once would only wait for each other's cores; those of two, ``gloo(2)``, may run beside.
Of the others a file's go to one worker, which captures and plans what they share once.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.quick_xla import CACHE, compile_quickly

SMALL_S = 0.03
"""What a program takes to compile that no other process reads from a file."""
pytest_plugins = ("tests.cpu_seconds", "tests.sampling")
os.environ["AUTOPAR_MEASURE"] = "0"  # no test's plan hangs on the machine that it is made on
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")  # no test fails by its speed
gc.set_threshold(50_000, 20, 10)  # most of what tests import and capture stays: look seldom
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit it; the folder stays until the end
    _compiled = compile_quickly(os.environ, "--xla_force_host_platform_device_count=8")


def pytest_itemcollected(item: pytest.Item) -> None:
    # As it is collected: xdist reads the groups before any conftest may modify the items.
    if marker := item.get_closest_marker("gloo"):
        ranks = marker.args[0] if marker.args else 4
        item.add_marker(pytest.mark.xdist_group(f"gloo {ranks}"))
    else:
        item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}/{item.path.stem}"))


@pytest.fixture(autouse=True, scope="session")
def _warm_ranks() -> Iterator[None]:
    from autopar.runtime.jobs import jax_launch, pytorch_launch
    from tests.warm_ranks import jax_worker, with_its_ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytorch_launch, "with_its_ranks", with_its_ranks)
        patch.setattr(jax_launch, "worker", jax_worker)
        yield


@pytest.fixture(autouse=True, scope="session")
def _kernels_are_compiled_by_one_worker() -> Iterator[None]:
    from tests.kernels import by_one_process

    with pytest.MonkeyPatch.context() as patch:
        if "numba" in sys.modules:
            from numba.core.dispatcher import Dispatcher

            folder = Path(os.environ[CACHE])
            folder.mkdir(parents=True, exist_ok=True)
            lock = folder / "kernels.lock"
            patch.setattr(Dispatcher, "compile", by_one_process(Dispatcher.compile, lock))
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_mlir_context() -> Iterator[None]:
    """JAX makes one for each program, which takes as long as lowering a small one."""
    with pytest.MonkeyPatch.context() as patch:
        if "jax" in sys.modules:
            from jax._src.interpreters import mlir

            patch.setattr(mlir, "make_ir_context", functools.cache(mlir.make_ir_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def _compiled_programs_are_kept_as_they_are() -> Iterator[None]:
    """JAX compresses what it compiled, a twentieth of its time; any process reads this too."""
    with pytest.MonkeyPatch.context() as patch:
        if "jax" in sys.modules:
            from jax._src import compilation_cache

            compress = functools.partial(zlib.compress, level=0)
            plain = SimpleNamespace(compress=compress, decompress=zlib.decompress)
            patch.setattr(compilation_cache, "zlib", plain)
        yield


@pytest.fixture(autouse=True, scope="session")
def _small_programs_stay_in_their_process() -> Iterator[None]:
    """To write one to a file and to read it again takes as long as to compile it."""
    with pytest.MonkeyPatch.context() as patch:
        if "jax" in sys.modules:
            from jax._src import compiler

            read, write = compiler._cache_read, compiler._cache_write
            small: dict[tuple[str, Any], Any] = {}

            def read_one(name: str, key: str, options: Any, backend: Any, devices: Any) -> Any:
                if (key, backend) in small:
                    return small[key, backend], 0
                return read(name, key, options, backend, devices)

            def write_one(
                key: str, took_s: float, name: str, backend: Any, program: Any, callbacks: Any
            ) -> None:
                if took_s >= SMALL_S or callbacks:
                    write(key, took_s, name, backend, program, callbacks)
                else:
                    small[key, backend] = program

            patch.setattr(compiler, "_cache_read", read_one)
            patch.setattr(compiler, "_cache_write", write_one)
        yield
