"""The fast tier of jobs: lost hosts, other numbers of hosts, damaged copies."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from jaxckpt_train.store.manifest import COMMIT_NAME, MANIFEST_NAME
from jaxckpt_train.tiers.host_files import LAYOUT_NAME
from tests.support.commands import json_of
from tests.support.jobs import fast
from tests.support.jobs.fixtures import JobOf
from tests.support.jobs.job import Job

HOSTS = 4


@contextlib.contextmanager
def lost(tier: Path, hosts: Sequence[str]) -> Iterator[None]:
    """Take the directories of these hosts away meanwhile."""
    kept = tier.with_name("kept")
    kept.mkdir()
    for host in hosts:
        (tier / host).rename(kept / host)
    try:
        yield
    finally:
        for host in hosts:
            shutil.rmtree(tier / host, ignore_errors=True)
            (kept / host).rename(tier / host)
        kept.rmdir()


def places(tmp_path: Path) -> tuple[str, str]:
    return str(tmp_path / "slow"), str(tmp_path / "fast")


def saved(job: Job, tmp_path: Path, steps: Sequence[int], redundancy: str, hosts: list[str] | None = None) -> None:
    job.call(fast.save_steps, *places(tmp_path), [*steps], hosts, {"redundancy": redundancy})


def restored(job: Job, tmp_path: Path, redundancy: str = "partner", hosts: list[str] | None = None) -> int:
    """Restore the newest step, with the right bytes in all processes; return its number."""
    answers = job.call(fast.restore, *places(tmp_path), hosts, {"redundancy": redundancy})
    assert answers == [[answers[0][0], []]] * job.processes
    return int(answers[0][0])


@pytest.mark.parametrize("redundancy", ["partner", "xor", "p+q"])
def test_any_lost_hosts(job_of: JobOf, tmp_path: Path, redundancy: str) -> None:
    job, tier = job_of(HOSTS, 1), tmp_path / "fast"
    saved(job, tmp_path, [9, 10, 11, 12], redundancy)
    names = [f"host{number}" for number in range(HOSTS)]
    for host in names:
        with lost(tier, [host]):
            assert restored(job, tmp_path, redundancy) == 12
    for pair in itertools.combinations(names, 2):
        apart = (int(pair[1][-1]) - int(pair[0][-1])) % HOSTS not in (1, HOSTS - 1)
        survives = redundancy == "p+q" or (redundancy == "partner" and apart)
        with lost(tier, pair):
            assert restored(job, tmp_path, redundancy) == (12 if survives else 10)
    with lost(tier, names[1:]):
        assert restored(job, tmp_path, redundancy) == 10


@pytest.mark.parametrize("redundancy", ["none", "partner", "xor"])
def test_everything_is_synced_before_a_host_publishes(job_of: JobOf, tmp_path: Path, redundancy: str) -> None:
    answers = job_of(4, 1).call(fast.syncs, *places(tmp_path), ["a", "a", "b", "b"], redundancy)
    here = {name for _, names in answers for name in names}
    assert {Path(name).name for name in here} >= {COMMIT_NAME, MANIFEST_NAME, LAYOUT_NAME, "state"}
    assert here - {name for synced, _ in answers for name in synced} == set()


def test_ls_says_what_a_host_does_not_have(job_of: JobOf, tmp_path: Path) -> None:
    saved(job_of(HOSTS, 1), tmp_path, [10, 11], "partner")
    for host in range(HOSTS):
        found = json_of("ls", tmp_path / "slow", "--fast-tier", tmp_path / "fast" / f"host{host}")["steps"]
        assert [(each["step"], each["tier"]) for each in found] == [(10, "both"), (11, "fast")]
        assert 0 < found[1]["absent_files"] <= HOSTS - 2  # it has its own files, and a copy of its neighbour's
        assert found[1]["bytes"] == found[0]["bytes"]


@pytest.mark.parametrize("redundancy", ["partner", "xor"])
def test_copies_and_parity_are_no_faster_than_their_limit(job_of: JobOf, tmp_path: Path, redundancy: str) -> None:
    steps, options = range(1, 31), {"redundancy": redundancy, "max_bytes_per_s": 1 << 20}
    start = time.monotonic()
    job_of(2, 1).call(fast.save_steps, *places(tmp_path), [*steps], None, options)
    read = (len(steps) - 1) * fast.values_of("rows", 1).nbytes // 2
    assert time.monotonic() - start > read / (1 << 20)


def test_job_without_most_hosts_deletes_no_steps_of_theirs(job_of: JobOf, tmp_path: Path) -> None:
    """It begins from scratch, as the run has no other step. With all hosts, the newest step is found again."""
    job = job_of(HOSTS, 1)
    saved(job, tmp_path, [1, 2], "partner")
    shutil.copytree(tmp_path / "fast", tmp_path / "all")
    for host in ("host1", "host2"):
        shutil.rmtree(tmp_path / "fast" / host)
    saved(job, tmp_path, [1], "partner")
    for host in ("host0", "host3"):
        assert any("0000000002" in path.name for path in (tmp_path / "fast" / host).glob("run-*/step-*"))


def test_too_few_hosts_for_parity_get_copies_and_a_warning(job_of: JobOf, tmp_path: Path) -> None:
    (warning,), others = job_of(2, 1).call(fast.warnings, *places(tmp_path), "p+q")
    assert "copies" in warning
    assert others == []


def test_without_redundancy_each_host_is_needed(job_of: JobOf, tmp_path: Path) -> None:
    job = job_of(HOSTS, 1)
    saved(job, tmp_path, [10, 11], "none")
    assert restored(job, tmp_path, "none") == 11
    with lost(tmp_path / "fast", ["host2"]):
        assert restored(job, tmp_path, "none") == 10


@pytest.mark.parametrize("process", [0, 2])
def test_host_that_does_not_answer_costs_no_step(job_of: JobOf, tmp_path: Path, process: int) -> None:
    """It may answer the next job: the older steps, which need no other host, are not restored meanwhile."""
    job, hosts = job_of(HOSTS, 1), ["host1", "host0", "host3", "host2"]  # each needs what another one has
    saved(job, tmp_path, [9, 10, 11], "none")
    answers = job.outcomes(fast.restores_without_network, *places(tmp_path), hosts, process)
    assert all("StorageError" in each["error"] for each in answers), answers
    assert restored(job, tmp_path, "none", hosts) == 11


@pytest.mark.parametrize("redundancy", ["partner", "xor", "p+q"])
@pytest.mark.parametrize("processes", [3, 5])
def test_other_number_of_hosts(job_of: JobOf, tmp_path: Path, redundancy: str, processes: int) -> None:
    saved(job_of(HOSTS, 3), tmp_path, [10, 11], redundancy)
    hosts = [f"host{number}" for number in (3, 0, 2, 5, 6)][:processes]  # another order, one lost, some new
    devices = {3: 4, 5: 1}[processes]
    with lost(tmp_path / "fast", ["host1"]):
        assert restored(job_of(processes, devices), tmp_path, redundancy, hosts) == 11


@pytest.mark.parametrize("redundancy", ["partner", "xor", "p+q"])
def test_hosts_with_several_processes(job_of: JobOf, tmp_path: Path, redundancy: str) -> None:
    job, hosts = job_of(HOSTS, 1), ["host0", "host0", "host1", "host1"]
    saved(job, tmp_path, [10, 11], redundancy, hosts)
    for host in ("host0", "host1"):
        with lost(tmp_path / "fast", [host]):
            assert restored(job, tmp_path, redundancy, hosts) == 11


@pytest.mark.parametrize("redundancy", ["partner", "xor", "p+q"])
def test_damaged_bytes_come_from_elsewhere(job_of: JobOf, tmp_path: Path, redundancy: str) -> None:
    job, chosen = job_of(HOSTS, 1), random.Random(7)
    saved(job, tmp_path, [10, 11], redundancy)
    files = [each for each in sorted((tmp_path / "fast").rglob("*")) if each.is_file() and "0011" in str(each)]
    for file in files:
        whole = file.read_bytes()
        for damage in ("flip", "cut", "gone"):
            at = chosen.randrange(len(whole) or 1)
            if damage == "flip":
                file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chosen.randrange(8)]) + whole[at + 1 :])
            elif damage == "cut":
                file.write_bytes(whole[:at])
            else:
                file.unlink()
            assert restored(job, tmp_path, redundancy) == 11, f"{damage} at {at} of {file}"
            file.write_bytes(whole)


@pytest.mark.parametrize("name", [COMMIT_NAME, MANIFEST_NAME, LAYOUT_NAME])
def test_host_with_damaged_metadata_still_gives_its_files(job_of: JobOf, tmp_path: Path, name: str) -> None:
    job, tier = job_of(HOSTS, 1), tmp_path / "fast"
    saved(job, tmp_path, [10, 11], "partner")
    for damaged, gone in itertools.permutations(range(HOSTS), 2):
        (file,) = tier.glob(f"host{damaged}/run-*/step-*0011.*/{name}")
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with lost(tier, [f"host{gone}"]):
            assert restored(job, tmp_path) == 11
        file.write_bytes(whole)


def test_owner_uses_the_files_of_a_host_that_lost_only_its_commit(job_of: JobOf, tmp_path: Path) -> None:
    job, tier = job_of(HOSTS, 1), tmp_path / "fast"
    saved(job, tmp_path, [10, 11], "partner")
    (commit,) = tier.glob(f"host2/run-*/step-*0011.*/{COMMIT_NAME}")
    commit.unlink()
    shutil.rmtree(tier / "host1")
    answers = job.call(fast.owns, *places(tmp_path), [12, 13], {"keep": 2})
    assert answers == [[11, [], [12, 13]]] * HOSTS


def test_what_is_left_of_lost_steps_is_removed(job_of: JobOf, tmp_path: Path) -> None:
    job = job_of(HOSTS, 1)
    saved(job, tmp_path, [10, 11], "partner")
    for host in ("host1", "host2"):
        shutil.rmtree(tmp_path / "fast" / host)
    answers = job.call(fast.owns, *places(tmp_path), [11], {"keep": 5})
    assert answers == [[10, [], [11]]] * HOSTS


def test_first_update_after_a_restore_renews_copies(job_of: JobOf, tmp_path: Path) -> None:
    job, tier = job_of(HOSTS, 1), tmp_path / "fast"
    arguments = (*places(tmp_path), 5, {"save_interval_steps": 100, "save_on_exit": False})
    job.call(fast.loop, *arguments)  # it saves steps 2 and 4
    for host, step in (("host1", 4), ("host2", 5), ("host0", 5)):
        with lost(tier, [host]):
            assert job.call(fast.loop, *arguments)[0][0] == step
            kept = shutil.copytree(tier / host, tmp_path / host)
        shutil.rmtree(tier / host)
        kept.rename(tier / host)


def test_next_job_continues_after_the_fast_step(job_of: JobOf, tmp_path: Path) -> None:
    job = job_of(HOSTS, 1)
    saved(job, tmp_path, [10, 11], "partner")
    answers = job.call(fast.continues, *places(tmp_path), [12, 13, 20, 21])
    assert answers == [[11, [10, 11, 20], [20, 21]]] * HOSTS
    assert restored(job, tmp_path) == 21


def test_hosts_that_return_with_later_steps_refuse_no_saves(job_of: JobOf, tmp_path: Path) -> None:
    saved(job_of(HOSTS, 1), tmp_path, [10, 11, 12, 13], "partner")
    for steps, expected in (([11], [10, [10], [11]]), ([], [11, [10, 11], [11]])):
        answers = job_of(2, 1).call(fast.continues, *places(tmp_path), steps, ["other0", "other1"])
        assert answers == [expected] * 2
    answers = job_of(HOSTS, 1).call(fast.continues, *places(tmp_path), [12, 13])
    assert answers == [[11, [10, 11], [12, 13]]] * HOSTS
    assert restored(job_of(HOSTS, 1), tmp_path) == 13


def test_directory_that_hosts_share_is_refused(job_of: JobOf, tmp_path: Path) -> None:
    slow, tier = places(tmp_path)
    outcomes = job_of(2, 1).outcomes(fast.shares, slow, tier, ["a", "b"], [tier, tier])
    assert all("SettingsError" in each["error"] and "shared by several hosts" in each["error"] for each in outcomes)


def test_one_host_with_two_directories_is_refused(job_of: JobOf, tmp_path: Path) -> None:
    slow, tier = places(tmp_path)
    outcomes = job_of(2, 1).outcomes(fast.shares, slow, tier, ["a", "a"], [f"{tier}/0", f"{tier}/1"])
    assert all("SettingsError" in each["error"] and "failure_domain" in each["error"] for each in outcomes)


def test_loop_continues_from_a_run_that_has_only_fast_steps(job_of: JobOf, tmp_path: Path) -> None:
    slow, tier = places(tmp_path)
    job = job_of(HOSTS, 1)
    options = {"save_interval_steps": 100, "save_on_exit": False}
    first = job.call(fast.loop, slow, tier, 5, options)
    assert [each[0] for each in first] == [0] * HOSTS
    with lost(tmp_path / "fast", ["host1"]):
        second = job.call(fast.loop, slow, tier, 8, options)
    assert [each[0] for each in second] == [4] * HOSTS
    whole = job.call(fast.loop, f"{slow}-whole", f"{tier}-whole", 8, options)
    assert [each[1] for each in second] == [each[1] for each in whole]


def test_all_processes_copy_the_last_step_of_a_loop_that_ends_early(job_of: JobOf, tmp_path: Path) -> None:
    slow, tier = places(tmp_path)
    assert job_of(2, 1).call(fast.breaks, slow, tier, 6) == [[6]] * 2
    shutil.rmtree(tier)
    assert restored(job_of(2, 1), tmp_path) == 6


def test_storage_that_hangs_does_not_hold_up_fast_saves(job_of: JobOf, tmp_path: Path) -> None:
    assert job_of(2, 1).call(fast.saves_while_the_storage_hangs, *places(tmp_path)) == [[10, 11]] * 2


def test_copies_of_jobs_share_what_has_not_changed(job_of: JobOf, tmp_path: Path) -> None:
    job = job_of(2, 1)
    links = job.call(fast.saves_frozen, *places(tmp_path), [10, 20])
    assert links == [[2, 2]] * 2  # its own file and the copy, each in two steps
    drained = [file.stat() for file in (tmp_path / "slow").glob("step-*/*/*.safetensors")]
    assert [each.st_nlink for each in drained if each.st_size >= 1 << 20] == [2] * 4
    with lost(tmp_path / "fast", ["host0"]):
        assert job.call(fast.restores_frozen, *places(tmp_path)) == [[20, True]] * 2
    with lost(tmp_path / "fast", ["host0", "host1"]):
        assert job.call(fast.restores_frozen, *places(tmp_path)) == [[20, True]] * 2


@pytest.mark.parametrize("redundancy", ["partner", "xor", "p+q"])
def test_damaged_file_is_not_taken_over_after_a_restore(job_of: JobOf, tmp_path: Path, redundancy: str) -> None:
    job, options = job_of(HOSTS, 1), {"redundancy": redundancy}
    job.call(fast.saves_frozen, *places(tmp_path), [11, 12], options)
    fast.damage_frozen(str(tmp_path / "fast"), 1, 12)
    links = job.call(fast.saves_frozen, *places(tmp_path), [13, 14, 15], options, 12)
    assert {min(each) for each in links} == {2}  # all files are taken over, and step 13 has a new one of process 1
    for host in range(HOSTS):
        with lost(tmp_path / "fast", [f"host{host}"]):
            assert job.call(fast.restores_frozen, *places(tmp_path), options) == [[15, True]] * HOSTS


def test_damaged_file_is_not_taken_over_by_a_job_without_redundancy(job_of: JobOf, tmp_path: Path) -> None:
    job, options = job_of(HOSTS, 1), {"redundancy": "none"}
    job.call(fast.saves_frozen, *places(tmp_path), [11, 12])
    fast.damage_frozen(str(tmp_path / "fast"), 1, 12)
    job.call(fast.saves_frozen, *places(tmp_path), [13], options, 12)
    assert job.call(fast.restores_frozen, *places(tmp_path), options) == [[13, True]] * HOSTS


@pytest.mark.parametrize("redundancy", ["xor", "p+q"])
def test_parity_is_computed_from_intact_files(job_of: JobOf, tmp_path: Path, redundancy: str) -> None:
    job, options = job_of(HOSTS, 1), {"redundancy": redundancy}
    job.call(fast.saves_frozen, *places(tmp_path), [11, 12, 13, 14], options, None, 12)
    for host in range(HOSTS):
        with lost(tmp_path / "fast", [f"host{host}"]):
            assert job.call(fast.restores_frozen, *places(tmp_path), options) == [[14, True]] * HOSTS


def test_dropped_manager_stops_serving(job_of: JobOf, tmp_path: Path) -> None:
    assert job_of(2, 1).call(fast.drops, *places(tmp_path)) == [[True, False]] * 2


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "a"]])
def test_objects_that_write_their_own_files(job_of: JobOf, tmp_path: Path, hosts: list[str]) -> None:
    assert job_of(2, 1).call(fast.saves_own_files, *places(tmp_path), hosts, [1], {}) == [["data.bin"]] * 2


@pytest.mark.parametrize("redundancy", ["partner", "xor", "p+q"])
def test_objects_read_only_intact_files(job_of: JobOf, tmp_path: Path, redundancy: str) -> None:
    job, options = job_of(HOSTS, 1), {"redundancy": redundancy}
    job.call(fast.saves_own_files, *places(tmp_path), None, [10, 11], options)
    (file,) = (tmp_path / "fast" / "host0").rglob("step-*0011.*/own/folder/data.bin")
    whole = file.read_bytes()
    for damaged in (whole, b"?" + whole[1:], whole[:10], None):
        if damaged is None:
            file.unlink()
        else:
            file.write_bytes(damaged)
        answers = job.call(fast.restores_own_files, *places(tmp_path), options)
        assert answers == [[11, 11]] * HOSTS
    with lost(tmp_path / "fast", ["host1", "host2"] if redundancy == "p+q" else ["host1"]):
        answers = job.call(fast.restores_own_files, *places(tmp_path), options)
    assert answers == [[10, 10]] * HOSTS


def test_machines_of_one_rack_are_lost_together(job_of: JobOf, tmp_path: Path) -> None:
    job, racks = job_of(HOSTS, 1), ["a", "a", "b", "b"]
    job.call(fast.in_racks, *places(tmp_path), racks, 11)
    for rack in (["host0", "host1"], ["host2", "host3"]):
        with lost(tmp_path / "fast", rack):
            assert job.call(fast.in_racks, *places(tmp_path), racks, None) == [[11, []]] * HOSTS


def test_mixed_redundancy_is_refused_in_all_processes(job_of: JobOf, tmp_path: Path) -> None:
    outcomes = job_of(3, 1).outcomes(fast.joins_with, *places(tmp_path), ["partner", "partner", "xor"])
    assert all("SettingsError" in each["error"] for each in outcomes)
    assert all("process 2 has redundancy='xor'" in each["error"] for each in outcomes)


def test_containers_of_one_machine_are_refused_without_domains(job_of: JobOf, tmp_path: Path) -> None:
    outcomes = job_of(2, 1).outcomes(fast.sees_another_disk, *places(tmp_path))
    assert all("SettingsError" in each["error"] and "failure_domain" in each["error"] for each in outcomes)


@pytest.mark.parametrize("host", [0, 1])
def test_host_without_a_directory_fails_all_at_once(job_of: JobOf, tmp_path: Path, host: int) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / f"host{host}").write_text("not a directory")
    start = time.monotonic()
    outcomes = job_of(2, 1).outcomes(fast.restore, *places(tmp_path))
    assert all("StorageError" in each["error"] and f"fast/host{host}" in each["error"] for each in outcomes)
    assert time.monotonic() - start < fast.BARRIER_TIMEOUT_S


@pytest.mark.parametrize("host", [0, 1])
def test_host_that_cannot_clean_fails_all_at_once(job_of: JobOf, tmp_path: Path, host: int) -> None:
    start = time.monotonic()
    outcomes = job_of(2, 1).outcomes(fast.owns_with_a_refusal, *places(tmp_path), host)
    assert all("StorageError" in each["error"] and "Device or resource busy" in each["error"] for each in outcomes)
    assert time.monotonic() - start < fast.BARRIER_TIMEOUT_S


@pytest.mark.parametrize("host", [0, 1])
def test_host_that_refuses_a_save_names_the_reason_to_all(job_of: JobOf, tmp_path: Path, host: int) -> None:
    outcomes = job_of(2, 1).outcomes(fast.saves_with_a_refusal, *places(tmp_path), host)
    assert all("StorageError" in each["error"] and "Read-only" in each["error"] for each in outcomes), outcomes


def test_no_file_name_has_the_token(job_of: JobOf, tmp_path: Path) -> None:
    assert job_of(2, 1).call(fast.marks_with_token, *places(tmp_path)) == [[1, 0]] * 2


@pytest.mark.parametrize(("before", "after"), [((1, 8), (1, 8)), ((2, 4), (4, 2))])
def test_another_mesh_of_two_dimensions(
    job_of: JobOf, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    job_of(*before).call(fast.save_on_mesh, *places(tmp_path), [2, 4])
    with lost(tmp_path / "fast", ["host1"] if before[0] > 1 else []):
        answers = job_of(*after).call(fast.restore_on_mesh, *places(tmp_path), [4, 2])
    assert answers == [[11, []]] * after[0]


def test_each_host_drains_the_files_that_it_has(job_of: JobOf, tmp_path: Path) -> None:
    job = job_of(2, 1)
    saved(job, tmp_path, [11], "none")
    for paths in job.call(fast.drained_by, *places(tmp_path), ["host1", "host0"]):
        assert all("p00001" in path for path in paths[0])
        assert all("p00000" in path for path in paths[1])
        assert paths[0]
        assert paths[1]
