"""Restores one pytree: compares it with the target, reads the leaves that are asked for, and assembles the tree."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from jaxckpt_train._validation import flag, shown
from jaxckpt_train.errors import CorruptCheckpointError, MismatchError, SettingsError
from jaxckpt_train.pytree.colocated.transfer import HostLeaf, HostReads, dtype_of, runs_on_hosts
from jaxckpt_train.pytree.flatten import PLACEHOLDER, flatten, nodes_with_other_static, shortened, unflatten
from jaxckpt_train.pytree.leaves import (
    EMPTY,
    STORED,
    ArrayLeaf,
    EmptyLeaf,
    Flat,
    KeyLeaf,
    LeafRecord,
    TreeRecord,
    decode_tree,
    python_value,
)
from jaxckpt_train.pytree.mismatch import (
    Differences,
    exact_array,
    inexact_line,
    leaf_difference,
    raise_differences,
    rename_map,
    rounded_array,
)
from jaxckpt_train.pytree.paths import (
    ROOT,
    Key,
    Only,
    find_nested_leaves,
    join,
    leaf_filter,
    parse_key,
    refuse_idle_pattern,
    refuse_too_deep,
    split,
)
from jaxckpt_train.pytree.placing import Destination, Placer, value_of, weakly_typed
from jaxckpt_train.pytree.shared_reads import JobLoads, JointRead, ReadSelection, read_together
from jaxckpt_train.pytree.target import (
    LeafRequest,
    Placement,
    concrete_sharding,
    default_platform,
    device_placement,
    host_placement,
    in_format_of,
    leaf_request,
    lost_type,
    own_dtype,
    resolve_request,
    shardings_by_name,
)
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.buffers import ReadBudget
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import ReadBox, ReadProgress, iter_boxes
from jaxckpt_train.store.threads import paused_collection

_log = logging.getLogger("jaxckpt_train")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a tree is loaded; `jaxckpt_train.load` documents the options."""

    only: Only = None
    rename: Mapping[str, str] | None = None
    cast: bool = False
    missing: Literal["error", "keep"] = "error"
    shardings: Any = None
    forms: Callable[[Flat, TreeRecord, Mapping[str, str]], tuple[TreeRecord, dict[str, str]]] | None = None  # of others
    donatable: bool | None = None  # None: leaves that replace an array on a device
    has_types: bool = True  # whether weak types and Python numbers are recorded; most other tools do not

    def __post_init__(self) -> None:
        if self.rename is not None and not isinstance(self.rename, Mapping):
            raise SettingsError(
                f'rename: expected a mapping such as {{"old/**": "new/**"}}, found {shown(self.rename)}'
            )
        pairs: Any = (self.rename or {}).items()
        for old, new in pairs:
            if not (isinstance(old, str) and isinstance(new, str)):
                raise SettingsError(f"rename: expected leaf paths as text, found {shown(old)}: {shown(new)}")
        refuse_too_deep("shardings", self.shardings)
        if self.missing not in ("error", "keep"):
            raise SettingsError(f'missing: expected "error" or "keep", found {self.missing!r}')
        flag("cast", self.cast)
        if self.donatable is not None:
            flag("donatable", self.donatable)


class _LeafLoad(NamedTuple):
    """One leaf to produce: its path in the checkpoint, its record, what it must become, whether it can be donated."""

    name: str
    record: LeafRecord
    array: ArrayRecord | None
    request: LeafRequest
    donatable: bool


