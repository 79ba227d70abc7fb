"""Where `explain` says that axes lie on a torus."""

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.slices import find_slice
from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.nouns.mesh import Mesh
from autopar.report.torus import axes_on_torus, torus_lines, torus_object

SQUARE = find_slice("v5e-4x4")
CLUSTER = Cluster("v5e", (DeviceGroup(find_device("TPU-v5e"), 16),), SQUARE.levels())


def rows(axis: str, kind: str = "reduce_scatter") -> list[dict[str, str]]:
    return [{"axis": axis, "kind": kind}]


def test_an_axis_over_the_whole_square_says_what_is_made_of_its_scatters() -> None:
    mesh = Mesh(("dp_shard",), (16,))
    (lying,) = axes_on_torus(CLUSTER, mesh, rows("dp_shard"))
    assert "dp_shard 16: a dim of 4 (a line) and a dim of 4 (a line) of ici 4x4" in str(lying)
    assert "its reduce-scatters are two, over 8 ranks and over the 2 left" in str(lying)
    assert torus_object([lying])[0]["reduce_scatter_in_two"] == 8
    (parts,) = axes_on_torus(CLUSTER, mesh, rows("dp_shard/first"))
    assert str(parts) == str(lying)
    (gathers,) = axes_on_torus(CLUSTER, mesh, rows("dp_shard", "all_gather"))
    assert "reduce-scatters" not in str(gathers)


def test_an_axis_over_several_slices_says_that_it_is_summed() -> None:
    two = Cluster("v5e", (DeviceGroup(find_device("TPU-v5e"), 32),), SQUARE.levels(2))
    (lying,) = axes_on_torus(two, Mesh(("dp_shard",), (32,)), rows("dp_shard"))
    assert "all-reduces of its reduce-scatters" in str(lying)
    assert torus_object([lying])[0]["reduce_scatter_is_all_reduce"]


def test_axes_along_dims_scatter_as_they_are_asked() -> None:
    mesh = Mesh(("dp_shard", "tp"), (4, 4))
    lying = axes_on_torus(CLUSTER, mesh, [*rows("dp_shard"), *rows("tp"), *rows("depth")])
    assert [one.axis for one in lying] == ["dp_shard", "tp"]
    assert not any("reduce-scatters" in str(one) for one in lying)
    assert len(torus_lines(lying)) == 4
    assert not axes_on_torus(Cluster("x", CLUSTER.groups, ()), mesh, rows("tp"))
