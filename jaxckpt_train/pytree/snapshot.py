"""The snapshot of a pytree: its present values, safe from donation and in-place changes, as sources for the store.

Arrays on the CPU are held as views where possible. A training step that donates an array whose memory is held makes JAX
copy it into new memory, which is slow; so the module detects donation (`DonationDetector`) and then copies into kept
memory. The value guard (`ValueGuard`) finds nan and inf, on the devices that hold the arrays.
"""

from __future__ import annotations

import cmath
import contextlib
import dataclasses
import functools
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, MutableSequence, Sequence
from itertools import compress, repeat
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import backends
from jax.sharding import SingleDeviceSharding

from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.pytree._jax import without_caller_settings
from jaxckpt_train.pytree.colocated.transfer import HostParts, HostSnapshot
from jaxckpt_train.pytree.copies import (
    Busy,
    TransferBudget,
    Transfers,
    copy_all,
    device_wait_s,
    distinct_shards,
    has_single_controller,
    is_on_host,
    is_traced,
    runs_on_hosts,
    some_arrays,
    take_from_devices,
)
from jaxckpt_train.pytree.flatten import check_storable, flatten, is_key_array
from jaxckpt_train.pytree.identity import LastSaved, LeafIdentities, UnreadArray
from jaxckpt_train.pytree.leaves import EMPTY, ArrayLeaf, EmptyLeaf, Flat, KeyLeaf, LeafRecord, TreeRecord, record_value
from jaxckpt_train.pytree.partition import JobPartition, LocalShard, take_local_shards
from jaxckpt_train.settings import KIB, MIB, Colocated, SnapshotMode
from jaxckpt_train.store.boxes import box_from_index, full_box
from jaxckpt_train.store.segment import ArraySource, ChunkSource, StableChunkSource, is_inexact, is_storable
from jaxckpt_train.store.threads import Latch, paused_collection

