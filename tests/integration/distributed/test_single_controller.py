"""A single controller whose hosts are separate processes: the hosts write and read, and the controller commits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.pytree.colocated import transfer
from jaxckpt_train.store import threads
from tests.support.colocated_states import HOSTS, MIB, PLAIN, abstract, spread, written_by
from tests.support.jobs.arrays import global_array, values_of
from tests.support.jobs.controller import HostProcess, controlled
from tests.support.jobs.fixtures import JobOf
from tests.support.same_trees import assert_same

FOUR = 4


def state() -> dict[str, Any]:
    value = np.random.default_rng(0).integers(0, 100, (256, 64)).astype(np.float32)
    return {
        "rows": spread(value, (FOUR,), "x"),
        "all": spread(np.tile(value, (64, 4)), (FOUR,)),
        "half": spread(value.astype(jnp.bfloat16), (2, 2), None, "y"),
        "step": spread(np.int32(3), (FOUR,)),
        "one": jax.device_put(value[0], jax.devices()[2]),
        "numpy": value[1],
    }


@pytest.fixture(autouse=True)
def _cuts_of_a_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small arrays as large ones are cut."""
    monkeypatch.setattr(transfer, "LEAST_CUT_BYTES", MIB)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[jax.Device, HostProcess]]:
    folder = tmp_path_factory.mktemp("hosts")
    found = {device: HostProcess(str(folder / str(device.id))) for device in jax.devices()[:FOUR]}
    yield found
    for host in found.values():
        host.end()


def test_each_host_writes_and_reads_its_shards(tmp_path: Path, hosts: dict[jax.Device, HostProcess]) -> None:
    tree = state()
    with controlled(hosts):
        jct.save(tmp_path / "c", tree, settings=jct.StoreSettings(colocated=True))
        assert all("write_here" in host.calls and "read_here" not in host.calls for host in hosts.values())
        assert_same(jct.load(tmp_path / "c", like=abstract(tree), settings=HOSTS), tree)
        assert all(host.calls.count("read_here") == 1 for host in hosts.values())
    assert set(written_by(tmp_path / "c")) == {0, 1, 2, 3, 4}
    assert jct.verify(tmp_path / "c").ok
    assert_same(jct.load(tmp_path / "c", like=abstract(tree)), tree)


def test_host_reads_within_budget(tmp_path: Path, hosts: dict[jax.Device, HostProcess]) -> None:
    tree = {str(number): spread(np.full((FOUR, 100_000), number, np.float32), (FOUR,), "x") for number in range(6)}
    before = [host.calls.count("read_here") for host in hosts.values()]
    with controlled(hosts):
        jct.save(tmp_path / "c", tree, settings=HOSTS)
        little = jct.StoreSettings(colocated=True, read_budget_bytes=1 << 20)
        assert_same(jct.load(tmp_path / "c", like=abstract(tree), settings=little), tree)
    after = [host.calls.count("read_here") for host in hosts.values()]
    assert [now - then for now, then in zip(after, before, strict=True)] == [3] * FOUR  # of two boxes of 400 kB each


def test_hosts_load_what_another_process_saved(tmp_path: Path, hosts: dict[jax.Device, HostProcess]) -> None:
    tree = state()
    jct.save(tmp_path / "c", tree, settings=PLAIN)
    target = {**abstract(tree), "rows": spread(np.zeros((256, 64), np.float32), (2, 2), "y", "x")}
    with controlled(hosts):
        loaded = jct.load(tmp_path / "c", like=target, settings=HOSTS)
    assert_same(loaded, {**tree, "rows": jax.device_put(np.asarray(tree["rows"]), target["rows"].sharding)})


def save_in_job(path: str) -> None:
    jct.save(path, {"w": global_array([64, 6], [4], ["x"])})


def refused_in_job(path: str) -> str:
    with pytest.raises(jct.SettingsError, match=r"this job has 4 processes"):
        jct.save(path, {"w": global_array([64, 6], [4], ["x"])}, settings=jct.StoreSettings(colocated=True))
    return "refused"


