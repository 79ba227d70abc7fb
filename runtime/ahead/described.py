"""Devices that are described and not there, for a program to be compiled ahead for.

A process that compiles for TPUs needs libtpu, and an environment by which it does not look for a
machine (`environment`). Nothing in it may ask JAX which devices there are: `standing_in` answers
such questions with the described ones.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from autopar.nouns.errors import UserError


class CannotCompile(UserError):
    """No compiler for the described devices, or it knows no such topology."""


@dataclass(frozen=True, slots=True)
class Described:
    """What the compiler is told of the devices of a cluster.

    topology: of one slice, as libtpu names it (``v5e:4x4``); of CPUs empty.
    wraps:    whether each dim of the slice is a ring.
    devices:  of all slices together.
    """

    platform: str
    devices: int
    topology: str = ""
    wraps: tuple[bool, ...] = ()
    slices: int = 1

    def __str__(self) -> str:
        if self.platform == "cpu":
            return f"{self.devices} CPU devices"
        several = f"{self.slices} slices " if self.slices > 1 else ""
        return f"{several}{self.topology}, {self.devices} devices"

    def as_dict(self) -> dict[str, Any]:
        """What `from_dict` reads back."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Described:
        return Described(**{**data, "wraps": tuple(data["wraps"])})


def environment(target: Described) -> dict[str, str]:
    """What a process that compiles for ``target`` needs in its environment, before jax is."""
    if target.platform == "cpu":
        count = f"--xla_force_host_platform_device_count={target.devices}"
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": count}
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a second process would stop at the first one's lock
        "TPU_STDERR_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def devices_of(target: Described) -> list[Any]:
    """The devices in the order of ranks: slice after slice, the last dim fastest.

    Raises:
        CannotCompile: no libtpu, or a topology that it does not know.
    """
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        return list(jax.devices("cpu")[: target.devices])
    if importlib.util.find_spec("libtpu") is None:
        raise CannotCompile(
            f"--compile: no compiler for {target} here: libtpu is not installed. `pip install "
            "libtpu` of the version that `pip install 'jax[tpu]'` names; no TPU is needed"
        )
    options: dict[str, Any] = {"wrap": (*target.wraps, *[False] * (3 - len(target.wraps)))}
    if target.slices > 1:
        options["num_slices"] = target.slices
    if target.topology.startswith("v4:"):
        options["chip_config_name"] = "megacore"
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=target.topology, **options
        )
    except Exception as error:  # JaxRuntimeError, and whatever stands in the way of loading libtpu
        why = str(error).strip().splitlines()[0]
        raise CannotCompile(
            f"--compile: the installed libtpu knows no topology {target.topology}: {why}. Plan for "
            "a slice that it knows, or install the libtpu of your jax"
        ) from error
    return sorted(described.devices, key=_rank)


def _rank(device: Any) -> tuple[int, ...]:
    return (getattr(device, "slice_index", 0) or 0, *device.coords, device.core_on_chip)


@contextmanager
def standing_in(target: Described, devices: Sequence[Any]) -> Iterator[None]:
    """Inside, JAX answers that these devices are all there are, and makes meshes of them."""
    import jax

    own = jax.make_mesh

    def make_mesh(shape: Sequence[int], names: Sequence[str], **more: Any) -> Any:
        return own(tuple(shape), tuple(names), **{"devices": devices, **more})

    answers: dict[str, Any] = {
        "make_mesh": make_mesh,
        "devices": lambda backend=None: list(devices),
        "local_devices": lambda *_, **__: list(devices),
        "device_count": lambda backend=None: len(devices),
        "default_backend": lambda: target.platform,
    }
    before = {name: getattr(jax, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(jax, name, answer)
        yield
    finally:
        for name, own_answer in before.items():
            setattr(jax, name, own_answer)
