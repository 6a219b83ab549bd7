"""The handler of Grain's iterators: their position in the data, with what must fit for it to mean the same."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from typing import Any

from jaxckpt_train.checkpointables.contract import Json, Saved, Staged
from jaxckpt_train.checkpointables.fingerprint import check_fingerprint, current_fingerprint
from jaxckpt_train.checkpointables.grain_elastic import Counted, what_it_counts
from jaxckpt_train.checkpointables.grain_of_orbax import own_state
from jaxckpt_train.checkpointables.grain_pipeline import (
    DATA_LOADER,
    describe,
    grain_version,
    is_data_loader,
    iterator_classes,
    loses_its_order,
    name_of,
    structure_differences,
    worker_count,
)
from jaxckpt_train.checkpointables.iterator_state import decode_state, encode_state
from jaxckpt_train.checkpointables.per_process_value import refuse_missing
from jaxckpt_train.checkpointables.pytree import JsonValue
from jaxckpt_train.errors import CorruptCheckpointError, IteratorStateError, SettingsError, UnsupportedLeafError
from jaxckpt_train.formats.orbax_grain import ORBAX_GRAIN
from jaxckpt_train.multihost import current

_log = logging.getLogger("jaxckpt_train")

_FIELDS = frozenset({"grain_version", "iterator", "workers", "processes", "process", "fingerprint", "state"})
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# What iterators raise from set_state when a state is not theirs. An error of reading the data is none of these.
_REFUSALS = (LookupError, ValueError, TypeError, AttributeError, StopIteration)
_START_ANEW = "or leave it out of what is restored, to start the data from the beginning"


def mark_absl_flags_parsed() -> None:
    """Mark absl's flags as parsed, unless they are or absl is not imported. Calling it twice does nothing more.

    Grain reads absl flags as soon as a pipeline with worker processes is asked for its state or its first element. In
    a program that is not started by `absl.app.run` (every Hydra app) they were never parsed, and Grain fails with
    `UnparsedFlagAccessError`. Marked as parsed, all flags have their defaults; `app.run` may still parse them later.
    """
    flags: Any = sys.modules.get("absl.flags")
    if flags is not None and not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


class GrainHandler:
    """Iterators of Grain's `DataLoader` and of its `Dataset` pipelines.

    Args:
        processes: how many processes take part in the training; None: those of this job.
        process: the index of this one; None: its number in this job.
        fingerprint: says what data this is. A restore is refused when both sides have one and they differ.

    Raises:
        SettingsError: there is no such process.
    """

    kind = "grain"
    restores = (ORBAX_GRAIN,)
    early = True

    def __init__(
        self, *, processes: int | None = None, process: int | None = None, fingerprint: str | None = None
    ) -> None:
        if not 0 <= (process or 0) < (processes or 1):
            raise SettingsError(f"GrainHandler: expected 0 <= process < processes, found {process} and {processes}")
        self._given = processes, process
        self.fingerprint = fingerprint
        self._warned: set[str] = set()

    def handles(self, value: object) -> bool:
        """Whether it is a Grain iterator. Never imports Grain: where nobody did, nothing can be one."""
        return isinstance(value, iterator_classes())

    def stage(self, value: Any) -> Staged:
        """The position after the last element that `value` gave, with what a restore compares.

        Raises:
            UnsupportedLeafError: the state of an iterator that is not Grain's own is no plain data.
        """
        mark_absl_flags_parsed()
        state = _take_state(value)
        if is_data_loader(value):
            self._warn_of_addresses(state)
        self._warn_of_another_order(state)
        processes, process = self._who()
        same = {
            "grain_version": grain_version(),
            "iterator": name_of(value),
            "workers": worker_count(value),
            "processes": processes,
            "counts": list(what_it_counts(value)),
            "fingerprint": self._current_fingerprint(),
            "state": state,
        }
        return Staged(value={**same, "process": process}, same=same)

    def restore(self, target: Any, saved: Saved) -> Any:
        """Set `target` to the saved position, and let it start prefetching.

        Returns:
            `target` itself. Without a target the saved data as a dict, for which Grain is not needed.

        Raises:
            IteratorStateError: the position does not fit the target, which then is where it was.
            CorruptCheckpointError: the saved data is not what `stage` writes.
        """
        if saved.kind == ORBAX_GRAIN:
            return JsonValue(saved.value()) if target is None else self._restore_from_orbax(target, saved)
        data, state = _read(saved)
        if target is None:
            return {**data, "state": state}
        mark_absl_flags_parsed()
        if data["grain_version"] != grain_version():
            _log.warning(
                "iterator %r was saved with Grain %s, this is Grain %s: Grain promises only that a state fits the "
                "version that made it",
                saved.name,
                data["grain_version"],
                grain_version(),
            )
        self._check_run(target, data, saved)
        self._warn_of_another_order(data["state"])
        return _go_on_from(target, state, saved.name, data["grain_version"])

    def _restore_from_orbax(self, target: Any, saved: Saved) -> Any:
        """The same with what Grain's own handler had Orbax save: states alone, with nothing said about them."""
        mark_absl_flags_parsed()
        return _go_on_from(target, own_state(saved, *self._who()), saved.name, None)

    def _who(self) -> tuple[int, int]:
        """How many processes there are, and which of them this is."""
        job, (processes, process) = current(), self._given
        if processes is None and process is None:
            return job.processes, job.process
        return 1 if processes is None else processes, 0 if process is None else process

    def _current_fingerprint(self) -> str | None:
        now = current_fingerprint()
        return self.fingerprint if now is None else now

    def _check_run(self, target: Any, data: Json, saved: Saved) -> None:
        """Compare all but the state itself."""
        name = saved.name
        if not self.handles(target) or (data["iterator"] == DATA_LOADER) != is_data_loader(target):
            raise IteratorStateError(
                f"iterator {name!r}: saved from a {describe(data['iterator'])}, found a {describe(name_of(target))}; "
                f"give an iterator of the same kind, {_START_ANEW}"
            )
        check_fingerprint(name, data["fingerprint"], self._current_fingerprint())
        processes, process = self._who()
        refuse_missing(saved, data["processes"])
        if data["processes"] != processes:
            _check_processes(target, data, processes, saved)
        elif saved.values > 1 and data["process"] != process:
            raise CorruptCheckpointError(
                f"iterator {name!r}: the file of process {process} says that it is of process {data['process']}"
            )
        saved_workers, workers = data["workers"], worker_count(target)
        if saved_workers is not None and workers is not None and saved_workers != workers:
            raise IteratorStateError(
                f"iterator {name!r}: saved with {saved_workers} worker processes, found {workers}; the order of the "
                f"data depends on them: set the worker count back to {saved_workers}, {_START_ANEW}"
            )

    def _warn_of_another_order(self, state: Json) -> None:
        version = grain_version() or ""
        if "window shuffle" not in self._warned and loses_its_order(state, version):
            self._warned.add("window shuffle")
            _log.warning(
                "Grain %s does not resume a WindowShuffleIterDataset exactly: its elements come in another order "
                "after a resume; install Grain 0.2.16 or newer",
                version,
            )

    def _warn_of_addresses(self, state: Json) -> None:
        """Tell before it is too late that Grain, which compares these texts, will refuse them in the next process."""
        for key in ("sampler", "data_source"):
            text = state.get(key) if isinstance(state, dict) else None
            if isinstance(text, str) and _ADDRESS.search(text) and text not in self._warned:
                self._warned.add(text)
                _log.warning(
                    "Grain knows the %s of this DataLoader by its repr, %.200s; it has an address in it, so that a "
                    "restart will be refused: give the class a __repr__ that says what data it is",
                    key.replace("_", " "),
                    text,
                )


