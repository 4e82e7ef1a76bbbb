"""Meshes, patterns and rules: arithmetic on ranks, so only the last test starts ranks."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.errors import ConfigError, ElixirError, LayoutError, UsageError
from elixir_moe.parallel.mesh import expert_mesh, init_mesh
from elixir_moe.parallel.pattern import Pattern, RankMesh
from elixir_moe.parallel.rules import annotate, named_tensors, pattern_of
from elixir_moe.wrapping.tiling import tile
from tests.support.every import every
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


def mesh(rank: int = 0, **sizes: int) -> RankMesh:
    """Axes in the order given, over ranks 0, 1, 2, ..."""
    world = range(int(torch.tensor(list(sizes.values())).prod()))
    return RankMesh(axes=tuple(sizes), sizes=tuple(sizes.values()), ranks=tuple(world), rank=rank)


def dense(rank: int = 0) -> RankMesh:
    return mesh(rank, dp=4, tp=2)


def expert(rank: int = 0) -> RankMesh:
    return mesh(rank, edp=2, ep=2, tp=2)


class TestRankMesh:
    def test_coordinates_are_row_major(self) -> None:
        found = [expert(rank).coordinate for rank in range(8)]
        assert found == list(itertools.product(range(2), range(2), range(2)))

    @pytest.mark.parametrize(
        ("rank", "axes", "want"),
        [
            (0, ("dp",), (0, 2, 4, 6)),
            (5, ("dp",), (1, 3, 5, 7)),
            (5, ("tp",), (4, 5)),
            (5, ("dp", "tp"), tuple(range(8))),
            (5, ("tp", "dp"), (0, 2, 4, 6, 1, 3, 5, 7)),
            (5, (), (5,)),
        ],
    )
    def test_ranks_along(self, rank: int, axes: tuple[str, ...], want: tuple[int, ...]) -> None:
        assert dense(rank).ranks_along(axes) == want

    def test_ranks_along_partition_the_world(self) -> None:
        for n in range(4):
            for axes in itertools.combinations(("edp", "ep", "tp"), n):
                parts = {frozenset(expert(rank).ranks_along(axes)) for rank in range(8)}
                assert sorted(r for part in parts for r in part) == list(range(8))
                assert every(len(part) == 2**n for part in parts)

    def test_the_ranks_need_not_count_from_zero(self) -> None:
        some = RankMesh(axes=("dp", "tp"), sizes=(2, 2), ranks=(9, 4, 7, 2), rank=7)
        assert some.coordinate == (1, 0) and some.ranks_along(("dp",)) == (9, 7) and some.size("tp") == 2

    def test_world(self) -> None:
        assert RankMesh.world(3, 1) == RankMesh(axes=("dp",), sizes=(3,), ranks=(0, 1, 2), rank=1)

    def test_of_itself(self) -> None:
        assert RankMesh.of(dense()) is not None and RankMesh.of(dense()) == dense()

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"axes": ("dp", "dp"), "sizes": (1, 2)}, "unique name"),
            ({"axes": ("dp",), "sizes": (1, 2)}, "unique name"),
            ({"axes": ("dp",), "sizes": (3,)}, "needs 3 distinct ranks"),
            ({"axes": ("dp",), "sizes": (2,), "ranks": (1, 1), "rank": 1}, "needs 2 distinct ranks"),
            ({"axes": ("dp",), "sizes": (2,), "rank": 5}, "rank 5 is not in its own mesh"),
        ],
    )
    def test_errors(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(LayoutError, match=message):
            RankMesh(**{"ranks": (0, 1), "rank": 0, **settings})

    def test_a_mesh_without_names(self) -> None:
        class Nameless:
            mesh_dim_names = None
            mesh = torch.arange(2)

            def get_rank(self) -> int:
                return 0

        with pytest.raises(LayoutError, match="pass mesh_dim_names"):
            Pattern(Nameless(), replicate=("dp",))


class TestPattern:
    """The divisors of the class's docstring, then slices."""

    @pytest.mark.parametrize(
        ("pattern", "ranks", "divisor"),
        [
            (Pattern(mesh(dp=8), replicate=("dp",)), tuple(range(8)), 8),
            (Pattern(dense(3), replicate=("dp",), shard={"tp": 0}), (1, 3, 5, 7), 4),
            (Pattern(dense(3), replicate=("dp", "tp")), tuple(range(8)), 8),
            (Pattern(dense(3), replicate=("dp", "tp"), partial=("tp",)), tuple(range(8)), 4),
            (Pattern(expert(3), replicate=("edp",), shard={"ep": 0, "tp": 2}), (3, 7), 4),
            (Pattern(expert(3), replicate=("edp", "tp"), shard={"ep": 0}), (2, 3, 6, 7), 8),
            (Pattern(expert(3), replicate=("edp", "tp"), shard={"ep": 0}, partial="tp"), (2, 3, 6, 7), 4),
            (Pattern(mesh(2, edp=1, ep=8, tp=1), replicate=("edp",), shard={"ep": 0}), (2,), 8),
            (Pattern(mesh(2, edp=8, ep=1, tp=1), replicate="edp", shard={"ep": 0}), tuple(range(8)), 8),
            (Pattern(mesh(a=4, b=2), replicate=("a",), shard={"b": 1}, divisor=8), (0, 2, 4, 6), 8),
        ],
    )
    def test_replicas_and_divisor(self, pattern: Pattern, ranks: tuple[int, ...], divisor: int) -> None:
        assert pattern.replicate_ranks == ranks and pattern.gradient_divisor == divisor

    def test_gradients_are_those_of_the_mean_over_the_batch(self) -> None:
        """Ranks that differ in (edp, ep) hold different tokens; each gives every slice one unit of gradient."""
        for rank in range(8):
            pattern = Pattern(mesh(rank, edp=2, ep=4), replicate=("edp",), shard={"ep": 0})
            units_here = pattern.mesh.size("ep")  # tokens of all ranks of this rank's ep process group came here
            total = sum(units_here for _ in pattern.replicate_ranks)
            assert total / pattern.gradient_divisor == 1

    @pytest.mark.parametrize(
        "shard",
        [{}, {"ep": 0}, {"tp": 1}, {"ep": 0, "tp": 1}, {"ep": 1, "tp": 1}, {"tp": 1, "ep": 1}, {"tp": 0, "ep": 0}],
    )
    def test_slices_tile_the_parameter(self, shard: dict[str, int]) -> None:
        local = (2, 3)
        replicate = tuple(axis for axis in ("edp", "ep", "tp") if axis not in shard)
        patterns = [Pattern(expert(rank), replicate=replicate, shard=shard) for rank in range(8)]
        shape = patterns[0].global_shape(local)
        times = torch.zeros(shape, dtype=torch.int64)
        for pattern in patterns:
            i, j = pattern.local_offset(local)
            times[i : i + 2, j : j + 3] += 1
        assert (times == len(patterns[0].replicate_ranks)).all()
        assert shape == (2 * patterns[0].shards_of(0), 3 * patterns[0].shards_of(1))

    def test_of_two_axes_on_one_dim_the_first_is_outer(self) -> None:
        rank = 2  # ep=1, tp=0
        outer_ep = Pattern(expert(rank), replicate=("edp",), shard={"ep": 0, "tp": 0})
        outer_tp = Pattern(expert(rank), replicate=("edp",), shard={"tp": 0, "ep": 0})
        assert outer_ep.local_offset((5,)) == (10,) and outer_tp.local_offset((5,)) == (5,)
        assert outer_ep != outer_tp

    def test_with_a_view_slices_tile_another_shape_of_the_same_elements(self) -> None:
        """Gate and up of a rank, one behind the other: all gates come first in the logical parameter."""
        whole = torch.arange(8 * 3).view(8, 3)
        gates, ups = whole.chunk(2)
        for rank in (0, 1):
            local = torch.cat([gates.chunk(2)[rank], ups.chunk(2)[rank]])
            pattern = Pattern(mesh(rank, tp=2), replicate=(), shard={"tp": 1}, view=(2, 2, 3))
            assert pattern.global_shape(local.shape) == (8, 3) and pattern.grid_shape(local.shape) == (2, 4, 3)
            offset, cell = pattern.local_offset(local.shape), pattern.cell_shape(local.shape)
            window = tuple(slice(o, o + n) for o, n in zip(offset, cell, strict=True))
            assert torch.equal(whole.view(2, 4, 3)[window], local.view(cell))
        assert pattern != Pattern(mesh(1, tp=2), replicate=(), shard={"tp": 1}) and "view=(2, 2, 3)" in str(pattern)
        for shape in ((4, 4), ()):
            with pytest.raises(LayoutError, match=r"growing on dim 0, does not fit the shape"):
                pattern.global_shape(shape)

    def test_replicas_have_the_same_slice(self) -> None:
        for rank in range(8):
            pattern = Pattern(expert(rank), replicate=("edp",), shard={"ep": 0, "tp": 1})
            for other in pattern.replicate_ranks:
                twin = Pattern(expert(other), replicate=("edp",), shard={"ep": 0, "tp": 1})
                assert twin.local_offset((2, 3)) == pattern.local_offset((2, 3))

    def test_it_is_plain_data(self) -> None:
        a = Pattern(expert(1), replicate=["edp"], shard={"ep": 0, "tp": 2})
        b = Pattern(expert(1), replicate="edp", shard=(("ep", 0), ("tp", 2)))
        assert a == b and hash(a) == hash(b) and a.shard == (("ep", 0), ("tp", 2)) and a.replicate == ("edp",)
        assert a != Pattern(expert(1), replicate="edp", shard={"ep": 0, "tp": 2}, dtype=torch.float32)

    def test_every_rank_describes_it_alike(self) -> None:
        texts = {
            Pattern(expert(r), replicate=("edp", "tp"), shard={"ep": 0}, partial="tp").describe() for r in range(8)
        }
        assert texts == {
            "Pattern(mesh(edp=2, ep=2, tp=2), replicate=('edp', 'tp'), shard={'ep': 0}, partial=('tp',)), divisor=4, "
            "ranks=(0, 1, 2, 3, 4, 5, 6, 7)"
        }

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (
                {"replicate": ("dp", "pp"), "shard": {"tp": 0}},
                r"axes \['pp'\] are not among the mesh's axes \('dp', 'tp'\)",
            ),
            ({"replicate": ("dp",), "shard": {"ep": 0}}, r"axes \['ep'\] are not among"),
            ({"replicate": ("dp", "tp"), "partial": ("ep",)}, r"axes \['ep'\] are not among"),
            ({"replicate": ("dp", "tp"), "shard": {"tp": 0}}, "either replicated or sharded, once"),
            ({"replicate": ("dp", "tp", "dp")}, "either replicated or sharded, once"),
            ({"replicate": ("dp",)}, r"lacks the axes \['tp'\]"),
            ({"replicate": ("dp",), "shard": {"tp": 0}, "partial": ("tp",)}, "partial axes must be among"),
            ({"replicate": ("dp",), "shard": {"tp": -1}}, "count from 0"),
            ({"replicate": ("dp", "tp"), "divisor": 0}, "divisor=0: expected a whole number of at least 1 or None"),
            ({"replicate": ("dp", "tp"), "divisor": 1.5}, "divisor=1.5"),
            ({"replicate": ("dp", "tp"), "divisor": True}, "divisor=True"),
            ({"replicate": None}, "replicate=None: expected the name of a mesh axis or a sequence of names"),
            ({"replicate": 1}, "replicate=1: expected the name"),
            ({"replicate": (0, 1)}, r"replicate=\(0, 1\): expected the name"),
            ({"replicate": b"dp"}, "replicate=b'dp': expected the name"),
            ({"replicate": ("dp", "tp"), "partial": None}, "partial=None: expected the name"),
            ({"replicate": {"dp": 0, "tp": 1}}, "replicate={'dp': 0, 'tp': 1}: expected the name"),
            ({"replicate": "dp", "shard": "tp"}, "shard='tp': expected a mapping of mesh axes to tensor dims"),
            ({"replicate": "dp", "shard": None}, "shard=None: expected a mapping"),
            ({"replicate": "dp", "shard": 0}, "shard=0: expected a mapping"),
            ({"replicate": "dp", "shard": ("tp", 0)}, r"shard=\('tp', 0\): expected a mapping"),
            ({"replicate": "dp", "shard": [("tp", 0, 1)]}, "expected a mapping"),
            ({"replicate": "dp", "shard": {"tp": "0"}}, "shard={'tp': '0'}: expected a mapping"),
            ({"replicate": "dp", "shard": {"tp": True}}, "shard={'tp': True}: expected a mapping"),
            ({"replicate": "dp", "shard": {"tp": 0.0}}, "shard={'tp': 0.0}: expected a mapping"),
            ({"replicate": "dp", "shard": {1: 0}}, "shard={1: 0}: expected a mapping"),
            ({"replicate": ("dp", "tp"), "view": (2, -1)}, r"view=\(2, -1\): expected a shape without -1"),
            ({"replicate": ("dp", "tp"), "view": 2}, "view=2: expected a shape"),
            ({"replicate": ("dp", "tp"), "grows": -1}, "grows=-1: expected a tensor dim"),
            ({"replicate": ("dp", "tp"), "dtype": "bf16"}, "dtype='bf16': expected a torch.dtype"),
        ],
    )
    def test_errors(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(LayoutError, match=message):
            Pattern(dense(), **settings)

    @pytest.mark.parametrize("wrong", [None, "dp", ("dp", "tp"), torch.arange(2)], ids=str)
    def test_what_is_no_mesh(self, wrong: Any) -> None:
        with pytest.raises(LayoutError, match=r"expected a DeviceMesh with named axes.*em.init_mesh\(\)"):
            Pattern(wrong, replicate=("dp",))

    def test_an_axis_of_one_rank_needs_no_mention(self) -> None:
        assert Pattern(mesh(dp=4, tp=1), replicate=("dp",)).replicate_ranks == (0, 1, 2, 3)

    def test_a_dim_the_tensor_lacks(self) -> None:
        pattern = Pattern(dense(), replicate=("dp",), shard={"tp": 1})
        for method in (pattern.global_shape, pattern.local_offset):
            with pytest.raises(LayoutError, match=r"shards \[\('tp', 1\)\], but the tensor has only 1 dims"):
                method((4,))


class Model(nn.Module):
    """A few names to match."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
        self.head = nn.Linear(2, 4, bias=False)


class Special(Model):
    """The same, of a class of its own."""


REPLICATED = Pattern(dense(), replicate=("dp", "tp"))
CUT = Pattern(dense(), replicate=("dp",), shard={"tp": 0})
CUT_0_OF_ONE = Pattern(mesh(dp=8, tp=1), replicate=("dp",), shard={"tp": 0})
OTHER = Pattern(mesh(dp=8, tp=1), replicate=("dp", "tp"))
CUT_1 = Pattern(dense(), replicate=("dp",), shard={"tp": 1})


class TestAnnotate:
    def test_a_wrapped_model_is_refused(self) -> None:
        model = nn.Linear(2, 2)
        model._elixir = object()  # what wrap leaves on it
        with pytest.raises(UsageError, match=r"before em\.wrap"):
            annotate(model, {"*": REPLICATED})

    def test_the_first_rule_that_matches_wins(self) -> None:
        model = Model()
        annotate(model, {"experts.0.*": CUT, "*.weight": REPLICATED, "*": CUT})
        got = {name: pattern_of(p) for name, p in model.named_parameters()}
        assert got == {
            "embedding.weight": REPLICATED,
            "experts.0.weight": CUT,
            "experts.0.bias": CUT,
            "experts.1.weight": REPLICATED,
            "experts.1.bias": CUT,
            "head.weight": REPLICATED,
        }

    def test_without_a_pattern(self) -> None:
        parameter = Model().head.weight
        assert pattern_of(parameter) is None and pattern_of(parameter, CUT) is CUT

    def test_tied_parameters(self) -> None:
        model = Model()
        model.head.weight = model.embedding.weight
        annotate(model, {"head.*": CUT, "embedding.*": CUT, "*": REPLICATED})
        assert pattern_of(model.head.weight) == CUT
        with pytest.raises(LayoutError, match=r"'head.weight' is tied to 'embedding.weight'"):
            annotate(model, {"head.*": CUT, "*": REPLICATED})

    @pytest.mark.parametrize("tiled", [False, True])
    def test_a_class_matches_the_parameters_of_its_modules_and_of_those_inside(self, tiled: bool) -> None:
        model = nn.ModuleDict({"first": Model(), "second": Special(), "norm": nn.LayerNorm(2)})
        if tiled:
            tile(model, at_most=16)
        annotate(model, {"*.bias": REPLICATED, Special: CUT, nn.Linear: CUT_0_OF_ONE, "*": OTHER})
        got = {name: pattern_of(p) for name, p in named_tensors(model)}
        assert got == {
            "first.embedding.weight": OTHER,
            "first.experts.0.weight": CUT_0_OF_ONE,
            "first.experts.0.bias": REPLICATED,
            "first.experts.1.weight": CUT_0_OF_ONE,
            "first.experts.1.bias": REPLICATED,
            "first.head.weight": CUT_0_OF_ONE,
            "second.embedding.weight": CUT,
            "second.experts.0.weight": CUT,
            "second.experts.0.bias": REPLICATED,
            "second.experts.1.weight": CUT,
            "second.experts.1.bias": REPLICATED,
            "second.head.weight": CUT,
            "norm.weight": OTHER,
            "norm.bias": REPLICATED,
        }

    def test_a_class_matches_its_subclasses_and_a_class_of_the_whole_model_everything(self) -> None:
        model = Special()
        annotate(model, {Model: CUT})
        assert {pattern_of(p) for p in model.parameters()} == {CUT}

    def test_classes_of_tied_parameters(self) -> None:
        model = Model()
        model.head.weight = model.embedding.weight
        annotate(model, {nn.Embedding: CUT, "head.*": CUT, nn.Module: REPLICATED})
        assert pattern_of(model.head.weight) == CUT
        with pytest.raises(LayoutError, match=r"'head.weight' is tied to 'embedding.weight'"):
            annotate(model, {nn.Embedding: CUT, nn.Linear: REPLICATED})

    @pytest.mark.parametrize(
        ("rules", "messages"),
        [
            ({nn.Conv1d: CUT, "*": REPLICATED}, ["rule Conv1d matches no parameter: correct the class or remove"]),
            ({nn.Embedding: CUT}, ["'experts.0.weight' (2, 2) is matched by no rule", "'head.weight'"]),
            ({Model: CUT, nn.Linear: REPLICATED}, ["rule Linear never applies", "put the narrower rule first"]),
            ({"*": CUT, nn.Linear: REPLICATED}, ["rule Linear never applies", "put the narrower rule first"]),
            ({}, ["'embedding.weight' (4, 2) is matched by no rule", "'head.weight' (4, 2) is matched by no rule"]),
            ({"*.weight": CUT}, ["'experts.0.bias' (2,) is matched by no rule", "'experts.1.bias'"]),
            ({"expert.*": CUT, "*": REPLICATED}, ["rule 'expert.*' matches no parameter"]),
            ({"*": REPLICATED, "experts.*": CUT}, ["rule 'experts.*' never applies", "put the narrower rule first"]),
            ({"*": CUT_1}, ["'experts.0.bias'", "'experts.1.bias'", "only 1 dims"]),
        ],
    )
    @pytest.mark.fault(29)
    def test_errors_name_everything_concerned(self, rules: dict[str, Pattern], messages: list[str]) -> None:
        model = Model()
        with pytest.raises(LayoutError) as caught:
            annotate(model, rules)
        assert every(message in str(caught.value) for message in messages), caught.value
        assert every(pattern_of(p) is None for p in model.parameters()), "a failed annotate leaves nothing behind"

    @pytest.mark.parametrize(
        ("model", "rules", "message"),
        [
            (None, {"*": REPLICATED}, "model is a NoneType, expected an nn.Module"),
            ({"*": REPLICATED}, Model(), "model is a dict, expected an nn.Module"),
            (Model().head.weight, {"*": REPLICATED}, "model is a Parameter, expected an nn.Module"),
            (Model(), [("*", REPLICATED)], "rules is a list, expected a mapping of globs to patterns"),
            (Model(), REPLICATED, "rules is a Pattern, expected a mapping"),
            (Model(), None, "rules is a NoneType, expected a mapping"),
            (Model(), {"head.*": "dp", "*": REPLICATED}, "rules maps 'head.*' to a str, expected a glob (str)"),
            (Model(), {"head.*": Pattern, "*": REPLICATED}, "rules maps 'head.*' to a type, expected"),
            (Model(), {"*": REPLICATED, "nothing": None}, "rules maps 'nothing' to a NoneType, expected"),
            (Model(), {0: REPLICATED, "*": REPLICATED}, "rules maps 0 to a Pattern, expected a glob (str)"),
            (Model(), {dict: REPLICATED, "*": REPLICATED}, "rules maps <class 'dict'> to a Pattern, expected a glob"),
            (Model(), {Model().head: REPLICATED}, "to a Pattern, expected a glob (str) or a subclass of nn.Module"),
        ],
    )
    def test_what_are_no_rules(self, model: Any, rules: Any, message: str) -> None:
        with pytest.raises(LayoutError) as caught:
            annotate(model, rules)
        assert message in str(caught.value)


def run_meshes() -> dict[str, Any]:
    world, results = init_mesh(device_type="cpu"), {}
    with_tp = init_mesh(2, device_type="cpu")
    meshes = {
        "world": world,
        "tp": with_tp,
        "ep": expert_mesh(world, 2),
        "ep tp": expert_mesh(with_tp, 2),
        "etp 1": expert_mesh(with_tp, 4, etp=1),
    }
    assert meshes["ep"] is expert_mesh(world, 2), "asked again, the same mesh"
    for name, device_mesh in meshes.items():
        got = RankMesh.of(device_mesh)
        assert got.rank == dist.get_rank()
        for axis in got.axes:
            assert tuple(dist.get_process_group_ranks(device_mesh.get_group(axis))) == got.ranks_along((axis,))
        results[name] = (got.axes, got.sizes, got.ranks)
    results["errors"] = errors = []
    for call in (
        lambda: init_mesh(3, device_type="cpu"),
        lambda: init_mesh(0, device_type="cpu"),
        lambda: expert_mesh(world, 3),
        lambda: expert_mesh(with_tp, 4),
        lambda: expert_mesh(world, 1, etp=3),
        lambda: expert_mesh(expert_mesh(world, 2), 2),
    ):
        try:
            call()
        except LayoutError as error:
            errors.append(str(error))
    return results


def test_device_meshes(ranks: Ranks) -> None:
    for got in ranks(4).run(run_meshes):
        order = (0, 1, 2, 3)
        assert got["world"] == (("dp", "tp"), (4, 1), order)
        assert got["tp"] == (("dp", "tp"), (2, 2), order)
        assert got["ep"] == (("edp", "ep", "tp"), (2, 2, 1), order)
        assert got["ep tp"] == (("edp", "ep", "tp"), (1, 2, 2), order)
        assert got["etp 1"] == (("edp", "ep", "tp"), (1, 4, 1), order)
        tp3, tp0, ep3, ep4, etp3, twice = got["errors"]
        assert "tp=3: expected a whole number that divides 4" in tp3 and "[1, 2, 4]" in tp3 and "tp=0" in tp0
        assert "ep=3" in ep3 and "[1, 2, 4]" in ep3
        assert "ep=4: expected a whole number that divides 2" in ep4 and "[1, 2]" in ep4
        assert "etp=3" in etp3 and "[1, 2, 4]" in etp3 and "use em.init_mesh()" in twice


def run_refused(call: Callable[..., Any], settings: dict[str, Any]) -> tuple[type, str]:
    """(rank) What the call raises; `expert_mesh` gets the mesh of the world."""
    arguments = [init_mesh(device_type="cpu")] if call is expert_mesh else []
    try:
        call(*arguments, **settings)
    except Exception as error:
        return type(error), str(error)
    raise AssertionError(f"{settings} were accepted")


@pytest.mark.parametrize(
    ("call", "settings", "kind", "message"),
    [
        (
            init_mesh,
            {"tp": "2"},
            LayoutError,
            "tp='2': expected a whole number that divides 2 (the ranks of the world)",
        ),
        (init_mesh, {"tp": 1.0}, LayoutError, "tp=1.0: expected a whole number"),
        (init_mesh, {"tp": True}, LayoutError, "tp=True: expected a whole number"),
        (init_mesh, {"tp": None}, LayoutError, "tp=None: expected a whole number"),
        (init_mesh, {"device_type": "gpu"}, ConfigError, "device_type='gpu': expected one of ["),
        (init_mesh, {"device_type": torch.device("cpu")}, ConfigError, "device_type=device(type='cpu'): expected one"),
        (init_mesh, {"device_type": ""}, ConfigError, "device_type='': expected one of ["),
        (expert_mesh, {"ep": "1"}, LayoutError, "ep='1': expected a whole number that divides 2"),
        (expert_mesh, {"ep": 1.0}, LayoutError, "ep=1.0: expected a whole number"),
        (expert_mesh, {"ep": True}, LayoutError, "ep=True: expected a whole number"),
        (expert_mesh, {"ep": None}, LayoutError, "ep=None: expected a whole number"),
        (expert_mesh, {"ep": 1, "etp": "1"}, LayoutError, "etp='1': expected a whole number that divides 2"),
        (expert_mesh, {"ep": 1, "etp": 1.0}, LayoutError, "etp=1.0: expected a whole number"),
        (expert_mesh, {"ep": 1, "etp": True}, LayoutError, "etp=True: expected a whole number"),
    ],
)
def test_degrees_and_devices_that_are_none(
    call: Callable[..., Any], settings: dict[str, Any], kind: type[ElixirError], message: str, ranks: Ranks
) -> None:
    if call is init_mesh and "tp" in settings:
        settings = {**settings, "device_type": "cpu"}
    for raised, text in ranks(2).run(run_refused, call, settings):
        assert raised is kind and message in text, (raised, text)


@pytest.mark.parametrize("wrong", [None, 4, "world", RankMesh.world(2, 0)], ids=str)
def test_an_expert_mesh_of_no_mesh(wrong: Any) -> None:
    with pytest.raises(LayoutError, match=r"needs a mesh with axes \('dp', 'tp'\), got .*: use em.init_mesh\(\)"):
        expert_mesh(wrong, ep=1)
