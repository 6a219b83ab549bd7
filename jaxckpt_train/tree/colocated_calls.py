"""Calls functions on the hosts of devices, many at a time, through JAX's Colocated Python; hands back their answers.

JAX itself sends the function: by its name, in a pickle that it makes and that only it reads. Nothing of a checkpoint
and nothing of ours is in one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxckpt_train.errors import CheckpointTimeoutError, OtherProcessError, SettingsError
from jaxckpt_train.store.latch import LOOK_S, Latch
from jaxckpt_train.store.workers import shared_workers
from jaxckpt_train.told_errors import decode_error
from jaxckpt_train.tree.caller_context import enable_x64
from jaxckpt_train.tree.colocated_host import moved_here, read_here, write_here
from jaxckpt_train.tree.colocated_messages import Answer, UnseenError, decode_answer
from jaxckpt_train.tree.colocated_turns import Turns

MOST_AT_ONCE = 64
ASKED_AT_ONCE = 8
"""How many hosts are asked in a second whether they get any further."""

_spec: Any = jax.ShapeDtypeStruct
_NOTHING = np.zeros(1, np.uint8)

Kind = tuple[tuple[int, ...], str]
"""Shape and dtype of an array."""


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
