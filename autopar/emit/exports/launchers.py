"""Launchers: nodes, processes and accelerators of a job; image, partition and paths are
placeholders in capitals.

PyTorch jobs have one process for each device, JAX jobs one for each node.
"""

from __future__ import annotations

from typing import Any

import yaml

from autopar.emit.exports.setup import Setup
from autopar.emit.exports.text import Export, Limit, header, refuse_beyond

SCRIPT = "train.py"
PORT = 29500
SKYPILOT = {
    "A100-40GB": "A100",
    "A100-40GB-PCIe": "A100",
    "A100-80GB-PCIe": "A100-80GB",
    "H100-PCIe": "H100",
    "H100-NVL": "H100",
    "V100-16GB": "V100",
    "V100-32GB": "V100-32GB",
    "RTX-4090": "RTX4090",
    "RTX-A6000": "RTXA6000",
    "MI300X": "MI300X",
    "TPU-v4": "tpu-v4",
    "TPU-v5e": "tpu-v5litepod",
    "TPU-v5p": "tpu-v5p",
    "TPU-v6e": "tpu-v6e",
}
"""Names of its catalogue that differ from ours."""
RAY = {
    "A100-40GB": "A100-40G",
    "A100-80GB": "A100-80G",
    "V100-16GB": "V100",
    "V100-32GB": "V100",
}


def slurm(setup: Setup) -> Export:
    """``job.sbatch``. Raises `Refused`."""
    no_tpu = _no_tpu(setup, "its nodes are reserved through the cloud's own queue")
    refuse_beyond("slurm", (_one_kind(setup), no_tpu))
    m = setup.machines
    left_out = _placeholders(
        "the partition, account and time limit", "the environment's activation"
    )
    gpus = [f"#SBATCH --gpus-per-node={m.devices_per_node}"] if m.kind == "gpu" else []
    head = 'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    lines = [
        "#!/bin/bash",
        header(setup, "SLURM", left_out).rstrip("\n"),
        "#SBATCH --job-name=autopar",
        f"#SBATCH --nodes={m.nodes}",
        "#SBATCH --ntasks-per-node=1",
        *gpus,
        "#SBATCH --exclusive",
        "#SBATCH --partition=PARTITION",
        "set -euo pipefail",
        head,
        "srun --ntasks-per-node=1 " + _command(setup, "$SLURM_JOB_ID", f"$HEAD:{PORT}"),
    ]
    return Export({"job.sbatch": "\n".join(lines) + "\n"}, left_out, "sbatch job.sbatch")


def kubeflow(setup: Setup) -> Export:
    """``trainjob.yaml`` for the Kubeflow trainer 2.3. Raises `Refused`."""
    limits = (
        _one_kind(setup),
        _no_tpu(setup, "the torch-distributed runtime starts GPU and CPU pods"),
        _no_jax(setup, "the torch-distributed runtime starts torchrun"),
    )
    refuse_beyond("kubeflow", limits)
    m = setup.machines
    resources: dict[str, Any] = {}
    if m.kind == "gpu":
        resource = "amd.com/gpu" if m.accelerator.startswith("MI") else "nvidia.com/gpu"
        resources = {"limits": {resource: m.devices_per_node}}
    left_out = _placeholders("the image, its namespace and volumes")
    trainer: dict[str, Any] = {
        "image": "IMAGE",
        "numNodes": m.nodes,
        "numProcPerNode": m.devices_per_node,
        "command": ["torchrun", SCRIPT],
    }
    if resources:
        trainer["resourcesPerNode"] = resources
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "autopar"},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
    }
    text = header(setup, "Kubeflow Trainer 2.3", left_out) + yaml.safe_dump(job, sort_keys=False)
    return Export({"trainjob.yaml": text}, left_out, "kubectl create -f trainjob.yaml")


