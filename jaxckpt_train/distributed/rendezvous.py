"""A meeting: one thing that all processes do. Process 0 hears all others, and tells them what came of it.

What all processes give to process 0 in a meeting: small values are listed together, large ones lie apart.

Silence: for how long processes that are waited for have given no sign of life.

The contract of what the processes of one job tell each other through: keys with values that all of them reach.

Errors as they are told to other processes: the same class there, so that all of them decide the same.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from jaxckpt_train import errors
from jaxckpt_train.errors import CheckpointError, CheckpointTimeoutError, OtherProcessError, StorageError
from jaxckpt_train.store.threads import Latch
from jaxckpt_train.store.timeouts import call_with_timeout

# Made anew of a message alone; whatever else was raised becomes an OtherProcessError.
_TOLD = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind not in (errors.Preempted, StorageError)
}
_ATTRIBUTES = ("differences", "leaves")
TELL_S = 30.0  # between two lines about who is waited for
SMALL_BYTES = 512
PACK = 32  # large values that are read at once: together they must stay below the 2 GiB of one answer
_HERE, _APART = b"=", b">"
LEAVING_S = 3.0
SLICE_S = 1.0  # how soon an interrupt is seen, and a process that has been silent for too long
LOOK_S = 0.5  # that a look may take: one without a limit does not return while process 0, which answers, is stopped
GLANCE_S = 0.1  # likewise, where it may as well be seen at the next look
PERIOD_S = 10.0  # between two signs of life
ASKING_PER_S = 1000  # how often the key-value store is asked in vain in a second, by so many that they must take turns
MOST_SHOWN = 8
MOST_LABEL_BYTES = 200
_DONE, _FAILED = b"+", b"-"
_PARTICULAR = re.compile(r"\S*/\S*|\d+")  # paths and numbers: where they differ, who compares them says it better
_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")


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


class KeyValues(Protocol):
    """A store of small values. A key is text with `/` in it, and is written by one process. Any thread may call.

    What it does not answer in about the time that is asked, it raises as CheckpointError.
    """

    def set(self, key: str, value: bytes) -> None:
        """Give a key its value, whether or not it has one."""

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value, as soon as there is one; None: there was none for so many seconds. 0: whether there is one now."""

    def find(self, folder: str) -> Mapping[str, bytes]:
        """The values of all keys below `folder/`, by the rest of their names."""

    def increment(self, key: str) -> int:
        """Add one to the count of a key, which begins at 0, and return it. No key is both counted and set."""

    def delete(self, folder: str) -> None:
        """Forget all keys below `folder/`."""


class Silence:
    """How long processes have given no sign of life. Only time in which this one was awake counts.

    Attributes:
        numbers: of those that are waited for.
        signs: the last one of each.
        waited_s: for how long.
    """

    def __init__(self, numbers: Sequence[int], limit_s: float, period_s: float, slice_s: float) -> None:
        self.numbers, self.signs, self.waited_s = numbers, dict[int, bytes](), 0.0
        self._limit_s, self._period_s, self._slice_s = limit_s, period_s, slice_s
        self._heard_at = dict.fromkeys(numbers, 0.0)
        self._at, self._next_look_s, self._next_tell_s = time.monotonic(), period_s, min(TELL_S, limit_s / 4)

    def looks(self) -> bool:
        """Count the time since it was asked last; whether it is time to look for signs."""
        now = time.monotonic()
        self.waited_s += min(now - self._at, 2 * self._slice_s)
        self._at = now
        if self.waited_s < self._next_look_s:
            return False
        self._next_look_s = self.waited_s + self._period_s
        return True

    def heard(self, signs: Mapping[int, bytes]) -> bool:
        """Take note of the signs that there are; whether there is a new one."""
        new = [number for number, sign in signs.items() if self.signs.get(number) != sign]
        for number in new:
            self.signs[number], self._heard_at[number] = signs[number], self.waited_s
        return bool(new)

    def lost(self, came: Mapping[int, bytes]) -> list[int]:
        """Those that are silent for too long, and have not come."""
        return [
            number
            for number in self.numbers
            if number not in came and self.waited_s - self._heard_at[number] >= self._limit_s
        ]

    def should_report(self) -> bool:
        """Whether it is time to say who is waited for."""
        if self.waited_s < self._next_tell_s:
            return False
        self._next_tell_s = self.waited_s + TELL_S
        return True


