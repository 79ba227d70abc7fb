"""Texts of graphs, plans and what is lowered from them, kept in ``tests/golden``.

    python -m tests.text.golden

writes all of them again; what changed is then read as a diff. The plans are made by hand, with
figures that nothing measured: a new price changes none of these files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from autopar.files import plan_text
from autopar.files.sources import relative_sources
from autopar.frontends.shared.captured import Captured
from autopar.lowering import text as lowered_text
from autopar.lowering.lowered import Lowered
from autopar.lowering.of_plan import batch_dims, lowered_plan, planned_graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan, Stage
from autopar.nouns.text import graph as graph_text
from tests import plans
from tests.emit.following import following

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "golden"
FORMS = ("graph", "plan", "lowered")
MESH = Mesh.parse("dp_shard=2 x tp=2")


def of_file(path: str) -> Captured:
    from autopar.frontends.dispatch import capture
    from autopar.frontends.loading import load_workload

    return capture(load_workload(str(ROOT / path)))


def of_zoo(family: str) -> Captured:
    from autopar.frontends.dispatch import capture
    from benchmarks.zoo_models import ZOO

    return capture(ZOO[family]())


def of_jax(name: str) -> Captured:
    from autopar.frontends.jax import capture
    from tests.jax import families, models

    model = getattr(families, name, None) or getattr(models, name)
    made = model()
    return capture(made.loss, made.params, made.batch)


@dataclass(frozen=True)
class Case:
    """A model, and what ``tp`` splits in ops whose keys end so; all others follow.

    microbatches: one where a norm over the whole batch leaves no other choice.
    """

    captured: Callable[[], Captured]
    tp: Mapping[str, str]
    microbatches: int = 2


def _ends(**choices: str) -> dict[str, str]:
    """Ends of keys by choice: ``n="q/linear up/linear"``."""
    return {end: choice for choice, ends in choices.items() for end in ends.split()}


GPT = _ends(n="q/linear k/linear v/linear up/linear head/linear", k="out/linear down/linear")
CASES: Mapping[str, Case] = {
    "gpt_torch": Case(lambda: of_file("examples/02_gpt.py"), GPT),
    "gpt_jax": Case(lambda: of_file("examples/05_gpt_jax.py"), GPT),
    "llama_torch": Case(
        lambda: of_zoo("llama"),
        _ends(
            n="q_proj/linear k_proj/linear v_proj/linear gate_proj/linear up_proj/linear "
            "lm_head/linear",
            k="o_proj/linear down_proj/linear",
            v="embed_tokens/embedding",
        ),
    ),
    "llama_jax": Case(
        lambda: of_jax("llama"),
        _ends(
            n="::linear_t ::linear_t_1 ::linear_t_2 ::linear_t_4 ::linear_t_5",
            k="::linear_t_3 ::linear_t_6",
        ),
    ),
    "resnet_torch": Case(
        lambda: of_file("examples/04_resnet.py"),
        _ends(o="first.conv/conv", c="second.conv/conv"),
        microbatches=1,
    ),
    "resnet_jax": Case(lambda: of_jax("resnet"), _ends(o="::conv", c="::conv_1"), microbatches=1),
    "t5_torch": Case(
        lambda: of_zoo("t5"),
        _ends(n="q/linear k/linear v/linear wi/linear lm_head/linear", k="o/linear"),
    ),
    "t5_jax": Case(
        lambda: of_jax("t5"),
        _ends(n="/linear_t /linear_t_1 /linear_t_2 ::linear_t", k="/linear_t_3 ::linear_t_1"),
    ),
}


@cache
def captured(case: str) -> Captured:
    """With sources as they are named from the root of the checkout."""
    model = CASES[case].captured()
    return replace(model, graph=relative_sources(model.graph, ROOT))


@cache
def planned(case: str) -> tuple[Plan, Lowered]:
    """A plan made by hand, and what follows from it."""
    model, microbatches = captured(case), CASES[case].microbatches
    spread = following(model, MESH, CASES[case].tp, stream="D", micro=microbatches)
    framework = case.rpartition("_")[2]
    plan = plans.plan(
        workload=f"{case}.py",
        framework=framework,
        spreads=(spread,),
        stages=(Stage(zero=2),),
        microbatches=microbatches,
        style="compiled" if framework == "jax" else "eager",
    )
    graph = planned_graph(plan, model.graph)
    return plan, lowered_plan(plan, graph, batch_dims(model.batch))


def texts(case: str) -> dict[str, str]:
    """The texts of a case by the name of their file."""
    plan, lowered = planned(case)
    return {
        f"{case}.graph.txt": graph_text.to_text(captured(case).graph) + "\n",
        f"{case}.plan.txt": plan_text.to_text(plan) + "\n",
        f"{case}.lowered.txt": lowered_text.to_text(lowered) + "\n",
    }


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for case in CASES:
        for name, text in texts(case).items():
            (FOLDER / name).write_text(text)


if __name__ == "__main__":
    write()
