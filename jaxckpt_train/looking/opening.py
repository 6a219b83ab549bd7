"""Opens what a user names: a checkpoint, a step of a run, or what another tool has written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from jaxckpt_train.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    SettingsError,
    StepNotFoundError,
    StorageError,
)
from jaxckpt_train.formats.flax_directory import FlaxFile
from jaxckpt_train.formats.foreign import Foreign
from jaxckpt_train.looking.run_look import StepLook, has_steps, look_at_run, newest_whole, passed_over
from jaxckpt_train.opened import IMPORTED_KIND, OURS, Opened, open_found
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps.refusals import of_others
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.local import is_file
from jaxckpt_train.store.transaction import is_committed, open_committed

_log = logging.getLogger("jaxckpt_train")


def open_at(backend: Backend, path: str, step: float | None = None, *, verify: bool = True) -> Opened:
    """Open what is at a path.

    Args:
        backend: where.
        path: absolute; of a checkpoint, a run, or what Orbax, PyTorch, safetensors or Flax have written.
        step: of a run, or of a directory of Flax, where it may have a fraction; None: the newest that is whole, of
            Flax's the newest.
        verify: whether digests are compared when it is read.

    Raises:
        NotACheckpointError: there is none, or no such step; or a step of a run of Orbax has to be chosen.
        SettingsError: the step is that of a run of ours, and no whole number.
        CorruptCheckpointError: it is damaged; of a run, if no step is given, all of its steps are.
        StorageError: it cannot be read, or a newer step cannot, which may be whole.
    """
    settings = StoreSettings(verify_on_load=verify)
    if _is_run(backend, path):
        name, skipped = _step_of(backend, path, step)
        return Opened(OURS, backend, open_committed(backend, f"{path}/{name}"), settings, path, skipped)
    if step is not None or is_file(path):
        return open_found(backend, _foreign(backend, path, step), settings)
    try:
        return Opened(OURS, backend, open_committed(backend, path), settings)
    except NotACheckpointError:
        found = _found(backend, path)
        if found is None:
            raise
    return open_found(backend, found, settings)


def text_of_other(backend: Backend, path: str) -> str:
    """What is at a path that is no run of ours, for a message; empty: nothing that is known here.

    Raises:
        CorruptCheckpointError, NotACheckpointError: another tool has left it, and none of it can be opened.
        StorageError: it cannot be read.
    """
    if is_file(path):
        return "a file"
    found = of_others(backend, path)
    if found:
        return found
    if is_committed(backend, path):
        return "one checkpoint of this package"
    other = _found(backend, path)
    kind = "Flax" if isinstance(other, FlaxFile) else "" if other is None else other.kind
    return f"a checkpoint of {kind}" if kind else ""


def _foreign(backend: Backend, path: str, step: float | None) -> Foreign | FlaxFile:
    """What another tool has written at a path: a file, or one of several in a directory."""
    if step is None:
        from jaxckpt_train.formats.found import find_file

        return find_file(backend, path)
    found = None if is_file(path) else _found(backend, path, step)
    if found is None:
        raise NotACheckpointError(f"{path}: expected a run to take step {step} of, found none")
    return found


def _found(backend: Backend, path: str, step: float | None = None) -> Foreign | FlaxFile | None:
    """What another tool has left in a directory; its readers are imported when something may be theirs."""
    from jaxckpt_train.formats.found import find_in_directory

    return find_in_directory(backend, path, step)


def _is_run(backend: Backend, path: str) -> bool:
    try:
        return has_steps(backend, path)
    except StorageError:
        return False


def _step_of(backend: Backend, path: str, step: float | None) -> tuple[str, tuple[str, ...]]:
    """The name of a step, and of those that are passed over for it."""
    looks = look_at_run(backend, path)
    return _newest_of(path, looks) if step is None else (_named(path, looks, step), ())


def _newest_of(path: str, looks: Sequence[StepLook]) -> tuple[str, tuple[str, ...]]:
    """The newest whole step; one that is newer and damaged is warned of, and one that may be whole is an error."""
    found = newest_whole(looks)
    bad = passed_over(looks, found)
    refused = next((look.refusal for look in bad if look.refusal is not None), None)
    if refused is not None:
        if found is not None:
            hint = f"it may be the newest that is whole; to take an older one, give its number: --step {found.step}"
            if not isinstance(refused, StorageError):
                raise type(refused)(f"{refused}; {hint}") from refused
            raise StorageError(refused.errno, f"{refused.strerror}; {hint}", refused.filename) from refused
        raise refused
    if found is None:
        if not bad:
            raise StepNotFoundError(f"{path}: has no step that can be restored; `jaxckpt ls {path}` says why")
        raise CorruptCheckpointError(
            f"{path}: none of its steps can be restored; `jaxckpt ls {path}` says why of each, and of {bad[0].name}: "
            f"{bad[0].problem}"
        )
    for look in bad:
        _log.warning("%s/%s is passed over: %s", path, look.name, look.problem)
    return found.name, tuple(look.name for look in bad)


def _named(path: str, looks: Sequence[StepLook], step: float) -> str:
    same = [each for each in looks if each.step == step]
    if not same:
        there = ", ".join(str(each.step) for each in looks[-5:]) or "none"
        if isinstance(step, float) and not step.is_integer():
            raise SettingsError(
                f"{path}: expected a whole number for its step, found {step}; the last ones are {there}"
            )
        raise StepNotFoundError(f"{path}: has no step {step}; the last ones are {there}")
    return next((each.name for each in same if each.is_current), same[-1].name)


def metadata_of(opened: Opened) -> Mapping[str, object]:
    """What a checkpoint says of itself beside its tree."""
    info = opened.committed.manifest.info
    known = ("step", "created", "metrics", "custom_metadata", "versions", "temporary")
    return {name: info[name] for name in known if name in info}


def told_of_import(opened: Opened) -> Mapping[str, object]:
    """What the manifest of its import says of where that comes from; the kind is that of the first of several."""
    first = None if opened.wrote_tree == OURS else opened.wrote_tree
    return {"imported_from": opened.path} | ({} if first is None else {IMPORTED_KIND: first})
