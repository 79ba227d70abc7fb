"""Plans and clusters made by hand, for tests of what reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.cost_models.catalogue import find_device
from autopar.nouns.cluster import Cluster, Device, DeviceGroup
from autopar.nouns.level import Level
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Fingerprints, Plan, RunnerUp, Spread, Stage
from autopar.nouns.prediction import Memory, Prediction
from autopar.nouns.recompute import KEEP_ALL

MIB = 1 << 20


def cluster(devices: int = 4) -> Cluster:
    device = Device("toy", "cpu", 1 << 30, 1e10, (("fp32", 1e11),), 1e-6)
    level = Level("wire", devices, 1e9, 1e-4, library="gloo")
    return Cluster("a toy", (DeviceGroup(device, devices),), (level,))


def gpus(*names: str, bandwidth_bytes_per_s: float = 300e9) -> Cluster:
    """Four GPUs of the catalogue, as many of each name, on one switch."""
    groups = tuple(DeviceGroup(find_device(name), 4 // len(names)) for name in names)
    return Cluster("four", groups, (Level("link", 4, bandwidth_bytes_per_s, 2e-6),))


def cluster_text(cores: int) -> str:
    """A cluster file of CPU cores over loopback."""
    return f"""
name: cores
groups:
  - {{device: cpu-core, count: {cores}}}
levels:
  - {{name: loopback, span: {cores}, bandwidth: 1 GB/s, latency: 100 us, library: gloo}}
"""


def memory(**changes: int) -> Memory:
    """128 MiB in all of a limit of 1 GiB."""
    whole = Memory(
        total=128 * MIB,
        parameters=16 * MIB,
        gradients=16 * MIB,
        optimizer=32 * MIB,
        activations=60 * MIB,
        buffers=4 * MIB,
        limit=1024 * MIB,
    )
    return replace(whole, **changes)


def prediction(**changes: Any) -> Prediction:
    whole = Prediction(
        step_time_s=0.120,
        lower_bound_s=0.100,
        compute_time_s=0.090,
        exposed_communication_s=0.030,
        tokens_per_s=17_066.7,
        mfu=0.25,
        memory_bytes=memory(),
        time_band_s=(0.100, 0.144),
        memory_band_bytes=(104 * MIB, 152 * MIB),
    )
    return replace(whole, **changes)


def plan(**changes: Any) -> Plan:
    """A GPT on 2 x 2 devices, with one plan that lost."""
    spread = Spread(
        mesh=Mesh(("dp_shard", "tp"), (2, 2)),
        ops={"block::up/linear": "tp:n", "block::down/linear": "tp:k"},
        shared={"block::norm/layer_norm": "tp:S1"},
        parameters={"block::up.weight": "tp:S0"},
    )
    why = "25 ms more of gathers than it saves"
    lost = RunnerUp({"dp_shard": 4}, 3, KEEP_ALL, 1, 0.150, 64 * MIB, why)
    whole = Plan(
        workload="model.py:GPT",
        framework="torch",
        spreads=(spread,),
        stages=(Stage(zero=2),),
        microbatches=1,
        style="eager",
        precision="float32",
        optimizer="adamw",
        schedule="none",
        fingerprints=Fingerprints("m", "c", "p", "t"),
        prediction=prediction(),
        runners_up=(lost,),
        searcher="elimination",
    )
    return replace(whole, **changes)
