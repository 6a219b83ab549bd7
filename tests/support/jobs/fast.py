"""Runs with a fast tier, for functions that the processes of a job call. Each process is a host with its own folder."""

from __future__ import annotations

import errno
import functools
import gc
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxckpt_train as jct
from benchmarks.process_figures import ResidentMeter
from jaxckpt_train.run import fast_steps
from jaxckpt_train.store.backends import peers
from jaxckpt_train.store.backends.base import Entry
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.tiers import fast_tier
from tests.support.jobs import training
from tests.support.jobs.arrays import Spec, digest_of, holds, sharding_of

BARRIER_TIMEOUT_S = 20.0
SHAPES: dict[str, tuple[list[int], str]] = {
    "rows": ([120, 500], "float32"),
    "columns": ([16, 120], "int32"),
    "same": ([3001], "float16"),
    "empty": ([8, 0], "float32"),
    "one": ([], "float32"),
}
SPECS: dict[str, Spec] = {"rows": ["x"], "columns": [None, "x"], "same": [], "empty": [], "one": []}


def values_of(name: str, step: int) -> np.ndarray:
    """Return the values of an array at a step."""
    shape, dtype = SHAPES[name]
    return np.random.default_rng([step, sum(map(ord, name))]).integers(0, 100, shape).astype(dtype)


def state_of(step: int) -> dict[str, Any]:
    """Return the state of a step, over all devices of the job."""
    mesh = [jax.device_count()]
    return {
        name: jax.make_array_from_callback(
            tuple(SHAPES[name][0]), sharding_of(mesh, SPECS[name]), lambda at, name=name: values_of(name, step)[at]
        )
        for name in SHAPES
    }


def mesh_state(step: int, mesh: list[int]) -> dict[str, Any]:
    """Return the state of a step on a mesh with the axes "x" and "y"."""
    specs: dict[str, Spec] = {**SPECS, "rows": ["x", "y"], "columns": ["y", "x"]}
    return {
        name: jax.make_array_from_callback(
            tuple(SHAPES[name][0]), sharding_of(mesh, specs[name]), lambda at, name=name: values_of(name, step)[at]
        )
        for name in SHAPES
    }


def domain(fast: str, hosts: list[str] | None) -> str:
    """Return the host of this process."""
    return f"host{jax.process_index()}" if hosts is None else hosts[jax.process_index()]


def manager_of(slow: str, fast: str, hosts: list[str] | None, options: dict[str, Any]) -> jct.StepManager:
    """Return the manager of a run."""
    host = domain(fast, hosts)
    given: dict[str, Any] = {"failure_domain": host, "interval_steps": 1, **options}
    tier = jct.FastTierSettings(directory=f"{fast}/{host}", **given)
    store = jct.StoreSettings(barrier_timeout_s=BARRIER_TIMEOUT_S)
    return jct.StepManager(slow, fast_tier=tier, settings=store, save_decision_policy=jct.FixedIntervalPolicy(10))


def save_steps(
    slow: str, fast: str, steps: list[int], hosts: list[str] | None = None, options: dict[str, Any] | None = None
) -> list[str]:
    """Save steps, those at multiples of ten to both tiers."""
    with manager_of(slow, fast, hosts, options or {}) as manager:
        for step in steps:
            result = manager.save(step, {"state": state_of(step)})
            assert result.saved, result.reason
            manager.wait()
    return [f"{fast}/{domain(fast, hosts)}"]


def syncs(slow: str, fast: str, hosts: list[str], redundancy: str) -> list[list[str]]:
    """Save a step; return which files this process has synced before it was published here, and those it has here."""
    folder, synced, names = Path(fast, domain(fast, hosts)), set[tuple[int, int]](), ("fsync", "fdatasync")
    real = {name: getattr(os, name) for name in names}

    def record(descriptor: int, name: str) -> None:
        real[name](descriptor)
        found = os.fstat(descriptor)
        if not list(folder.glob("run-*/step-*")):
            synced.add((found.st_dev, found.st_ino))

    for name in names:
        setattr(os, name, functools.partial(record, name=name))
    try:
        save_steps(slow, fast, [11], hosts, {"redundancy": redundancy})
    finally:
        for name in names:
            setattr(os, name, real[name])
    found = {file: file.stat() for file in folder.glob("run-*/step-*/**/*")}
    here = {str(file): (each.st_dev, each.st_ino) for file, each in found.items()}
    return [[name for name, each in here.items() if each in synced], [*here]]


