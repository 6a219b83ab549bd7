"""A fake single-controller runtime: each CPU device acts as a host, which is a separate process.

It replaces `jax.experimental.colocated_python.colocated_python`, whose CPU backend runs all calls in this process.
Like the real one it sends functions by cloudpickle, requires arrays of one device, and checks the specs of results.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Listener
from typing import Any

import cloudpickle
import jax
import msgspec
import pytest

from jaxckpt_train.pytree.colocated import transfer
from tests.support.jobs.host_process import Reply, Request, packed, unpacked
from tests.support.paths import REPO_ROOT


class HostProcess:
    """One host, and its pending replies.

    Attributes:
        calls: names of the functions that it received.
        is_called: whether there was a call.
    """

    def __init__(self, address: str, most_file_bytes: int | None = None) -> None:
        listener = Listener(address, "AF_UNIX")
        options = json.dumps({"address": address, "most_file_bytes": most_file_bytes})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.jobs.host_process", options],
            cwd=REPO_ROOT,
            env={**os.environ, "PYTHONPATH": str(REPO_ROOT), "JAX_NUM_CPU_DEVICES": "1"},
        )
        self._connection = listener.accept()
        listener.close()
        self.calls: list[str] = []
        self.is_called = threading.Event()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Reply]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self, function: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> Reply:
        """Run a function on the host; a dead host raises the error of the real runtime."""
        number, future = next(self._numbers), Future[Reply]()
        self._waiting[number] = future
        inner = getattr(function, "func", function)
        self.calls.append(inner.__name__)
        request = Request(number, cloudpickle.dumps(function), tuple(map(packed, arrays)))
        self.is_called.set()
        try:
            with self._lock:
                self._connection.send_bytes(msgspec.msgpack.encode(request))
        except OSError as error:
            raise _gone() from error
        if not self._reader.is_alive() and not future.done():
            raise _gone()
        reply = future.result()
        if reply.error is not None:
            raise jax.errors.JaxRuntimeError(f"INTERNAL: {reply.error}")
        return reply

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                reply = msgspec.msgpack.decode(self._connection.recv_bytes(), type=Reply)
                self._waiting.pop(reply.number).set_result(reply)
        for future in list(self._waiting.values()):
            future.set_exception(_gone())

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self._connection.close()
        self._reader.join()


def _gone() -> Exception:
    return jax.errors.JaxRuntimeError("UNAVAILABLE: the host is gone")


class _Callable:
    def __init__(
        self, hosts: Mapping[jax.Device, HostProcess], function: Callable[..., Any], specs: Callable[..., Any]
    ) -> None:
        self._hosts, self._function, self._specs = hosts, function, specs

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        ((device,),) = {tuple(array.devices()) for array in arrays}
        specs = self._specs(*[jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding) for each in arrays])
        found = [unpacked(data) for data in self._hosts[device].run(self._function, arrays).arrays]
        assert [(each.shape, each.dtype) for each in found] == [(spec.shape, spec.dtype) for spec in specs]
        return tuple(jax.device_put(each, spec.sharding) for each, spec in zip(found, specs, strict=True))


class _Unspecialized:
    def __init__(self, hosts: Mapping[jax.Device, HostProcess], function: Callable[..., Any]) -> None:
        self._hosts, self._function = hosts, function

    def specialize(self, out_specs_fn: Callable[..., Any]) -> _Callable:
        return _Callable(self._hosts, self._function, out_specs_fn)


@contextmanager
def controlled(hosts: Mapping[jax.Device, HostProcess]) -> Iterator[None]:
    """Let Colocated Python run in these processes."""
    from jax.experimental import colocated_python

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(colocated_python, "colocated_python", lambda function: _Unspecialized(hosts, function))
        transfer._colocated.cache_clear()
        try:
            yield
        finally:
            transfer._colocated.cache_clear()
