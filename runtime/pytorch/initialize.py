"""Initial weights exactly as the original model draws them, without the whole model in memory.

The recorded constructor is replayed op by op with the same seed, so the random numbers are the
same. A storage exists from the op that fills it to the last op that touches it before it is filled
again; what is left of a parameter then is cut to the pieces that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.expert_places import Order, rows_of
from autopar.runtime.pytorch.parameters import Region
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.recording import Call, Record, Untrusted, View, named_tensors, record
from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.tensors import tree_map_only


@dataclass(frozen=True, slots=True)
class Target:
    """Where the initial value of one piece goes: a local tensor, its region of the whole, and the
    other tensors of this rank that hold the same; ``order``: of experts that are placed."""

    tensor: torch.Tensor
    region: Region
    twins: tuple[torch.Tensor, ...] = ()
    order: Order = None

    def take(self, whole: torch.Tensor) -> None:
        """Writes the piece of the ``whole`` tensor."""
        for tensor in (self.tensor, *self.twins):
            tensor.copy_(rows_of(whole, self.region, self.order))


def initialize(
    make: Callable[[], nn.Module],
    seed: int,
    targets: Mapping[str, Target],
    recorded_of: Callable[[Callable[[], nn.Module]], Record] = record,
) -> str | None:
    """Fills every target with what ``make()`` draws after ``torch.manual_seed(seed)``.

    ``recorded_of`` is `record`, or gives what it gave for the same constructor before.

    Returns None, or the reason why the whole model had to be built in memory for it. The state of
    the random generator is left as it was. Raises `ProgramError` for a name or a shape that the
    model does not have.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            recorded = recorded_of(make)
        except Exception as error:  # whatever a constructor does under fake tensors
            reason = str(error) if isinstance(error, Untrusted) else _short(error)
            torch.manual_seed(seed)
            fill(dict(named_tensors(make())), targets)
            return reason
        _check(recorded.values, targets)
        torch.manual_seed(seed)
        replay(recorded, targets)
    return None


def seed_draws(workload: Workload, ranks: Ranks) -> None:
    """Ranks that compute on the same samples draw the same numbers from now on, others draw other
    ones."""
    torch.manual_seed(workload.seed + 1 + ranks.index(*ranks.sample_axes))


def _short(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0][:120]
    return f"{type(error).__name__}: {text}"


def _check(values: Mapping[str, View | torch.Tensor], targets: Mapping[str, Target]) -> None:
    for name, target in targets.items():
        if name not in values:
            raise ProgramError(
                f"the program has {name}, and the model does not: it has changed since it was "
                "planned; plan it again"
            )
        value = values[name]
        shape = value.size if isinstance(value, View) else tuple(value.shape)
        inside = len(shape) == len(target.region) and all(
            s.stop <= n for s, n in zip(target.region, shape, strict=True)
        )
        if not inside:
            raise ProgramError(
                f"{name} has shape {list(shape)} in the model; the program wants "
                f"{[f'{s.start}:{s.stop}' for s in target.region]} of it: plan the model again"
            )


def fill(values: Mapping[str, torch.Tensor], targets: Mapping[str, Target]) -> None:
    """Gives every target its piece of the tensor of its name; raises as `initialize`."""
    _check(values, targets)
    with torch.no_grad():
        for name, target in targets.items():
            target.take(values[name])


def replay(recorded: Record, targets: Mapping[str, Target]) -> None:
    """Runs the recorded calls for real; the random generator must have been seeded."""
    wanted: dict[int, list[tuple[View, Target]]] = {}
    for name, target in targets.items():
        value = recorded.values[name]
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                target.take(value)
        else:
            wanted.setdefault(value.storage, []).append((value, target))
    memory = _Memory(recorded)
    ends, last = _lives(recorded.calls)
    with torch.no_grad():
        for i, call in enumerate(recorded.calls):
            memory.run(call)
            for storage in ends.get(i, ()):
                if last[storage] == i:
                    for view, target in wanted.pop(storage, ()):
                        target.take(memory.tensor(view))
                memory.drop(storage)
        for pairs in wanted.values():  # made, and never touched by an op
            for view, target in pairs:
                target.take(memory.tensor(view))


def _lives(calls: list[Call]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """(call index -> storages whose content nobody reads later, storage -> its last call)."""
    touched: dict[int, int] = {}
    ends: dict[int, list[int]] = {}
    for i, call in enumerate(calls):
        for storage in call.touches:
            if storage == call.whole and storage in touched:
                ends.setdefault(touched[storage], []).append(storage)
            touched[storage] = i
    for storage, i in touched.items():
        ends.setdefault(i, []).append(storage)
    return ends, touched


class _Memory:
    """The storages that are alive, each a flat tensor."""

    def __init__(self, recorded: Record) -> None:
        self._flat = dict(recorded.constants)
        self._bytes: dict[int, int] = {}
        views = [v for call in recorded.calls for v in _views((call.args, call.kwargs, call.made))]
        for view in (*views, *_views(list(recorded.values.values()))):
            self._bytes[view.storage] = max(self._bytes.get(view.storage, 0), view.span_bytes)

    def tensor(self, view: View) -> torch.Tensor:
        if view.storage not in self._flat:
            count = self._bytes[view.storage] // view.dtype.itemsize
            self._flat[view.storage] = torch.empty(count, dtype=view.dtype)
        flat = self._flat[view.storage]
        if flat.dtype is not view.dtype:
            flat = flat.view(view.dtype)
        return torch.as_strided(flat, view.size, view.stride, view.offset)

    def run(self, call: Call) -> None:
        args, kwargs = tree_map_only(View, self.tensor, (call.args, call.kwargs))
        result = call.func(*args, **kwargs)
        given = {view.storage for view in _views((call.args, call.kwargs))}
        made: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, made.append, result)
        for view, tensor in zip(call.made, made, strict=True):
            if view.storage not in given and view.storage not in self._flat:
                self._bind(view, tensor)

    def _bind(self, view: View, tensor: torch.Tensor) -> None:
        strides = zip(tensor.stride(), view.stride, tensor.shape, strict=True)
        same = tensor.storage_offset() == view.offset and all(
            a == b or n == 1 for a, b, n in strides
        )
        if not same:  # laid out in another way than the fake op said
            self.tensor(view).copy_(tensor)
            return
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._flat[view.storage] = torch.as_strided(tensor, (count,), (1,), 0)

    def drop(self, storage: int) -> None:
        self._flat.pop(storage, None)


def _views(tree: Any) -> list[View]:
    views: list[View] = []
    tree_map_only(View, views.append, tree)
    return views