class TreeRestore:
    """Restores the tree of one checkpointable of an open checkpoint."""

    def __init__(self, files: Opener, committed: Committed, part: PartRecord, settings: StoreSettings) -> None:
        self._files, self._committed, self._settings = files, committed, settings
        self._subject = f"{committed.directory}: {part.name}"
        self.record: TreeRecord = decode_tree(part, committed.directory)
        self._arrays = {array.name: array for array in part.arrays}

    def load(
        self, like: Any, options: LoadOptions, progress: ReadProgress | None = None, loads: JobLoads | None = None
    ) -> Any:
        """Load the stored leaves in the structure of `like`, or rebuild the tree without a target.

        Args:
            like: the target, or None.
            options: how.
            progress: called with the number of bytes that this process has read.
            loads: the loads of the job in which all processes take part; None: this process reads alone.

        Raises:
            MismatchError: before anything is read; lists every difference between the checkpoint and `like`.
            CorruptCheckpointError: bytes are not what was saved.
            CheckpointTimeoutError, OtherProcessError: another process does not take part, or loads something else.
        """
        with jax.transfer_guard_host_to_device("allow"):  # the caller's guard concerns implicit transfers of training
            return self._load(like, options, progress, loads or JobLoads(None, self._settings))

    def _load(self, like: Any, options: LoadOptions, progress: ReadProgress | None, loads: JobLoads) -> Any:
        if like is None:
            names = rename_map(list(self.record.leaves), options.rename or {})
            return self._load_all(names, leaf_filter(options.only), options, progress, loads)
        with paused_collection():
            flat, names, leaf_loads, places = self._plan(like, options, loads)
        if options.has_types:
            self._report_lost_types(names, leaf_loads)
        if self.record.static:
            self._report_other_static(flat, {names[leaf_load.name]: leaf_load.name for leaf_load in leaf_loads})
        values = self._load_leaves(leaf_loads, places, progress, loads)
        loaded = dict(zip((names[leaf_load.name] for leaf_load in leaf_loads), values, strict=True))
        del values
        leaves = zip(flat.names, flat.leaves, strict=True)
        return unflatten(like, [in_format_of(leaf, loaded.pop(name, leaf)) for name, leaf in leaves])

    def _report_lost_types(self, names: Mapping[str, str], leaf_loads: Sequence[_LeafLoad]) -> None:
        lost = [
            (names[leaf_load.name], text)
            for leaf_load in leaf_loads
            if (text := lost_type(leaf_load.record, leaf_load.request)) is not None
        ]
        if lost:
            (name, text), others = lost[0], f" ({len(lost) - 1} other leaves have such differences)" if lost[1:] else ""
            _log.warning(
                "%s: leaf %r: %s; otherwise computations may get another dtype%s", self._subject, name, text, others
            )

    def _report_other_static(self, flat: Flat, loaded: Mapping[str, str]) -> None:
        for path, _ in nodes_with_other_static(self.record.static, flat.static, flat.names, loaded):
            _log.warning(
                "%s: node %r: its static data is %s in the checkpoint, but %s in the target; its values were loaded by "
                "position, because the type is registered without keys",
                self._subject,
                path,
                shortened(self.record.static[path]),
                shortened(flat.static[path]),
            )

    def compare(self, like: Any, options: LoadOptions, loads: JobLoads | None = None) -> None:
        """Raise the MismatchError that `load` would raise; read nothing."""
        if like is not None:
            self._plan(like, options, loads or JobLoads(None, self._settings))

    def _plan(
        self, like: Any, options: LoadOptions, loads: JobLoads
    ) -> tuple[Flat, dict[str, str], list[_LeafLoad], list[Placement | None]]:
        """Return the target's leaves, their names by stored name, the leaves to produce, and where each goes."""
        names = rename_map(list(self.record.leaves), options.rename or {})
        selected = leaf_filter(options.only)
        flat = flatten(like)
        if options.forms is not None:
            self.record, names = options.forms(flat, self.record, names)
        given = shardings_by_name(options.shardings)
        leaves = dict(zip(flat.names, flat.leaves, strict=True))
        requests = {name: leaf_request(name, leaf, given(name)) for name, leaf in leaves.items() if selected(name)}
        loads.expect(request.sharding for request in requests.values())
        saved_names = {new: old for old, new in names.items()}
        found = self._compare(requests, saved_names, selected, options, flat)
        leaf_loads = [
            self._leaf_load(saved_names[name], request, donatable=_is_donatable(options, leaves[name]))
            for name, request in found.items()
        ]
        return flat, names, leaf_loads, self._places(leaf_loads)

    def _places(self, leaf_loads: Sequence[_LeafLoad]) -> list[Placement | None]:
        """Return where each stored leaf goes; None: it is inline.

        Raises:
            MismatchError: lists all shardings that do not fit.
        """
        known: dict[object, Placement] = {}  # most leaves share their shape and sharding
        places, lines = list[Placement | None](), list[str]()
        for leaf_load in leaf_loads:
            try:
                places.append(_placement(leaf_load, known) if isinstance(leaf_load.record, STORED) else None)
            except MismatchError as error:
                lines.append(str(error))
        raise_differences(self._subject, lines)
        return places

    def _compare(
        self,
        requests: Mapping[str, LeafRequest],
        saved_names: Mapping[str, str],
        selected: Callable[[str], bool],
        options: LoadOptions,
        flat: Flat,
    ) -> dict[str, LeafRequest]:
        """Raise all differences at once; return what each leaf that is loaded must become."""
        differences, found = Differences(self._subject, keeps=options.missing == "keep"), dict[str, LeafRequest]()
        leaves = dict(zip(flat.names, flat.leaves, strict=True))
        for name, asked in requests.items():
            if asked.form == "skip":
                continue
            if name not in saved_names:
                if options.missing != "keep" or isinstance(leaves[name], jax.ShapeDtypeStruct):
                    differences.missing(name, asked)
                continue
            saved = saved_names[name]
            record, array = self.record.leaves[saved], self._arrays.get(saved)
            found[name] = request = resolve_request(asked, record, array, has_types=options.has_types)
            line = leaf_difference(name, record, array, request, cast=options.cast)
            line = line or self._inexact_number(name, saved, request, is_rounded=asked.weak)
            if line is not None:
                differences.unlike(line, array, request)
        skipped = tuple("" if name == ROOT else f"{name}/" for name, leaf in leaves.items() if leaf is PLACEHOLDER)
        free = [name for name in leaves if name not in saved_names]
        for name, saved in saved_names.items():
            if name not in requests and selected(name) and not name.startswith(skipped):
                differences.unexpected(name, self.record.leaves[saved], self._arrays.get(saved), free)
        loaded = {name: saved_names[name] for name in found} if self.record.static else {}
        for path, kind in nodes_with_other_static(self.record.static, flat.static, flat.names, loaded):
            if kind == "moved":
                differences.moved(path, self.record.static[path], flat.static[path])
        if not differences:
            # A pattern may match only leaves that a placeholder skips, but one must match a leaf of the target.
            known = {**saved_names, **leaves} if any(map(selected, leaves)) else leaves
            refuse_idle_pattern(self._subject, options.only, known)
        differences.raise_all()
        return found

    def _inexact_number(self, name: str, saved: str, request: LeafRequest, *, is_rounded: bool) -> str | None:
        """Describe a Python number that the wanted dtype does not hold; weakly typed ones are rounded, as JAX does."""
        record = self.record.leaves[saved]
        if request.dtype is None or isinstance(record, STORED):
            return None
        value = python_value(saved, record, self._subject)
        if is_rounded and isinstance(value, (float, complex)) and rounded_array(value, request.dtype) is not None:
            return None
        return inexact_line(name, value, request) if exact_array(value, request.dtype) is None else None

    def _load_all(
        self,
        names: Mapping[str, str],
        selected: Callable[[str], bool],
        options: LoadOptions,
        progress: ReadProgress | None,
        loads: JobLoads,
    ) -> Any:
        given = shardings_by_name(options.shardings)
        chosen = [old for old, new in names.items() if selected(new)]
        refuse_idle_pattern(self._subject, options.only, names.values())
        if options.rename and (pair := find_nested_leaves(set(names.values()))):
            raise MismatchError(f"{self._subject}: rename: leaf {pair[0]!r} would be below leaf {pair[1]!r}")
        donatable = _is_donatable(options, None)
        leaf_loads = [
            self._leaf_load(old, self._request_without_target(old, given(names[old])), donatable=donatable)
            for old in chosen
        ]
        loads.expect(leaf_load.request.sharding for leaf_load in leaf_loads)
        lines = [
            leaf_difference(names[leaf_load.name], leaf_load.record, leaf_load.array, leaf_load.request, cast=False)
            for leaf_load in leaf_loads
            if leaf_load.array
        ]
        raise_differences(self._subject, [line for line in lines if line is not None])
        produced = self._load_leaves(leaf_loads, self._places(leaf_loads), progress, loads)
        values = dict(zip((names[leaf_load.name] for leaf_load in leaf_loads), produced, strict=True))
        if options.rename:
            record = TreeRecord({}, {names[old]: leaf for old, leaf in self.record.leaves.items()})
            return rebuild(record, values, self._subject)
        return rebuild(self.record, values, self._subject)

    def _request_without_target(self, name: str, sharding: jax.sharding.Sharding | None) -> LeafRequest:
        """Return what a leaf becomes without a target: itself, on the host, or on devices if a sharding is given."""
        record, array = self.record.leaves[name], self._arrays.get(name)
        place = concrete_sharding(name, sharding)
        match record:
            case ArrayLeaf(host):
                assert array is not None
                dtype = own_dtype(record, array)
                on_device = place is not None and host == "jax"
                form: Any = "jax" if on_device else "scalar" if host == "scalar" else "numpy"
                return LeafRequest(form, array.shape, dtype, place, weak=record.weak and on_device)
            case KeyLeaf(impl):
                assert array is not None
                return LeafRequest("key", array.shape[:-1], sharding=place, impl=impl)
            case EmptyLeaf():
                return LeafRequest("empty")
            case _:
                return LeafRequest("python")

    def _leaf_load(self, name: str, request: LeafRequest, *, donatable: bool) -> _LeafLoad:
        return _LeafLoad(
            name, self.record.leaves[name], self._arrays.get(name), request, donatable and request.form == "jax"
        )

    def _load_leaves(
        self,
        leaf_loads: Sequence[_LeafLoad],
        places: Sequence[Placement | None],
        progress: ReadProgress | None,
        loads: JobLoads,
    ) -> list[Any]:
        """Produce all values in order; inline values first, so that their errors precede a bulk read."""
        values: list[Any] = [PLACEHOLDER] * len(leaf_loads)
        stored: list[tuple[int, _LeafLoad, Placement]] = []
        for number, (leaf_load, place) in enumerate(zip(leaf_loads, places, strict=True)):
            if place is not None:
                stored.append((number, leaf_load, place))
            else:
                values[number] = self._inline(leaf_load)
        self._read(stored, values, progress, loads)
        return values

    def _read(
        self,
        leaf_loads: Sequence[tuple[int, _LeafLoad, Placement]],
        values: list[Any],
        progress: ReadProgress | None,
        loads: JobLoads,
    ) -> None:
        """Read the stored leaves, and put each array where it goes while others are still being read."""
        leaf_loads = self._read_on_hosts(leaf_loads, values, progress)
        if not leaf_loads:
            return
        unplaced = any(
            leaf_load.request.form == "jax" and not placement.devices for _, leaf_load, placement in leaf_loads
        )
        default = default_platform() if unplaced else "cpu"
        requests = [
            Wanted(
                leaf_load.array,
                placement.boxes,
                leaf_load.donatable or _passes_through_host(leaf_load, placement, default),
            )
            for _, leaf_load, placement in leaf_loads
            if leaf_load.array is not None
        ]
        destinations = [
            Destination(
                number,
                leaf_load.name,
                leaf_load.request,
                placement,
                DTYPES[leaf_load.array.dtype],
                _leaves_host(leaf_load, placement, default),
                leaf_load.donatable,
            )
            for number, leaf_load, placement in leaf_loads
            if leaf_load.array is not None
        ]
        budget = ReadBudget(self._settings.read_budget_bytes)
        placer = Placer(destinations, values, budget)
        shared, cached, memory = self._choose_shared(destinations, loads)
        left = sorted(set(range(len(requests))) - {each.number for each in shared} - {*cached})
        # `partial`, not a closure: a closure would stay in the frames of an error, with all that is loaded.
        read_alone = functools.partial(self._read_alone, requests, cached, left, placer, budget)
        if not shared:
            read_alone(progress)
            return
        joint = JointRead(
            loads.coordinator, self._files, self._committed, self._subject, self._settings, progress, memory
        )
        joint.run(shared, placer.take, read_alone)

    def _read_alone(
        self,
        requests: Sequence[Wanted],
        cached: Sequence[int],
        left: Sequence[int],
        placer: Placer,
        budget: ReadBudget,
        progress: ReadProgress | None,
    ) -> None:
        """Read the given arrays in this process; those in `cached` may go through the page cache."""
        direct = False if self._settings.direct_io == "auto" else self._settings.direct_io
        through_cache = dataclasses.replace(self._settings, direct_io=direct)
        for numbers, settings in ((cached, through_cache), (left, self._settings)):
            if not numbers:
                continue
            chosen = [requests[number] for number in numbers]
            reading = iter_boxes(self._files, self._committed, chosen, settings, progress, budget)
            with contextlib.closing(reading) as boxes:
                for wanted, box, data in boxes:
                    placer.take(ReadBox(numbers[wanted], box, data))
                    del data  # the next box may need its memory
        placer.finish()

    def _choose_shared(self, destinations: Sequence[Destination], loads: JobLoads) -> ReadSelection:
        """Choose the arrays that the processes of the job read once together, or through one page cache."""
        places = [(self._arrays[each.name], each.placement) for each in destinations]
        block_bytes = self._committed.manifest.block_bytes
        return read_together(places, self._settings.read_once, loads, block_bytes)

    def _read_on_hosts(
        self, leaf_loads: Sequence[tuple[int, _LeafLoad, Placement]], values: list[Any], progress: ReadProgress | None
    ) -> Sequence[tuple[int, _LeafLoad, Placement]]:
        """Let other hosts of this single controller read what goes to their devices; return the remaining leaves."""
        there, rest = list[tuple[int, _LeafLoad, Placement]](), list[tuple[int, _LeafLoad, Placement]]()
        for each in leaf_loads:
            is_there = each[2].sharding is not None and runs_on_hosts(each[2].sharding, self._settings.colocated)
            (there if is_there else rest).append(each)
        if there:
            leaves = [
                HostLeaf(leaf_load.array, place, dtype_of(leaf_load.array, leaf_load.request.dtype))
                for _, leaf_load, place in there
                if leaf_load.array
            ]
            found = HostReads(self._files, self._committed, self._settings, leaves).load(progress)
            for (number, leaf_load, _), array in zip(there, found, strict=True):
                values[number] = weakly_typed(leaf_load.name, array) if leaf_load.request.weak else array
        return rest

    def _inline(self, leaf_load: _LeafLoad) -> Any:
        if isinstance(leaf_load.record, EmptyLeaf):
            return EMPTY
        value = python_value(leaf_load.name, leaf_load.record, self._subject)
        if leaf_load.request.form in ("python", "none"):
            return value
        assert leaf_load.request.dtype is not None
        array = rounded_array(value, leaf_load.request.dtype)
        assert array is not None, "the comparison has checked it"
        return value_of(leaf_load.name, leaf_load.request, array)