def restore(
    slow: str,
    fast: str,
    hosts: list[str] | None = None,
    options: dict[str, Any] | None = None,
    step: int | None = None,
) -> list[Any]:
    """Restore the newest step; return its number, and the names of the arrays with wrong bytes."""
    with manager_of(slow, fast, hosts, options or {}) as manager:
        found = manager.restore({"state": state_of(0)}, step)["state"]
        assert manager.restored_step is not None
        wrong = [name for name in SHAPES if not holds(found[name], values_of(name, manager.restored_step))]
        return [manager.restored_step, wrong]


def restores_without_network(slow: str, fast: str, hosts: list[str], process: int) -> int | None:
    """Restore the newest step while a process does not reach the others; return its number."""
    with manager_of(slow, fast, hosts, {"redundancy": "none", "timeout_s": 2.0}) as manager:
        if jax.process_index() == process:
            peers.Peer._connect = _refuse_connection  # type: ignore[method-assign]
        try:
            manager.restore({"state": state_of(0)})
            return manager.restored_step
        finally:
            peers.Peer._connect = _CONNECT  # type: ignore[method-assign]


_CONNECT = peers.Peer._connect


def _refuse_connection(peer: peers.Peer) -> peers.Connection:
    raise TimeoutError


def saves_if_the_name_of_a_host_is_loopback_there(slow: str, fast: str) -> list[str]:
    """As `save_steps`; for process 0, the name of its host is 127.0.1.1."""
    found, process = fast_steps.coordinator_host, jax.process_index()
    fast_steps.coordinator_host = lambda: found() if process else "127.0.1.1"
    try:
        return save_steps(slow, fast, [1])
    finally:
        fast_steps.coordinator_host = found


def save_on_mesh(slow: str, fast: str, mesh: list[int]) -> None:
    """Save step 11 to the fast tier, from a mesh of two dimensions."""
    with manager_of(slow, fast, None, {}) as manager:
        assert manager.save(11, {"state": mesh_state(11, mesh)}, fast_only=True).saved


def restore_on_mesh(slow: str, fast: str, mesh: list[int]) -> list[Any]:
    """As `restore`, to a mesh of two dimensions."""
    with manager_of(slow, fast, None, {}) as manager:
        found = manager.restore({"state": mesh_state(0, mesh)})["state"]
        return [manager.restored_step, [name for name in SHAPES if not holds(found[name], values_of(name, 11))]]


def drained_by(slow: str, fast: str, hosts: list[str]) -> list[list[str]]:
    """Return which files of the newest step each process would copy to the slow tier."""
    with manager_of(slow, fast, hosts, {"redundancy": "none"}) as manager:
        manager.restore({"state": state_of(0)})
        assert manager._fast is not None
        name = manager._fast._run.fast_line()[-1].name
        return list(manager._fast.paths_by_process(name, jax.process_count()).values())


class HangingStorage(LocalBackend):
    """No file of a step can be created below a folder until `go` is set."""

    def __init__(self, folder: str) -> None:
        self._folder, self.go = folder, threading.Event()

    def create(self, path: str, *, direct: Any) -> Any:
        if path.startswith(f"{self._folder}/") and "step-" in path:
            self.go.wait()
        return super().create(path, direct=direct)


def saves_while_the_storage_hangs(slow: str, fast: str) -> list[int]:
    """Save a step to both tiers, and one to the fast tier while the copy of the first one hangs; return the latter."""
    storage, host = HangingStorage(slow), domain(fast, None)
    tier = jct.FastTierSettings(directory=f"{fast}/{host}", failure_domain=host, interval_steps=1)
    settings = jct.StoreSettings(io_threads=1)
    with jct.StepManager(slow, fast_tier=tier, settings=settings, backend=storage) as manager:
        try:
            manager.save(10, {"state": state_of(10)})
            manager.save(11, {"state": state_of(11)}, fast_only=True)
            assert manager.settle(30.0, waits_for_copies=False) is None
            return manager.fast_steps
        finally:
            storage.go.set()


BASE = np.arange(1 << 21, dtype=np.int32).reshape(8, -1)


