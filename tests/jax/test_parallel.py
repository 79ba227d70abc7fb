"""What programs carry: modules that stand alone, and the file that is put together of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.emit.jax import parallel as assembled
from autopar.emit.jax import train as train_text
from autopar.emit.jax.emit import OWN
from autopar.nouns import costly
from autopar.runtime.jax import parallel
from autopar.runtime.jax.parallel import blocks

HOME = Path(parallel.__file__).parent
FILES = {file.stem: file for file in HOME.glob("*.py") if file.stem != "__init__"}
EVERY = f"from parallel import {', '.join([*OWN, *train_text.RUNTIME])}\n"


def imports(text: str) -> set[str]:
    """Modules that a text imports anywhere."""
    made = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            made |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            made.add(str(node.module))
    return made


def test_every_module_is_put_in() -> None:
    assert set(assembled.MODULES) == set(FILES)
    text = assembled.parallel_text([EVERY], ["all of it"])
    defined = {
        n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)
    }
    assert {"Step", "gathered", "attention", "read_workload"} <= defined


def test_the_modules_import_jax_and_numpy_and_each_other_in_order() -> None:
    for place, name in enumerate(assembled.MODULES):
        for imported in imports(FILES[name].read_text()):
            first = imported.partition(".")[0]
            if first == "autopar":
                own = imported.rpartition(".")[2]
                assert imported == f"autopar.runtime.jax.parallel.{own}"
                assert assembled.MODULES.index(own) < place
            else:
                assert first in ("jax", "numpy", *sys.stdlib_module_names)
    assert not any(m.startswith("autopar") for m in imports(assembled.parallel_text([EVERY], [""])))


def test_no_name_is_there_twice() -> None:
    """In one file the second would take the place of the first."""
    names: Counter[str] = Counter()
    for file in FILES.values():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names[node.name] += 1
            elif isinstance(node, ast.Assign):
                names.update(
                    n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)
                )
    assert [name for name, count in names.items() if count > 1] == []


def test_what_programs_may_import_is_there() -> None:
    for name in (*OWN, *train_text.RUNTIME):
        assert hasattr(parallel, name), name


@pytest.mark.parametrize(
    "roots", [EVERY, "from parallel import Step", "from parallel import gather, layers, attention"]
)
def test_a_part_of_it_is_whole(roots: str, tmp_path: Path) -> None:
    """No name is read that was left out, and none is left in that nothing reads."""
    (tmp_path / "parallel.py").write_text(assembled.parallel_text([roots], ["A part."]))
    config = str(Path(__file__).parents[2] / "pyproject.toml")
    for command in (["check"], ["format", "--check"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", config, str(tmp_path)],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout


def test_what_nothing_reaches_is_left_out() -> None:
    text = assembled.parallel_text(["from parallel import gather"], [""])
    assert "def gather(" in text
    assert "def attention(" not in text
    assert "class Step" not in text


def test_what_backward_keeps_is_what_prices_say() -> None:
    """`autopar.nouns.costly` has the table; programs cannot import it."""
    assert blocks._COSTLY == {name for row in costly.TABLE for name in row.primitives}
    assert blocks._MOVED == set(costly.COLLECTIVES.primitives)


def state_of(devices: int, factor: float = 1.0) -> dict[str, Any]:
    """Cut, whole on all, in bfloat16, with odd names, and a number."""
    mesh = Mesh(jax.devices()[:devices], ("d",))
    cut, whole = NamedSharding(mesh, P(None, "d")), NamedSharding(mesh, P())
    x = jnp.arange(32.0).reshape(4, 8) * factor
    return {
        "params": {"blocks/up.weight": jax.device_put(x, cut), "norm": jax.device_put(x[0], whole)},
        "m": {"half": jax.device_put(x.astype(jnp.bfloat16), cut)},
        "step": jax.device_put(jnp.int32(3), whole),
    }


def test_a_state_comes_back_as_it_lay(tmp_path: Path) -> None:
    state = state_of(4)
    parallel.save(tmp_path, state)
    back = parallel.restore(tmp_path, state_of(4, factor=0.0))
    for own, other in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        assert own.dtype == other.dtype
        assert own.sharding == other.sharding
        assert np.asarray(own).tobytes() == np.asarray(other).tobytes()


def test_what_is_not_whole_is_passed_over(tmp_path: Path) -> None:
    """The newest of two that are whole; none is where a process has not written its file."""
    state = state_of(2)
    assert parallel.restore(tmp_path, state) is state
    parallel.save(tmp_path, state)
    later = {**state_of(2, factor=2.0), "step": state["step"] + 7}
    parallel.save(tmp_path, later)
    assert int(parallel.restore(tmp_path, state)["step"]) == 10
    (file,) = (tmp_path / "step-10").iterdir()
    file.rename(file.with_name("0-of-2.npz"))
    assert int(parallel.restore(tmp_path, state)["step"]) == 3