def ray(setup: Setup) -> Export:
    """``ray_job.py``. Raises `Refused`."""
    limits = (
        _one_kind(setup),
        _no_tpu(setup, "TorchTrainer's workers have GPUs or CPUs"),
        _no_jax(setup, "TorchTrainer makes a process group of PyTorch"),
    )
    refuse_beyond("ray", limits)
    m = setup.machines
    left_out = _placeholders(
        "where results are stored", "what the training function does: it may call autopar.load"
    )
    kind = ""
    if m.kind == "gpu":
        kind = f'\n    accelerator_type="{RAY.get(m.accelerator, m.accelerator)}",'
    text = f'''{header(setup, "Ray Train", left_out)}from __future__ import annotations

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

scaling = ScalingConfig(
    num_workers={setup.layout.device_count},
    use_gpu={m.kind == "gpu"},{kind}
)


def train() -> None:
    """Runs in every worker; Ray has made the process group."""
    import runpy

    runpy.run_path("{SCRIPT}", run_name="__main__")


if __name__ == "__main__":
    run = RunConfig(name="autopar", storage_path="STORAGE_PATH")
    TorchTrainer(train, scaling_config=scaling, run_config=run).fit()
'''
    return Export({"ray_job.py": text}, left_out, "python ray_job.py")


def skypilot(setup: Setup) -> Export:
    """``sky.yaml``. Raises `Refused`."""
    refuse_beyond("skypilot", [_one_kind(setup), _one_slice(setup)])
    m = setup.machines
    if m.kind == "cpu":
        resources: dict[str, Any] = {"cpus": f"{m.devices_per_node}+"}
    else:
        name = SKYPILOT.get(m.accelerator, m.accelerator)
        whole = (
            f"{name}-{setup.layout.device_count}:1"
            if m.kind == "tpu"
            else f"{name}:{m.devices_per_node}"
        )
        resources = {"accelerators": whole}
    left_out = _placeholders("the cloud and region", "what setup installs")
    command = _command(setup, "autopar", f"$HEAD:{PORT}").replace(
        f"--nproc-per-node {m.devices_per_node}", "--nproc-per-node $SKYPILOT_NUM_GPUS_PER_NODE"
    )
    if m.kind == "cpu":
        command = _command(setup, "autopar", f"$HEAD:{PORT}")
    task = {
        "name": "autopar",
        "resources": resources,
        "num_nodes": 1 if m.kind == "tpu" else m.nodes,
        "workdir": ".",
        "setup": "pip install -r requirements.txt\n",
        "run": f'HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n{command}\n',
    }
    text = header(setup, "SkyPilot 0.14", left_out) + yaml.safe_dump(task, sort_keys=False)
    return Export({"sky.yaml": text}, left_out, "sky launch sky.yaml")


def _command(setup: Setup, job: str, endpoint: str) -> str:
    if setup.framework == "jax":
        return f"python {SCRIPT}"
    m = setup.machines
    return (
        f"torchrun --nnodes {m.nodes} --nproc-per-node {m.devices_per_node} --rdzv-backend c10d "
        f'--rdzv-id {job} --rdzv-endpoint "{endpoint}" {SCRIPT}'
    )


def _placeholders(*what: str) -> tuple[str, ...]:
    lines = [f"the training script: {SCRIPT} stands for it, as capitals for all that is yours"]
    return (*lines, *what)


def _one_kind(setup: Setup) -> Limit:
    return Limit(
        bool(setup.machines.ranks),
        "devices of several kinds",
        f"its job asks for one, and the plan has {setup.machines.ranks}",
        "Start torchrun on every node with its --node-rank in that order",
    )


def _one_slice(setup: Setup) -> Limit:
    return Limit(
        setup.machines.slices > 1,
        f"{setup.machines.slices} slices of {setup.machines.accelerator}",
        "its task asks for one slice",
        "Start one task a slice, or export to maxtext and start it with xpk --num-slices",
    )


def _no_tpu(setup: Setup, why: str) -> Limit:
    m = setup.machines
    return Limit(m.kind == "tpu", f"a job on {m.accelerator}", why, "Export to skypilot")


def _no_jax(setup: Setup, why: str) -> Limit:
    return Limit(setup.framework == "jax", "a JAX job", why, "Export to slurm or skypilot")
