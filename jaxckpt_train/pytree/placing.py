"""Turns the boxes of a load into leaves: converts their dtype, and puts them onto devices as they arrive."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.pytree._jax import boxes_of, without_caller_settings
from jaxckpt_train.pytree.target import LeafRequest
from jaxckpt_train.store.boxes import Box, full_box
from jaxckpt_train.store.buffers import ReadBudget, empty_array
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.reader import ReadBox
from jaxckpt_train.store.segment import DTYPES

_log = logging.getLogger("jaxckpt_train")
_WANTED_PARAMETERS = ["aval", "sharding", "xs", "devices", "committed"]
COMPARED_AT_ONCE = 1 << 18  # elements
_finfo: Any = jnp.finfo
_iinfo: Any = jnp.iinfo


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one array goes: the distinct boxes to read, and for every device the number of its box (none: default)."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding | None
    boxes: Sequence[Box]
    devices: Sequence[tuple[jax.Device, int]]


def place_array(name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> Placement:
    """Find the boxes that the devices of this process need; raise MismatchError if the sharding does not fit."""
    if sharding is None:
        return Placement(shape, None, (full_box(shape),), ())
    try:
        if isinstance(sharding, jax.sharding.NamedSharding):  # before JAX 0.7 other shardings cannot check a shape
            sharding.check_compatible_aval(shape)
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise MismatchError(f"leaf {name!r}: shape {shape} does not fit its sharding {sharding}: {error}") from error
    numbers: dict[Box, int] = {}
    devices = []
    for device, box in boxes_of(indices, shape):
        devices.append((device, numbers.setdefault(box, len(numbers))))
    return Placement(shape, sharding, tuple(numbers), tuple(devices))


def default_platform() -> str:
    """Return the platform of the device on which JAX puts an array without a sharding."""
    (device,) = jax.device_put(np.zeros((), np.bool_)).devices()
    platform: str = device.platform
    return platform


class ArrayLoad(NamedTuple):
    """A stored array on its way to the leaf `name`; `donatable`: as for `DevicePuts.put`."""

    name: str
    array: ArrayRecord
    request: LeafRequest
    placement: Placement
    donatable: bool

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the leaf."""
        return DTYPES[self.array.dtype] if self.request.dtype is None else self.request.dtype


class Placer:
    """Makes the values of one load from boxes as they arrive; `budget` counts what it converts for accelerators."""

    def __init__(self, loads: Sequence[ArrayLoad], values: dict[str, Any], budget: ReadBudget) -> None:
        self._loads, self._values, self._budget = loads, values, budget
        self._puts = DevicePuts()
        self._late = dict[int, np.ndarray]()
        uses_default = any(each.request.form == "jax" and not each.placement.devices for each in loads)
        self._default = default_platform() if uses_default else "cpu"
        for each in loads:
            shape, sharding = each.placement.shape, each.placement.sharding
            if not each.placement.boxes and sharding is not None:  # the whole array is on other processes
                array = jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=each.dtype)
                values[each.name] = _typed(each, array)

    def leaves_host(self, load: ArrayLoad) -> bool:
        """Return whether an array goes to an accelerator."""
        if load.placement.devices:
            return all(device.platform != "cpu" for device, _ in load.placement.devices)
        return load.request.form == "jax" and self._default != "cpu"

    def take(self, read: ReadBox) -> None:
        """Take one box; the caller must release its memory."""
        wanted, box, data = read
        each = self._loads[wanted]
        if each.dtype != data.dtype:
            data = converted(each.name, data, each.dtype)
            if self.leaves_host(each):
                self._budget.charge(data)  # until the transfer to the device ends
        if each.request.form == "jax":
            array = self._puts.put(wanted, each.placement, box, data, donatable=each.donatable)
            if array is not None:
                self._values[each.name] = _typed(each, array)
        elif spans_processes(each.request.sharding):
            self._late[wanted] = data
        else:
            self._values[each.name] = value_of(each.name, each.request, data)

    def finish(self) -> None:
        """Make the values that all processes make together, in the same order in all of them."""
        for number in sorted(self._late):
            each = self._loads[number]
            self._values[each.name] = value_of(each.name, each.request, self._late.pop(number))


def _typed(each: ArrayLoad, array: jax.Array) -> jax.Array:
    return weakly_typed(each.name, array) if each.request.weak else array


def _find_fast_put() -> Callable[..., jax.Array] | None:
    """Find JAX's internal call that makes an array from one host buffer per device; None where it has changed.

    The public functions that do the same take ten times as long for a small array. See ADR 009.
    """
    try:
        from jax._src.interpreters import pxla
    except ImportError:
        return None
    found: Callable[..., jax.Array] | None = getattr(pxla, "batched_device_put", None)
    if found is None or list(inspect.signature(found).parameters)[: len(_WANTED_PARAMETERS)] != _WANTED_PARAMETERS:
        return None
    return found


