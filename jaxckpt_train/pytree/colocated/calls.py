"""Calls functions on the hosts of devices, many at a time, through JAX's Colocated Python; hands back their answers.

JAX itself sends the function: by its name, in a pickle that it makes and that only it reads. Nothing of a checkpoint
and nothing of ours is in one.

Whose devices are on other hosts than this one process that drives them all, and the CPU devices beside them.

The order in which hosts are called: each for one thing at a time, so that it needs the memory of one.
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
from jax.extend.backend import backends

from jaxckpt_train.distributed.rendezvous import decode_error
from jaxckpt_train.errors import CheckpointTimeoutError, OtherProcessError, SettingsError
from jaxckpt_train.pytree._jax import enable_x64
from jaxckpt_train.pytree.colocated.host import Answer, UnseenError, decode_answer, moved_here, read_here, write_here
from jaxckpt_train.settings import Colocated
from jaxckpt_train.store.threads import LOOK_S, Latch, shared_workers

MOST_AT_ONCE = 64
ASKED_AT_ONCE = 8
"""How many hosts are asked in a second whether they get any further."""
_spec: Any = jax.ShapeDtypeStruct
_NOTHING = np.zeros(1, np.uint8)
Kind = tuple[tuple[int, ...], str]
"""Shape and dtype of an array."""


class Turns:
    """Hands out numbers of calls to the threads that make them, those of a host one after the other.

    Args:
        hosts: of each call.
    """

    def __init__(self, hosts: Sequence[Hashable]) -> None:
        self._hosts = hosts
        self._left: dict[Hashable, deque[int]] = {}
        for number, host in enumerate(hosts):
            self._left.setdefault(host, deque()).append(number)
        self._ready = queue.SimpleQueue[deque[int] | None]()  # of the hosts that have nothing to do, what is left
        self._is_over = False
        for left in self._left.values():
            self._ready.put(left)

    def take(self) -> int | None:
        """The next call of a host that has nothing to do; None: it is over. May be called once for each call.

        Waits until there is such a host: until `let_go`, or `end`.
        """
        left = self._ready.get()
        return None if left is None or self._is_over else left.popleft()

    def let_go(self, number: int) -> None:
        """The host of this call has nothing of it any more."""
        left = self._left[self._hosts[number]]
        if left:
            self._ready.put(left)

    def end(self) -> None:
        """Begin no further call; who waits goes on, as some hosts may never have done."""
        self._is_over = True
        for _ in self._hosts:
            self._ready.put(None)


def is_single_controller(runtime_type: str) -> bool:
    """Whether a runtime drives devices of many hosts from one process, as JAX names it (`device.client.runtime_type`).

    Those are "pathways" and "proxy/pathways".
    """
    return "pathways" in runtime_type.split("/")


def has_single_controller() -> bool:
    """Whether one of the runtimes of this process is of that kind; there may be one of its own CPU beside it."""
    return any(is_single_controller(client.runtime_type) for client in backends().values())


def runs_on_hosts(sharding: jax.sharding.Sharding, setting: Colocated) -> bool:
    """Whether arrays of this sharding are saved and loaded by the hosts of its devices.

    Raises:
        SettingsError: it was asked for in a job of several processes, each of which has its own devices already.
    """
    if setting == "auto":
        devices: Any = sharding.device_set  # all of one client
        return is_single_controller(next(iter(devices)).client.runtime_type)
    if setting and jax.process_count() > 1:
        raise SettingsError(
            f"StoreSettings.colocated: True is for one process that drives all devices; this job has "
            f"{jax.process_count()} processes, each of which saves and loads what its own devices hold: leave it out"
        )
    return setting


@functools.cache
def cpu_device_of(device: jax.Device) -> jax.Device:
    """The CPU device on the host of a device: what is called with its arrays runs there.

    Raises:
        SettingsError: the runtime has none.
    """
    if device.device_kind == "cpu":
        return device  # asked for one device alone, JAX 0.10 may name another one of the same process
    from jax.experimental import colocated_python

    try:
        (found,) = colocated_python.colocated_cpu_devices((device,))
    except (ValueError, AttributeError, RuntimeError) as error:
        raise SettingsError(
            f"{device}: its runtime shows no CPU device on the same host ({error}), so nothing can be run there; start "
            "it with Colocated Python, or bring all arrays through this process by StoreSettings(colocated=False)"
        ) from error
    return found


class HostCall(NamedTuple):
    """One call: on the host of a CPU device, with a plan, its arrays, and what comes back beside an answer.

    `room` is how many bytes the answer has; `kinds` is None for a call that gives nothing but the answer.
    """

    device: jax.Device
    plan: np.ndarray
    arrays: Sequence[jax.Array]
    room: int
    kinds: tuple[Kind, ...] | None = None


class HostResult(NamedTuple):
    """What a call gave: its number, the answer, and arrays on its CPU device."""

    number: int
    answer: Answer
    arrays: Sequence[jax.Array]


def call_hosts(calls: Sequence[HostCall], doing: str, looked: Callable[[bool], object]) -> Generator[HostResult]:
    """Make all calls, each host one at a time, and hand out the results as they come.

    A host is given its next call once its last result was taken, and the one after that asked for. Use
    `contextlib.closing` around the iterator. After the first error no further call is begun.

    Args:
        calls: begun in this order.
        doing: for messages, as "saving c".
        looked: told about once a second, on the calling thread, whether a host has got any further; what it raises
            ends the waiting, but not what the hosts have begun.

    Raises:
        What a host met, of the same class where it is one of ours, named by the host.
        OtherProcessError: JAX lost the host, or could not run anything there.
        SettingsError: Colocated Python cannot be used here.
        CheckpointTimeoutError: no host has got any further for ten minutes.
    """
    refuse_without_pickler()
    under_way: dict[int, jax.Device] = {}
    turns = Turns([call.device for call in calls])

    def call(_: int) -> HostResult | None:
        number = turns.take()
        if number is None:
            return None
        under_way[number] = calls[number].device
        try:
            with enable_x64(True):  # which may be that of the calling thread alone
                return _called(number, calls[number], doing)
        except BaseException:
            turns.end()
            raise
        finally:
            del under_way[number]

    asking, seen = Asking(under_way), [0]

    def moved() -> int:
        before, seen[0] = seen[0], asking.moves
        looked(seen[0] != before)
        return seen[0]

    workers = shared_workers(min(len({call.device for call in calls}), MOST_AT_ONCE), "jaxckpt-hosts")
    each = workers.run_each(call, range(len(calls)), give_up=turns.end, moved=moved)
    try:
        with asking, contextlib.closing(each) as results:
            for result in results:
                if result is not None:
                    number = result.number
                    yield result
                    del result
                    turns.let_go(number)
    except CheckpointTimeoutError as error:
        raise CheckpointTimeoutError(f"{doing}: {error}") from None


class Asking:
    """Asks hosts whose calls are under way how far they have got: within, once a second, on a thread of its own.

    A host that has stopped does not even answer to that; then `moves` stays as it is.

    Attributes:
        moves: another number whenever one has got further.
    """

    def __init__(self, under_way: dict[int, jax.Device]) -> None:
        self._under_way, self._seen = under_way, dict[jax.Device, bytes]()
        self._turn, self.moves = 0, 0
        self._is_over = Latch()

    def __enter__(self) -> Asking:
        with contextlib.suppress(
            RuntimeError
        ):  # the system has no thread for it: who is slow is not told from who stopped
            threading.Thread(target=self._run, name="jaxckpt-hosts-asked", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.open()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.ask()

    def ask(self) -> int:
        """Ask some of them; returns `moves`."""
        devices = list(self._under_way.values())
        for place in range(min(len(devices), ASKED_AT_ONCE)):
            device = devices[(self._turn + place) % len(devices)]
            try:
                found = np.asarray(_asked()(jax.device_put(_NOTHING, device))[0]).tobytes()
            except jax.errors.JaxRuntimeError:
                continue  # its own call tells of it
            if self._seen.get(device) != found:
                self._seen[device] = found
                self.moves += 1
        self._turn += ASKED_AT_ONCE
        return self.moves


def _called(number: int, call: HostCall, doing: str) -> HostResult:
    try:
        plan = jax.device_put(call.plan, call.device)
        if call.kinds is None:
            answered, *arrays = _writing(call.room)(plan, *call.arrays)
        else:
            answered, *arrays = _reading(call.room, call.kinds)(plan)
        answer = decode_answer(np.asarray(answered))  # waits until it is there
    except (jax.errors.JaxRuntimeError, ImportError) as error:
        raise OtherProcessError(
            f"the host of {call.device}, {doing}: {error}; see to it that all hosts live, run Colocated Python, and "
            "have JAX, cloudpickle and jaxckpt_train in the releases of this process; StoreSettings(colocated=False) "
            "does without them, and brings all arrays through this process"
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
def _asked() -> Callable[..., tuple[jax.Array, ...]]:
    return _colocated(moved_here, (((8,), "uint8"),))


def _colocated(function: Callable[..., Any], kinds: tuple[Kind, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """A function that runs on the host of its first argument, and gives back arrays of these kinds there."""
    from jax.experimental import colocated_python

    def outputs(plan: jax.ShapeDtypeStruct, *others: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(_spec(shape, dtype, sharding=plan.sharding) for shape, dtype in kinds)

    calling: Any = colocated_python.colocated_python(function)
    made: Callable[..., tuple[jax.Array, ...]] = calling.specialize(out_specs_fn=outputs)
    return made


def refuse_without_pickler() -> None:
    """Raise SettingsError where Colocated Python lacks what it sends functions with."""
    try:
        import cloudpickle  # type: ignore[import-untyped]  # noqa: F401  # JAX sends functions with it
    except ImportError as error:
        raise SettingsError(
            "StoreSettings.colocated: JAX's Colocated Python needs the package cloudpickle, here and on the hosts: pip "
            'install "jaxckpt-train[colocated]"; or bring all arrays through this process by '
            "StoreSettings(colocated=False)"
        ) from error
