"""A step of an optimizer whose state is in host memory: it passes through the device in chunks.

What the optimizer keeps beside numbers for each element (AdamW's count of steps) stays where it is.
On a CUDA device three streams work at once: a chunk arrives, the one before is updated, the one
before that goes back into pinned memory; at the end the host waits for the last. On a CPU the same
happens in one memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from autopar.nouns.offload import CHUNK_BYTES, CHUNKS
from autopar.runtime.pytorch.accelerators import is_accelerator, module_of
from autopar.runtime.pytorch.groups import GroupsError, check_by_element
from autopar.torch_private.modules import step_hooks_once

CUT = 1024
"""Parameters are cut at multiples of so many elements: kernels compute what is left of a vector by
other instructions, which may round otherwise."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``first`` to ``end - 1`` of a parameter; all of it where ``whole``."""

    leaf: torch.Tensor
    first: int
    end: int
    whole: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements of a tensor of the parameter's shape: a view, of contiguous ones."""
        return tensor if self.whole else tensor.reshape(-1)[self.first : self.end]

    def parameter(self) -> torch.Tensor:
        """What the optimizer updates, with its gradient."""
        if self.whole:
            return self.leaf
        assert self.leaf.grad is not None
        made = self.of(self.leaf.detach())
        made.grad = self.of(self.leaf.grad)
        return made

    @property
    def last(self) -> bool:
        return self.end == self.leaf.numel()


def host_like(leaf: torch.Tensor) -> torch.Tensor:
    """Memory of the host for as many numbers, pinned where the device copies from it by itself."""
    return torch.empty_like(
        leaf, device="cpu", requires_grad=False, pin_memory=is_accelerator(leaf.device)
    )


def is_streamed(leaf: torch.Tensor, value: object) -> bool:
    """Whether ``value`` has a number for each element of ``leaf``."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == leaf.shape


def check_streams(optimizer: torch.optim.Optimizer) -> None:
    """Raises `GroupsError` for a script's optimizer that cannot step on a part of all elements."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        raise GroupsError(
            f"{type(optimizer).__name__} steps on all parameters at once as far as is known, and "
            "this plan sends the optimizer's state through the device in chunks "
            "(offload=optimizer): take one of torch.optim, or plan with --fix offload=none"
        )
    refused = isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam))
    if not refused:
        try:
            check_by_element(optimizer)
        except GroupsError:
            refused = True
    if refused:
        raise GroupsError(
            f"{type(optimizer).__name__} does not go by elements, and this plan sends the "
            "optimizer's state through the device in chunks (offload=optimizer): take AdamW or "
            "another that does, or plan with --fix offload=none"
        )


