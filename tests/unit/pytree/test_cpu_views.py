"""Views of arrays on the CPU device: the bytes of each array, whatever its dtype or layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import jaxckpt_train as jct
from jaxckpt_train.pytree.snapshot import plain_kinds, take_views
from tests.support.same_trees import assert_same, raw

pytestmark = pytest.mark.timeout(60)

NUMPYS_OWN = ("bool", "int8", "uint16", "int32", "float16", "float32", "complex64")
OTHERS = ("bfloat16", "float8_e4m3fn", "int4", "uint4")
SHAPES = ((), (0, 3), (5,), (3, 4))


def leaves_of(*dtypes: str) -> dict[str, jax.Array]:
    numbers = {shape: np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3 for shape in SHAPES}
    return {f"{dtype}{shape}": jnp.asarray(numbers[shape], dtype) for dtype in dtypes for shape in SHAPES}


def data_of(tree: dict[str, jax.Array]) -> list[Any]:
    views = take_views(list(tree), list(tree.values()))
    assert views is not None
    assert [(v.name, v.shape, v.dtype) for v in views] == [(n, leaf.shape, leaf.dtype) for n, leaf in tree.items()]
    return [view.chunks[0].data for view in views]


@pytest.mark.parametrize("dtypes", [NUMPYS_OWN, OTHERS, NUMPYS_OWN + OTHERS], ids=["numpy's own", "others", "both"])
def test_every_dtype_and_shape_has_its_bytes(dtypes: tuple[str, ...], tmp_path: Path) -> None:
    tree = leaves_of(*dtypes)
    data = data_of(tree)
    expected = [memoryview if name.startswith(NUMPYS_OWN) else np.ndarray for name in tree]
    assert [type(each) for each in data] == expected
    assert [raw(each) for each in data] == [raw(leaf) for leaf in tree.values()]
    jct.save(tmp_path / "c", tree)
    assert_same(jct.load(tmp_path / "c", like=tree), tree)


def test_array_with_custom_layout_has_its_bytes(tmp_path: Path) -> None:
    """Python's buffer protocol refuses such an array."""
    plain = jnp.arange(20.0).reshape(4, 5)
    other = jax.device_put(plain, Format(Layout((1, 0)), plain.sharding))
    with pytest.raises(BufferError):
        memoryview(other)  # type: ignore[arg-type]
    tree = {"a": plain, "b": other, "c": jnp.arange(3)}
    assert [raw(each) for each in data_of(tree)] == [raw(leaf) for leaf in tree.values()]
    jct.save(tmp_path / "c", tree)
    assert_same(jct.load(tmp_path / "c"), {name: np.asarray(leaf) for name, leaf in tree.items()})


def test_views_keep_what_is_donated_as_it_was() -> None:
    tree = {name: leaf for name, leaf in leaves_of("float32", "bfloat16", "int32").items() if leaf.size}
    expected = [raw(leaf) for leaf in tree.values()]
    data = data_of(tree)
    step = jax.jit(lambda leaves: [leaf + 1 for leaf in leaves], donate_argnums=0)
    after = list(tree.values())
    for _ in range(5):
        after = step(after)
    assert [raw(each) for each in data] == expected


def test_views_wait_for_what_is_not_computed_yet() -> None:
    one, times = jnp.eye(500), 40
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, y: y @ one + 1, x))
    for _ in range(3):
        (data,) = data_of({"late": slow(jnp.zeros((500, 500)))})
        assert raw(data) == np.full((500, 500), times, np.float32).tobytes()


def test_deleted_array_has_no_views() -> None:
    tree = leaves_of("float32")
    next(iter(tree.values())).delete()
    assert take_views(list(tree), list(tree.values())) is None


def test_keys_and_numpy_arrays_are_no_plain_kinds() -> None:
    assert plain_kinds([jax.random.key(0), np.arange(3), 5, None]) == set()
    assert plain_kinds([jnp.arange(3), np.arange(3)]) == {type(jnp.arange(3))}


def test_one_device_may_have_any_sharding_form() -> None:
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[3:4])
    places = [*jax.devices()[:2], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))]
    tree = {f"x{number}": jax.device_put(jnp.arange(9) + number, place) for number, place in enumerate(places)}
    assert [raw(each) for each in data_of(tree)] == [raw(leaf) for leaf in tree.values()]


def test_arrays_on_several_devices_have_no_views() -> None:
    spread = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x"))
    tree = {"a": jnp.arange(4), "b": jax.device_put(jnp.arange(4), spread)}
    assert take_views(list(tree), list(tree.values())) is None
