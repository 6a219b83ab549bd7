"""Errors as they are told to other processes: the same class there, so that all of them decide the same."""

from __future__ import annotations

import msgspec

from jaxckpt_train import errors
from jaxckpt_train.errors import CheckpointError, OtherProcessError, StorageError

# Made anew of a message alone; whatever else was raised becomes an OtherProcessError.
_TOLD = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind not in (errors.Preempted, StorageError)
}
_ATTRIBUTES = ("differences", "leaves")


class _Told(msgspec.Struct):
    process: int
    kind: str
    text: str
    errno: int | None = None
    filename: str | None = None
    more: dict[str, tuple[str, ...]] = {}


def encode_error(error: BaseException, process: int) -> bytes:
    """What is told of an error that this process met."""
    more = {name: tuple(map(str, getattr(error, name))) for name in _ATTRIBUTES if hasattr(error, name)}
    told = _Told(process, type(error).__name__, _text(error), more=more)
    if isinstance(error, StorageError):
        told.errno, told.text = error.errno, str(error.strerror)
        told.filename = None if error.filename is None else str(error.filename)
    return msgspec.json.encode(told)


def decode_error(data: bytes, doing: str, who: str | None = None) -> CheckpointError:
    """The error that another process (`who`; None: it has told its number) met while `doing` this."""
    told = msgspec.json.decode(data, type=_Told)
    where = f"{who or f'process {told.process}'}, {doing}"
    if told.kind == StorageError.__name__ and told.errno is not None:
        return StorageError(told.errno, f"{where}: {told.text}", told.filename)
    kind = _TOLD.get(told.kind)
    if kind is None:
        return OtherProcessError(f"{where}: {told.kind}: {told.text}")
    error = kind(f"{where}: {told.text}")
    for name in _ATTRIBUTES:
        if name in told.more:
            setattr(error, name, told.more[name])
    return error


def _text(error: BaseException) -> str:
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001  # one that holds what cannot be shown: the others must be told all the same
        return "cannot be shown"