def _check_processes(target: Any, data: Json, processes: int, saved: Saved) -> None:
    """Refuse a position of another number of processes, unless it means the same to this one.

    Raises:
        IteratorStateError: it does not.
    """
    name, before, counts = saved.name, _counted(data), what_it_counts(target)
    several = "" if data["processes"] == 1 else "es"
    told = f"iterator {name!r}: saved by {data['processes']} process{several}, found {processes}"
    same_number = f"restart with {data['processes']}, {_START_ANEW}"
    if saved.values > 1:
        raise IteratorStateError(
            f"{told}; each was at a position of its own, in its own share of the data: {same_number}"
        )
    if before.unit == "share" or before.unit != counts.unit:
        raise IteratorStateError(
            f"{told}; its position counts elements of one share of the data, and says nothing about others: use "
            f"grain.experimental.ElasticIterator, or dataset.shuffle()[i::n].batch(b // n).to_iter_dataset(), in this "
            f"order; {same_number}"
        )
    if before.records != counts.records:
        raise IteratorStateError(
            f"{told}; its position counts batches, of {before.records} records in all processes together, and here of "
            f"{counts.records}: set the batch size to {before.records} // {processes} in each, or {same_number}"
        )
    _log.info("%s: each goes on from the position that all had, in %s of the whole data", told, before.unit)


