"""A grace period is a deadline wherever the loop is; slow but steady work is no stall."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxckpt_train as jct
from jaxckpt_train.pending import PendingSave, ProgressTracker, call_within
from jaxckpt_train.store.backends.local import LocalBackend, LocalSource
from jaxckpt_train.store.threads import POLL_S, Latch, interruptible
from jaxckpt_train.store.timeouts import call_with_timeout
from tests.support.fake_backends import HoldingBackend, callback_on
from tests.support.locks import is_owned, remove_lock
from tests.support.runs import made_run, state_of, step_of
from tests.support.shutdowns import shutdown_of
from tests.support.signal_handlers import WATCHED, handlers_put_back

pytestmark = pytest.mark.timeout(120)

GRACE_S, LATEST_S = 1.5, 6.0


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    """Restore the handlers, which ignore further signals once a process leaves."""
    with handlers_put_back(*WATCHED, may_end=True):
        yield


def sigterm_soon() -> threading.Timer:
    """Send SIGTERM to this process a moment later, while the main thread waits."""
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    return timer


def while_the_next_waits(ckpt: jct.CheckpointCallback) -> None:
    ckpt(state_of(2))
    sigterm_soon()
    ckpt(state_of(3))
    raise AssertionError("the loop went on")


def within_steps(ckpt: jct.CheckpointCallback) -> None:
    sigterm_soon()
    for step in ckpt.steps(10**6):
        ckpt(state_of(step + 1))


def at_the_end(ckpt: jct.CheckpointCallback) -> None:
    sigterm_soon()
    ckpt(state_of(2))


def after_poll_returns_true(ckpt: jct.CheckpointCallback) -> None:
    ckpt(state_of(2))
    os.kill(os.getpid(), signal.SIGTERM)
    assert ckpt.poll()


@pytest.mark.parametrize("loop", [while_the_next_waits, within_steps, at_the_end, after_poll_returns_true])
def test_grace_period_holds_wherever_loop_is(tmp_path: Path, loop: Callable[[Any], None]) -> None:
    backend = HoldingBackend("rename", "step-0000000002")
    ckpt = callback_on(backend, tmp_path, grace_period_s=GRACE_S, save_interval_steps=1)
    started, code = 0.0, None
    try:
        with ckpt:
            ckpt.resume(state_of(0))
            ckpt(state_of(1), step=1)
            ckpt.wait_until_finished()
            started = time.monotonic()
            loop(ckpt)
    except SystemExit as left:
        code = left.code
    assert code == (None if loop is at_the_end else 75)  # a finished loop exits normally
    took_s = time.monotonic() - started
    given_up = ckpt.manager._save_slot.given_up
    assert given_up is not None
    backend.go.set()
    given_up.wait(60)
    assert took_s < LATEST_S
    assert ckpt.preempted
    while is_owned(tmp_path):
        pass  # it is released on another thread
    following = jct.StepManager(tmp_path)
    assert following.steps == [1, 2]
    assert following.history.events()[-1]["how"] == "late"


def due(ckpt: jct.CheckpointCallback, state: Any) -> None:
    ckpt(state)
    raise AssertionError("the loop went on")


def last(ckpt: jct.CheckpointCallback, state: Any) -> None:
    for _ in ckpt.steps(2):
        ckpt(state)


STREAM = jct.StoreSettings(snapshot="stream")


@pytest.mark.parametrize("if_stalled", ["skip", "raise"])
@pytest.mark.parametrize("loop", [due, last])
def test_late_snapshot_is_given_up(tmp_path: Path, loop: Callable[[Any, Any], None], if_stalled: Any) -> None:
    backend = HoldingBackend("create", "step-0000000002")
    options: dict[str, Any] = {"grace_period_s": GRACE_S, "save_interval_steps": 1, "if_stalled": if_stalled}
    ckpt = callback_on(backend, tmp_path, store=STREAM, **options)
    state, started = state_of(2), 0.0
    with pytest.raises(SystemExit) as left, ckpt:
        ckpt.resume(state_of(0))
        ckpt(state_of(1), step=1)
        ckpt.wait_until_finished()
        started = time.monotonic()
        sigterm_soon()
        loop(ckpt, state)
    took_s = time.monotonic() - started
    assert left.value.code == 75
    assert took_s < LATEST_S
    for leaf in jax.tree.leaves(state):
        leaf.delete()  # as a step with donated arguments does
    given_up = ckpt.manager._save_slot.given_up
    assert given_up is not None
    backend.go.set()
    with pytest.raises(jct.CheckpointTimeoutError, match="the state was not fetched"):
        given_up.wait(60)
    assert jct.StepManager(tmp_path).steps == [1]


def test_snapshot_in_time_is_saved(tmp_path: Path) -> None:
    backend = HoldingBackend("create", "step-0000000002")
    ckpt = callback_on(backend, tmp_path, store=STREAM, grace_period_s=60.0, save_interval_steps=2)
    threading.Timer(1.0, backend.go.set).start()
    with pytest.raises(SystemExit) as left, ckpt:
        ckpt.resume(state_of(0))
        ckpt(state_of(1))
        sigterm_soon()
        ckpt(state_of(2))
        raise AssertionError("the loop went on")
    assert left.value.code == 75
    assert jct.StepManager(tmp_path).steps == [2]


@pytest.mark.parametrize("grace_period_s", [None, 0.2])
def test_snapshot_without_deadline_is_awaited(tmp_path: Path, grace_period_s: float | None) -> None:
    backend = HoldingBackend("create", "step-0000000001")
    ckpt = callback_on(backend, tmp_path, store=STREAM, grace_period_s=grace_period_s, save_interval_steps=1)
    threading.Timer(1.0, backend.go.set).start()
    with pytest.raises(SystemExit), ckpt:
        ckpt.resume(state_of(0))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)  # a step that takes longer than the grace period
        ckpt(state_of(1))
    assert jct.StepManager(tmp_path).steps == [1]


@pytest.mark.parametrize("mode", ["device", "stream"])
def test_unfinished_computation_is_no_stall(tmp_path: Path, mode: Any) -> None:
    settings = jct.StoreSettings(snapshot=mode)
    start, slow = jnp.ones(100_000), takes_long(1.5)
    with jct.StepManager(tmp_path, settings=settings, stall_timeout_s=0.6) as manager:
        first = slow(start)
        assert manager.save(1, {"state": {"w": first}}).saved
        assert manager.save(2, {"state": {"w": slow(first)}}).saved
    assert jct.StepManager(tmp_path).steps == [1, 2]


class SlowCheckpointable:
    """A checkpointable that writes its files slowly."""

    def __init__(self, seconds: float = 1.5, nbytes: int = 4) -> None:
        self._seconds, self._nbytes = seconds, nbytes

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            time.sleep(self._seconds)
            (directory.path / "data.bin").write_bytes(bytes(self._nbytes))

        return write()

    async def load(self, directory: Any) -> Any: ...


def test_slow_custom_object_is_no_stall(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, stall_timeout_s=0.2) as manager:
        assert manager.save(1, {"own": SlowCheckpointable()}).saved
        assert manager.save(2, {"own": SlowCheckpointable()}).saved
    assert jct.StepManager(tmp_path).steps == [1, 2]


class SlowSource:
    """A file whose reads are slow, but always succeed."""

    def __init__(self, source: Any) -> None:
        self._source, self.size, self.close = source, source.size, source.close

    def read_into(self, offset: int, data: Any, needed: int) -> None:
        time.sleep(0.25)
        self._source.read_into(offset, data, needed)


class SlowlyReadBackend(LocalBackend):
    """A disk that reads an object's own files slowly."""

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        source = super().open(directory, name, direct=direct)
        return SlowSource(source) if name.endswith("data.bin") else source


