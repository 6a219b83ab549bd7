"""Calls functions on the hosts of a single-controller runtime through JAX's Colocated Python, and returns the answers.

JAX sends a function by its name, in a pickle that only JAX makes and reads. It contains no part of a checkpoint and no
data of this package.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxckpt_train.distributed.rendezvous import decode_error
from jaxckpt_train.errors import CheckpointTimeoutError, OtherProcessError, SettingsError
from jaxckpt_train.pytree._jax import enable_x64
from jaxckpt_train.pytree.colocated.host import Answer, UnseenError, decode_answer, moved_here, read_here, write_here
from jaxckpt_train.store.threads import POLL_S, Latch, shared_workers

MOST_AT_ONCE = 64
ASKED_AT_ONCE = 8  # hosts that are asked for their progress per second
_spec: Any = jax.ShapeDtypeStruct
_NOTHING = np.zeros(1, np.uint8)
Kind = tuple[tuple[int, ...], str]  # shape and dtype of an array


class HostQueue:
    """Hands out the numbers of calls to threads, so that each host has one call at a time, and memory for one."""

    def __init__(self, hosts: Sequence[Hashable]) -> None:
        self._hosts = hosts
        self._left: dict[Hashable, deque[int]] = {}
        for number, host in enumerate(hosts):
            self._left.setdefault(host, deque()).append(number)
        self._ready = queue.SimpleQueue[deque[int] | None]()  # remaining calls of each idle host
        self._is_over = False
        for left in self._left.values():
            self._ready.put(left)

    def take(self) -> int | None:
        """Wait for an idle host, and return its next call; None: ended. May be called as often as there are calls."""
        left = self._ready.get()
        return None if left is None or self._is_over else left.popleft()

    def release(self, number: int) -> None:
        """Mark the host of this call as idle."""
        left = self._left[self._hosts[number]]
        if left:
            self._ready.put(left)

    def end(self) -> None:
        """Start no further call, and wake the threads that wait: some hosts may never finish."""
        self._is_over = True
        for _ in self._hosts:
            self._ready.put(None)


@functools.cache
def cpu_device_of(device: jax.Device) -> jax.Device:
    """Return the CPU device on the host of a device: a call with arrays on it runs on that host.

    Raises:
        SettingsError: the runtime has no such device.
    """
    if device.device_kind == "cpu":
        return device  # for a CPU device, JAX 0.10 may name another one of the same process
    from jax.experimental import colocated_python

    try:
        (found,) = colocated_python.colocated_cpu_devices((device,))
    except (ValueError, AttributeError, RuntimeError) as error:
        raise SettingsError(
            f"{device}: its runtime shows no CPU device on the same host ({error}), so nothing can run there; start it "
            "with Colocated Python, or transfer all arrays through this process with StoreSettings(colocated=False)"
        ) from error
    return found


class HostCall(NamedTuple):
    """A call on the host of a CPU device.

    `room`: size of the answer in bytes. `kinds`: of the arrays that come with it; None: the call only writes.
    """

    device: jax.Device
    plan: np.ndarray
    arrays: Sequence[jax.Array]
    room: int
    kinds: tuple[Kind, ...] | None = None


class HostResult(NamedTuple):
    """The answer to call number `number`, and arrays on its CPU device."""

    number: int
    answer: Answer
    arrays: Sequence[jax.Array]


def call_hosts(
    calls: Sequence[HostCall], doing: str, report_progress: Callable[[bool], object]
) -> Generator[HostResult]:
    """Make all calls, one at a time on each host, and yield the results as they arrive.

    A host gets its next call after its last result was taken and the following one was asked for. Use
    `contextlib.closing` around the iterator. After the first error, no further call is started.

    Args:
        calls: in the order in which they start.
        doing: for messages, such as "saving c".
        report_progress: called about once a second, in the calling thread, with whether a host has made progress.

    Raises:
        The error of a host, of the same class if it is of this package; names the host.
        OtherProcessError: JAX lost the host, or could not run anything there.
        SettingsError: Colocated Python cannot be used here.
        CheckpointTimeoutError: no host has made progress for ten minutes.
    """
    refuse_without_pickler()
    under_way: dict[int, jax.Device] = {}
    host_queue = HostQueue([call.device for call in calls])

    def call(_: int) -> HostResult | None:
        number = host_queue.take()
        if number is None:
            return None
        under_way[number] = calls[number].device
        try:
            with enable_x64(True):  # the calling thread may have it for itself only
                return _call_host(number, calls[number], doing)
        except BaseException:
            host_queue.end()
            raise
        finally:
            del under_way[number]

    poller, seen = ProgressPoller(under_way), [0]

    def moved() -> int:
        before, seen[0] = seen[0], poller.moves
        report_progress(seen[0] != before)
        return seen[0]

    workers = shared_workers(min(len({call.device for call in calls}), MOST_AT_ONCE), "jaxckpt-hosts")
    each = workers.run_each(call, range(len(calls)), give_up=host_queue.end, moved=moved)
    try:
        with poller, contextlib.closing(each) as results:
            for result in results:
                if result is not None:
                    number = result.number
                    yield result
                    del result
                    host_queue.release(number)
    except CheckpointTimeoutError as error:
        raise CheckpointTimeoutError(f"{doing}: {error}") from None


class ProgressPoller:
    """Asks hosts with running calls for their progress, once a second, on a thread of its own.

    `moves` changes whenever a host has made progress. A host that has stopped does not answer.
    """

    def __init__(self, under_way: dict[int, jax.Device]) -> None:
        self._under_way, self._seen = under_way, dict[jax.Device, bytes]()
        self._turn, self.moves = 0, 0
        self._is_over = Latch()

    def __enter__(self) -> ProgressPoller:
        # Without a thread, a slow host cannot be distinguished from a stopped one.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._run, name="jaxckpt-hosts-asked", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.open()

    def _run(self) -> None:
        while not self._is_over.wait(POLL_S):
            self.ask()

    def ask(self) -> int:
        """Ask some of the hosts; return `moves`."""
        devices = list(self._under_way.values())
        for place in range(min(len(devices), ASKED_AT_ONCE)):
            device = devices[(self._turn + place) % len(devices)]
            try:
                found = np.asarray(_progress_call()(jax.device_put(_NOTHING, device))[0]).tobytes()
            except jax.errors.JaxRuntimeError:
                continue  # the host's own call will raise it
            if self._seen.get(device) != found:
                self._seen[device] = found
                self.moves += 1
        self._turn += ASKED_AT_ONCE
        return self.moves


def _call_host(number: int, call: HostCall, doing: str) -> HostResult:
    try:
        plan = jax.device_put(call.plan, call.device)
        if call.kinds is None:
            encoded, *arrays = _writing(call.room)(plan, *call.arrays)
        else:
            encoded, *arrays = _reading(call.room, call.kinds)(plan)
        answer = decode_answer(np.asarray(encoded))  # waits until it is there
    except (jax.errors.JaxRuntimeError, ImportError) as error:
        raise OtherProcessError(
            f"the host of {call.device}, {doing}: {error}; check that all hosts are alive, run Colocated Python, and "
            "have the same releases of JAX, cloudpickle and jaxckpt_train as this process; "
            "StoreSettings(colocated=False) needs none of this, and transfers all arrays through this process"
        ) from error
    who = f"host {answer.host} (of {call.device}, process {answer.pid})"
    if answer.is_unseen:
        raise UnseenError(f"{who}, {doing}")
    if answer.error is not None:
        raise decode_error(answer.error, doing, who)
    return HostResult(number, answer, arrays)


@functools.lru_cache(64)
def _writing(room: int) -> Callable[..., tuple[jax.Array, ...]]:
    return _colocated(write_here, (((room,), "uint8"),))


@functools.lru_cache(64)
def _reading(room: int, kinds: tuple[Kind, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    return _colocated(functools.partial(read_here, shapes=kinds), (((room,), "uint8"), *kinds))


@functools.cache
def _progress_call() -> Callable[..., tuple[jax.Array, ...]]:
    return _colocated(moved_here, (((8,), "uint8"),))


def _colocated(function: Callable[..., Any], kinds: tuple[Kind, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """Wrap a function so that it runs on the host of its first argument, and returns arrays of these kinds there."""
    from jax.experimental import colocated_python

    def outputs(plan: jax.ShapeDtypeStruct, *others: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(_spec(shape, dtype, sharding=plan.sharding) for shape, dtype in kinds)

    calling: Any = colocated_python.colocated_python(function)
    made: Callable[..., tuple[jax.Array, ...]] = calling.specialize(out_specs_fn=outputs)
    return made


def refuse_without_pickler() -> None:
    """Raise SettingsError if cloudpickle, which Colocated Python needs, is not installed."""
    try:
        import cloudpickle  # type: ignore[import-untyped]  # noqa: F401  # JAX sends functions with it
    except ImportError as error:
        raise SettingsError(
            "StoreSettings.colocated: JAX's Colocated Python needs the package cloudpickle, here and on the hosts: pip "
            'install "jaxckpt-train[colocated]"; or transfer all arrays through this process with '
            "StoreSettings(colocated=False)"
        ) from error