def saves_frozen(
    slow: str,
    fast: str,
    steps: list[int],
    options: dict[str, Any] | None = None,
    restored: int | None = None,
    rots: int | None = None,
) -> list[int]:
    """Save steps of which only a small part changes; return the links of each large file here, in the newest step.

    `restored`: first restore the newest step, which is this one. `rots`: after this step, process 1 damages its file.
    """
    base = jax.make_array_from_callback(BASE.shape, sharding_of([jax.device_count()], ["x"]), BASE.__getitem__)
    host = domain(fast, None)
    tier = jct.FastTierSettings(directory=f"{fast}/{host}", failure_domain=host, interval_steps=1, **(options or {}))
    with jct.StepManager(slow, fast_tier=tier, frozen="base") as manager:
        if restored is not None:
            manager.restore({"state": {"base": base, "lora": np.zeros(9, np.int64)}})
            assert manager.restored_step == restored
        for step in steps:
            state = {"state": {"base": base, "lora": np.full(9, step)}}
            assert manager.save(step, state, force=True, fast_only=step % 10 != 0).saved
            manager.wait()
            if step == rots and jax.process_index() == 1:
                damage_frozen(fast, 1, step)
    (newest,) = Path(fast, host).glob(f"run-*/step-{steps[-1]:010}*")
    found = [file.stat() for file in newest.rglob("*.safetensors")]
    return [each.st_nlink for each in found if each.st_size >= 1 << 20]


def damage_frozen(fast: str, process: int, step: int) -> None:
    """Change the last byte of the large file that a process has written, on its host, under all names of the file."""
    (folder,) = Path(fast, f"host{process}").glob(f"run-*/step-{step:010}*/state")
    (file,) = (each for each in folder.glob(f"p{process:05}-*") if each.stat().st_size >= 1 << 20)
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        last = opened.read(1)
        opened.seek(-1, 2)
        opened.write(bytes([last[0] ^ 1]))


def restores_frozen(slow: str, fast: str, options: dict[str, Any] | None = None) -> list[Any]:
    """Restore the newest of these steps; return its number, and whether all bytes are right."""
    with manager_of(slow, fast, None, options or {}) as manager:
        found = manager.restore({"state": {"base": np.zeros_like(BASE), "lora": np.zeros(9, np.int64)}})["state"]
        step = manager.restored_step
        return [step, bool(np.array_equal(found["base"], BASE) and (found["lora"] == step).all())]


def continues(slow: str, fast: str, steps: list[int], hosts: list[str] | None = None) -> list[Any]:
    """Restore, drain what was restored, and save steps; return the step, and the steps of both tiers in the end."""
    with manager_of(slow, fast, hosts, {}) as manager:
        manager.restore({"state": state_of(0)})
        manager.own()
        manager.drain_newest()
        for step in steps:
            assert manager.save(step, {"state": state_of(step)}).saved
        manager.wait()
        tiers = manager._job_sync.on_primary("looking", lambda: [manager.steps, manager.fast_steps])
        return [manager.restored_step, *tiers]


def train(slow: str, fast: str, log: str, options: dict[str, Any]) -> None:
    """Restore the newest step and check its bytes, then save steps until the process is killed.

    `log`: a file that receives a line for each restored and each acknowledged step.
    """
    with manager_of(slow, fast, None, options) as manager, Path(log).open("a") as lines:

        def note(what: str, step: int) -> None:
            if manager.is_primary:
                lines.write(f"{what} {step}\n")
                lines.flush()

        step = 0
        try:
            found = manager.restore({"state": state_of(0)})["state"]
        except jct.StepNotFoundError:
            note("restored", 0)
        else:
            step = int(manager.restored_step or 0)
            wrong = [name for name in SHAPES if not holds(found[name], values_of(name, step))]
            note(f"wrong {wrong}" if wrong else "restored", step)
        while True:
            step += 1
            manager.save(step, {"state": state_of(step)}, force=True, fast_only=step % 10 != 0)
            manager.wait()
            note("saved", step)


def warnings(slow: str, fast: str, redundancy: str) -> list[str]:
    """Join the hosts of a run, and return the warnings."""
    found = list[logging.LogRecord]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = found.append  # type: ignore[method-assign]
    logger = logging.getLogger("jaxckpt_train")
    logger.addHandler(handler)
    with manager_of(slow, fast, None, {"redundancy": redundancy}) as manager:
        manager.own()
    logger.removeHandler(handler)
    return [record.getMessage() for record in found]


def shares(slow: str, fast: str, hosts: list[str], directories: list[str]) -> None:
    """Save a step, with a directory for each process."""
    process = jax.process_index()
    tier = jct.FastTierSettings(directory=directories[process], failure_domain=hosts[process])
    with jct.StepManager(slow, fast_tier=tier) as manager:
        manager.save(1, {"state": state_of(1)})


