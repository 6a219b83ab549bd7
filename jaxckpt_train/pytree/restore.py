"""Restores one pytree: compares it with the target, reads the leaves that are asked for, and assembles the tree."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from jaxckpt_train._validation import flag, shown
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.errors import CorruptCheckpointError, MismatchError, SettingsError
from jaxckpt_train.pytree.colocated.transfer import HostReads
from jaxckpt_train.pytree.copies import runs_on_hosts
from jaxckpt_train.pytree.flatten import PLACEHOLDER, flatten, nodes_with_other_static, shortened, unflatten
from jaxckpt_train.pytree.leaves import (
    EMPTY,
    ROOT,
    STORED,
    EmptyLeaf,
    Flat,
    Key,
    Only,
    TreeRecord,
    decode_tree,
    describe_saved,
    find_nested_leaves,
    join,
    leaf_filter,
    parse_key,
    python_value,
    refuse_idle_pattern,
    refuse_too_deep,
    split,
)
from jaxckpt_train.pytree.placing import (
    ArrayLoad,
    Placement,
    Placer,
    place_array,
    spans_processes,
    value_of,
    weakly_typed,
)
from jaxckpt_train.pytree.shared_reads import JointRead, ReadSelection, read_index_files, select_shared
from jaxckpt_train.pytree.target import (
    Comparison,
    LeafRequest,
    in_format_of,
    leaf_difference,
    leaf_request,
    loses_type,
    raise_differences,
    rename_map,
    request_without_target,
    rounded_array,
    shardings_by_name,
)
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.buffers import ReadBudget
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.manifest import PartRecord
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import ReadBox, ReadProgress, iter_boxes
from jaxckpt_train.store.segment import DTYPES
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
        rename: Any = {} if self.rename is None else self.rename
        if not isinstance(rename, Mapping) or not all(
            isinstance(path, str) for pair in rename.items() for path in pair
        ):
            raise SettingsError(f'rename: expected a mapping such as {{"old/**": "new/**"}}, found {shown(rename)}')
        refuse_too_deep("shardings", self.shardings)
        if self.missing not in ("error", "keep"):
            raise SettingsError(f'missing: expected "error" or "keep", found {self.missing!r}')
        flag("cast", self.cast)
        if self.donatable is not None:
            flag("donatable", self.donatable)


class JobLoads:
    """The loads of one call in a job, with a coordinator of their own, which is created when it is needed."""

    def __init__(
        self, job: Coordinator | None, settings: StoreSettings, coordinator: Coordinator | None = None
    ) -> None:
        self._job = None if job is None or job.processes == 1 or settings.read_once is False else job
        self._timeout_s, self.coordinator = settings.barrier_timeout_s, coordinator
        self.processes = 1 if self._job is None else self._job.processes

    def expect(self, shardings: Iterable[jax.sharding.Sharding | None]) -> None:
        """Create the coordinator if arrays span processes, before anything can fail in this process alone.

        All processes count these coordinators: a process without one would be out of step at every later load.
        """
        if self._job is not None and self.coordinator is None and any(map(spans_processes, shardings)):
            self.coordinator = self._job.within("load", self._timeout_s)

    @contextlib.contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Propagate an error within to the other processes, some of which may be waiting for this one."""
        try:
            yield
        except BaseException as error:
            if self.coordinator is not None and not getattr(error, "lost", ()):  # a lost process may run the store
                self.coordinator.share_error("loading", error)
            raise
        finally:
            if self.coordinator is not None:
                self.coordinator.end()