def _placement(leaf_load: _LeafLoad, known: dict[object, Placement]) -> Placement:
    assert leaf_load.array is not None
    shape, sharding = leaf_load.array.shape, leaf_load.request.sharding
    if leaf_load.request.form != "jax":
        sharding = None
    found = known.get((shape, sharding))
    if found is None:
        found = host_placement(shape) if sharding is None else device_placement(leaf_load.name, shape, sharding)
        known[shape, sharding] = found
    return found


def _is_donatable(options: LoadOptions, leaf: Any) -> bool:
    """Return whether the new leaf can be donated; by default, if the leaf of the target can."""
    return isinstance(leaf, jax.Array) if options.donatable is None else options.donatable


def _passes_through_host(leaf_load: _LeafLoad, placement: Placement, default: str) -> bool:
    """Return whether its bytes only pass through host memory: to an accelerator, or to another dtype or byte order."""
    if (
        leaf_load.array is not None
        and leaf_load.request.dtype is not None
        and leaf_load.request.dtype != DTYPES[leaf_load.array.dtype]
    ):
        return True
    return _leaves_host(leaf_load, placement, default)


def _leaves_host(leaf_load: _LeafLoad, placement: Placement, default: str) -> bool:
    """Return whether it goes to an accelerator."""
    if placement.devices:
        return all(device.platform != "cpu" for device, _ in placement.devices)
    return leaf_load.request.form == "jax" and default != "cpu"


