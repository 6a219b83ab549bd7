"""The snapshot: a pytree as it is now, safe against donation and in-place changes, as sources for the store.

Views of many arrays of the CPU device at once: a few calls for all leaves instead of some for each.

Whether a loop donates the state that a save still holds: then a copy into kept memory is cheaper than a view.

The value guard: which leaves of a state hold nan or inf, asked on the devices they lie on.
"""

from __future__ import annotations

import cmath
import contextlib
import dataclasses
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from itertools import compress, repeat
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import backends
from jax.sharding import SingleDeviceSharding

from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.pytree._jax import nothing_set
from jaxckpt_train.pytree.colocated.transfer import HostParts, HostTaker, host_taker
from jaxckpt_train.pytree.copies import (
    Ahead,
    Transfers,
    copy_all,
    device_wait_s,
    distinct_shards,
    is_on_host,
    some_arrays,
    take_from_devices,
)
from jaxckpt_train.pytree.flatten import EMPTY, Flat, flatten
from jaxckpt_train.pytree.leaves import (
    ArrayLeaf,
    EmptyLeaf,
    KeyLeaf,
    LeafRecord,
    TreeRecord,
    check_storable,
    is_key_array,
    record_value,
)
from jaxckpt_train.pytree.partition import JobShares, LocalShard, take_local_shards
from jaxckpt_train.settings import KIB, MIB, Colocated, SnapshotMode
from jaxckpt_train.store.boxes import box_from_index, full_box
from jaxckpt_train.store.dtypes import is_inexact, is_storable
from jaxckpt_train.store.segment import ArraySource, ChunkSource, OwnChunkSource
from jaxckpt_train.store.threads import Latch, paused_collection

NAN, INF = 2, 1
# So many arrays are looked at by one computation: a runtime takes only some tens of them before the first is done.
TOGETHER = 256
LEAST_BYTES = 32 * MIB
_PROBES, _PROBE_BYTES, _ARRAYS_LOOKED_AT = 4, 64 * KIB, 256
_KEPT_STRUCTURES = 4
_INCOMPARABLE = (TypeError, ValueError)  # static data in the tree that has no hash, or arrays in it
_donated: OrderedDict[Any, None] = OrderedDict()  # structures of trees (PyTreeDef), the latest last
T = TypeVar("T")
_STRONG, _WEAK = ArrayLeaf(), ArrayLeaf(weak=True)


class ValueGuard:
    """What is wrong with the values of one tree, as it is now.

    Making one orders the looks at JAX arrays, some hundred by each computation, and looks at numpy arrays itself;
    `flaws` waits for the answers. The computations are compiled when a tree is first looked at. An inf in a single
    number is no flaw: the best loss of a run that has measured none is one.
    """

    def __init__(self, names: Sequence[str], leaves: Sequence[Any]) -> None:
        self.is_looking = False  # whether it waits for the devices, which may still be computing
        self._found: list[tuple[str, int, int]] = []
        self._asked: list[tuple[list[tuple[str, int]], jax.Array]] = []
        groups: dict[Any, list[tuple[str, jax.Array]]] = defaultdict(list)
        for name, leaf in zip(names, leaves, strict=True):
            if isinstance(leaf, jax.Array):
                if isinstance(leaf.dtype, np.dtype) and is_inexact(leaf.dtype) and leaf.size:  # else it holds keys
                    self._sort_in(name, leaf, groups)
            elif isinstance(leaf, (np.ndarray, np.generic)):
                if is_inexact(leaf.dtype):
                    self._found.append((name, leaf.ndim, _flaw_of(np.asarray(leaf))))
            elif isinstance(leaf, (float, complex)) and cmath.isnan(leaf):
                self._found.append((name, 0, NAN))
        for group in groups.values():
            for at in range(0, len(group), TOGETHER):
                some = group[at : at + TOGETHER]
                with nothing_set():
                    asked = _device_flaws(tuple(array for _, array in some))
                self._asked.append(([(name, array.ndim) for name, array in some], asked))

    def _sort_in(self, name: str, leaf: jax.Array, groups: dict[Any, list[tuple[str, jax.Array]]]) -> None:
        if not leaf.is_fully_addressable:  # each process looks at what it has, without the others
            for shard in {str(shard.index): shard.data for shard in leaf.addressable_shards}.values():
                if shard.size:
                    self._sort_in(name, shard, groups)
        elif is_on_host(leaf):  # offloaded: no device computes with it where it is
            self._found.append((name, leaf.ndim, _flaw_of(np.asarray(leaf))))
        else:
            groups[tuple(leaf.sharding.addressable_devices_indices_map(leaf.shape))].append((name, leaf))

    def flaws(self) -> list[tuple[str, str]]:
        """The leaf paths that hold what they should not, each with "nan" or "inf"."""
        found = list(self._found)
        self.is_looking = True
        try:
            with jax.transfer_guard_device_to_host("allow"):  # a few bytes; the user's guard is about the training
                for leaves, asked in self._asked:
                    answers = np.asarray(asked)
                    found += [(name, rank, int(flaw)) for (name, rank), flaw in zip(leaves, answers, strict=True)]
        finally:
            self.is_looking = False
        flaws = [
            (name, "nan" if flaw == NAN else "inf")
            for name, rank, flaw in found
            if flaw == NAN or (flaw == INF and rank > 0)
        ]
        return list(dict.fromkeys(flaws))


