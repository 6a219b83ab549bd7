"""The fingerprint of a run's data: set while the callback saves or restores, compared for its data iterator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from jaxckpt_train.errors import IteratorStateError

DATA_NAME = "data"
"""The checkpointable that is the loop's data iterator."""
_fingerprint: ContextVar[str | None] = ContextVar("jaxckpt_train_fingerprint", default=None)


@contextlib.contextmanager
def with_fingerprint(fingerprint: str | None) -> Iterator[None]:
    """What is saved or restored meanwhile, on this thread, has this fingerprint.

    Args:
        fingerprint: says what data this is; None leaves each handler its own.
    """
    token = _fingerprint.set(fingerprint)
    try:
        yield
    finally:
        _fingerprint.reset(token)


def current_fingerprint() -> str | None:
    """The fingerprint that holds on this thread now."""
    return _fingerprint.get()


def check_fingerprint(name: str, saved: str | None, found: str | None) -> None:
    """Refuse data that is not what was saved.

    Args:
        name: of the checkpointable.
        saved, found: the two fingerprints; nothing is compared if one is None.

    Raises:
        IteratorStateError: they differ.
    """
    if saved is not None and found is not None and saved != found:
        raise IteratorStateError(
            f"iterator {name!r}: saved with fingerprint {saved!r}, found {found!r}; use the data it was saved with, "
            "or leave it out of what is restored, to start the data from the beginning"
        )
