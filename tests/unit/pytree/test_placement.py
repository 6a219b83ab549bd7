"""Placement: from any mesh to any other, byte for byte, with exactly the requested sharding."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxckpt_train as jct
from jaxckpt_train.pytree._jax import enable_x64, set_mesh
from jaxckpt_train.pytree.placing import default_platform
from tests.support.runs import Counter
from tests.support.same_trees import raw

P, S = PartitionSpec, jax.ShapeDtypeStruct
FAST = jct.StoreSettings(durability="none")
HOST = {
    "w": np.arange(64 * 24, dtype=np.float32).reshape(64, 24),
    "h": np.arange(8 * 16, dtype=np.float32).reshape(16, 8).astype(jnp.bfloat16),
    "b": np.arange(24, dtype=np.int32),
    "n": np.array(3, np.float32),
}


def mesh(rows: int, columns: int, names: tuple[str, str] = ("x", "y"), kind: Any = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices("cpu")[: rows * columns]).reshape(rows, columns)
    return Mesh(devices, names, axis_types=(kind, kind))


def on(mesh: Mesh, *, whole: bool = False) -> dict[str, NamedSharding]:
    a, b = (None, None) if whole else mesh.axis_names
    return {
        "w": NamedSharding(mesh, P(a, b)),
        "h": NamedSharding(mesh, P((b, a) if b else None)),
        "b": NamedSharding(mesh, P(b)),
        "n": NamedSharding(mesh, P()),
    }


def everywhere(sharding: Any) -> dict[str, Any]:
    return dict.fromkeys(HOST, sharding)


def layouts() -> dict[str, dict[str, Any]]:
    return {
        "4x2": on(mesh(4, 2)),
        "8x1": on(mesh(8, 1)),
        "1x8": on(mesh(1, 8)),
        "2x4": on(mesh(2, 4)),
        "2x1": on(mesh(2, 1)),
        "renamed": on(mesh(2, 4, ("data", "model"))),
        "turned": on(Mesh(mesh(4, 2).devices[::-1, ::-1], ("x", "y"), axis_types=(AxisType.Auto,) * 2)),
        "explicit": on(mesh(2, 4, kind=AxisType.Explicit)),
        "replicated": on(mesh(4, 2), whole=True),
        "one device": everywhere(SingleDeviceSharding(jax.devices("cpu")[3])),
        "uncommitted": everywhere(None),
    }


LAYOUTS = layouts()


def put(shardings: dict[str, Any]) -> dict[str, jax.Array]:
    return {
        name: jnp.asarray(leaf) if shardings[name] is None else jax.device_put(leaf, shardings[name])
        for name, leaf in HOST.items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    for name, shardings in LAYOUTS.items():
        jct.save(folder / name, put(shardings), settings=FAST)
    return {name: folder / name for name in LAYOUTS}


def check(found: dict[str, jax.Array], shardings: dict[str, Any]) -> None:
    for name, leaf in HOST.items():
        assert raw(found[name]) == leaf.tobytes()
        for shard in found[name].addressable_shards:
            assert raw(shard.data) == raw(leaf[shard.index])
        if shardings[name] is None:
            assert not found[name].committed
        else:
            assert found[name].sharding == shardings[name]
            assert found[name].committed


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_loads_into_every_other(saved: dict[str, Path], source: str, target: str) -> None:
    shardings = LAYOUTS[target]
    like = {name: S(leaf.shape, leaf.dtype, sharding=shardings[name]) for name, leaf in HOST.items()}
    check(jct.load(saved[source], like), shardings)


@pytest.mark.parametrize("target", ["2x4", "one device", "uncommitted", "explicit"])
def test_arrays_are_targets_too(saved: dict[str, Path], target: str) -> None:
    check(jct.load(saved["4x2"], put(LAYOUTS[target])), LAYOUTS[target])


def test_every_layout_loads_to_the_host(saved: dict[str, Path]) -> None:
    for path in saved.values():
        for found in (jct.load(path), jct.load(path, HOST)):
            assert {name: raw(leaf) for name, leaf in found.items()} == {n: leaf.tobytes() for n, leaf in HOST.items()}
            assert all(type(leaf) is np.ndarray for leaf in found.values())


def test_shardings_may_be_one_or_tree_prefix(saved: dict[str, Path], tmp_path: Path) -> None:
    everyone = NamedSharding(mesh(4, 2), P())
    abstract = {name: S(leaf.shape, leaf.dtype) for name, leaf in HOST.items()}
    for like in (None, abstract, put(LAYOUTS["uncommitted"])):
        check(jct.load(saved["2x4"], like, shardings=everyone), everywhere(everyone))
        check(jct.load(saved["2x4"], like, shardings=LAYOUTS["2x1"]), LAYOUTS["2x1"])
    jct.save(tmp_path / "c", {"params": put(LAYOUTS["4x2"]), "opt": [put(LAYOUTS["4x2"])]}, settings=FAST)
    like = {"params": abstract, "opt": [abstract]}
    found = jct.load(tmp_path / "c", like, shardings={"params": LAYOUTS["1x8"], "opt": everyone})
    check(found["params"], LAYOUTS["1x8"])
    check(found["opt"][0], everywhere(everyone))
    partly = jct.load(tmp_path / "c", shardings={"params": everyone, "opt": None})
    check(partly["params"], everywhere(everyone))
    assert type(partly["opt"][0]["w"]) is np.ndarray


def test_the_sharding_of_the_target_wins(saved: dict[str, Path]) -> None:
    like = {name: S(leaf.shape, leaf.dtype, sharding=LAYOUTS["8x1"][name]) for name, leaf in HOST.items()}
    check(jct.load(saved["4x2"], like, shardings=LAYOUTS["2x4"]), LAYOUTS["8x1"])


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        ("b", P("x", None), r"leaf 'b': shape \(24,\) does not fit its sharding.*rank at least 2"),
        ("n", P("x"), r"leaf 'n': shape \(\) does not fit its sharding"),
        ("odd", P("x"), r"leaf 'odd': shape \(7, 3\) does not fit its sharding"),
    ],
)
def test_unfit_sharding_is_refused_by_name(name: str, spec: P, reason: str, tmp_path: Path) -> None:
    tree = {**HOST, "odd": np.ones((7, 3), np.float32)}
    jct.save(tmp_path / "c", tree, settings=FAST)
    for segment in tmp_path.rglob("*.safetensors"):
        segment.unlink()  # refused before anything is read
    like = {key: S(leaf.shape, leaf.dtype) for key, leaf in tree.items()}
    with pytest.raises(jct.MismatchError, match=reason):
        jct.load(tmp_path / "c", like, shardings={name: NamedSharding(mesh(4, 2), spec)})


@pytest.mark.parametrize("shardings", [3, {"w": P("x")}, P("x"), {"w": "x"}], ids=str)
def test_value_that_is_no_sharding_is_refused(saved: dict[str, Path], shardings: Any) -> None:
    with pytest.raises(jct.SettingsError, match=r"shardings: leaf .*NamedSharding\(mesh"):
        jct.load(saved["4x2"], shardings=shardings)


def test_64_bit_array_is_not_narrowed_in_silence(tmp_path: Path) -> None:
    with enable_x64(True):
        jct.save(tmp_path / "c", {"w": jnp.arange(3.0) / 3}, settings=FAST)
    with pytest.raises(jct.MismatchError, match=r"leaf 'w': saved float64.*jax_enable_x64"):
        jct.load(tmp_path / "c", shardings=NamedSharding(mesh(4, 2), P()))


@pytest.mark.skipif(jax.__version_info__ < (0, 7), reason="JAX 0.6 gives abstract results no sharding")
def test_target_made_by_eval_shape_under_explicit_mesh(saved: dict[str, Path]) -> None:
    explicit = mesh(4, 2, kind=AxisType.Explicit)
    arrays = put(on(explicit))
    with set_mesh(explicit):
        abstract = jax.eval_shape(jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + leaf, tree)), arrays)
        assert isinstance(abstract["w"].sharding.mesh, AbstractMesh)
        found = jct.load(saved["2x4"], abstract)
    assert {name: raw(leaf) for name, leaf in found.items()} == {name: leaf.tobytes() for name, leaf in HOST.items()}
    for name, leaf in found.items():
        assert leaf.sharding.is_equivalent_to(arrays[name].sharding, leaf.ndim)
        assert jax.typeof(leaf) == jax.typeof(arrays[name])
    with pytest.raises(jct.MismatchError, match="abstract mesh"):
        jct.load(saved["2x4"], abstract)


def test_target_made_by_eval_shape_with_shardings(saved: dict[str, Path]) -> None:
    wanted = LAYOUTS["2x4"]
    make = jax.jit(
        lambda: {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in HOST.items()}, out_shardings=wanted
    )
    check(jct.load(saved["4x2"], make.eval_shape(), shardings=wanted), wanted)
    check(jct.load(saved["4x2"], make()), wanted)


def test_abstract_mesh_means_mesh_in_effect(saved: dict[str, Path]) -> None:
    concrete = mesh(2, 4)
    like = {
        name: S(leaf.shape, leaf.dtype, sharding=NamedSharding(concrete.abstract_mesh, on(concrete)[name].spec))
        for name, leaf in HOST.items()
    }
    with set_mesh(concrete):
        check(jct.load(saved["8x1"], like), on(concrete))


def test_memory_kinds_are_honoured(saved: dict[str, Path]) -> None:
    kinds = [memory.kind for memory in jax.devices("cpu")[0].addressable_memories()]
    if "pinned_host" not in kinds:
        pytest.skip(f"memories of a CPU device here: {kinds}")
    pinned = {name: place.with_memory_kind("pinned_host") for name, place in LAYOUTS["4x2"].items()}
    like = {name: S(leaf.shape, leaf.dtype, sharding=pinned[name]) for name, leaf in HOST.items()}
    found = jct.load(saved["2x4"], like)
    check(found, pinned)
    assert {leaf.sharding.memory_kind for leaf in found.values()} == {"pinned_host"}


def test_weak_types_and_sharded_keys_are_kept(tmp_path: Path) -> None:
    spread = NamedSharding(mesh(4, 2), P("x"))
    keys = jax.device_put(jax.random.split(jax.random.key(1), 8), spread)
    tree = {"weak": jnp.asarray(2.0), "weak int": jnp.asarray(2), "strong": jnp.float32(2.0), "keys": keys}
    jct.save(tmp_path / "c", tree, settings=FAST)
    found = jct.load(tmp_path / "c", tree)
    assert [found[name].weak_type for name in ("weak", "weak int", "strong")] == [True, True, False]
    assert found["keys"].sharding == spread
    assert raw(found["keys"]) == raw(keys)


@pytest.mark.skipif(jax.__version_info__ < (0, 7), reason="jax.shard_map came with JAX 0.7")
def test_restored_replicas_may_be_donated_again_and_again(saved: dict[str, Path]) -> None:
    line = Mesh(np.array(jax.devices("cpu")), ("x",), axis_types=(AxisType.Auto,))
    everyone = NamedSharding(line, P())
    like = {name: S(leaf.shape, leaf.dtype, sharding=everyone) for name, leaf in HOST.items()}

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(jax.shard_map, mesh=line, in_specs=P(), out_specs=P(), check_vma=False)
    def step(w: jax.Array) -> jax.Array:
        return w + jax.lax.axis_index("x").astype(w.dtype)  # another value on each device, on purpose

    for _ in range(20):
        found = jct.load(saved["4x2"], like)
        w = found["w"]
        for times in range(1, 4):
            before, w = w, step(w)
            assert before.is_deleted()
            for shard in w.addressable_shards:
                assert raw(shard.data) == raw(HOST["w"] + times * np.float32(shard.device.id))
        assert raw(found["b"]) == HOST["b"].tobytes()


def test_default_platform_ignores_the_default_device_number() -> None:
    assert default_platform() == "cpu"
    with jax.default_device(jax.devices("cpu")[3]):
        assert default_platform() == "cpu"


@pytest.mark.parametrize("has_target", [True, False])
def test_all_unfit_shardings_are_in_one_error(has_target: bool, tmp_path: Path) -> None:
    tree = {name: jnp.asarray(leaf) for name, leaf in {**HOST, "odd": np.ones((7, 3), np.float32)}.items()}
    jct.save(tmp_path / "c", tree, settings=FAST)
    like = {key: S(leaf.shape, leaf.dtype) for key, leaf in tree.items()}
    over = NamedSharding(mesh(4, 2), P("x"))
    with pytest.raises(jct.MismatchError, match="differ in 2 leaves") as caught:
        jct.load(tmp_path / "c", like if has_target else None, shardings={"odd": over, "n": over})
    assert ["leaf 'n'" in str(caught.value), "leaf 'odd'" in str(caught.value)] == [True, True]


def test_unfit_sharding_leaves_other_checkpointables_unchanged(tmp_path: Path) -> None:
    odd = {"odd": np.ones((7, 3), np.float32)}
    jct.save_checkpointables(tmp_path / "c", {"data": Counter(), "state": odd}, settings=FAST)
    data = Counter()
    data.position = 5
    like = {"odd": S((7, 3), np.float32, sharding=NamedSharding(mesh(4, 2), P("x")))}
    with pytest.raises(jct.MismatchError, match="leaf 'odd'"):
        jct.load_checkpointables(tmp_path / "c", {"data": data, "state": like})
    assert data.position == 5
