"""Loads that read once per job: the bytes, how many are read, the number of steps, and the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.distributed import shared_memory
from jaxckpt_train.pytree.redistribution import JobTransfer, Transfer
from jaxckpt_train.store.segment import DTYPES
from tests.support.jobs.arrays import global_array, sharding_of
from tests.support.jobs.counted_loads import (
    ARRAYS,
    MIB,
    SPECS,
    WAYS,
    Arrays,
    Count,
    apart,
    devices_in,
    holds,
    load_counted,
    load_counted_apart,
    patterned,
    save_alone,
    size_of,
    target_of,
)
from tests.support.jobs.fixtures import JobOf
from tests.support.tiers import nightly_after

OTHER_SPECS: dict[str, list[Any]] = {
    **SPECS, "columns": [None, ["x", "y"]], "grid": ["y", "x"], "rows": [None, "y"], "third": [["y", "x"]],
    "long": ["y"],
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "c"
    save_alone(str(path), ARRAYS)
    return path


def check(answers: list[dict[str, Any]], size: int) -> None:
    assert [answer["wrong"] for answer in answers] == [[]] * len(answers)
    assert sum(answer["bytes"] for answer in answers) <= 1.02 * size


JOBS = [(4, 1, [2, 2]), (4, 2, [4, 2]), (2, 4, [2, 4])]
PAIRS = [(WAYS[0], SPECS), (WAYS[1], OTHER_SPECS), (WAYS[0], OTHER_SPECS), (WAYS[1], SPECS)]
CASES = [(JOBS[job], *PAIRS[pair]) for job, pair in [(0, 0), (0, 1), (1, 2), (1, 3)]]
MORE_CASES = [
    (JOBS[job], *PAIRS[pair]) for job, pair in [(0, 2), (0, 3), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]
]


@pytest.mark.parametrize(("size", "load", "specs"), nightly_after(len(CASES), CASES + MORE_CASES))
def test_every_byte_is_read_once_per_job(
    whole: Path, job_of: JobOf, size: tuple[int, int, list[int]], load: Any, specs: dict[str, list[Any]]
) -> None:
    processes, devices, mesh = size
    answers = job_of(processes, devices).call(load, str(whole), mesh, specs, ARRAYS, True)
    check(answers, size_of(ARRAYS))
    most = max(answer["bytes"] for answer in answers)
    assert most <= size_of(ARRAYS) / processes + 2 * 4 * MIB  # the shards differ by whole blocks


def test_each_process_reads_all_without_read_once(whole: Path, job_of: JobOf) -> None:
    specs = dict[str, list[Any]]({name: [] for name in ARRAYS})
    answers = job_of(4, 1).call(load_counted, str(whole), [4], specs, ARRAYS, False)
    assert [answer["wrong"] for answer in answers] == [[]] * 4
    assert sum(answer["bytes"] for answer in answers) == 4 * size_of(ARRAYS)


def load_alone(path: str, who: int) -> list[str]:
    """Only process `who` loads."""
    if jax.process_index() != who:
        return []
    settings = jct.StoreSettings(read_once=False, barrier_timeout_s=2.0)
    loaded = jct.load(path, target_of(ARRAYS, SPECS, [2, 2]), settings=settings)
    return [name for name, each in ARRAYS.items() if not holds(loaded[name], patterned(*each))]


def test_one_process_may_load_alone(whole: Path, job_of: JobOf) -> None:
    assert job_of(4, 1).call(load_alone, str(whole), 3) == [[]] * 4


def load_scrambled(path: str, order: list[int], mesh: list[int], specs: dict[str, list[Any]]) -> dict[str, Any]:
    """Load onto some devices of the job, in any order."""
    count, place = Count(), devices_in(order, mesh)
    target = target_of(ARRAYS, specs, place)
    loaded = jct.load(path, target, settings=jct.StoreSettings(read_once=True), progress=count)
    return {
        "wrong": [name for name, each in ARRAYS.items() if not holds(loaded[name], patterned(*each))],
        "bytes": count.bytes,
        "shards": len(loaded["replicated"].addressable_shards),
    }


@pytest.mark.parametrize(
    ("order", "mesh"), [([3, 0, 2, 1], [2, 2]), ([3, 1], [1, 2]), ([2, 0], [2, 1]), ([6, 1, 3, 0, 7, 2, 5, 4], [4, 2])]
)
def test_some_devices_in_any_order(whole: Path, job_of: JobOf, order: list[int], mesh: list[int]) -> None:
    devices = 2 if len(order) > 4 else 1
    answers = job_of(4, devices).call(load_scrambled, str(whole), order, mesh, SPECS)
    check(answers, size_of(ARRAYS))
    assert [answer["shards"] for answer in answers] == [
        sum(number // devices == process for number in order) for process in range(4)
    ]


@pytest.mark.parametrize("load", WAYS)
def test_every_dtype_is_read_once(tmp_path: Path, job_of: JobOf, load: Any) -> None:
    kinds: Arrays = {name: ([64, 520], name) for name in jax_kinds()}
    assert {"bfloat16", "float8_e4m3fn", "int4", "bool", "uint8", "float16", "complex64"} <= set(kinds)
    save_alone(str(tmp_path / "c"), kinds)
    for spec in ([], [None, "x"], ["y", "x"]):
        specs = {name: list[Any](spec) for name in kinds}
        answers = job_of(4, 1).call(load, str(tmp_path / "c"), [2, 2], specs, kinds, True, 8 * MIB)
        check(answers, size_of(kinds))


def jax_kinds() -> list[str]:
    """Return the names of the dtypes of which JAX makes arrays."""
    found = []
    for name in DTYPES:
        try:
            made = jax.device_put(np.zeros((1,), DTYPES[name]))
        except (TypeError, ValueError, jax.errors.JaxRuntimeError):
            continue
        found += [name] if made.dtype == DTYPES[name] else []  # 64-bit types need x64
    return found


def load_wide(path: str, read_once: bool, x64: bool) -> list[str]:
    """Load 64-bit types, and return the dtype and the bytes of each array."""
    with jax.enable_x64(x64):
        settings = jct.StoreSettings(read_once=read_once)
        try:
            loaded = jct.load(path, shardings=sharding_of([4], []), settings=settings)
        except jct.MismatchError as error:
            return [str(error)]
    return [
        f"{name} {leaf.dtype} {np.asarray(leaf.addressable_data(0)).tobytes().hex()}"
        for name, leaf in sorted(loaded.items())
    ]


@pytest.mark.parametrize("x64", [True, False])
def test_64_bit_types_load_equally_with_read_once(tmp_path: Path, job_of: JobOf, x64: bool) -> None:
    values: dict[str, Any] = {"i": np.arange(5) - 2, "f": np.arange(5) / 3, "c": np.arange(5) * (1 + 2j)}
    with jax.enable_x64(True):
        jct.save(tmp_path / "c", {name: jax.numpy.asarray(each) for name, each in values.items()})
    job = job_of(4, 1)
    answers = job.call(load_wide, str(tmp_path / "c"), True, x64)
    assert answers == job.call(load_wide, str(tmp_path / "c"), False, x64)
    if x64:
        names = {"i": "int64", "f": "float64", "c": "complex128"}
        assert answers[2] == [f"{name} {names[name]} {values[name].tobytes().hex()}" for name in sorted(values)]


def load_special(path: str, read_once: bool) -> list[str]:
    """Load keys, weak scalars, casts, renames, parts, kept values and NumPy arrays together with global arrays."""
    everywhere, columns = sharding_of([4], []), sharding_of([4], [None, "x"])
    weak = jax.jit(lambda: jax.numpy.sin(2.0) * 1.0, out_shardings=everywhere)()
    key = jax.jit(lambda: jax.random.key(1), out_shardings=everywhere)()
    target = {
        "new": {"a": jax.ShapeDtypeStruct((64, 256), np.dtype("float16"), sharding=everywhere)},
        "b": jax.ShapeDtypeStruct((256, 64), np.dtype("float32"), sharding=columns),
        "key": jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=everywhere),
        "weak": weak,
        "host": np.zeros((64, 256), np.float32),
        "kept": global_array([8], [4], []),
        "unread": jct.PLACEHOLDER,
    }
    loaded = jct.load(
        path, target, rename={"old/**": "new/**"}, cast=True, missing="keep", only=lambda name: name != "none",
        settings=jct.StoreSettings(read_once=read_once),
    )  # fmt: skip
    assert loaded["kept"] is target["kept"]
    assert loaded["weak"].weak_type
    found = [loaded["new"]["a"], loaded["b"], jax.random.key_data(loaded["key"]), loaded["weak"]]
    return [
        *(f"{leaf.dtype} {leaf.sharding} {np.asarray(leaf.addressable_data(0)).tobytes().hex()}" for leaf in found),
        loaded["host"].tobytes().hex(),
    ]


def test_load_options_work_with_read_once(tmp_path: Path, job_of: JobOf) -> None:
    values = patterned([64, 256], "int16").astype(np.float32)
    tree = {"old": {"a": values}, "b": values.T.copy(), "key": jax.random.key(7), "weak": jax.numpy.sin(2.0) * 1.0}
    jct.save(tmp_path / "c", {**tree, "host": values, "unread": values})
    job = job_of(4, 1)
    answers = job.call(load_special, str(tmp_path / "c"), True)
    assert answers == job.call(load_special, str(tmp_path / "c"), False)
    assert answers[0][0].startswith("float16 ")
    assert answers[0][0].endswith(values.astype(np.float16).tobytes().hex())
    assert answers[1][1].endswith(values.T[:, 16:32].tobytes().hex())


def load_and_watch(path: str, arrays: Arrays, budget: int, times: int, is_apart: bool) -> list[dict[str, Any]]:
    """Load several times, and return the compiled programs, transfers and additional memory of each load."""
    compiled, moved = list[str](), list[int]()
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, took_s, **_: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    gather = JobTransfer.gather

    def counted(transfer: JobTransfer, row: np.ndarray) -> Transfer:
        moved.append(row.nbytes)
        return gather(transfer, row)

    answers = []
    for _ in range(times):
        compiled.clear()
        moved.clear()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak of the memory in use
        before = in_use("VmRSS")
        with apart(is_apart=is_apart), pytest.MonkeyPatch.context() as patch:
            patch.setattr(JobTransfer, "gather", counted)
            answers.append(load_counted(path, [4], {name: [] for name in arrays}, arrays, True, budget, check=False))
        answers[-1].update(compiled=len(compiled), moved=len(moved), more=in_use("VmHWM") - before)
    return answers


def in_use(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def test_many_small_arrays_move_in_one_transfer(tmp_path: Path, job_of: JobOf) -> None:
    small: Arrays = {f"{number:04}": ([17, 30 + number % 5], "float32") for number in range(1001)}
    save_alone(str(tmp_path / "c"), small)
    for answers in job_of(4, 1).call(load_and_watch, str(tmp_path / "c"), small, 64 * MIB, 2, True):
        assert answers[0]["compiled"] <= 8
        assert answers[1]["compiled"] <= 1
        assert answers[1]["moved"] == 1
        assert answers[1]["bytes"] <= 0.3 * size_of(small)


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_load_keeps_to_its_budget(tmp_path: Path, job_of: JobOf, is_apart: bool) -> None:
    large: Arrays = {f"{number}": ([6, 1024, 1024], "float32") for number in range(4)}
    save_alone(str(tmp_path / "c"), large)
    for answers in job_of(4, 1).call(load_and_watch, str(tmp_path / "c"), large, 16 * MIB, 2, is_apart):
        assert 4 < answers[1]["moved"] < 40 if is_apart else answers[1]["moved"] == 0
        assert answers[1]["more"] <= size_of(large) + 16 * MIB + 16 * MIB


def test_auto_reads_once_only_if_worthwhile(tmp_path: Path, job_of: JobOf) -> None:
    arrays: Arrays = {
        "large": ([32, 1024, 1024], "uint8"),
        "small": ([100], "float32"),
        "cut": ([4096, 1024], "float32"),
    }
    save_alone(str(tmp_path / "c"), arrays)
    specs: dict[str, list[Any]] = {"large": [], "small": [], "cut": ["x"]}
    job = job_of(4, 1)
    check(job.call(load_counted_apart, str(tmp_path / "c"), [4], specs, arrays, "auto"), size_of(arrays))
    specs["large"] = ["x"]  # only the small array is read more than once
    answers = job.call(load_counted_apart, str(tmp_path / "c"), [4], specs, arrays, "auto")
    assert sum(answer["bytes"] for answer in answers) == size_of(arrays) + 3 * 400
    only: Arrays = {"only": ([1024, 1024], "float32")}
    save_alone(str(tmp_path / "only"), only)  # each process reads all of it, because it is small
    answers = job.call(load_counted_apart, str(tmp_path / "only"), [4], {"only": []}, only, "auto")
    assert sum(answer["bytes"] for answer in answers) == 4 * size_of(only)


def load_without_sight(path: str, specs: dict[str, list[Any]], arrays: Arrays, who: int) -> dict[str, Any]:
    """As `load_counted`, but process `who` cannot open memory of others, as in an isolated container."""

    def refuse(address: bytes) -> np.ndarray:
        raise PermissionError(1, "not from here")

    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == who:
            patch.setattr(shared_memory, "open_memory", refuse)
        return load_counted(path, [4], specs, arrays, "auto")


def test_auto_mode_chooses_read_once_or_page_cache(tmp_path: Path, job_of: JobOf) -> None:
    arrays: Arrays = {"large": ([32, 1024, 1024], "uint8")}
    save_alone(str(tmp_path / "c"), arrays)
    job = job_of(4, 1)
    check(job.call(load_counted, str(tmp_path / "c"), [4], {"large": []}, arrays, "auto"), size_of(arrays))
    answers = job.call(load_without_sight, str(tmp_path / "c"), {"large": []}, arrays, 2)
    assert [(answer["wrong"], answer["bytes"]) for answer in answers] == [([], size_of(arrays))] * 4
