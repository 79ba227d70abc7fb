"""Where the experts of a program's layers lie on ranks, and how pieces that lie so are files again.

A layer's matrices are stored by place (`autopar.nouns.expert_placement`): everything that splits
them has contiguous places. Routes come by the model's numbers and are turned into places at the
call; initial values, checkpoints, weights and what is verified are turned into places here, run by
run of neighbours that are neighbours in the model too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from autopar.nouns.expert_placement import ExpertPlacement
from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch.parameters import Declared, Region
from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.modules import parameters_of

Order = tuple[int, ...] | None
"""The expert at each place; None: in their order."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A module of a program, by the model's name; ``experts`` at each place where they are placed,
    and the ``places`` [experts] of each."""

    name: str
    experts: Order = None
    places: Tensor | None = None


_layers: WeakKeyDictionary[nn.Module, Layer] = WeakKeyDictionary()
_holders: dict[int, ref[nn.Module]] = {}
"""By the id of a parameter; looked up again where that has become another's."""


def name_layers(
    model: nn.Module,
    placed: Mapping[str, tuple[tuple[int, ...], ...]],
    declared: Mapping[str, Declared],
    mesh: Mesh,
) -> dict[str, Order]:
    """By parameter, how its experts lie; from here on `layer_of` knows the modules of ``model``.

    placed: of `Settings`, layers that other stages hold among them. Raises `ProgramError` where it
    says what the parameters of a layer do not.
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if name not in placed:
            _layers[module] = Layer(name)
            continue
        placement = ExpertPlacement(placed[name])
        _layers[module] = Layer(name, placement.experts, torch.tensor(placement.places))
    orders: dict[str, Order] = {}
    for name, known in declared.items():
        owner = name.rpartition(".")[0]
        if known.placed and owner in placed:
            orders[name] = _order(name, known, ExpertPlacement(placed[owner]), mesh)
    for owner in placed:
        if owner in modules and not any(name.rpartition(".")[0] == owner for name in orders):
            raise ProgramError(
                f"SETTINGS.placed has {owner!r}, none of whose parameters is declared with "
                "placed=True: plan the model again"
            )
    return orders


def _order(name: str, known: Declared, placement: ExpertPlacement, mesh: Mesh) -> Order:
    ranks = mesh.ways(known.sharding.split_axes(0))
    if (len(placement.experts), len(placement.ranks)) != (known.shape[0], ranks):
        raise ProgramError(
            f"SETTINGS.placed has {len(placement.experts)} experts on {len(placement.ranks)} ranks "
            f"for {name}, of which {ranks} ranks hold {known.shape[0]}: plan the model again"
        )
    return placement.experts


def layer_of(module: nn.Module | None) -> Layer | None:
    """What is known of a module; None of one that nobody named."""
    return None if module is None else _layers.get(module)


def holder_of(matrices: Tensor) -> nn.Module | None:
    """The module of a program whose parameter ``matrices`` are, or are made of in the dtype of
    compute; None of what else they are, such as what compiled code made."""
    parameter = _parameter_of(matrices)
    known = _holders.get(id(parameter))
    module = None if known is None else known()
    if module is not None and _holds(module, parameter):
        return module
    for module in [*_layers]:
        for own in parameters_of(module).values():
            _holders[id(own)] = ref(module)
    known = _holders.get(id(parameter))
    module = None if known is None else known()
    return module if module is not None and _holds(module, parameter) else None


def _parameter_of(matrices: Tensor) -> Tensor:
    """What autograd knows ``matrices`` as a cast of, else themselves."""
    cast = matrices.grad_fn
    if cast is None or not cast.next_functions:
        return matrices
    made_of: Tensor = getattr(cast.next_functions[0][0], "variable", matrices)
    return made_of if made_of.shape == matrices.shape else matrices


def _holds(module: nn.Module, parameter: Tensor) -> bool:
    return any(own is parameter for own in parameters_of(module).values())


def in_places(index: Tensor, module: nn.Module | None) -> Tensor:
    """``index`` [n, k] of experts as the model numbers them -> their places."""
    layer = layer_of(module)
    if layer is None or layer.places is None:
        return index
    places = layer.places.to(index.device)
    if places is not layer.places and not index.is_meta:  # moved once
        assert module is not None
        _layers[module] = replace(layer, places=places)
    return places[index]


def runs(region: Region, order: tuple[int, ...]) -> Iterator[tuple[slice, Region]]:
    """(rows of the local tensor, the region of the model's tensor that they are) of a piece that is
    ``region`` by place."""
    start, end = region[0].start, region[0].stop
    first = start
    while first < end:
        last = first + 1
        while last < end and order[last] == order[last - 1] + 1:
            last += 1
        experts = slice(order[first], order[first] + last - first)
        yield slice(first - start, last - start), (experts, *region[1:])
        first = last


def rows_of(whole: Tensor, region: Region, order: Order) -> Tensor:
    """What of the model's ``whole`` tensor a piece has that is ``region`` by place."""
    if order is None:
        return whole[region]
    experts = torch.tensor(order[region[0]], device=whole.device, dtype=torch.int64)
    return whole[(slice(None), *region[1:])].index_select(0, experts)
