"""AXLearn (commit 34aed43c): mesh rules for a trainer's configuration."""

from __future__ import annotations

from autopar.emit.exports.held import HALF
from autopar.emit.exports.jax_trainers import mesh_limits, stage_limit
from autopar.emit.exports.setup import Setup
from autopar.emit.exports.sizes import in_words
from autopar.emit.exports.text import Export, header, not_carried, recomputes, refuse_beyond
from autopar.nouns.recompute import SELECTIVE

NAME = "axlearn"


def export(setup: Setup) -> Export:
    """``autopar_mesh.py``, mesh rules for a trainer's configuration. Raises `Refused`."""
    x = setup.layout
    refuse_beyond(NAME, (*mesh_limits(setup), stage_limit(setup)))
    kept = "" if setup.held is None else setup.held.kept
    left_out = not_carried(
        setup,
        f"the model's sizes: of the trainer's configuration{in_words(setup)}"
        if in_words(setup)
        else "",
        f"the parameters' dtype, {kept}: of the trainer's configuration" if kept in HALF else "",
        f"ZeRO {x.zero}: fsdp splits parameters too, as ZeRO 3"
        if x.zero in (1, 2) and x.dp_shard > 1
        else "",
        "sequence parallelism over tp: the layers' own partition specs decide it"
        if x.sequence_parallel and x.tp > 1
        else "",
        f"schedule {x.schedule} and the cut into stages: the model's pipeline layer has its own"
        if x.pp > 1
        else "",
        f"the batch of {x.global_batch}, clip_norm and optimizer: of the trainer's configuration",
        f"recompute={SELECTIVE} keeps what attention gave: here it runs again"
        if x.recompute.policy == SELECTIVE
        else "",
        selects_ops=True,
    )
    start = "add mesh_rules of autopar_mesh.py to your trainer's configuration"
    opening = header(setup, "AXLearn (commit 34aed43c)", left_out)
    text = f'''{opening}from __future__ import annotations

from typing import Any

{_imports(setup)}
SELECTOR = ".*"  # the instance types that this mesh is for, a regular expression


def mesh_rules() -> list[tuple[str, Any]]:
    """`trainer.mesh_rules` of a configuration."""
    modifiers = [
{_modifiers(setup)}
    ]
    chain = ChainConfigModifier.default_config().set(config_modifiers=modifiers)
    return [(SELECTOR, chain)]
'''
    return Export({"autopar_mesh.py": text}, left_out, start)


def _imports(setup: Setup) -> str:
    names = ["ChainConfigModifier", "MeshShapeModifier"]
    lines = []
    if setup.layout.microbatches > 1:
        names.append("GradientAccumulationModifier")
    if recomputes(setup) != "none":
        names.append("RematSpecModifier")
        lines += ["import jax", "from axlearn.common.base_layer import RematSpec"]
    listed = "".join(f"    {name},\n" for name in sorted(names))
    lines.append(f"from axlearn.common.trainer_config_modifier import (\n{listed})")
    lines.append("from axlearn.experiments.text.gpt.common import mesh_shape_from_axes")
    return "\n".join(lines) + "\n"


def _modifiers(setup: Setup) -> str:
    sizes = {
        "pipeline": setup.layout.pp,
        "data": setup.layout.dp_replicate,
        "expert": setup.layout.ep,
        "fsdp": setup.layout.dp_shard // setup.layout.ep,
        "seq": setup.layout.cp,
        "model": setup.layout.tp,
    }
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)

    lines = [
        "MeshShapeModifier.default_config().set(",
        f"    mesh_shape=mesh_shape_from_axes({axes}),",
        "),",
    ]
    if setup.layout.microbatches > 1:
        lines += [
            "GradientAccumulationModifier.default_config().set(",
            f"    grad_acc_steps={setup.layout.microbatches},",
            "),",
        ]
    if recomputes(setup) != "none":
        kept = {
            "full": "nothing_saveable",
            "selective": "dots_with_no_batch_dims_saveable",
        }[recomputes(setup, selects_ops=True)]
        lines += [
            "RematSpecModifier.default_config().set(",
            "    remat_policies={",
            '        "model.decoder.transformer.layer": RematSpec(',
            f"            prevent_cse=False, policy=jax.checkpoint_policies.{kept}",
            "        ),",
            "    },",
            "),",
        ]
    return "\n".join(f"        {line}" for line in lines)