def test_slow_steady_digests_are_no_stall(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, backend=SlowlyReadBackend(), stall_timeout_s=1.0) as manager:
        assert manager.save(1, {"own": SlowCheckpointable(0, 40 << 20)}).saved
        assert manager.save(2, {"own": SlowCheckpointable(0, 4)}).saved
    assert jct.StepManager(tmp_path).steps == [1, 2]


def takes_long(seconds: float) -> Callable[[jax.Array], jax.Array]:
    """Return a function that returns at once and computes for about `seconds`."""

    def compiled(times: int) -> Callable[[jax.Array], jax.Array]:
        looped = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, each: jnp.sin(each) + 0.001, x))
        return looped.lower(jnp.ones(100_000)).compile()

    sample = compiled(20)
    sample(jnp.ones(100_000)).block_until_ready()
    started = time.perf_counter()
    sample(jnp.ones(100_000)).block_until_ready()
    return compiled(int(20 * seconds / (time.perf_counter() - started)))


def test_stopped_process_counts_no_wait_time() -> None:
    tracker = ProgressTracker()
    tracker.waited(3600.0)
    assert tracker.waited_s == POLL_S
    tracker()
    assert tracker.waited_s == 0
    excused = ProgressTracker(lambda: True)
    excused.waited(1.0)
    assert excused.waited_s == 0


def test_wait_ends_at_shutdown_request() -> None:
    asked: list[bool] = []
    save: PendingSave[int] = PendingSave("x", lambda: 1)
    latch = Latch()
    threading.Timer(0.2, lambda: asked.append(True)).start()
    assert "asked to stop" in str(save.wait_for(latch, 60, None, lambda: bool(asked)))