def test_hosts_and_multi_process_jobs_exchange_checkpoints(
    tmp_path: Path, hosts: dict[jax.Device, HostProcess], job_of: JobOf
) -> None:
    job = job_of(FOUR, 1)
    job.call(save_in_job, str(tmp_path / "c"))
    target = spread(np.zeros((64, 6), np.float32), (FOUR,), "x")
    with controlled(hosts):
        loaded = jct.load(tmp_path / "c", like={"w": target}, settings=HOSTS)
        jct.save(tmp_path / "back", loaded, settings=HOSTS)
    assert_same(loaded["w"], jax.device_put(values_of([64, 6]), target.sharding))
    assert job.call(load_in_job, str(tmp_path / "back")) == [True] * FOUR


def load_in_job(path: str) -> bool:
    wanted = global_array([64, 6], [4], ["x"])
    found = jct.load(path, like={"w": wanted})["w"]
    pairs = zip(found.addressable_shards, wanted.addressable_shards, strict=True)
    return all(np.asarray(mine.data).tobytes() == np.asarray(theirs.data).tobytes() for mine, theirs in pairs)


def test_multi_process_job_refuses_colocated_saves(tmp_path: Path, job_of: JobOf) -> None:
    assert job_of(FOUR, 1).call(refused_in_job, str(tmp_path / "c")) == ["refused"] * FOUR


def test_host_that_cannot_write_is_named(tmp_path: Path, hosts: dict[jax.Device, HostProcess]) -> None:
    small = HostProcess(str(tmp_path / "socket"), most_file_bytes=1 << 20)
    third = jax.devices()[2]
    try:
        with (
            controlled({**hosts, third: small}),
            pytest.raises(jct.StorageError, match=rf"host \S+ \(of cpu:2, process {small.process.pid}\)") as raised,
        ):
            jct.save(tmp_path / "run" / "c", state(), settings=HOSTS)
    finally:
        small.end()
    assert raised.value.errno is not None
    assert "p00003-s000.safetensors" in str(raised.value.filename)
    assert list((tmp_path / "run").iterdir()) == []


def test_host_that_dies_fails_save_and_is_named(tmp_path: Path, hosts: dict[jax.Device, HostProcess]) -> None:
    lost = HostProcess(str(tmp_path / "socket"))
    lost.process.send_signal(signal.SIGSTOP)  # it takes the call, and never answers
    second = jax.devices()[1]
    try:
        with controlled({**hosts, second: lost}):
            pending = jct.save_async(tmp_path / "run" / "c", state(), settings=HOSTS)
            assert lost.is_called.wait(60)
            assert not pending.committed.done()
            lost.process.kill()
            with pytest.raises(jct.OtherProcessError, match=r"cpu:1, .*UNAVAILABLE"):
                pending.wait()
    finally:
        lost.end()
    assert list((tmp_path / "run").iterdir()) == []


def test_load_from_stopped_host_times_out(
    tmp_path: Path, hosts: dict[jax.Device, HostProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = state()
    jct.save(tmp_path / "c", tree, settings=PLAIN)
    stopped = HostProcess(str(tmp_path / "socket"))
    stopped.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(threads, "GIVE_UP_S", 5.0)
    try:
        with (
            controlled({**hosts, jax.devices()[3]: stopped}),
            pytest.raises(jct.CheckpointTimeoutError, match=r"/c: jaxckpt-hosts: .* 5 s"),
        ):
            jct.load(tmp_path / "c", like=abstract(tree), settings=HOSTS)
    finally:
        stopped.end()


def test_hosts_report_their_progress(tmp_path: Path, hosts: dict[jax.Device, HostProcess]) -> None:
    """Progress of a slow host counts, so that its save does not time out."""
    from jaxckpt_train.pytree.colocated.transfer import ProgressPoller

    with controlled(hosts):
        asking = ProgressPoller({0: jax.devices()[0], 1: jax.devices()[1]})
        first = asking.ask()
        assert asking.ask() == first
        jct.save(tmp_path / "c", state(), settings=HOSTS)
        assert asking.ask() == first + 2