NAN, INF = 2, 1
# Arrays checked by one computation: a runtime accepts only some tens of computations before the first is done.
TOGETHER = 256
LEAST_BYTES = 32 * MIB
_PROBES, _PROBE_BYTES, _ARRAYS_LOOKED_AT = 4, 64 * KIB, 256
_KEPT_STRUCTURES = 4
_INCOMPARABLE = (TypeError, ValueError)  # static data in the tree that has no hash, or arrays in it
_donated: OrderedDict[Any, None] = OrderedDict()  # structures of trees (PyTreeDef), the latest last
T = TypeVar("T")
_STRONG, _WEAK = ArrayLeaf(), ArrayLeaf(weak=True)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A pytree at one moment: its record, and the arrays to write. It holds the memory until it is dropped."""

    record: TreeRecord
    arrays: list[ArraySource]
    transfers: Transfers | None
    is_taken: Latch  # open once the caller may do anything with what it saved
    donation: DonationDetector | None  # None: there are no views
    guard: ValueGuard | None
    # In a job, numbers of the arrays that each process has for itself, as far as this one knows. An array that is
    # wholly on this process is among them until `own` is called.
    local: list[int] = dataclasses.field(default_factory=list)
    # Chunks, in this process, of those of them that another process writes, by number of the array.
    compared: dict[int, tuple[ChunkSource, ...]] = dataclasses.field(default_factory=dict)
    # Numbers of the arrays that are wholly on another process, and that process.
    owners: Mapping[int, int] = dataclasses.field(default_factory=dict)
    on_hosts: HostParts | None = None  # what other hosts write of the arrays
    device_wait_s: float = 0.0  # 0.0 where copies were only started
    identities: LeafIdentities | None = None
    last: LastSaved | None = None
    same: frozenset[str] = frozenset()  # paths of leaves that are the same arrays as in that

    def wait_for_devices(self) -> float:
        """Wait, in the background, until the devices have finished pending computations; return the seconds."""
        waited_s = 0.0 if self.transfers is None else self.transfers.wait_for_devices()
        return waited_s + (0.0 if self.on_hosts is None else self.on_hosts.wait_for_devices())

    def own(self, number: int) -> None:
        """Make this process write an array that no other process has."""
        self.local.remove(number)
        if number in self.compared:
            self.arrays[number] = self.arrays[number]._replace(chunks=self.compared.pop(number))

    def close(self) -> None:
        """Release what is still on devices: the snapshot is written, or never will be."""
        if self.donation is not None:
            self.donation.end()
        if self.transfers is not None:
            self.transfers.close()
        if self.on_hosts is not None:
            self.on_hosts.close()


def snapshot(
    tree: Any,
    mode: SnapshotMode = "auto",
    ahead: TransferBudget | None = None,
    *,
    is_guarded: bool = False,
    partition: JobPartition | None = None,
    colocated: Colocated = False,
    is_tracked: bool = False,
    last: LastSaved | None = None,
) -> Snapshot:
    """Take a pytree as it is now, safe from later donation and in-place changes; each distinct shard once.

    Numpy arrays are copied. JAX arrays on the CPU are held as views, once they are computed: a donation then copies
    them instead of reusing their memory. After such a donation, later trees of the same structure are copied, as by
    mode "host". `ahead` limits what is in transit from the devices in all trees of a save; `is_guarded`: find nan and
    inf; `partition`: what this process of a job writes; `colocated`: other hosts write what they hold. `is_tracked`:
    remember which arrays these are; `last`: leave those where they are that will be taken over from the last save.
    """
    with paused_collection():
        flat = flatten(tree)
        identities = LeafIdentities(flat.names, flat.leaves) if is_tracked else None
        same = frozenset() if last is None else last.identities.same(flat.names, flat.leaves)
        settled = last.before.settled(same) if last is not None and same else frozenset()
        hosts = _host_snapshot(flat.leaves, colocated)
    keeps_views = mode in ("auto", "host")
    waited_s = _wait_for_cpus(flat.leaves, hosts) if keeps_views else 0.0
    with paused_collection():
        collector = _LeafCollector(keeps_views=keeps_views, partition=partition, hosts=hosts, settled=settled)
        records = collector.take_all(flat.names, flat.leaves)
        on_hosts = None if hosts is None else hosts.finish()
    arrays = collector.arrays
    guard = ValueGuard(flat.names, flat.leaves) if is_guarded else None
    donation = None
    if mode == "host":
        _copy_views(collector)
    elif mode == "auto" and is_donated(flat.structure):
        with contextlib.suppress(MemoryError, OSError):  # if memory is short, keep the views
            _copy_views(collector)
    elif mode == "auto" and flat.structure is not None and not (collector.elsewhere or on_hosts):
        donation = DonationDetector(flat, arrays)
    transfers = None
    if collector.elsewhere:
        numbers, elsewhere = zip(*collector.elsewhere, strict=True)
        take: Any = take_from_devices if partition is None else take_local_shards
        chunks, transfers = take(elsewhere, mode, ahead or TransferBudget(64 * MIB))
        for number, found in zip(numbers, chunks, strict=True):
            arrays[number] = arrays[number]._replace(chunks=found)
        waited_s += transfers.waited_s
    is_taken = Latch()
    if mode == "stream" and transfers is not None:
        is_taken = transfers.done
    else:
        is_taken.open()
    record = TreeRecord(flat.containers, records, flat.static)
    compared = {number: tuple(arrays[number].chunks) for number in collector.compared}
    for number in compared:
        arrays[number] = arrays[number]._replace(chunks=())
    local, owners = collector.local, collector.owners
    return Snapshot(
        record,
        arrays,
        transfers,
        is_taken,
        donation,
        guard,
        local,
        compared,
        owners,
        on_hosts,
        waited_s,
        identities,
        last,
        same,
    )


def _host_snapshot(leaves: Sequence[Any], setting: Colocated) -> HostSnapshot | None:
    """Create the snapshot for other hosts; None: none takes part."""
    if setting is False or (setting == "auto" and not has_single_controller()):
        return None
    shardings = {leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array) and not is_traced(leaf)}
    return HostSnapshot(setting) if any(runs_on_hosts(sharding, setting) for sharding in shardings) else None


def _wait_for_cpus(leaves: Sequence[Any], hosts: HostSnapshot | None) -> float:
    """Wait for the leaves on CPU devices, which are held as views; return the seconds."""

    @functools.cache
    def is_viewed(sharding: jax.sharding.Sharding) -> bool:
        return _is_on_cpus(sharding) and not (hosts is not None and hosts.accepts(sharding))

    return device_wait_s([leaf for leaf in some_arrays(leaves) if is_viewed(leaf.sharding)])


def _copy_views(collector: _LeafCollector) -> None:
    """Replace views of arrays on the CPU by copies; numpy leaves were copied before."""
    views = [chunk.data for array in collector.arrays for chunk in array.chunks if _is_view(chunk.data)]
    copies = {id(view): copy for view, copy in zip(views, copy_all(list(map(np.asarray, views))), strict=True)}
    for number, array in enumerate(collector.arrays):
        chunks = tuple(
            StableChunkSource(chunk.box, copies[id(chunk.data)]) if id(chunk.data) in copies else chunk
            for chunk in array.chunks
        )
        collector.arrays[number] = array._replace(chunks=chunks)


def _is_view(data: object) -> bool:
    if isinstance(data, memoryview):
        return data.nbytes > 0
    return isinstance(data, np.ndarray) and data.size > 0 and not data.flags.owndata


class _ShardingFacts(NamedTuple):
    single: bool
    on_host: bool
    described: dict[str, Any] | None
    local: bool
    owner: int | None
    is_of_hosts: bool


class _LeafCollector:
    """Takes the leaves of a tree. It caches facts about a sharding or dtype for later leaves."""

    def __init__(
        self,
        keeps_views: bool,
        partition: JobPartition | None = None,
        hosts: HostSnapshot | None = None,
        settled: Collection[str] = (),
    ) -> None:
        self.arrays: list[ArraySource] = []
        # Arrays whose chunks are incomplete: their numbers, and the JAX array or its parts with the rest.
        self.elsewhere: list[tuple[int, jax.Array | Sequence[LocalShard]]] = []
        self.local: list[int] = []
        self.compared: list[int] = []
        self.owners: dict[int, int] = {}
        self._keeps_views, self._partition, self._hosts = keeps_views, partition, hosts
        self._settled = settled
        self._facts: dict[jax.sharding.Sharding, _ShardingFacts] = {}
        self._plain: dict[Any, bool] = {}

    def take_all(self, names: Sequence[str], leaves: Sequence[Any]) -> dict[str, LeafRecord]:
        """Take every leaf; plain arrays on the CPU device are taken together."""
        kinds = plain_kinds(leaves) if self._keeps_views and self._partition is None and self._hosts is None else set()
        alike = [type(leaf) in kinds for leaf in leaves]
        if self._settled:
            alike = [yes and name not in self._settled for yes, name in zip(alike, names, strict=True)]
        views = take_views(list(compress(names, alike)), list(compress(leaves, alike))) if kinds else None
        if views is None:
            return {name: self.take(name, leaf) for name, leaf in zip(names, leaves, strict=True)}
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
        self._assign(copy.nbytes)
        self.arrays.append(ArraySource(name, copy.shape, native, (ChunkSource(full_box(copy.shape), copy),)))
        return ArrayLeaf(host="scalar" if isinstance(value, np.generic) else "numpy", big_endian=value.dtype != native)

    def _take_jax(self, name: str, leaf: jax.Array) -> LeafRecord:
        if is_traced(leaf):
            raise UnsupportedLeafError(
                f"leaf {name!r}: expected an array, found a traced value; save outside of jit, with the arrays that it "
                "returns"
            )
        if leaf.is_deleted():
            raise UnsupportedLeafError(
                f"leaf {name!r}: the array was donated to a jitted function or deleted; "
                "save the arrays that the function returned"
            )
        form = self._sharding_facts(name, leaf.sharding)
        is_plain = self._is_plain(name, leaf)
        if form.owner is not None:  # the array is wholly on another process, which counts it as its own
            assert self._partition is not None
            # The key data of another process cannot be computed here; shape and dtype suffice.
            remote = leaf if is_plain else jax.eval_shape(jax.random.key_data, leaf)
            self._partition.writes(math.prod(remote.shape) * remote.dtype.itemsize)
            self.owners[len(self.arrays)] = form.owner
            self.arrays.append(ArraySource(name, remote.shape, remote.dtype, (), form.described))
        else:
            self._add(name, leaf if is_plain else jax.random.key_data(leaf), form)
        if not is_plain:
            return KeyLeaf(impl=str(jax.random.key_impl(leaf)))
        return _WEAK if leaf.weak_type else _STRONG

    def _sharding_facts(self, name: str, sharding: jax.sharding.Sharding) -> _ShardingFacts:
        known = self._facts.get(sharding)
        if known is not None:
            return known
        if not sharding.is_fully_addressable and self._partition is None:
            raise UnsupportedLeafError(
                f"leaf {name!r}: the array spans devices of other processes, which cannot be saved here; "
                "gather it to the devices of one process first"
            )
        devices: Any = sharding.device_set
        single, local = len(devices) == 1, sharding.is_fully_addressable
        processes = set() if local else {device.process_index for device in devices}
        self._facts[sharding] = _ShardingFacts(
            single,
            on_host=_is_on_cpus(sharding),
            described=None if single else describe_sharding(sharding),
            local=local,
            owner=processes.pop() if len(processes) == 1 else None,
            is_of_hosts=self._hosts is not None and self._hosts.accepts(sharding),
        )
        return self._facts[sharding]

    def _is_plain(self, name: str, leaf: jax.Array) -> bool:
        """Return whether the store knows the dtype; otherwise the leaf must be a PRNG key array."""
        known = self._plain.get(leaf.dtype)
        if known is None:
            known = not is_key_array(leaf)
            if known and not is_storable(np.dtype(leaf.dtype)):
                raise UnsupportedLeafError(
                    f"leaf {name!r}: dtype {leaf.dtype} cannot be stored, because it has no fixed binary representation"
                )
            self._plain[leaf.dtype] = known
        return known

    def _add(self, name: str, leaf: jax.Array, form: _ShardingFacts) -> None:
        shape = leaf.shape
        chunks: tuple[ChunkSource, ...] = ()
        if self._hosts is not None and form.is_of_hosts:
            self._hosts.add(len(self.arrays), leaf)
        elif self._partition is not None:
            is_compared = form.local and not self._assign(leaf.nbytes)
            parts = _whole_shards(leaf) if form.local else self._partition.of(leaf)
            if name in self._settled and not is_compared:
                chunks = tuple(ChunkSource(part.box, UnreadArray(name, part.held, part.inner)) for part in parts)
            elif form.on_host and self._keeps_views:
                chunks = tuple(ChunkSource(part.box, np.asarray(part.held)[part.inner or ...]) for part in parts)
            elif is_compared:
                chunks = tuple(ChunkSource(part.box, np.array(part.held, copy=True)) for part in parts)
            else:
                self.elsewhere.append((len(self.arrays), parts))
        elif name in self._settled:
            parts = _whole_shards(leaf)
            chunks = tuple(ChunkSource(part.box, UnreadArray(name, part.held)) for part in parts)
        elif not (form.on_host and self._keeps_views):
            self.elsewhere.append((len(self.arrays), leaf))
        elif form.single:
            chunks = (ChunkSource(full_box(shape), np.asarray(leaf)),)
        else:
            shards = distinct_shards(leaf)
            chunks = tuple(ChunkSource(box_from_index(shard.index, shape), np.asarray(shard.data)) for shard in shards)
        self.arrays.append(ArraySource(name, shape, leaf.dtype, chunks, form.described))

    def _assign(self, nbytes: int) -> bool:
        """Return whether this process writes an array that each process has for itself; the others compare it."""
        if self._partition is None:
            return True
        self.local.append(len(self.arrays))
        is_writer = self._partition.writes(nbytes)
        if not is_writer:
            self.compared.append(len(self.arrays))
        return is_writer


def _whole_shards(leaf: jax.Array) -> Sequence[LocalShard]:
    shards = distinct_shards(leaf)
    return [LocalShard(box_from_index(shard.index, leaf.shape), shard.data, None) for shard in shards]


def describe_sharding(sharding: jax.sharding.Sharding) -> dict[str, Any] | None:
    """Describe a sharding as plain data, for display: the mesh's axis sizes and the partition of each dimension."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = {str(axis): size for axis, size in sharding.mesh.shape.items()}
        spec = [list(map(str, p)) if isinstance(p, tuple) else None if p is None else str(p) for p in sharding.spec]
        return {"mesh": mesh, "spec": spec}
    return {"type": type(sharding).__name__, "devices": len(sharding.device_set)}


