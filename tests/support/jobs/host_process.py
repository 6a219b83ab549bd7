"""A host of a fake single-controller runtime: a process with one CPU device that runs the functions it receives."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import resource
import sys
import threading
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

import cloudpickle
import jax
import msgspec
import numpy as np

from jaxckpt_train.store.segment import DTYPES

Packed = tuple[str, tuple[int, ...], bytes]


def packed(array: Any) -> Packed:
    """Return an array as plain data."""
    found = np.asarray(array)
    return found.dtype.name, found.shape, found.tobytes()


def unpacked(data: Packed) -> np.ndarray:
    """Return the array of plain data."""
    name, shape, content = data
    return np.frombuffer(bytearray(content), DTYPES[name]).reshape(shape)


class Request(msgspec.Struct):
    """A function, pickled as by Colocated Python, and its arrays."""

    number: int
    function: bytes
    arrays: tuple[Packed, ...]


class Reply(msgspec.Struct):
    """The results of a function, or its error."""

    number: int
    arrays: tuple[Packed, ...] = ()
    error: str | None = None


def _run(request: Request) -> Reply:
    try:
        with jax.enable_x64(True):
            arrays = [jax.device_put(unpacked(data)) for data in request.arrays]
            found = cloudpickle.loads(request.function)(*arrays)
            return Reply(request.number, tuple(map(packed, found)))
    except BaseException:  # noqa: BLE001  # end of a process: the error goes to the test
        return Reply(request.number, error=traceback.format_exc())


def main() -> None:
    """Run each request on its own thread, until the controller disconnects."""
    faulthandler.enable()
    options = json.loads(sys.argv[1])
    if options["most_file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["most_file_bytes"], resource.RLIM_INFINITY))
    connection: Connection[Any, Any] = Client(options["address"], "AF_UNIX")
    sending = threading.Lock()

    def serve(request: Request) -> None:
        reply = msgspec.msgpack.encode(_run(request))
        with sending, contextlib.suppress(OSError):
            connection.send_bytes(reply)

    with contextlib.suppress(EOFError):
        while True:
            request = msgspec.msgpack.decode(connection.recv_bytes(), type=Request)
            threading.Thread(target=serve, args=(request,), daemon=True).start()


if __name__ == "__main__":
    main()
