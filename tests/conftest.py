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
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.quick_xla import compile_quickly

pytest_plugins = ("tests.cpu_seconds",)
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