class ValueGuard:
    """Finds nan and inf in the present values of a tree. The constructor starts the checks; `flaws` waits for results.

    An inf in a single number is no flaw, because the best loss of a run without a measurement is inf.
    """

    def __init__(self, names: Sequence[str], leaves: Sequence[Any]) -> None:
        self.busy = Busy()  # with waits for devices, which may still be computing
        self._found: list[tuple[str, int, int]] = []
        self._pending: list[tuple[list[tuple[str, int]], jax.Array]] = []
        groups: dict[Any, list[tuple[str, jax.Array]]] = defaultdict(list)
        for name, leaf in zip(names, leaves, strict=True):
            if isinstance(leaf, jax.Array):
                if isinstance(leaf.dtype, np.dtype) and is_inexact(leaf.dtype) and leaf.size:  # no key array
                    self._add_leaf(name, leaf, groups)
            elif isinstance(leaf, (np.ndarray, np.generic)):
                if is_inexact(leaf.dtype):
                    self._found.append((name, leaf.ndim, int(_flaw(np, np.asarray(leaf)))))
            elif isinstance(leaf, (float, complex)) and cmath.isnan(leaf):
                self._found.append((name, 0, NAN))
        for group in groups.values():
            for at in range(0, len(group), TOGETHER):
                some = group[at : at + TOGETHER]
                with without_caller_settings():
                    results = _device_flaws(tuple(array for _, array in some))
                self._pending.append(([(name, array.ndim) for name, array in some], results))

    def _add_leaf(self, name: str, leaf: jax.Array, groups: dict[Any, list[tuple[str, jax.Array]]]) -> None:
        if not leaf.is_fully_addressable:  # each process checks its own shards
            for shard in {str(shard.index): shard.data for shard in leaf.addressable_shards}.values():
                if shard.size:
                    self._add_leaf(name, shard, groups)
        elif is_on_host(leaf):  # offloaded: no device can compute with it in that memory
            self._found.append((name, leaf.ndim, int(_flaw(np, np.asarray(leaf)))))
        else:
            groups[tuple(leaf.sharding.addressable_devices_indices_map(leaf.shape))].append((name, leaf))

    def flaws(self) -> list[tuple[str, str]]:
        """Return the paths of leaves that hold nan or inf, each with "nan" or "inf"."""
        found = list(self._found)
        # A few bytes: the user's guard concerns the training.
        with self.busy, jax.transfer_guard_device_to_host("allow"):
            for leaves, results in self._pending:
                answers = np.asarray(results)
                found += [(name, rank, int(flaw)) for (name, rank), flaw in zip(leaves, answers, strict=True)]
        names = {NAN: "nan", INF: "inf"}
        flaws = [(name, names[flaw]) for name, rank, flaw in found if flaw == NAN or (flaw == INF and rank > 0)]
        return list(dict.fromkeys(flaws))


