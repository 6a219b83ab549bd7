"""Weaker protocols of commits on object stores. A campaign of crashes must find each of these flaws."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from jaxckpt_train.run.entry import Entry
from jaxckpt_train.run.record import FoundRecord, RecordKeeper
from jaxckpt_train.store.backends import objects
from jaxckpt_train.store.committed import CommitRecord, Committed
from jaxckpt_train.store.manifest import FORMAT, FORMAT_VERSION, Manifest, encode_manifest
from jaxckpt_train.store.transaction import ObjectAttempt, StepAttempt, Transaction


@dataclasses.dataclass(frozen=True)
class Flaw:
    """How the protocol is weakened, and the programs and modes that must show it."""

    weaken: Callable[[pytest.MonkeyPatch], None]
    tried: Sequence[tuple[str, Any]]


def _without_read_back(patch: pytest.MonkeyPatch) -> None:
    """Believe what a conditional put returns, although it may be the answer to a repeated request."""

    def put(place: Any, data: bytes, mode: Any, retries: int) -> Any | None:
        import obstore

        try:
            return obstore.put(*place, data, mode=mode, use_multipart=False)
        except Exception as error:
            if objects._is_refused(error, mode):
                return None
            raise

    patch.setattr(objects, "_put_on_condition", put)


def _without_fence(patch: pytest.MonkeyPatch) -> None:
    """Let a new owner continue with the record of the former one."""

    def take_over(self: RecordKeeper, found: FoundRecord, entries: Sequence[Entry]) -> bool:
        if found.version is None:
            return original(self, found, entries)
        self.record, self._version = found.record, found.version
        return True

    original = RecordKeeper._take_over
    patch.setattr(RecordKeeper, "_take_over", take_over)


def _recorded_first(patch: pytest.MonkeyPatch) -> None:
    """Write the step into the record before its manifest and COMMIT."""

    def complete(self: StepAttempt, manifest: Manifest) -> Committed:
        if self._before_publishing is not None:
            self._before_publishing()
        return Transaction.complete(self, manifest)

    patch.setattr(StepAttempt, "complete", complete, raising=False)


def _pointer_first(patch: pytest.MonkeyPatch) -> None:
    """Let COMMIT of a single checkpoint refer to it before it is complete."""

    def complete(self: ObjectAttempt, manifest: Manifest) -> Committed:
        data = encode_manifest(manifest)
        record = CommitRecord(FORMAT, FORMAT_VERSION, len(data), hashlib.sha256(data).hexdigest())
        self._commit = msgspec.json.encode(record)
        original(self, True)
        return Transaction.complete(self, manifest)

    original = ObjectAttempt._publish
    patch.setattr(ObjectAttempt, "complete", complete, raising=False)
    patch.setattr(ObjectAttempt, "_publish", lambda self, replace: None)


def _doubtful_removed(patch: pytest.MonkeyPatch) -> None:
    """Remove an attempt although the record may name it."""

    def publish(self: StepAttempt, *, replace: bool = False, if_taken: str | None = None) -> None:
        Transaction.publish(self, replace=replace, if_taken=if_taken)

    patch.setattr(StepAttempt, "publish", publish)


FLAWS = {
    "no read-back": Flaw(_without_read_back, [("single", "retried")]),
    "no fence": Flaw(_without_fence, [("saves", "late")]),
    "recorded first": Flaw(_recorded_first, [("saves", "dies")]),
    "pointer first": Flaw(_pointer_first, [("single", "dies")]),
    "doubtful removed": Flaw(_doubtful_removed, [("handed over", "blind")]),
}
