"""A second device in pure Python: streams and events that keep `Clocks`, and no numbers.

torch lets a program bring a device of its own ("PrivateUse1"). Under fake tensors nothing of it is
ever computed, so what is needed is what `torch.cuda` has beside kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import torch

from autopar.runtime.rehearsal.clocks import HOST, Clocks, Known
from autopar.torch_private.distributed import python_device

NAME = "gpu"


class Lane:
    """A stream of the device, as `torch.cuda.Stream`."""

    made = 0

    def __init__(self, device: Any = None, priority: int = 0, **given: Any) -> None:
        del device, priority, given
        self.device_index, self.device_type = 0, 20
        self.stream_id = Lane.made
        Lane.made += 1

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, _module().current_device())

    @property
    def key(self) -> str:
        return "the default stream" if self.stream_id == 0 else f"stream {self.stream_id}"

    def wait_stream(self, stream: Lane) -> None:
        _module().clocks.wait(self.key, _module().clocks.now(stream.key))

    def wait_event(self, event: Mark) -> None:
        _module().clocks.wait(self.key, event.known)

    def record_event(self, event: Mark | None = None) -> Mark:
        event = Mark() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        _module().waits(f"{self.key}.synchronize()", self.key)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Lane:
        _module().entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _module().entered.pop()


class Mark:
    """A mark in a stream, as `torch.cuda.Event`."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.known: Known = {}

    def record(self, stream: Lane | None = None) -> None:
        stream = stream or _module().current_stream()
        self.known = _module().clocks.now(stream.key)

    def wait(self, stream: Lane | None = None) -> None:
        (stream or _module().current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _module().waits("event.synchronize()", None)
        _module().clocks.wait(HOST, self.known)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Mark) -> float:
        return 1.0


class Device(ModuleType):
    """What ``torch.gpu`` is in a rehearsal."""

    Stream: ClassVar[type[Lane]] = Lane
    Event: ClassVar[type[Mark]] = Mark

    def __init__(self, count: int, waits: Callable[[str], None]) -> None:
        super().__init__(f"torch.{NAME}")
        self.clocks = Clocks()
        self.count = count
        self.default = Lane()
        self.entered: list[Lane] = [self.default]
        self.told = waits
        self.set = 0
        self.chosen = False
        self.lost: BaseException | None = None
        self.default_generators = [torch.Generator() for _ in range(count)]

    def loses(self, error: BaseException) -> None:
        """A hook of autograd raised ``error``, which does not reach who called backward."""
        self.lost = self.lost or error

    def waits(self, what: str, stream: str | None) -> None:
        """The host waits for ``stream``, or None: for something else that the caller knows."""
        self.told(what)
        if stream is not None:
            self.clocks.wait(HOST, self.clocks.now(stream))

    @contextmanager
    def stream(self, stream: Lane | None) -> Iterator[None]:
        self.entered.append(stream or self.current_stream())
        try:
            yield
        finally:
            self.entered.pop()

    def set_stream(self, stream: Lane) -> None:
        self.entered[-1] = stream

    def current_stream(self, device: Any = None) -> Lane:
        return self.entered[-1]

    def default_stream(self, device: Any = None) -> Lane:
        return self.default

    def current_device(self) -> int:
        return self.set

    def set_device(self, device: Any) -> None:
        self.chosen = True
        place = torch.device(device) if isinstance(device, str) else device
        self.set = (place.index or 0) if isinstance(place, torch.device) else int(place)

    def device_count(self) -> int:
        return self.count

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def synchronize(self, device: Any = None) -> None:
        self.waits("synchronize()", None)
        for stream in list(self.clocks.known):
            self.clocks.wait(HOST, self.clocks.now(stream))

    def manual_seed(self, seed: int) -> None:
        """Of a device that draws nothing."""

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Of a device that draws nothing."""

    def max_memory_allocated(self, device: Any = None) -> int:
        return 0

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return (9, 0)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def put_in(count: int, waits: Callable[[str], None]) -> Device:
    """Makes `NAME` a device of this process, of which there are ``count``; once a process."""
    device = Device(count, waits)
    python_device(NAME, device, device.loses)
    return device


def _module() -> Any:
    return sys.modules[f"torch.{NAME}"]