@jax.jit
def _device_flaws(arrays: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack([_flaw(jnp, array) for array in arrays])


def _flaw(numpy: Any, array: Any) -> Any:
    wide = array.astype(numpy.float32) if array.dtype.itemsize == 1 else array  # tiny floats lack isnan and isinf
    return numpy.where(numpy.isnan(wide).any(), NAN, numpy.where(numpy.isinf(wide).any(), INF, 0)).astype(numpy.int8)


class DonationDetector:
    """Detects, for one save, whether the loop donates the CPU arrays whose memory the save holds.

    JAX does not mark an array as donated while its memory is held. So this class copies a few small arrays instead of
    holding them; whether those are donated shows when the save is over.
    """

    def __init__(self, flat: Flat, arrays: MutableSequence[ArraySource]) -> None:
        self._structure, self._arrays = flat.structure, arrays
        self._probes: list[jax.Array] = []
        for number, array in enumerate(itertools.islice(arrays, _ARRAYS_LOOKED_AT)):
            if len(self._probes) == _PROBES:
                break
            chunk = array.chunks[0] if len(array.chunks) == 1 else None
            if chunk is None or not isinstance(chunk.data, (np.ndarray, memoryview)):
                continue
            leaf = flat.leaves[flat.names.index(array.name)] if 0 < chunk.data.nbytes <= _PROBE_BYTES else None
            if isinstance(leaf, jax.Array):
                arrays[number] = array._replace(chunks=(chunk._replace(data=np.array(chunk.data, copy=True)),))
                self._probes.append(leaf)

    def end(self) -> None:
        """End the save: if the loop donated the arrays, remember it for the next save of a tree of this structure."""
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
    """Return whether a tree of this structure was donated during an earlier save."""
    try:
        return structure in _donated
    except _INCOMPARABLE:
        return False


def plain_kinds(leaves: Sequence[Any]) -> set[type]:
    """Return the types of leaves that are JAX arrays of numbers: no tracers, no PRNG keys."""
    examples = dict(zip(map(type, leaves), leaves, strict=True))
    return {
        kind
        for kind, leaf in examples.items()
        if isinstance(leaf, jax.Array) and not is_traced(leaf) and not is_key_array(leaf)
    }


def take_views(names: Sequence[str], leaves: Sequence[jax.Array]) -> list[ArraySource] | None:
    """Take arrays that are each on one CPU device, in half the time of a loop; None if not all can be taken so."""
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
    chunks = _make_tuples(ChunkSource, zip(map(boxes.__getitem__, shapes), views, strict=True))
    return list(
        _make_tuples(ArraySource, zip(names, shapes, dtypes, zip(chunks, strict=True), repeat(None), strict=False))
    )


def _views(leaves: Sequence[jax.Array], dtypes: Sequence[np.dtype]) -> Sequence[memoryview | np.ndarray] | None:
    """Return views of the arrays, which keep their memory unchanged; None if an array was deleted.

    Waits until all are computed. Making a memoryview takes a third of the time of making a numpy array, but Python's
    buffer protocol knows only numpy's own dtypes and the default layout.
    """
    known = {dtype for dtype in set(dtypes) if dtype.isbuiltin == 1}
    pairs = zip(leaves, dtypes, strict=True)
    try:
        return [memoryview(leaf) if dtype in known else np.asarray(leaf) for leaf, dtype in pairs]
    except (BufferError, RuntimeError):
        return None if any(leaf.is_deleted() for leaf in leaves) else list(map(np.asarray, leaves))


def _all_on_cpu(shardings: Sequence[jax.sharding.Sharding]) -> bool:
    """Return whether each array lies on one CPU device. Most shardings are distinct objects, and slow to compare."""
    if set(map(type, shardings)) == {SingleDeviceSharding} and set(backends()) == {"cpu"}:
        return True
    return all(
        len(sharding.device_set) == 1 and sharding.is_fully_addressable and _is_on_cpus(sharding)
        for sharding in set(shardings)
    )


def _is_on_cpus(sharding: jax.sharding.Sharding) -> bool:
    devices: Any = sharding.device_set
    return all(device.platform == "cpu" for device in devices)


def _make_tuples(kind: type[T], fields: Iterable[tuple[Any, ...]]) -> Iterable[T]:
    """Make named tuples; their own constructor is a Python function and takes twice as long."""
    make: Any = tuple.__new__
    return map(make, repeat(kind), fields)