class HeldReads:
    """Holds reads of segments until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, read_into = threading.Event(), LocalSource.read_into

        def held(source: Any, *more: Any) -> None:
            assert "safetensors" not in source._path or self.go.wait(60), "the read was never released"
            read_into(source, *more)

        monkeypatch.setattr(LocalSource, "read_into", held)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldReads]:
    held = HeldReads(monkeypatch)
    yield held
    held.go.set()


@pytest.mark.parametrize("how", ["resume", "init_from"])
def test_shutdown_request_ends_a_load(tmp_path: Path, reads: HeldReads, how: str) -> None:
    run = made_run(tmp_path / "run", 5)
    options: dict[str, Any] = {} if how == "resume" else {"init_from": str(run / "step-0000000005")}
    directory = run if how == "resume" else tmp_path / "new"
    backend, started = HoldingBackend("rename", "nothing"), time.monotonic()
    ckpt = callback_on(backend, directory, grace_period_s=20.0, on_preemption="raise", **options)
    ckpt._start()  # with its handlers
    sigterm_soon()
    with pytest.raises(jct.Preempted, match="signal SIGTERM") as left:
        ckpt.resume(state_of(0))
    assert time.monotonic() - started < LATEST_S
    assert left.value.step == (5 if how == "resume" else None)
    assert ckpt.preempted
    reads.go.set()
    with callback_on(backend, run) as following:  # the directory was released
        assert step_of({"state": following.resume(state_of(0))}) == 5


def test_load_in_callback_ends_with_exit_code(tmp_path: Path, reads: HeldReads) -> None:
    backend = HoldingBackend("rename", "nothing")
    with (
        pytest.raises(SystemExit) as left,
        callback_on(backend, made_run(tmp_path, 5), grace_period_s=20.0, exit_code=13) as ckpt,
    ):
        sigterm_soon()
        ckpt.resume(state_of(0))
    assert left.value.code == 13
    assert [event["event"] for event in jct.StepManager(tmp_path).history.events()][-2:] == ["preempted", "end"]


def test_load_without_deadline_is_finished_first(tmp_path: Path, reads: HeldReads) -> None:
    with (
        pytest.raises(SystemExit),
        callback_on(HoldingBackend("rename", "nothing"), made_run(tmp_path, 5)) as ckpt,
    ):
        sigterm_soon()
        threading.Timer(1.5, reads.go.set).start()
        assert step_of({"state": ckpt.resume(state_of(0))}) == 5
        assert list(ckpt.steps(10)) == []


def test_error_of_a_check_ends_the_wait() -> None:
    go = threading.Event()

    def check() -> None:
        raise KeyError

    with pytest.raises(KeyError), interruptible(check):
        call_with_timeout("run", lambda: go.wait(60))
    go.set()


def test_call_within_returns_at_its_limit() -> None:
    go, done = threading.Event(), []
    assert call_within(lambda: done.append(1), 60)
    assert not call_within(lambda: go.wait(60), 0.05)
    go.set()
    assert done == [1]


def test_late_check_shortens_the_lead_time() -> None:
    now = [0.0]
    shutdown = shutdown_of(max_run_time_s=100, grace_period_s=30.0, monotonic=lambda: now[0])
    now[0] = 95.0  # a long step
    assert shutdown.is_asked()
    assert shutdown.must_leave()
    assert shutdown.left_s() == 3.0  # 2 of the 5 are for the end of the process


def test_late_last_save_can_be_short(tmp_path: Path) -> None:
    ckpt = callback_on(HoldingBackend("rename", "nothing"), tmp_path, grace_period_s=20.0)
    now = [0.0]
    ckpt._shutdown._monotonic = ckpt._shutdown._signals._monotonic = lambda: now[0]
    with pytest.raises(SystemExit), ckpt:
        ckpt.resume(state_of(0))
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] = 19.0
        ckpt(state_of(1))
    assert step_of(jct.StepManager(tmp_path).restore({"state": state_of(0)})) == 1


def test_superseded_owner_publishes_nothing(tmp_path: Path) -> None:
    backend = HoldingBackend("create", ".tmp-")
    manager = jct.StepManager(tmp_path, backend=backend)
    assert manager.save(5, {"state": state_of(5)}).saved
    assert backend.reached.wait(60)
    remove_lock(tmp_path)
    backend.go.set()
    with pytest.raises(jct.DirectoryLockedError, match="this job owned it"):
        manager.wait()
    manager.close()
    assert jct.StepManager(tmp_path).steps == []
