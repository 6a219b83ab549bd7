"""The shardings that arrays had: free-form JSON for people, of which a manifest holds little that is distinct."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_SHARDINGS_BYTES = 64 << 10


class Shardings:
    """Those of one checkpointable, each kept once, however many arrays have it."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}
        self._room = MAX_SHARDINGS_BYTES

    def storable(self, sharding: object) -> object:
        """The sharding as it is to be stored: None if there is no room for one more."""
        try:
            return None if sharding is None else self.shared(sharding)
        except msgspec.ValidationError:
            return None

    def shared(self, sharding: object) -> object:
        """The first one that is equal to this.

        Raises:
            msgspec.ValidationError: there is no room for one more.
        """
        text = msgspec.json.encode(sharding)
        if text not in self._known:
            if len(text) > self._room:
                raise msgspec.ValidationError(f"more than {MAX_SHARDINGS_BYTES:,} bytes of distinct shardings")
            self._known[text] = sharding
            self._room -= len(text)
        return self._known[text]


def decode_sharding(raw: msgspec.Raw) -> Any:
    """One that may be of any size, looked at before it is made.

    Raises:
        msgspec.MsgspecError: it is too large, or no JSON.
    """
    if memoryview(raw).nbytes > MAX_SHARDINGS_BYTES:
        raise msgspec.ValidationError(f"more than {MAX_SHARDINGS_BYTES:,} bytes of distinct shardings")
    return msgspec.json.decode(raw)