class TreeRestore:
    """Restores the tree of one checkpointable of an open checkpoint."""

    def __init__(self, files: Opener, committed: Committed, part: PartRecord, settings: StoreSettings) -> None:
        self._files, self._committed, self._settings = files, committed, settings
        self._subject = f"{committed.directory}: {part.name}"
        self._part = part.name
        self.record: TreeRecord = decode_tree(part, committed.directory)
        self._arrays = {array.name: array for array in part.arrays}

    def load(self, like: Any, options: LoadOptions, progress: ReadProgress | None, loads: JobLoads) -> Any:
        """Load the stored leaves in the structure of `like` (None: rebuild the tree), if they have no difference."""
        with jax.transfer_guard_host_to_device("allow"):  # the caller's guard concerns implicit transfers of training
            if like is None:
                return self._load_all(options, progress, loads)
            with paused_collection():
                flat, saved_names, requests, arrays = self._plan(like, options, loads)
            self._warn(flat, saved_names, requests, options)
            loaded = self._read(saved_names, requests, arrays, progress, loads)
            leaves = zip(flat.names, flat.leaves, strict=True)
            return unflatten(like, [in_format_of(leaf, loaded.pop(name, leaf)) for name, leaf in leaves])

    def compare(self, like: Any, options: LoadOptions, loads: JobLoads) -> None:
        """Raise the MismatchError that `load` would raise; read nothing."""
        if like is not None:
            self._plan(like, options, loads)

    def _plan(
        self, like: Any, options: LoadOptions, loads: JobLoads
    ) -> tuple[Flat, dict[str, str], dict[str, LeafRequest], list[ArrayLoad]]:
        """Compare with the target; return its leaves, their stored names, and what is to be loaded."""
        names = rename_map(list(self.record.leaves), options.rename or {})
        selected = leaf_filter(options.only)
        flat = flatten(like)
        if options.forms is not None:
            self.record, names = options.forms(flat, self.record, names)
        given = shardings_by_name(options.shardings)
        leaves = dict(zip(flat.names, flat.leaves, strict=True))
        asked = {name: leaf_request(name, leaf, given(name)) for name, leaf in leaves.items() if selected(name)}
        loads.expect(request.sharding for request in asked.values())
        saved_names = {new: old for old, new in names.items()}
        kept = set[str]()
        if options.missing == "keep":
            kept = {name for name, leaf in leaves.items() if not isinstance(leaf, jax.ShapeDtypeStruct)}
        comparison = Comparison(
            self._subject, self.record, self._arrays, cast=options.cast, has_types=options.has_types, kept=kept
        )
        requests = comparison.requests(asked, saved_names)
        skipped = [name for name, leaf in leaves.items() if leaf is PLACEHOLDER]
        rest = [name for name in saved_names if name not in asked and selected(name)]
        comparison.unexpected(rest, saved_names, leaves, skipped)
        for path, kind in self._static_differences(flat, saved_names, requests):
            if kind == "moved":
                comparison.moved(path, self.record.static[path], flat.static[path])
        if not comparison.lines:
            # A pattern may match only leaves that a placeholder skips, but one must match a leaf of the target.
            known = {**saved_names, **leaves} if any(map(selected, leaves)) else leaves
            refuse_idle_pattern(self._subject, options.only, known)
        comparison.raise_all()
        replaced = {name for name in requests if isinstance(leaves[name], jax.Array)}
        return flat, saved_names, requests, self._array_loads(saved_names, requests, options.donatable, replaced)

    def _static_differences(
        self, flat: Flat, saved_names: Mapping[str, str], requests: Mapping[str, LeafRequest]
    ) -> Iterator[tuple[str, Literal["moved", "other"]]]:
        loaded = {name: saved_names[name] for name in requests} if self.record.static else {}
        return nodes_with_other_static(self.record.static, flat.static, flat.names, loaded)

    def _warn(
        self, flat: Flat, saved_names: Mapping[str, str], requests: Mapping[str, LeafRequest], options: LoadOptions
    ) -> None:
        records = {name: self.record.leaves[saved_names[name]] for name in requests if options.has_types}
        lost = [name for name, saved in records.items() if loses_type(saved, requests[name])]
        if lost:
            saved = describe_saved(records[lost[0]], self._arrays.get(saved_names[lost[0]]))
            _log.warning(
                "%s: leaf %r (and %d others): saved as %s, loaded as %s, so that computations may get another dtype; "
                "use a JAX array, a Python number, or jax_enable_x64, as it was when this was saved",
                *(self._subject, lost[0], len(lost) - 1, saved, requests[lost[0]]),
            )
        for path, _ in self._static_differences(flat, saved_names, requests):
            _log.warning(
                "%s: node %r: its static data is %s in the checkpoint, but %s in the target; its values were loaded by "
                "position, because the type is registered without keys",
                self._subject,
                path,
                shortened(self.record.static[path]),
                shortened(flat.static[path]),
            )

    def _array_loads(
        self,
        saved_names: Mapping[str, str],
        requests: Mapping[str, LeafRequest],
        donatable: bool | None,
        replaced: Iterable[str] = (),
    ) -> list[ArrayLoad]:
        """Place all stored leaves, or raise MismatchError. `donatable` None: those in `replaced` are."""
        known: dict[object, Placement] = {}  # most leaves share their shape and sharding
        loads, lines = list[ArrayLoad](), list[str]()
        for name, request in requests.items():
            saved = saved_names[name]
            if not isinstance(self.record.leaves[saved], STORED):
                continue
            array = self._arrays[saved]
            is_jax = request.form == "jax"
            key = array.shape, request.sharding if is_jax else None
            try:
                place = known[key] = known.get(key) or place_array(name, *key)
            except MismatchError as error:
                lines.append(str(error))
                continue
            is_donatable = name in replaced if donatable is None else donatable
            loads.append(ArrayLoad(name, array, request, place, is_donatable and is_jax))
        raise_differences(self._subject, lines)
        return loads

    def _load_all(self, options: LoadOptions, progress: ReadProgress | None, loads: JobLoads) -> Any:
        names = rename_map(list(self.record.leaves), options.rename or {})
        given = shardings_by_name(options.shardings)
        selected = leaf_filter(options.only)
        saved_names = {new: old for old, new in names.items() if selected(new)}
        refuse_idle_pattern(self._subject, options.only, names.values())
        if options.rename and (pair := find_nested_leaves(set(names.values()))):
            raise MismatchError(f"{self._subject}: rename: leaf {pair[0]!r} would be below leaf {pair[1]!r}")
        requests, lines = dict[str, LeafRequest](), list[str]()
        for name, saved in saved_names.items():
            leaf, array = self.record.leaves[saved], self._arrays.get(saved)
            requests[name] = request_without_target(saved, leaf, array, given(name))
            line = leaf_difference(name, leaf, array, requests[name], cast=False) if array else None
            lines += [] if line is None else [line]
        loads.expect(request.sharding for request in requests.values())
        raise_differences(self._subject, lines)
        arrays = self._array_loads(saved_names, requests, options.donatable)
        values = self._read(saved_names, requests, arrays, progress, loads)
        record = self.record
        if options.rename:
            record = TreeRecord({}, {names[old]: leaf for old, leaf in record.leaves.items()})
        return rebuild(record, values, self._subject)

    def _read(
        self,
        saved_names: Mapping[str, str],
        requests: Mapping[str, LeafRequest],
        arrays: Sequence[ArrayLoad],
        progress: ReadProgress | None,
        loads: JobLoads,
    ) -> dict[str, Any]:
        """Return all values by leaf path; inline values come first, so that their errors precede a bulk read."""
        values = {
            name: self._inline(saved_names[name], request)
            for name, request in requests.items()
            if not isinstance(self.record.leaves[saved_names[name]], STORED)
        }
        arrays, committed, alone = read_index_files(
            arrays, self._part, loads.coordinator, self._files, self._committed, self._settings
        )
        arrays = self._read_on_hosts(committed, arrays, values, progress)
        if not arrays:
            return values
        budget = ReadBudget(self._settings.read_budget_bytes)
        placer = Placer(arrays, values, budget)
        wanted = [
            Wanted(
                each.array,
                each.placement.boxes,
                each.donatable or each.dtype != DTYPES[each.array.dtype] or placer.leaves_host(each),
            )
            for each in arrays
        ]
        shared, cached, memory = ReadSelection()
        if loads.coordinator is not None:
            shared, cached, memory = select_shared(arrays, loads.coordinator, self._settings, committed, alone)
        left = sorted(set(range(len(wanted))) - {each.number for each in shared} - {*cached})
        # `partial`, not a closure: a closure would stay in the frames of an error, with all that is loaded.
        read_alone = functools.partial(self._read_alone, committed, wanted, cached, left, placer, budget)
        if not shared or loads.coordinator is None:
            read_alone(progress)
            return values
        joint = JointRead(loads.coordinator, self._files, committed, self._subject, self._settings, progress, memory)
        joint.run(shared, placer.take, read_alone)
        return values

    def _read_alone(
        self,
        committed: Committed,
        wanted: Sequence[Wanted],
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
            chosen = [wanted[number] for number in numbers]
            reading = iter_boxes(self._files, committed, chosen, settings, progress, budget)
            with contextlib.closing(reading) as boxes:
                for number, box, data in boxes:
                    placer.take(ReadBox(numbers[number], box, data))
                    del data  # the next box may need its memory
        placer.finish()

    def _read_on_hosts(
        self,
        committed: Committed,
        arrays: Sequence[ArrayLoad],
        values: dict[str, Any],
        progress: ReadProgress | None,
    ) -> Sequence[ArrayLoad]:
        """Let other hosts of this single controller read what goes to their devices; return the remaining arrays."""
        there, rest = list[ArrayLoad](), list[ArrayLoad]()
        for each in arrays:
            sharding = each.placement.sharding
            is_there = sharding is not None and runs_on_hosts(sharding, self._settings.colocated)
            (there if is_there else rest).append(each)
        if there:
            found = HostReads(self._files, committed, self._settings, there).load(progress)
            for each, array in zip(there, found, strict=True):
                values[each.name] = weakly_typed(each.name, array) if each.request.weak else array
        return rest

    def _inline(self, name: str, request: LeafRequest) -> Any:
        record = self.record.leaves[name]
        if isinstance(record, EmptyLeaf):
            return EMPTY
        value = python_value(name, record, self._subject)
        if request.form in ("python", "none"):
            return value
        assert request.dtype is not None
        array = rounded_array(value, request.dtype)
        assert array is not None, "the comparison has checked it"
        return value_of(name, request, array)


def rebuild(record: TreeRecord, leaves: Mapping[str, Any], subject: str) -> Any:
    """Build nested containers with the given leaves; a NamedTuple or object becomes a dict of its fields.

    Leaves of the record that are not given are left out, and so are containers without any given leaf; in a list or
    tuple, PLACEHOLDER keeps their position. Raises CorruptCheckpointError if no save writes such paths.
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
        node[last] = name
    if ROOT in record.leaves and len(record.leaves) > 1:
        raise CorruptCheckpointError(
            f"{subject}: expected no other leaf than the root, found {len(record.leaves) - 1} more"
        )
    return _build_node(root.get(ROOT, root), ROOT, record, leaves, subject)


def _build_node(node: Any, path: str, record: TreeRecord, leaves: Mapping[str, Any], subject: str) -> Any:
    kind = record.containers.get(path, "dict").partition(" ")[0]
    if isinstance(node, str):  # the path of a leaf
        if isinstance(record.leaves[node], EmptyLeaf) and node in leaves:
            return {"list": list, "tuple": tuple}.get(kind, dict)()
        return leaves.get(node, PLACEHOLDER)
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
