"""What is imported when, what is refused and how, and that the table is of what is there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.runtime.pytorch import kernels
from autopar.runtime.pytorch.kernels.launch import KernelUnavailable, interpreted
from autopar.runtime.pytorch.kernels.norm import rms_norm
from autopar.runtime.pytorch.kernels.table import KERNELS

FOLDER = Path(kernels.__file__).parent
MODULES = [file.stem for file in sorted(FOLDER.glob("*.py")) if file.stem != "__init__"]


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name)
def test_the_table_is_of_what_is_there(row: object) -> None:
    from autopar.runtime.pytorch.kernels.table import Kernel, kernel

    assert isinstance(row, Kernel)
    module = importlib.import_module(f"{kernels.__name__}.{row.file.removesuffix('.py')}")
    assert callable(getattr(module, row.name))
    assert hasattr(module, "reference") or hasattr(module, f"{row.name}_reference")
    assert all(hasattr(torch, dtype) for dtype in row.dtypes)
    assert kernel(row.name) is row


def test_importing_imports_no_triton() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}: importlib.import_module('{kernels.__name__}.' + name)\n"
        "assert 'triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_triton_it_says_what_to_install() -> None:
    code = (
        "import sys, torch\n"
        "sys.modules['triton'] = None\n"
        "from autopar.runtime.pytorch.kernels.norm import rms_norm\n"
        "rms_norm(torch.ones(2, 3), torch.ones(3))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "KernelUnavailable" in done.stderr
    assert "pip install autopar[kernels]" in done.stderr


@pytest.mark.skipif(interpreted(), reason="TRITON_INTERPRET is set for these tests themselves")
def test_without_a_device_it_says_where_to_go() -> None:
    with pytest.raises(KernelUnavailable, match=r"on cpu.*reference.*TRITON_INTERPRET=1"):
        rms_norm(torch.ones(2, 3), torch.ones(3))


def test_other_dtypes_and_shapes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"rms_norm reads float32.*float64.*reference"):
        rms_norm(torch.ones(2, 3).double(), torch.ones(3))
    with pytest.raises(ValueError, match="as rows are wide"):
        rms_norm(torch.ones(2, 3), torch.ones(4))