def _find_copying_put() -> Callable[..., jax.Array] | None:
    """Find the call behind `_find_fast_put`, which can copy into memory that XLA allocates; None where it is missing.

    On the CPU, XLA reuses only its own memory for the results of a computation to which its arguments are donated, and
    no public function copies a host array into such memory without keeping the host array for a while.
    """
    try:
        from jax._src.lib import xla_client  # type: ignore[attr-defined]

        during_call = xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
        put = functools.partial(xla_client.batched_device_put, force_copy=True, host_buffer_semantics=during_call)
    except (ImportError, AttributeError):
        return None
    return put if "force_copy" in (xla_client.batched_device_put.__doc__ or "") else None


_fast_put = _find_fast_put()
_copying_put = _find_copying_put()


class _Kind(NamedTuple):
    """The objects that JAX derives for the first array of a shape, dtype and sharding; reused for all later ones."""

    aval: Any
    sharding: jax.sharding.Sharding
    devices: Sequence[jax.Device]


class DevicePuts:
    """Puts the arrays of one load onto devices. The first of each kind goes through JAX's public functions."""

    def __init__(self) -> None:
        self._kinds: dict[object, _Kind] = {}
        self._incomplete: dict[int, tuple[list[jax.Array], int]] = {}

    def put(
        self, number: int, placement: Placement, box: int, data: np.ndarray, *, donatable: bool = False
    ) -> jax.Array | None:
        """Put one box of array number `number` onto its devices; return the array once it has all of its boxes.

        Without a sharding, the array goes to the default device and stays uncommitted. On the CPU, an aligned, writable
        box becomes the device's memory without a copy, and the caller must drop it. If the array is to be donatable,
        the box is copied into memory of XLA, which can reuse it when the array is donated to a computation.
        """
        if len(placement.boxes) == 1 and not (donatable and _spans_cpus_of_processes(placement)):
            return self._put_same(placement.shape, placement.sharding, data, donatable)
        shards, left = self._incomplete.pop(number, ([], len(placement.boxes)))
        assert placement.sharding is not None
        memory = placement.sharding.memory_kind
        for device, wanted in placement.devices:
            if wanted == box:
                alone = jax.sharding.SingleDeviceSharding(device, memory_kind=memory)
                shards.append(self._put_same(data.shape, alone, data, donatable))
        if left > 1:
            self._incomplete[number] = shards, left - 1
            return None
        return jax.make_array_from_single_device_arrays(placement.shape, placement.sharding, shards)

    def _put_same(
        self, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, data: np.ndarray, donatable: bool
    ) -> jax.Array:
        """Make an array with the same data on every device of its sharding that belongs to this process."""
        key = shape, data.dtype, sharding
        kind = self._kinds.get(key)
        donatable = donatable and data.size > 0  # XLA fails to copy an empty array that is sharded
        if kind is None or _fast_put is None:
            array = _public_put(shape, sharding, data)
            if array.dtype != data.dtype:  # JAX converts: 64-bit types while x64 is off
                return array
            devices = list(array.sharding.addressable_devices_indices_map(shape))
            kind = self._kinds[key] = _Kind(array.aval, array.sharding, devices)
            if not (donatable and _can_copy(kind)):
                return array
        put = _copying_put if donatable and _can_copy(kind) else _fast_put
        assert put is not None
        return put(kind.aval, kind.sharding, [data] * len(kind.devices), kind.devices, sharding is not None)


def _spans_cpus_of_processes(placement: Placement) -> bool:
    """Return whether CPU devices of other processes hold a part; the copying call fails for some of these arrays."""
    is_spread = placement.sharding is not None and not placement.sharding.is_fully_addressable
    return is_spread and any(device.platform == "cpu" for device, _ in placement.devices)


def _can_copy(kind: _Kind) -> bool:
    return _copying_put is not None and kind.devices[0].platform == "cpu"


def _public_put(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, data: np.ndarray) -> jax.Array:
    if sharding is None or sharding.is_fully_addressable:
        placed: jax.Array = jax.device_put(data, sharding)
        return placed
    devices = sharding.addressable_devices_indices_map(shape)
    alone = [jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, [jax.device_put(data, each) for each in alone])


def weakly_typed(name: str, array: jax.Array) -> jax.Array:
    """Make an array weakly typed, in the same memory if JAX's internal call is available."""
    if array.weak_type:
        return array
    if _fast_put is not None:
        shards = [shard.data for shard in array.addressable_shards]
        devices = [shard.device for shard in array.addressable_shards]
        return _fast_put(array.aval.update(weak_type=True), array.sharding, shards, devices, array.committed)
    # A weakly typed array keeps its weak type when its elements are replaced.
    weak = jnp.broadcast_to(jnp.asarray(array.dtype.type(0).item()), array.shape)
    if weak.dtype != array.dtype or not array.is_fully_addressable:
        _log.warning("leaf %r: saved weakly typed, but this JAX can only make it strongly typed", name)
        return array
    made: jax.Array = weak.at[...].set(array)
    return jax.device_put(made, array.sharding) if array.committed else made


def spans_processes(sharding: jax.sharding.Sharding | None) -> bool:
    """Return whether a sharding has devices of several processes, which then make the array in the same order."""
    return sharding is not None and not sharding.is_fully_addressable and not _is_of_one_process(sharding)


