"""All that a training is at one step: weights, optimizer, random numbers, and the script's own."""

from __future__ import annotations

import io
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.accelerators import is_accelerator, module_of
from autopar.runtime.pytorch.checkpoint import read, write
from autopar.runtime.pytorch.checkpoint_pieces import Piece, Pieces
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.optimizer import trainable
from autopar.runtime.pytorch.optimizer_state import optimizer_state, set_steps
from autopar.runtime.pytorch.pipeline.stages import Stages
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.storage import Storage
from autopar.runtime.shared.checkpoint_folder import CheckpointError

OWN = "own."
"""Before the name of what the script has beside the model: its counts say how much that is."""


class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(slots=True)
class State:
    """``objects`` and ``loaders``: the script's own, in the order in which it names them."""

    storage: Storage | Stages
    ranks: Ranks
    optimizer: torch.optim.Optimizer
    objects: list[Stateful] = field(default_factory=list)
    loaders: list[Stateful] = field(default_factory=list)
    _saving: threading.Thread | None = None
    _failed: list[BaseException] = field(default_factory=list)
    _group: Any = None

    def register(self, objects: Iterable[Any]) -> None:
        """Raises `UserError` for what has no ``state_dict`` and ``load_state_dict``."""
        for one in objects:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise UserError(
                    f"register_for_checkpointing({type(one).__name__}): it has no state_dict() and "
                    "load_state_dict(state); wrap it in an object that has"
                )
            self.objects.append(one)

    def save(self, folder: str | Path, step: int, wait: bool = True) -> None:
        """Writes ``folder``; all ranks call it. Without ``wait`` the state is copied and written
        while training goes on; the next call of any method here waits for that."""
        self.finish()
        pieces = self.pieces(step) | self.random_pieces() | self._own_pieces()
        if wait:
            write(folder, pieces)
            return
        if dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo")  # apart from what training exchanges
        copies = {
            name: replace(piece, tensor=piece.tensor.detach().to("cpu", copy=True))
            for name, piece in pieces.items()
        }

        def run() -> None:
            try:
                write(folder, copies, self._group)
            except BaseException as error:
                self._failed.append(error)

        self._saving = threading.Thread(target=run, name="autopar saves")
        self._saving.start()

    def finish(self) -> None:
        """Waits for a save that goes on beside training; raises what it raised."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        if self._failed:
            raise self._failed.pop()

    def load(self, folder: str | Path) -> int:
        """Goes on from ``folder``, which any plan may have written; its step. All ranks call it.

        Raises `CheckpointError` on every rank, before anything is changed, and `HalfLoaded` where
        reading broke off behind that.
        """
        self.finish()
        step = torch.zeros((), dtype=torch.int64)
        random = self.random_pieces()
        own: dict[str, Piece] = {}
        pieces = self.pieces(0) | {"step": Piece.whole(step)}

        def besides(stored: Mapping[str, Any]) -> Pieces:
            own.update(self._own_of(stored, folder))
            last = {f"{name.partition('.')[0]}.{self.ranks.world - 1}" for name in random}
            same = last <= set(stored) and f"rng.{self.ranks.world}" not in stored
            return own | (random if same else {})

        names = read(folder, pieces, unread=self._elsewhere(pieces), more=besides)
        if isinstance(self.storage, Stages):
            self.storage.copy_twins(self._state_of)
        set_steps(self.optimizer, int(step))
        for piece in own.values():
            self._take(piece.tensor, folder)
        if f"rng.{self.ranks.rank}" in names:
            torch.set_rng_state(random[f"rng.{self.ranks.rank}"].tensor)
            if is_accelerator(self.ranks.device):
                state = random[f"rng_cuda.{self.ranks.rank}"].tensor
                module_of(self.ranks.device).set_rng_state(state, self.ranks.device)
        return int(step)

    def pieces(self, step: int) -> dict[str, Piece]:
        """Weights, buffers and what the optimizer keeps, by their names in a checkpoint."""
        pieces = {"step": Piece.whole(torch.tensor(step))}
        updated = {id(h) for h in trainable(self.storage.pieces)}
        for held in self.storage.held.values():
            shape, leaf = held.declared.shape, held.leaf.detach()
            pieces[f"model.{held.name}"] = Piece(leaf, held.region, shape, held.order)
            if id(held) in updated:
                for state, value in self._kept(held).items():
                    name = f"optimizer.{state}.{held.name}"
                    like = value.shape == held.leaf.shape
                    own = Piece(value, held.region, shape, held.order)
                    pieces[name] = own if like else Piece.whole(value)
        for name, tensor, region in self.storage.buffers():
            shape = self.storage.declared_buffers[name].shape
            pieces[f"model.{name}"] = Piece(tensor, region, shape)
        return pieces

    def weights(self) -> tuple[dict[str, Piece], list[str]]:
        """Parameters and what else is in the model's state dict, by the model's names; and which of
        them are buffers."""
        pieces = {
            h.name: Piece(h.leaf.detach(), h.region, h.declared.shape, h.order)
            for h in self.storage.held.values()
        }
        buffers = [name for name, _, _ in self.storage.buffers() if name in self.storage.persistent]
        for name, tensor, region in self.storage.buffers():
            if name in self.storage.persistent:
                pieces[name] = Piece(tensor, region, self.storage.declared_buffers[name].shape)
        return pieces, buffers

    def random_pieces(self) -> dict[str, Piece]:
        pieces = {f"rng.{self.ranks.rank}": Piece.whole(torch.get_rng_state())}
        if is_accelerator(self.ranks.device):
            state = module_of(self.ranks.device).get_rng_state(self.ranks.device)
            pieces[f"rng_cuda.{self.ranks.rank}"] = Piece.whole(state)
        return pieces

    def _state_of(self, held: Held) -> list[torch.Tensor]:
        trained = held.leaf.requires_grad and held.leaf.numel()
        return list(self._kept(held).values()) if trained else []

    def _kept(self, held: Held) -> dict[str, torch.Tensor]:
        return optimizer_state(self.optimizer, held.leaf, self.storage.settings.offloads)

    def _elsewhere(self, pieces: Collection[str]) -> Collection[str]:
        """The names in a checkpoint that other ranks of the pipeline read."""
        if not isinstance(self.storage, Stages):
            return ()
        own = [name for name in pieces if name != "step"]
        every = [own] * self.ranks.world
        if self.ranks.world > 1:
            dist.all_gather_object(every, own)
        return {name for part in every for name in part}

    def _counts(self) -> str:
        groups = len(self.optimizer.param_groups)
        return f"{OWN}{len(self.objects)}.{len(self.loaders)}.{groups}"

    def _own_pieces(self) -> dict[str, Piece]:
        """The script's own state, of the first rank: it is the same on all."""
        if self.ranks.rank != 0:
            return {}
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        held: dict[str, Any] = {
            "groups": options,
            "objects": [one.state_dict() for one in self.objects],
            "loaders": [one.state_dict() for one in self.loaders],
        }
        file = io.BytesIO()
        torch.save(held, file)
        return {self._counts(): Piece.whole(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))}

    def _own_of(self, stored: Mapping[str, Any], folder: str | Path) -> dict[str, Piece]:
        """Where the script's own state goes. Raises `CheckpointError` for another script's."""
        for name, kept in stored.items():
            if name.startswith(OWN):
                if name != self._counts():
                    raise CheckpointError(
                        f"{folder} holds {_told(name)}, and this script has "
                        f"{_told(self._counts())}: register the same objects and make the same "
                        "loaders, in the same order, before load"
                    )
                return {name: Piece.whole(torch.empty(tuple(kept.size), dtype=torch.uint8))}
        return {}

    def _take(self, text: torch.Tensor, folder: str | Path) -> None:
        try:
            held = torch.load(io.BytesIO(text.numpy().tobytes()), weights_only=True)
        except Exception as error:  # whatever an object's state holds
            raise CheckpointError(
                f"the state of an object that was registered cannot be read from {folder} "
                f"({str(error).splitlines()[0]}): a state_dict holds numbers, texts, tensors, and "
                "lists and dicts of them"
            ) from error
        for group, options in zip(self.optimizer.param_groups, held["groups"], strict=True):
            group.update(options)
        _give(self.objects, held["objects"])
        _give(self.loaders, held["loaders"])


def _give(objects: Sequence[Stateful], states: Sequence[Any]) -> None:
    for one, state in zip(objects, states, strict=True):
        one.load_state_dict(state)


def _told(counts: str) -> str:
    objects, loaders, groups = counts.removeprefix(OWN).split(".")
    return f"{objects} registered objects, {loaders} loaders and {groups} optimizer groups"