def step_from_host(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, to the bit, with its state in host memory before and after.

    The optimizer must go by elements. It is asked for a step on each chunk, with its groups' own
    options; parameters without a gradient are left out, as it does. Hooks of its step see one.
    A step that breaks off leaves parameters and state of which some are updated and some not.
    """
    with step_hooks_once(optimizer):
        _chunk_by_chunk(optimizer)


def _chunk_by_chunk(optimizer: torch.optim.Optimizer) -> None:
    groups = optimizer.param_groups
    devices = {leaf.device for group in groups for leaf in group["params"]}
    lanes = _lanes(devices.pop() if devices else torch.device("cpu"))
    lanes.begin()
    begun: _Begun = {}
    under_way: deque[_Chunk] = deque()
    try:
        for group in groups:
            for pieces in chunks(group["params"]):
                if len(under_way) == CHUNKS:
                    under_way.popleft().finish()
                under_way.append(_Chunk(pieces, lanes, begun))
                under_way[-1].step(optimizer, group)
    finally:
        optimizer.param_groups = groups
        for chunk in under_way:
            chunk.finish()


def chunks(leaves: Sequence[torch.Tensor]) -> Iterator[list[Piece]]:
    """Pieces of `CHUNK_BYTES` together at most, in order. What is not contiguous is not cut."""
    chunk: list[Piece] = []
    room = CHUNK_BYTES
    for leaf in leaves:
        if leaf.grad is None:
            continue
        first, count, width = 0, leaf.numel(), leaf.element_size()
        while first < count:
            taken = count - first
            if taken * width > room and leaf.is_contiguous():
                taken = room // width // CUT * CUT
            if chunk and (taken * width > room or not taken):
                yield chunk
                chunk, room = [], CHUNK_BYTES
                continue
            chunk.append(Piece(leaf, first, first + taken, taken == count))
            first, room = first + taken, room - taken * width
    if chunk:
        yield chunk


_Begun = dict[torch.Tensor, dict[str, Any]]
"""Of each parameter of which not all pieces are updated, its state after the step so far."""


@dataclass(slots=True)
class _Chunk:
    """One chunk on its way; holds the device's memory until `finish`."""

    pieces: list[Piece]
    lanes: _Lanes
    begun: _Begun
    _moved: list[torch.Tensor] = field(default_factory=list)
    _done: torch.Event | None = None

    def step(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
        lanes = self.lanes
        parameters = [piece.parameter() for piece in self.pieces]
        kept = [_on_host(piece.leaf, optimizer.state.pop(piece.leaf, {})) for piece in self.pieces]
        every = [*zip(self.pieces, parameters, kept, strict=True)]
        try:
            with lanes.arriving():
                for piece, parameter, state in every:
                    if state:
                        optimizer.state[parameter] = self._arrived(piece, state)
            lanes.arrived()
            optimizer.param_groups = [{**group, "params": parameters}]
            optimizer.step()
            lanes.updated()
            with lanes.leaving():
                for piece, parameter, state in every:
                    made = optimizer.state.pop(parameter, {})
                    new = self.begun.setdefault(piece.leaf, dict(state))
                    self._leave(piece, made, new)
                    # What the other pieces find is the state before the step.
                    optimizer.state[piece.leaf] = (
                        self.begun.pop(piece.leaf) if piece.last else state
                    )
        except BaseException:
            for _, parameter, _ in every:
                optimizer.state.pop(parameter, None)
            for piece, _, state in every:
                optimizer.state[piece.leaf] = state
            raise
        self._done = lanes.left()

    def _arrived(self, piece: Piece, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a piece, on the device."""
        given = {}
        for name, value in state.items():
            if is_streamed(piece.leaf, value):
                own = piece.of(value).to(piece.leaf.device, non_blocking=True, copy=True)
                self._moved.append(own)
                given[name] = own
            else:  # each piece counts for itself
                given[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return given

    def _leave(self, piece: Piece, made: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Sends what was made of a piece to ``state``, which is that of the whole parameter."""
        shape = piece.of(piece.leaf).shape
        for name, value in made.items():
            if piece.leaf.ndim and isinstance(value, torch.Tensor) and value.shape == shape:
                if name not in state:
                    state[name] = host_like(piece.leaf)
                piece.of(state[name]).copy_(value, non_blocking=True)
                self._moved.append(value)
            else:
                state[name] = value

    def finish(self) -> None:
        """Waits until the host has all of it back."""
        if self._done is not None:
            self._done.synchronize()
        self._moved.clear()


def _on_host(leaf: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """With what an optimizer made on the device before the first step, or a script laid otherwise
    than its parameter, in the host's memory as `host_like` lays it."""
    return {
        name: host_like(leaf).copy_(value)
        if is_streamed(leaf, value)
        and (value.device.type != "cpu" or value.stride() != leaf.stride())
        else value
        for name, value in state.items()
    }


class _Lanes:
    """One memory: each copy is done when it returns."""

    def begin(self) -> None:
        """What arrives waits for what the device has been asked for so far."""

    def arriving(self) -> AbstractContextManager[Any]:
        return nullcontext()

    leaving = arriving

    def arrived(self) -> None:
        """What follows on the device waits for what arrives."""

    def updated(self) -> None:
        """What leaves waits for the device."""

    def left(self) -> torch.Event | None:
        """When all that leaves so far has left."""
        return None


class _StreamLanes(_Lanes):
    def __init__(self, device: torch.device) -> None:
        self._device, self._of = device, module_of(device)
        self._in, self._out = self._of.Stream(device), self._of.Stream(device)

    def begin(self) -> None:
        self._in.wait_stream(self._of.current_stream(self._device))

    def arriving(self) -> AbstractContextManager[Any]:
        lane: AbstractContextManager[Any] = self._of.stream(self._in)
        return lane

    def leaving(self) -> AbstractContextManager[Any]:
        lane: AbstractContextManager[Any] = self._of.stream(self._out)
        return lane

    def arrived(self) -> None:
        self._of.current_stream(self._device).wait_stream(self._in)

    def updated(self) -> None:
        self._out.wait_stream(self._of.current_stream(self._device))

    def left(self) -> torch.Event | None:
        done: torch.Event = self._of.Event()
        done.record(self._out)
        return done


@cache
def _lanes(device: torch.device) -> _Lanes:
    return _StreamLanes(device) if is_accelerator(device) else _Lanes()
