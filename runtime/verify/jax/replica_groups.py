"""Which devices a collective of an HLO module joins, in each of the ways in which XLA writes it.

replica_groups={{0,1},{2,3}}                      listed
replica_groups=[2,4]<=[2,4]T(1,0)                 rows of an iota, its dims in another order
replica_groups=mesh['x'=4,'y'=2] {'x'}            axes of a mesh, as Shardy's partitioner does
replica_groups=mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y':(2)2}
source_target_pairs={{0,1},{1,0}}                 who sends to whom
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autopar.nouns.scatters import FIRST, THEN

_LISTED = re.compile(r"replica_groups=\{\{([0-9,{} ]*)\}\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\](?:, device_ids=(?P<ids>\([^)]*\)\)?|\[[0-9,]*\]))?"
    r" \{(?P<over>[^}]*)\}"
)
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_OVER = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_ORDER = re.compile(r"\(\[([0-9,]+)\](?:T\(([0-9,]+)\))?\)")
_PAIRS = re.compile(r"source_target_pairs=\{\{(.*?)\}\}")


def group_of(line: str, device: int = 0) -> frozenset[int]:
    """The devices of the group that ``device`` is in; of pairs those that it sends to, and these.

    Raises:
        NotImplementedError: groups in no way that is known here.
    """
    if match := _LISTED.search(line):
        groups = [_numbers(group) for group in re.split(r"\},\s*\{", match[1])]
    elif match := _IOTA.search(line):
        rows, columns = _numbers(match[1])
        ids = _transposed(_numbers(match[2]), _numbers(match[3] or ""))
        groups = [ids[row * columns : (row + 1) * columns] for row in range(rows)]
    elif match := _MESH.search(line):
        groups = _of_mesh(match)
    elif match := _PAIRS.search(line):
        return _reached(pairs_of(match[1]), device)
    else:
        raise NotImplementedError(f"a collective without groups: {line.strip()[:200]}")
    return frozenset(next(group for group in groups if device in group))


def goes_around(line: str) -> bool:
    """Whether pairs of who sends to whom are rings: all that send receive."""
    match = _PAIRS.search(line)
    pairs = pairs_of(match[1]) if match else []
    return bool(pairs) and {one for one, _ in pairs} == {other for _, other in pairs}


def pairs_of(text: str) -> list[tuple[int, int]]:
    """``0,1},{1,0``"""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _reached(pairs: Sequence[tuple[int, int]], device: int) -> frozenset[int]:
    """All that are joined with ``device`` by pairs."""
    group = {device}
    while more := {d for pair in pairs if group.intersection(pair) for d in pair} - group:
        group |= more
    return frozenset(group)


def groups_of_axes(
    mesh: Mapping[str, int], scatters: Mapping[str, int] = MappingProxyType({})
) -> dict[frozenset[int], str]:
    """The group of device 0 for every set of axes, outermost first in the name, and for the parts
    of those that are scattered over in two (`autopar.nouns.scatters`)."""
    names = [axis for axis, size in mesh.items() if size > 1]
    strides, stride = {}, 1
    for axis in reversed(list(mesh)):
        strides[axis], stride = stride, stride * mesh[axis]
    axes_of = {}
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            places = itertools.product(*(range(mesh[a]) for a in axes))
            ids = (sum(p * strides[a] for p, a in zip(ps, axes, strict=True)) for ps in places)
            axes_of[frozenset(ids)] = "+".join(axes)
    for axis, first in scatters.items():
        if axis in mesh:
            near, own = mesh[axis] // first, strides[axis]
            axes_of[frozenset(range(0, mesh[axis] * own, near * own))] = axis + FIRST
            axes_of[frozenset(range(0, near * own, own))] = axis + THEN
    return axes_of


def _of_mesh(match: re.Match[str]) -> list[list[int]]:
    """Devices that differ along the axes of ``over`` alone; ``'x':(2)3`` is the part of an axis
    that has 2 steps outside of it and is 3 long."""
    dims: list[int] = []
    joined: list[bool] = []
    over = {name: (pre, size) for name, pre, size in _OVER.findall(match["over"])}
    for name, whole in _AXIS.findall(match["axes"]):
        pre, size = over.get(name, ("", ""))
        if not pre:
            dims.append(int(whole))
            joined.append(name in over)
            continue
        dims += [int(pre), int(size), int(whole) // (int(pre) * int(size))]
        joined += [False, True, False]
    ids = _device_ids(match["ids"], math.prod(dims))
    groups: dict[tuple[int, ...], list[int]] = {}
    places = itertools.product(*map(range, dims))
    for place, device in zip(places, ids, strict=True):
        outside = tuple(p for p, inside in zip(place, joined, strict=True) if not inside)
        groups.setdefault(outside, []).append(device)
    return list(groups.values())


def _device_ids(text: str | None, count: int) -> list[int]:
    if text is None:
        return list(range(count))
    if order := _ORDER.fullmatch(text):
        return _transposed(_numbers(order[1]), _numbers(order[2] or ""))
    return _numbers(text.strip("[]()"))


def _transposed(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Numbers from 0, laid out in ``sizes``, read with the dims in ``order``."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    dims = list(order) or list(range(len(sizes)))
    return [
        sum(place * strides[dim] for place, dim in zip(places, dims, strict=True))
        for places in itertools.product(*(range(sizes[dim]) for dim in dims))
    ]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