def loop(slow: str, fast: str, steps: int, options: dict[str, Any]) -> list[Any]:
    """Train with a callback; return the restored step, and a digest of the last state."""
    host = domain(fast, None)
    tier = {"directory": f"{fast}/{host}", "interval_steps": 2, "failure_domain": host}
    with jct.CheckpointCallback(slow, fast_tier=tier, **options) as ckpt:
        state, data = ckpt.resume(training.start(), iter(training.dataset(10_000)))
        started = ckpt.completed_steps
        for _ in ckpt.steps(steps):
            state, _ = training.train_step(state, training.global_batch(data))
            ckpt(state)
    return [started, digest_of({name: state[name] for name in ("w", "b", "seen")})]


def breaks(slow: str, fast: str, end: int) -> list[int]:
    """Train with a callback, which saves each second step, until a `break` after a step; return the slow steps."""
    host = domain(fast, None)
    tier = {"directory": f"{fast}/{host}", "interval_steps": 2, "failure_domain": host}
    with jct.CheckpointCallback(slow, save_interval_steps=10, fast_tier=tier) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(100):
            ckpt(state_of(step + 1))
            if step + 1 == end:
                break
    return jct.StepManager(slow).steps


def drops(slow: str, fast: str) -> list[bool]:
    """Drop a manager without closing it; return whether its files were served before and afterwards."""
    manager = manager_of(slow, fast, None, {})
    manager.save(1, {"state": state_of(1)}, fast_only=True)
    manager.wait()
    assert manager._fast is not None
    server = manager._fast.tier._server
    assert server is not None
    found = [is_served(server.address)]
    manager.on_all("meeting", lambda: None)  # the other process has tried its own, too
    del manager
    gc.collect()
    return [*found, is_served(server.address)]


def is_served(address: tuple[str, int]) -> bool:
    """Return whether a connection to an address is accepted."""
    try:
        socket.create_connection(address, 5).close()
    except OSError:
        return False
    return True


class Files:
    """An object that writes the same file in every process, into a folder of its own."""

    def __init__(self, step: int) -> None:
        self.step = step

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            (directory.path / "folder").mkdir(exist_ok=True)
            (directory.path / "folder" / "data.bin").write_bytes(bytes([self.step]) * 4000)

        return write()

    async def load(self, directory: Path) -> Any:
        async def read() -> None:
            data = (directory / "folder" / "data.bin").read_bytes()
            self.step = data[0] if data == data[:1] * 4000 else -1

        return read()


def saves_own_files(
    slow: str, fast: str, hosts: list[str] | None, steps: list[int], options: dict[str, Any]
) -> list[str]:
    """Save an object that writes its own files; return those of the steps on this host."""
    with manager_of(slow, fast, hosts, options) as manager:
        for step in steps:
            manager.save(step, {"state": state_of(step), "own": Files(step)}, fast_only=step % 10 != 0)
            manager.wait()
    return sorted(path.name for path in Path(fast, domain(fast, hosts)).rglob("*.bin"))


def restores_own_files(slow: str, fast: str, options: dict[str, Any]) -> list[Any]:
    """Restore this object; return the step, and that of the bytes that the object has read."""
    own = Files(0)
    with manager_of(slow, fast, None, options) as manager:
        manager.restore({"state": state_of(0), "own": own})
        return [manager.restored_step, own.step]


def sees_another_disk(slow: str, fast: str) -> None:
    """Save a step; process 1 is on the same machine, but in a container that does not see the marks of others."""
    manager = manager_of(slow, fast, ["a", "a"], {})
    assert manager._fast is not None
    files = manager._fast.tier.files
    if jax.process_index():
        files.list = lambda path: []  # type: ignore[method-assign]
    with manager:
        manager.save(1, {"state": state_of(1)})


def owns(slow: str, fast: str, steps: list[int], options: dict[str, Any]) -> list[Any]:
    """Own a run, restore it and save steps, as a loop does; return the restored step, and the arrays with wrong bytes.

    The last item has the names of the directories of steps on this host in the end.
    """
    with manager_of(slow, fast, None, options) as manager:
        manager.own()
        found, restored = manager.restore({"state": state_of(0)})["state"], int(manager.restored_step or 0)
        wrong = [name for name in SHAPES if not holds(found[name], values_of(name, restored))]
        for step in steps:
            assert manager.save(step, {"state": state_of(step)}, fast_only=True).saved
            manager.wait()
    left = Path(fast, domain(fast, None)).glob("run-*/step-*")
    return [restored, wrong, sorted(int(each.name[5:15]) for each in left)]