class GivenValues:
    """The values of one meeting. Process 0 may look for them again and again: it reads a large one once.

    Args:
        values: through which the processes talk.
        folder: of the keys of the meeting.
        processes: how many there are.
    """

    def __init__(self, values: KeyValues, folder: str, processes: int) -> None:
        self._values, self._folder, self._processes = values, folder, processes
        self._read: dict[int, bytes] = {}  # large ones

    def give(self, process: int, value: bytes, *, listed: bool = False) -> None:
        """Give the value of a process; `listed` says that process 0 is to see it at its next look, however large."""
        is_small = listed or len(value) <= SMALL_BYTES
        if not is_small:
            self._values.set(f"{self._folder}/large/{process // PACK}/{process}", value)
        self._values.set(f"{self._folder}/from/{process}", _HERE + value if is_small else _APART)

    def look(self) -> dict[int, bytes | None]:
        """Who has given one so far; and the value, or None if it lies apart. Packs that are full are read meanwhile."""
        listed = numbered(self._values.find(f"{self._folder}/from"))
        found = {process: None if each[:1] == _APART else each[1:] for process, each in listed.items()}
        apart: dict[int, int] = {}
        for process, value in found.items():
            if value is None and process not in self._read:
                apart[process // PACK] = apart.get(process // PACK, 0) + 1
        for pack, count in apart.items():
            first = max(1, pack * PACK)  # process 0 gives none
            if count == min((pack + 1) * PACK, self._processes) - first:
                self._read_pack(pack)
        return found

    def of(self, found: Mapping[int, bytes | None]) -> Iterator[bytes]:
        """All values, in the order of the processes, all of whom a look has found; each is held until it is taken."""
        for process in range(1, self._processes):
            value = found[process]
            if value is None and process not in self._read:
                self._read_pack(process // PACK)
            yield self._read.pop(process) if value is None else value

    def _read_pack(self, pack: int) -> None:
        folder = f"{self._folder}/large/{pack}"
        self._read.update(numbered(self._values.find(folder)))
        self._values.delete(folder)

    def forget(self) -> None:
        """They are not needed any more."""
        self._values.delete(f"{self._folder}/from")
        self._values.delete(f"{self._folder}/large")


def numbered(found: Mapping[str, bytes]) -> dict[int, bytes]:
    """By the numbers that the names are."""
    return {int(name): value for name, value in found.items()}


class Rendezvous:
    """One meeting, as one of the processes sees it.

    Args:
        values: through which they talk.
        folder: of the keys of this meeting.
        process: number of this process.
        processes: how many there are.
        doing: what all do here, for messages.
        timeout_s: seconds without a sign of life after which a process is not waited for any more.
        moved: gives another value whenever this process has got further; None: it is quick.
        heard: called whenever another one that is waited for has.
        left: folders of the keys by which processes say that they have left what this meeting is part of.

    Attributes:
        folder: as given.
        is_over: whether it has failed in another process, or one that is waited for is lost, while this one acts;
            known a while later.
    """

    def __init__(
        self,
        values: KeyValues,
        folder: str,
        process: int,
        processes: int,
        doing: str,
        timeout_s: float,
        moved: Callable[[], object] | None,
        heard: Callable[[], object] = lambda: None,
        left: Sequence[str] = (),
    ) -> None:
        self.folder, self.is_over, self._left = folder, False, left
        self._values, self._process, self._processes = values, process, processes
        self._doing, self._timeout_s, self._moved, self._heard = doing, timeout_s, moved, heard
        least_s, most_s = processes / ASKING_PER_S, timeout_s / 8
        self._period_s = min(max(PERIOD_S, least_s), most_s)
        self._slice_s = max(SLICE_S, min(least_s, most_s))  # that any other process waits at a time
        self._limit_s = timeout_s + (2 * self._period_s if process else 0.0)  # process 0 tells who else is silent
        self._given = GivenValues(values, folder, processes)
        label = _PARTICULAR.sub("...", doing).encode(errors="replace")[:MOST_LABEL_BYTES]
        self._label = len(label).to_bytes(2, "big") + label
        self._signs = 0
        self._told: bytes | None = None  # the error of another process that made this one fail
        self._lost: CheckpointTimeoutError | None = None  # found while this process acts

    def lead(self, act: Callable[[], bytes]) -> bytes:
        """What process 0 does: it acts, and tells the others what came of it."""
        with self._living():
            try:
                result = self._acted(act)
            except BaseException as error:
                self._tell("said", _FAILED + (self._told or encode_error(error, self._process)), besides=error)
                self._let_others_leave()
                raise
            self._tell("said", _DONE + self._label + result)
            self._given.forget()
            return result

    def _acted(self, act: Callable[[], bytes]) -> bytes:
        """What comes of it. If it has stopped since another process failed or is lost, that is what is raised."""
        try:
            return act()
        except CheckpointError:
            if self.is_over:
                self._raise_failure(self._given.look())
                if self._lost is not None:
                    raise self._lost from None
            raise

    def _raise_failure(self, found: Mapping[int, bytes | None]) -> None:
        """Raise what another process has told that failed."""
        for _, value in sorted(found.items()):
            if value is not None and value[:1] == _FAILED:
                self._told = value[1:]
                raise decode_error(self._told, self._doing)

    def collect(self) -> list[bytes]:
        """The values of the other processes, in their order; for process 0, within what it does.

        Raises:
            CheckpointError: one of them failed, or is not heard of any more.
        """
        silence = self._silence_of(range(1, self._processes))
        while self._values.get(f"{self.folder}/here", SLICE_S) is None:
            if not silence.looks():
                continue
            self._sign()
            left = [number for folder in self._left for number in numbered(self._values.find(folder))]
            came = dict.fromkeys(self._given.look(), b"")  # some may have come before they left
            if len(came) == self._processes - 1:
                break  # one of them was lost right after it had given its value, and could not wake this process
            if silence.heard(numbered(self._values.find(f"{self.folder}/alive")) | came):
                self._heard()
            self._refuse_leavers(left, came)
            self._look(silence, came)
        found = self._given.look()
        self._raise_failure(found)
        return [self._unlabelled(value[1:], process) for process, value in enumerate(self._given.of(found), 1)]

    def join(self, give: Callable[[], bytes]) -> bytes:
        """What any other process does: it gives its value, and hears what came of all."""
        with self._living():
            try:
                value = give()
            except BaseException as error:
                is_stopped = self.is_over and isinstance(error, CheckpointError)  # as another one has failed
                self._report(_FAILED + encode_error(error, self._process), besides=error)
                if is_stopped:
                    if self._lost is not None:
                        raise self._lost from None
                    self.hear()
                raise
        self._report(_DONE + self._label + value)
        return self.hear()

    def hear(self) -> bytes:
        """What process 0 says.

        Raises:
            CheckpointError: it failed, or another one did; or it is not heard of any more.
        """
        silence = self._silence_of((0,))
        while (said := self._values.get(f"{self.folder}/said", self._slice_s)) is None:
            if silence.looks():
                if any(self._values.get(f"{folder}/0", GLANCE_S) is not None for folder in self._left):
                    said = self._values.get(f"{self.folder}/said", LOOK_S)  # it may have come before it left
                    if said is not None:
                        break
                    self._refuse_leavers([0], ())
                sign = self._values.get(f"{self.folder}/alive/0", LOOK_S)
                if silence.heard({} if sign is None else {0: sign}):
                    self._heard()
                self._look(silence, {})
        if said[:1] == _FAILED:
            raise decode_error(said[1:], self._doing)
        return self._unlabelled(said[1:], 0)

    def _unlabelled(self, value: bytes, process: int) -> bytes:
        """What another process says, if it does the same as this one; numbers in that may be others."""
        size = int.from_bytes(value[:2], "big") + 2
        doing = value[2:size].decode(errors="replace")
        if doing != self._label[2:].decode(errors="replace"):
            raise OtherProcessError(
                f"process {process} is at {doing!r}, but process {self._process} is at {self._doing!r}: all processes "
                "of a job do the same, in the same order, each from one thread"
            )
        return value[size:]

    def _silence_of(self, numbers: Sequence[int]) -> Silence:
        return Silence(numbers, self._limit_s, self._period_s, self._slice_s if self._process else SLICE_S)

    def _let_others_leave(self) -> None:
        """Wait a moment for those that still act: what they write is removed next."""
        if self._moved is None:
            return
        end, wait_s = time.monotonic() + LEAVING_S, 0.1
        with contextlib.suppress(CheckpointError):
            while len(self._values.find(f"{self.folder}/from")) < self._processes - 1 and time.monotonic() < end:
                self._values.get(f"{self.folder}/never", wait_s)
                wait_s = min(2 * wait_s, SLICE_S) if self._processes > ASKING_PER_S else wait_s

    def _look(self, silence: Silence, came: Mapping[int, bytes]) -> None:
        """Tell of those that are waited for, or raise if one is silent for too long."""
        self._refuse_lost(silence, came)
        if silence.should_report():
            waited = [number for number in silence.numbers if number not in came]
            _log.warning("%s: waiting for %s (%.0f s)", self._doing, _listed(waited, self._processes), silence.waited_s)

    def _refuse_leavers(self, left: Collection[int], came: Collection[int]) -> None:
        missing = sorted({number for number in left if number not in came})
        if missing:
            raise OtherProcessError(
                f"{self._doing}: {_listed(missing, self._processes)} will not come: "
                f"{'it has' if len(missing) == 1 else 'they have'} closed what this is part of "
                "(its CheckpointCallback, or StepManager), as happens at an error in its loop; look into the log there"
            )

    def _refuse_lost(self, silence: Silence, came: Mapping[int, bytes]) -> None:
        lost = silence.lost(came)
        if lost:
            raise self._lost_error(lost, came=any(number in silence.signs for number in lost))

    def _lost_error(self, lost: Sequence[int], *, came: bool) -> CheckpointTimeoutError:
        what = "did not get any further" if came else "did not come"
        error = CheckpointTimeoutError(
            f"{self._doing}: {_listed(lost, self._processes)} {what} for {self._timeout_s:.3g} s, and "
            f"{'is' if len(lost) == 1 else 'are'} not waited for any longer; look into the log there"
        )
        error.lost = tuple(lost)
        return error

    def _tell(self, name: str, value: bytes, besides: BaseException | None = None) -> None:
        try:
            self._ask(lambda: self._values.set(f"{self.folder}/{name}", value))
        except CheckpointError as second:
            self._untold(second, besides)

    def _ask(self, call: Callable[[], T]) -> T:
        """Ask the store for what it answers at once; it does not if process 0, which runs it, is stopped."""
        if self._process == 0:
            return call()
        end = time.monotonic() + self._limit_s

        def look(_: int) -> None:
            if time.monotonic() >= end:
                raise self._lost_error((0,), came=True)

        return call_with_timeout(self._doing, lambda moved: call(), look)

    def _untold(self, second: CheckpointError, besides: BaseException | None) -> None:
        if besides is None:
            raise second
        besides.add_note(f"and the other processes could not be told: {second}")

    def _report(self, value: bytes, besides: BaseException | None = None) -> None:
        """Give a value to process 0, and wake it if it is the last one, or an error."""
        try:
            self._ask(lambda: self._given.give(self._process, value, listed=besides is not None))
        except CheckpointError as second:
            self._untold(second, besides)
        try:
            count = self._ask(lambda: self._values.increment(f"{self.folder}/count"))
        except CheckpointError as second:
            if besides is None:
                raise
            besides.add_note(f"and process 0 could not be woken: {second}")
            return
        if count == self._processes - 1 or besides is not None:
            self._tell("here", b"1", besides)

    def _sign(self) -> None:
        self._signs += 1
        self._values.set(f"{self.folder}/alive/{self._process}", str(self._signs).encode())

    @contextlib.contextmanager
    def _living(self) -> Iterator[None]:
        """Give signs of life meanwhile, as long as this process gets any further."""
        if self._moved is None:
            yield
            return
        ended = Latch()
        threading.Thread(target=self._live, args=(self._moved, ended), name="jaxckpt-alive", daemon=True).start()
        try:
            yield
        finally:
            ended.open()

    def _live(self, moved: Callable[[], object], ended: Latch) -> None:
        before: object = self  # nothing that it may give
        silence = self._silence_of((0,) if self._process else range(1, self._processes))
        try:
            while not ended.is_open():
                if (now := moved()) != before:
                    before = now
                    self._sign()
                self._watch(silence)
                while not silence.looks() and not ended.wait(min(SLICE_S, self._period_s / 4)):
                    pass
        except CheckpointTimeoutError as error:
            self._lost, self.is_over = error, True
        except CheckpointError as error:  # a thread's edge; who waits for this process finds out
            _log.warning("%s: the other processes could not be told that this one goes on: %s", self._doing, error)

    def _watch(self, silence: Silence) -> None:
        """Look for the others while this process acts: it may wait for one of them by other means."""
        if self._process:
            said = self._values.get(f"{self.folder}/said", LOOK_S)
            self.is_over = self.is_over or (said is not None and said[:1] == _FAILED)
            sign = self._values.get(f"{self.folder}/alive/0", LOOK_S)
            silence.heard({} if sign is None else {0: sign})
            self._refuse_lost(silence, {})
            return
        found = self._given.look()
        self.is_over = self.is_over or any(value is not None and value[:1] == _FAILED for value in found.values())
        came = dict.fromkeys(found, b"")
        silence.heard(numbered(self._values.find(f"{self.folder}/alive")) | came)
        self._refuse_lost(silence, came)


def _listed(numbers: Sequence[int], processes: int) -> str:
    shown = ", ".join(map(str, numbers[:MOST_SHOWN]))
    more = f" and {len(numbers) - MOST_SHOWN} more" if len(numbers) > MOST_SHOWN else ""
    return f"process{'' if len(numbers) == 1 else 'es'} {shown}{more} of {processes}"