@jax.jit
def _device_flaws(arrays: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack([_device_flaw(array) for array in arrays])


def _device_flaw(array: jax.Array) -> jax.Array:
    wide = array.astype(jnp.float32) if array.dtype.itemsize == 1 else array  # the smallest floats lack the questions
    return jnp.where(jnp.isnan(wide).any(), NAN, jnp.where(jnp.isinf(wide).any(), INF, 0)).astype(jnp.int8)


def _flaw_of(array: np.ndarray) -> int:
    wide = array.astype(np.float32) if array.dtype.itemsize == 1 else array
    if np.isnan(wide).any():
        return NAN
    return INF if np.isinf(wide).any() else 0


class HeldViews:
    """Of one save: finds out whether the loop donates the JAX arrays on the CPU whose memory the save holds.

    JAX does not mark an array as donated whose memory is held: it copies it into memory that is new, which is slow. So
    a few small arrays are copied here instead of held, and tell of all when the save is over.
    """

    def __init__(self, flat: Flat, arrays: MutableSequence[ArraySource]) -> None:
        self._structure, self._arrays = flat.structure, arrays
        self._probes: list[jax.Array] = []
        for number, array in enumerate(itertools.islice(arrays, _ARRAYS_LOOKED_AT)):
            if len(self._probes) == _PROBES:
                break
            if len(array.chunks) != 1:
                continue
            chunk = array.chunks[0]
            leaf = flat.leaves[flat.names.index(array.name)] if 0 < chunk.data.nbytes <= _PROBE_BYTES else None
            is_here = isinstance(chunk.data, (np.ndarray, memoryview))
            if isinstance(leaf, jax.Array) and is_here:
                arrays[number] = array._replace(chunks=(chunk._replace(data=np.array(chunk.data, copy=True)),))
                self._probes.append(leaf)

    def end(self) -> None:
        """The save is over: if the loop donated what it held, remember that for the next save of such a tree."""
        probes, self._probes = self._probes, []
        if not any(probe.is_deleted() for probe in probes):
            return
        if sum(chunk.data.nbytes for array in self._arrays for chunk in array.chunks) < LEAST_BYTES:
            return
        with contextlib.suppress(*_INCOMPARABLE):
            _donated[self._structure] = None
            _donated.move_to_end(self._structure)
            while len(_donated) > _KEPT_STRUCTURES:
                _donated.popitem(last=False)


def is_donated(structure: Any) -> bool:
    """Whether a tree of this structure was donated while a save held it."""
    try:
        return structure in _donated
    except _INCOMPARABLE:
        return False


def plain_kinds(leaves: Sequence[Any]) -> set[type]:
    """Those types of leaves that are JAX arrays of numbers: no tracers, no PRNG keys."""
    examples = dict(zip(map(type, leaves), leaves, strict=True))
    return {
        kind
        for kind, leaf in examples.items()
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and not is_key_array(leaf)
    }


def take_views(names: Sequence[str], leaves: Sequence[jax.Array]) -> list[ArraySource] | None:
    """What the store writes of arrays that all lie on one CPU device each; None if any does not, or cannot be taken.

    A loop over 10,000 leaves that does all of this for one after the other takes twice as long.
    """
    if not _all_on_cpu([leaf.sharding for leaf in leaves]):
        return None
    dtypes = [leaf.dtype for leaf in leaves]
    if not all(map(is_storable, set(dtypes))):
        return None
    views = _views(leaves, dtypes)
    if views is None:
        return None
    shapes = [leaf.shape for leaf in leaves]
    boxes = {shape: full_box(shape) for shape in set(shapes)}
    chunks = _made(ChunkSource, zip(map(boxes.__getitem__, shapes), views, strict=True))
    return list(_made(ArraySource, zip(names, shapes, dtypes, zip(chunks, strict=True), repeat(None), strict=False)))


def _views(leaves: Sequence[jax.Array], dtypes: Sequence[np.dtype]) -> Sequence[memoryview | np.ndarray] | None:
    """The memory of each, which stays as it is while the view lives; None: one was deleted.

    Waits until all are computed. A memoryview takes a third of the time of an array; Python's buffer protocol knows no
    dtypes but numpy's own, and no layouts but the usual one.
    """
    known = {dtype for dtype in set(dtypes) if dtype.isbuiltin == 1}
    pairs = zip(leaves, dtypes, strict=True)
    try:
        return [memoryview(leaf) if dtype in known else np.asarray(leaf) for leaf, dtype in pairs]
    except (BufferError, RuntimeError):
        return None if any(leaf.is_deleted() for leaf in leaves) else list(map(np.asarray, leaves))


def _all_on_cpu(shardings: Sequence[jax.sharding.Sharding]) -> bool:
    """Whether each is of one CPU device. Most are of their own object each, and slow to compare."""
    if set(map(type, shardings)) == {SingleDeviceSharding} and set(backends()) == {"cpu"}:
        return True
    return all(map(_is_on_cpu, set(shardings)))


def _is_on_cpu(sharding: jax.sharding.Sharding) -> bool:
    devices: Any = sharding.device_set
    return len(devices) == 1 and sharding.is_fully_addressable and next(iter(devices)).platform == "cpu"


def _made(kind: type[T], fields: Iterable[tuple[Any, ...]]) -> Iterable[T]:
    """Named tuples of one kind; their own constructor is a Python function, which takes twice as long."""
    make: Any = tuple.__new__
    return map(make, repeat(kind), fields)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A pytree as it was: its record, and the arrays to write. Holds the memory until it is dropped.

    Attributes:
        record: the tree and the values that are stored inline.
        arrays: what the store writes.
        transfers: brings what is still on devices; None where all is on the host.
        held: finds out whether the loop donates what is held here; None where no views are.
        guard: tells which leaves hold nan or inf; None: nobody asked.
        local: in a job of many processes, numbers of the arrays that each of them has for itself, as far as this one
            sees. An array that lies wholly on this process is among them until `own` is called.
        compared: those of them that another process writes, as this one has them.
        owners: numbers of the arrays that lie wholly on another process, and which process.
        is_taken: open once the caller may do anything with what it saved.
        on_hosts: what other hosts write of the arrays; None: nothing.
        device_wait_s: seconds that the caller waited until the devices had computed the tree; 0.0 where they were only
            given copies to make.
    """

    record: TreeRecord
    arrays: list[ArraySource]
    transfers: Transfers | None
    is_taken: Latch
    held: HeldViews | None
    guard: ValueGuard | None
    local: list[int] = dataclasses.field(default_factory=list)
    compared: dict[int, tuple[ChunkSource, ...]] = dataclasses.field(default_factory=dict)  # by number of the array
    owners: Mapping[int, int] = dataclasses.field(default_factory=dict)
    on_hosts: HostParts | None = None
    device_wait_s: float = 0.0

    def wait_for_devices(self) -> float:
        """Wait, in the background, until the devices have computed what they still have; the seconds that it took."""
        waited_s = 0.0 if self.transfers is None else self.transfers.wait_for_devices()
        return waited_s + (0.0 if self.on_hosts is None else self.on_hosts.wait_for_devices())

    def own(self, number: int) -> None:
        """Write an array that other processes see on this one only: no other process has it."""
        self.local.remove(number)
        if number in self.compared:
            self.arrays[number] = self.arrays[number]._replace(chunks=self.compared.pop(number))

    def close(self) -> None:
        """It is written, or never will be: let go of what is still on devices."""
        if self.held is not None:
            self.held.end()
        if self.transfers is not None:
            self.transfers.close()
        if self.on_hosts is not None:
            self.on_hosts.close()


def snapshot(
    tree: Any,
    mode: SnapshotMode = "auto",
    ahead: Ahead | None = None,
    *,
    is_guarded: bool = False,
    shares: JobShares | None = None,
    colocated: Colocated = False,
) -> Snapshot:
    """Take a pytree as it is now, safe from later donation and in-place changes.

    Numpy arrays are copied. JAX arrays on the CPU are held as views: a later donation then copies instead of reusing
    their memory; once that was seen of a tree, later ones of its structure are copied, as by "host". Waits until they
    are computed. Each distinct shard is taken once. Arrays on an accelerator:

    - "host": copied to pinned host memory, which is only ordered here and awaited in the background; where the devices
      know no such memory, all are started before the first is awaited here. On the CPU it copies too, into memory
      that is kept, so that a step which donates the state need not do it in memory that is new.
    - "device": copied on their devices, which is only ordered here; the copies leave in the background.
    - "auto": "device" where the devices surely have room, else "host".
    - "stream": not copied; the caller waits for `is_taken` while they are written, a few at a time.

    "device" and "stream" are taken at their word on the CPU too.

    Args:
        tree: any pytree.
        mode: as above.
        ahead: how much may be on its way from the devices to the writer at a time ("device" and "stream"), with
            all other trees of the same save; None: 64 MiB of this one.
        is_guarded: whether the result is to tell of nan and inf.
        shares: in a job of many processes, what this one writes; None: all.
        colocated: whether other hosts write what lies there: copies are ordered to their memory, in every mode.

    Raises:
        SettingsError: `colocated` cannot be used here.
        UnsupportedLeafError: a leaf that cannot be stored, named by its path.
    """
    with paused_collection():
        flat = flatten(tree)
        hosts = host_taker(flat.leaves, colocated)
    keeps_views = mode in ("auto", "host")
    waited_s = _wait_for_cpus(flat.leaves, hosts) if keeps_views else 0.0
    with paused_collection():
        taker = _Taker(keeps_views=keeps_views, shares=shares, hosts=hosts)
        records = taker.take_all(flat.names, flat.leaves)
        on_hosts = None if hosts is None else hosts.taken()
    guard = ValueGuard(flat.names, flat.leaves) if is_guarded else None
    held = None
    if mode == "host":
        _copy_views(taker)
    elif mode == "auto" and is_donated(flat.structure):
        with contextlib.suppress(MemoryError, OSError):  # no memory for it: then it is held, as before
            _copy_views(taker)
    elif mode == "auto" and flat.structure is not None and not (taker.elsewhere or on_hosts):
        held = HeldViews(flat, taker.arrays)
    transfers = None
    if taker.elsewhere:
        numbers, elsewhere = zip(*taker.elsewhere, strict=True)
        take: Any = take_from_devices if shares is None else take_local_shards
        chunks, transfers = take(elsewhere, mode, ahead or Ahead(64 * MIB))
        for number, found in zip(numbers, chunks, strict=True):
            taker.arrays[number] = taker.arrays[number]._replace(chunks=found)
        waited_s += transfers.waited_s
    is_taken = Latch()
    if mode == "stream" and transfers is not None:
        is_taken = transfers.done
    else:
        is_taken.open()
    record = TreeRecord(flat.containers, records, flat.static)
    compared = {number: tuple(taker.arrays[number].chunks) for number in taker.compared}
    for number in compared:
        taker.arrays[number] = taker.arrays[number]._replace(chunks=())
    local, owners, arrays = taker.local, taker.owners, taker.arrays
    return Snapshot(record, arrays, transfers, is_taken, held, guard, local, compared, owners, on_hosts, waited_s)


def _wait_for_cpus(leaves: Sequence[Any], hosts: HostTaker | None) -> float:
    """Wait for the leaves that are held as views, which are on CPU devices; the seconds that it took."""
    known = dict[jax.sharding.Sharding, bool]()

    def is_viewed(sharding: jax.sharding.Sharding) -> bool:
        found = known.get(sharding)
        if found is None:
            devices: Any = sharding.device_set
            on_host = all(device.platform == "cpu" for device in devices)
            is_taken = hosts is not None and hosts.takes(sharding)
            found = known[sharding] = on_host and not is_taken
        return found

    return device_wait_s([leaf for leaf in some_arrays(leaves) if is_viewed(leaf.sharding)])


def _copy_views(taker: _Taker) -> None:
    """Let go of the memory that the arrays on the CPU have now; copies of numpy leaves stay."""
    held = [chunk.data for array in taker.arrays for chunk in array.chunks if _is_view(chunk.data)]
    copies = {id(view): copy for view, copy in zip(held, copy_all(list(map(np.asarray, held))), strict=True)}
    for number, array in enumerate(taker.arrays):
        chunks = tuple(_copied(chunk, copies.get(id(chunk.data))) for chunk in array.chunks)
        taker.arrays[number] = array._replace(chunks=chunks)


def _copied(chunk: ChunkSource, copy: np.ndarray | None) -> ChunkSource:
    return chunk if copy is None else OwnChunkSource(chunk.box, copy)


def _is_view(data: object) -> bool:
    if isinstance(data, memoryview):
        return data.nbytes > 0
    return isinstance(data, np.ndarray) and data.size > 0 and not data.flags.owndata


class _Form(NamedTuple):
    """What matters of a sharding."""

    single: bool
    on_host: bool
    described: dict[str, Any] | None
    local: bool
    owner: int | None
    is_of_hosts: bool


class _Taker:
    """Takes leaves one after the other. What it finds out about a sharding, dtype or shape holds for later leaves.

    Attributes:
        arrays: what the store writes.
        elsewhere: numbers of those that still lack their chunks, and the JAX arrays, or their parts, that hold them.
        local: numbers of those that each process has for itself.
        compared: those of them that another one writes.
        owners: numbers of those that lie wholly on another process, and which one.
    """

    def __init__(self, keeps_views: bool, shares: JobShares | None = None, hosts: HostTaker | None = None) -> None:
        self.arrays: list[ArraySource] = []
        self.elsewhere: list[tuple[int, jax.Array | Sequence[LocalShard]]] = []
        self.local: list[int] = []
        self.compared: list[int] = []
        self.owners: dict[int, int] = {}
        self._keeps_views, self._shares, self._hosts = keeps_views, shares, hosts
        self._forms: dict[jax.sharding.Sharding, _Form] = {}
        self._plain: dict[Any, bool] = {}

    def take_all(self, names: Sequence[str], leaves: Sequence[Any]) -> dict[str, LeafRecord]:
        """Take every leaf; those that are plain arrays on the CPU device together."""
        kinds = plain_kinds(leaves) if self._keeps_views and self._shares is None and self._hosts is None else set()
        alike = [type(leaf) in kinds for leaf in leaves]
        together = (names, leaves) if all(alike) else (list(compress(names, alike)), list(compress(leaves, alike)))
        views = take_views(*together) if kinds else None
        if views is None:
            return {name: self.take(name, leaf) for name, leaf in zip(names, leaves, strict=True)}
        if all(alike):
            self.arrays.extend(views)
            return dict(zip(names, [_WEAK if leaf.weak_type else _STRONG for leaf in leaves], strict=True))
        following = iter(views)
        records: dict[str, LeafRecord] = {}
        for name, leaf, is_view in zip(names, leaves, alike, strict=True):
            if is_view:
                self.arrays.append(next(following))
                records[name] = _WEAK if leaf.weak_type else _STRONG
            else:
                records[name] = self.take(name, leaf)
        return records

    def take(self, name: str, leaf: Any) -> LeafRecord:
        if isinstance(leaf, jax.Array):
            return self._take_jax(name, leaf)
        if leaf is EMPTY:
            return EmptyLeaf()
        inline = record_value(name, leaf)
        if inline is not None:
            return inline
        value = check_storable(name, leaf)
        native = value.dtype.newbyteorder("=")
        copy = np.array(value, dtype=native, order="C", copy=True)
        self._sort(copy.nbytes)
        self.arrays.append(ArraySource(name, copy.shape, native, (ChunkSource(full_box(copy.shape), copy),)))
        return ArrayLeaf(host="scalar" if isinstance(value, np.generic) else "numpy", big_endian=value.dtype != native)

    def _take_jax(self, name: str, leaf: jax.Array) -> LeafRecord:
        if isinstance(leaf, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"leaf {name!r}: a traced value; save outside of jit, with the arrays that it returns"
            )
        if leaf.is_deleted():
            raise UnsupportedLeafError(
                f"leaf {name!r}: its memory was given away (donated to a jitted function or deleted); "
                "save the arrays that the function returned"
            )
        form = self._form(name, leaf.sharding)
        is_plain = self._is_plain(name, leaf)
        if form.owner is not None:
            # Nothing can be computed of keys on another process; shape and dtype are all that is needed of them.
            self._leave(form.owner, name, leaf if is_plain else jax.eval_shape(jax.random.key_data, leaf), form)
        else:
            self._add(name, leaf if is_plain else jax.random.key_data(leaf), form)
        if not is_plain:
            return KeyLeaf(impl=str(jax.random.key_impl(leaf)))
        return _WEAK if leaf.weak_type else _STRONG

    def _leave(self, owner: int, name: str, leaf: jax.Array | jax.ShapeDtypeStruct, form: _Form) -> None:
        """An array that lies wholly on another process, which counts it among those that it has for itself."""
        assert self._shares is not None
        self._shares.writes(math.prod(leaf.shape) * leaf.dtype.itemsize)
        self.owners[len(self.arrays)] = owner
        self.arrays.append(ArraySource(name, leaf.shape, leaf.dtype, (), form.described))

    def _form(self, name: str, sharding: jax.sharding.Sharding) -> _Form:
        known = self._forms.get(sharding)
        if known is not None:
            return known
        if not sharding.is_fully_addressable and self._shares is None:
            raise UnsupportedLeafError(
                f"leaf {name!r}: spans devices of other processes, which this version cannot save; "
                "gather it to the devices of one process first"
            )
        devices: Any = sharding.device_set
        single = len(devices) == 1
        on_host = all(device.platform == "cpu" for device in devices)
        described = None if single else describe_sharding(sharding)
        of_hosts = self._hosts is not None and self._hosts.takes(sharding)
        local = sharding.is_fully_addressable
        processes = set() if local else {device.process_index for device in devices}
        owner = processes.pop() if len(processes) == 1 else None
        form = _Form(single, on_host, described, local, owner, of_hosts)
        self._forms[sharding] = form
        return form

    def _is_plain(self, name: str, leaf: jax.Array) -> bool:
        """Whether its dtype is one that the store knows; else it must hold PRNG keys."""
        known = self._plain.get(leaf.dtype)
        if known is None:
            known = not is_key_array(leaf)
            if known and not is_storable(np.dtype(leaf.dtype)):
                raise UnsupportedLeafError(
                    f"leaf {name!r}: dtype {leaf.dtype} has no fixed byte form (float0 holds no data)"
                )
            self._plain[leaf.dtype] = known
        return known

    def _add(self, name: str, leaf: jax.Array, form: _Form) -> None:
        shape = leaf.shape
        chunks: tuple[ChunkSource, ...] = ()
        if self._hosts is not None and form.is_of_hosts:
            self._hosts.add(len(self.arrays), leaf)
        elif self._shares is not None:
            parts = self._own_parts(self._shares, leaf, form)
            if form.on_host and self._keeps_views:
                chunks = tuple(ChunkSource(part.box, np.asarray(part.held)[part.inner or ...]) for part in parts)
            elif self.compared and self.compared[-1] == len(self.arrays):
                chunks = tuple(ChunkSource(part.box, np.array(part.held, copy=True)) for part in parts)
            else:
                self.elsewhere.append((len(self.arrays), parts))
        elif not (form.on_host and self._keeps_views):
            self.elsewhere.append((len(self.arrays), leaf))
        elif form.single:
            chunks = (ChunkSource(full_box(shape), np.asarray(leaf)),)
        else:
            shards = distinct_shards(leaf)
            chunks = tuple(ChunkSource(box_from_index(shard.index, shape), np.asarray(shard.data)) for shard in shards)
        self.arrays.append(ArraySource(name, shape, leaf.dtype, chunks, form.described))

    def _own_parts(self, shares: JobShares, leaf: jax.Array, form: _Form) -> Sequence[LocalShard]:
        if not form.local:
            return shares.of(leaf)
        self._sort(leaf.nbytes)
        shards = distinct_shards(leaf)
        return [LocalShard(box_from_index(shard.index, leaf.shape), shard.data, None) for shard in shards]

    def _sort(self, nbytes: int) -> None:
        """Find out who writes what each process has for itself; the others compare it with theirs."""
        if self._shares is None:
            return
        self.local.append(len(self.arrays))
        if not self._shares.writes(nbytes):
            self.compared.append(len(self.arrays))


def describe_sharding(sharding: jax.sharding.Sharding) -> dict[str, Any] | None:
    """A sharding as plain data, for people to read: the mesh's axis sizes and the partition of each dimension."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = {_text(axis): size for axis, size in sharding.mesh.shape.items()}
        return {"mesh": mesh, "spec": [_json_part(part) for part in sharding.spec]}
    return {"type": type(sharding).__name__, "devices": len(sharding.device_set)}


def _json_part(part: Any) -> Any:
    if isinstance(part, tuple):
        return [_text(axis) for axis in part]
    return None if part is None else _text(part)


def _text(axis: object) -> str:
    return str(axis).encode(errors="backslashreplace").decode()  # JSON holds only valid Unicode