def in_racks(slow: str, fast: str, racks: list[str], step: int | None) -> list[Any] | None:
    """Save a step, or restore (None), as if each process were on a machine of its own, in one of these racks."""
    options, machine_id = {"failure_domain": racks[jax.process_index()]}, fast_tier.machine_id
    fast_tier.machine_id = lambda: f"machine{jax.process_index()}"
    try:
        if step is None:
            return restore(slow, fast, None, options)
        save_steps(slow, fast, [step], None, options)
        return None
    finally:
        fast_tier.machine_id = machine_id


def joins_with(slow: str, fast: str, redundancy: list[str]) -> None:
    """Own a run, with another redundancy in each process."""
    with manager_of(slow, fast, None, {"redundancy": redundancy[jax.process_index()]}) as manager:
        manager.own()


def owns_with_a_refusal(slow: str, fast: str, process: int) -> None:
    """Own a run; what an interrupted save has left on the host of a process is in use there."""
    manager = manager_of(slow, fast, None, {})
    assert manager._fast is not None
    tier = manager._fast.tier
    Path(tier.directory, ".step-0000000001.tmp").mkdir(parents=True)
    if jax.process_index() == process:
        remove = tier.files.remove

        def refuse(path: str) -> None:
            if "/.step-" in path:
                raise jct.StorageError(errno.EBUSY, "Device or resource busy", path)
            remove(path)

        tier.files.remove = refuse  # type: ignore[method-assign]
    with manager:
        manager.own()


def saves_with_a_refusal(slow: str, fast: str, process: int) -> None:
    """Save a step; the disk of a process is read-only by then."""
    manager = manager_of(slow, fast, None, {})
    assert manager._fast is not None
    files = manager._fast.tier.files
    manager.own()
    if jax.process_index() == process:
        make = files.make_directory

        def refuse(path: str, *, parents: bool, sync: bool) -> None:
            if "/.step-" in path:
                raise jct.StorageError(errno.EROFS, "Read-only file system", path)
            make(path, parents=parents, sync=sync)

        files.make_directory = refuse  # type: ignore[method-assign]
    with manager:
        manager.save(1, {"state": state_of(1)})
        manager.wait()


def marks_with_token(slow: str, fast: str) -> list[int]:
    """Join a fast tier; return how many names of files others may see meanwhile, and how many contain the token."""
    with manager_of(slow, fast, None, {}) as manager:
        assert manager._fast is not None
        tier, seen = manager._fast.tier, set[str]()
        listed = tier.files.list

        def list_and_note(path: str) -> list[Entry]:
            found = listed(path)
            seen.update(entry.name for entry in found)
            return found

        tier.files.list = list_and_note  # type: ignore[method-assign]
        manager.own()
        assert tier._server is not None
        return [len(seen), sum(tier._server._token.hex() in name for name in seen)]


def saves_often(slow: str, fast: str, saves: int, mib: int, options: dict[str, Any]) -> list[dict[str, int]]:
    """Save changing states of `mib` MiB per process; return memory, threads and open files after each tenth save.

    The memory is what the process has in addition to its state: `resident` at that moment, `peak` since the row before.
    """
    shape, sharding = (mib * jax.device_count(), 1 << 18), sharding_of([jax.device_count()], ["x"])
    state = {"w": jax.make_array_from_callback(shape, sharding, lambda at: np.zeros((mib, 1 << 18), np.float32))}
    update = jax.jit(lambda state: {"w": state["w"] + 1}, donate_argnums=0)
    state = jax.block_until_ready(update(state))
    rows, meter = list[dict[str, int]](), ResidentMeter()
    before = meter.read().before
    with manager_of(slow, fast, None, options) as manager:
        for step in range(1, saves + 1):
            state = update(state)
            assert manager.save(step, {"state": state}, force=True, fast_only=step % 50 != 0).saved
            manager.wait()
            if step % 10 == 0:
                found, files = meter.read(), len(list(Path("/proc/self/fd").iterdir()))
                memory = {"resident": found.final - before, "peak": found.peak - before}
                rows.append({**memory, "threads": threading.active_count(), "files": files})
                meter = ResidentMeter()
        restored = manager.restore({"state": state})["state"]["w"]
        assert float(restored.min()) == float(restored.max()) == saves + 1
    return rows