def _counted(data: Json) -> Counted:
    """What the saved position counts; older checkpoints do not tell."""
    counts = data.get("counts")
    try:
        unit, records = counts
    except (TypeError, ValueError):
        return Counted("share")
    return Counted(unit, records)


def _take_state(iterator: Any) -> Json:
    """The state as JSON data that shares nothing with the iterator."""
    state = iterator.get_state()
    if is_data_loader(iterator):
        try:
            state = json.loads(state)
        except (TypeError, ValueError) as error:
            raise UnsupportedLeafError(
                f"iterator state: {type(iterator).__name__} gives no JSON: {state!r:.200}"
            ) from error
    return encode_state(state)


def _read(saved: Saved) -> tuple[Json, Any]:
    """The saved data, and the state in it decoded."""
    data = saved.value()
    if not isinstance(data, dict) or not data.keys() >= _FIELDS:
        expected = ", ".join(sorted(_FIELDS))
        raise CorruptCheckpointError(f"iterator {saved.name!r}: expected a dict with {expected}; found {data!s:.200}")
    try:
        return data, decode_state(data["state"])
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"iterator {saved.name!r}: the saved state cannot be read") from error


def _go_on_from(target: Any, state: Any, name: str, version: str | None) -> Any:
    """Set the state if it is one of such a pipeline, and let it start prefetching."""
    before = _take_state(target)
    _check_structure(state, decode_state(before), name, version)
    _set_state(target, state, before, name)
    start_prefetch = getattr(target, "start_prefetch", None)
    if start_prefetch is not None:
        with contextlib.suppress(NotImplementedError):  # most iterators of Grain before 0.2.15
            start_prefetch()
    return target


def _check_structure(saved: Any, found: Any, name: str, version: str | None) -> None:
    differences = structure_differences(saved, found)
    if differences:
        versions = "" if version in (None, grain_version()) else f", or by Grain {version}"
        raise IteratorStateError(
            f"iterator {name!r}: the saved state is of another pipeline{versions}:\n  "
            + "\n  ".join(differences)
            + f"\nbuild the pipeline that it was saved with, {_START_ANEW}"
        )


def _set_state(target: Any, state: Any, before: Json, name: str) -> None:
    """Set the state; where the iterator refuses, set it back to what it was."""
    is_loader = is_data_loader(target)
    try:
        target.set_state(_for_set_state(state, is_loader))
    except _REFUSALS as error:
        with contextlib.suppress(*_REFUSALS):
            target.set_state(_for_set_state(decode_state(before), is_loader))
        raise IteratorStateError(_refused(target, state, decode_state(before), name)) from error


def _for_set_state(state: Any, is_loader: bool) -> Any:
    return json.dumps(state, indent=4).encode() if is_loader else state


def _refused(target: Any, saved: Any, found: Any, name: str) -> str:
    if is_data_loader(target) and isinstance(saved, dict) and isinstance(found, dict):
        for key in ("worker_count", "sampler", "data_source"):  # what Grain compares
            if saved.get(key) != found.get(key):
                return (
                    f"iterator {name!r}: the DataLoader has another {key.replace('_', ' ')}: "
                    f"saved {saved.get(key)!s:.300}, found {found.get(key)!s:.300}; restore into the DataLoader it was "
                    "saved with (Grain compares the repr, so a class whose repr has an address in it needs its own "
                    f"__repr__), {_START_ANEW}"
                )
    return (
        f"iterator {name!r}: {type(target).__name__} refused the saved state (the error above says why): "
        f"saved {saved!s:.300}, found {found!s:.300}; use the data and the pipeline it was saved with, {_START_ANEW}"
    )