@functools.lru_cache(maxsize=256)
def _is_of_one_process(sharding: jax.sharding.Sharding) -> bool:
    devices: Any = sharding.device_set
    return len({device.process_index for device in devices}) == 1


def value_of(name: str, request: LeafRequest, array: np.ndarray) -> Any:
    """Make a leaf from all of its data on the host."""
    match request.form:
        case "numpy":
            return array
        case "scalar":
            return array[()]
        case "python":
            value = array.item()
            return value if request.python is None else request.python(value)
        case "key":
            try:
                return _on_devices(request, array)
            except (TypeError, ValueError) as error:
                raise MismatchError(
                    f"leaf {name!r}: saved as a key of implementation {request.impl!r}, but this JAX cannot make such "
                    f"a key from {array.dtype}{list(array.shape)}: {error}"
                ) from error
        case _:
            made = _on_devices(request, array)
            return weakly_typed(name, made) if request.weak else made


def _on_devices(request: LeafRequest, array: np.ndarray) -> jax.Array:
    def make(data: Any) -> Any:
        return jax.random.wrap_key_data(jnp.asarray(data), impl=request.impl) if request.form == "key" else data

    made: jax.Array
    sharding = request.sharding
    if sharding is not None and not sharding.addressable_devices:  # all are of other processes
        dtype = jax.eval_shape(make, array).dtype
        made = jax.make_array_from_single_device_arrays(request.shape, sharding, [], dtype=dtype)
    elif spans_processes(sharding):
        # All processes have the data; `jax.device_put` would first compare the values of all of them.
        with without_caller_settings():
            made = jax.jit(make, out_shardings=sharding)(array)
    else:
        made = jax.device_put(make(array), sharding)
    return made


def converted(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert an array, in new memory; raise MismatchError if an integer or the finiteness of a float would change."""
    result = empty_array(array.shape, dtype)
    with np.errstate(all="ignore"):
        try:
            np.copyto(result, array, casting="unsafe")
        except TypeError:  # ml_dtypes cannot convert between all pairs of small floats; float64 holds all of them
            np.copyto(result, array.astype(np.float64), casting="unsafe")
        _check_survival(name, array.reshape(-1), result.reshape(-1))
    return result


def _check_survival(name: str, array: np.ndarray, result: np.ndarray) -> None:
    """Raise MismatchError if a value was lost; compares in pieces, to use little memory."""
    saved, wanted = array.dtype.newbyteorder("="), result.dtype.newbyteorder("=")
    if saved == wanted or array.size == 0:
        return
    least, most = _exact_range(saved, wanted)
    is_inexact = jnp.issubdtype(saved, jnp.inexact)
    if is_inexact and _finfo(saved).max <= most:
        return
    if not jnp.issubdtype(saved, jnp.complexfloating):
        values = array if is_inexact else _plain_integers(array)
        if least <= values.min() and values.max() <= most:
            return
    have_survived = _floats_survived if is_inexact else _integers_survived
    pieces = range(0, len(array), COMPARED_AT_ONCE)
    parts = ((array[at : at + COMPARED_AT_ONCE], result[at : at + COMPARED_AT_ONCE]) for at in pieces)
    if all(have_survived(old, new) for old, new in parts):
        return
    raise MismatchError(
        f"leaf {name!r}: cast=True, but {wanted} does not hold all values of the saved {saved}; give the target a "
        "wider dtype"
    )


def _exact_range(saved: np.dtype, wanted: np.dtype) -> tuple[float, float]:
    """Return the range of values that certainly survive; some floats and integers beyond it may survive too."""
    if wanted == np.bool_:
        return 0, 1
    if not jnp.issubdtype(wanted, jnp.inexact):
        limits = _iinfo(wanted)
        return int(limits.min), int(limits.max)
    info = _finfo(wanted)
    if jnp.issubdtype(saved, jnp.inexact):
        return float(info.min), float(info.max)
    most = int(min(2 ** (info.nmant + 1), float(info.max)))
    return max(-most, int(info.min)), most


def _integers_survived(old: np.ndarray, new: np.ndarray) -> bool:
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return False  # the caller has compared the ranges
    exact: bool = old.tolist() == new.real.astype(np.float64).tolist()  # Python compares an int with a float exactly
    return exact


def _floats_survived(old: np.ndarray, new: np.ndarray) -> bool:
    if (np.isfinite(old) & ~np.isfinite(new)).any():
        return False
    if new.dtype.itemsize > 1:
        return True
    # Some small dtypes have no infinity and saturate at their largest number.
    found, wanted = np.abs(new.astype(np.float64)), np.abs(old.astype(np.float64))
    return not (np.isfinite(wanted) & (wanted >= 1) & (wanted > 2 * found)).any()


def _plain_integers(array: np.ndarray) -> np.ndarray:
    """Convert ml_dtypes' integers and booleans to int8, which compares faster; return others unchanged."""
    is_plain = array.dtype.kind in "iu" or jnp.issubdtype(array.dtype, jnp.inexact)
    return array if is_plain else array.astype(np.int8)