def rebuild(record: TreeRecord, leaves: Mapping[str, Any], subject: str) -> Any:
    """Build nested containers with the given leaves; a NamedTuple or object becomes a dict of its fields.

    Leaves of the record that are not given are left out, and so are containers without any given leaf; in a list or
    tuple, PLACEHOLDER keeps their position.

    Raises:
        CorruptCheckpointError: the paths contradict each other, or no save writes such paths.
    """
    root: dict[str, Any] = {}
    for name in record.leaves:
        node = root
        keys = split(name)
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CorruptCheckpointError(f"{subject}: leaf {name!r} is below another leaf")
        last = keys[-1] if keys else ROOT
        if last in node:
            raise CorruptCheckpointError(f"{subject}: leaf {name!r} is also a container")
        node[last] = _Leaf(name)
    if ROOT in record.leaves and len(record.leaves) > 1:
        raise CorruptCheckpointError(
            f"{subject}: expected no other leaf than the root, found {len(record.leaves) - 1} more"
        )
    return _build_node(root.get(ROOT, root), ROOT, record, leaves, subject)


class _Leaf:
    def __init__(self, name: str) -> None:
        self.name = name


def _build_node(node: Any, path: str, record: TreeRecord, leaves: Mapping[str, Any], subject: str) -> Any:
    kind = record.containers.get(path, "dict").partition(" ")[0]
    if isinstance(node, _Leaf):
        if isinstance(record.leaves[node.name], EmptyLeaf) and node.name in leaves:
            return {"list": list, "tuple": tuple}.get(kind, dict)()
        return leaves.get(node.name, PLACEHOLDER)
    children = {key: _build_node(child, join(path, key), record, leaves, subject) for key, child in node.items()}
    if children and all(child is PLACEHOLDER for child in children.values()):
        return PLACEHOLDER
    if kind in ("list", "tuple"):
        try:
            ordered = [children.pop(str(number)) for number in range(len(children))]
        except KeyError:
            raise CorruptCheckpointError(f"{subject}: positions of the {kind} {path!r} are missing") from None
        return ordered if kind == "list" else tuple(ordered)
    return {_parsed(key, path, subject): child for key, child in children.items() if child is not PLACEHOLDER}


def _parsed(key: str, path: str, subject: str) -> Key:
    try:
        return parse_key(key)
    except (ValueError, OverflowError) as error:
        raise CorruptCheckpointError(f"{subject}: {key!r:.100} below {path!r:.100} is not a key: {error}") from error
