"""Damages checkpoints at random and looks whether anything wrong is ever loaded: `python -m tests.faults.corruption`.

A run of two steps lies in memory. The files of the newer step are damaged, in eight ways; then it is loaded, verified
and restored. A load gives what was saved or an error of ours; a verification finds every changed byte; a restore
goes back to the older step. Clean runs must never be complained about.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxckpt_train import checkpoint
from jaxckpt_train.checkpointables.pytree import JsonValue
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.settings import DigestName, StoreSettings
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.store.memory import MemoryBackend
from jaxckpt_train.store.verify import verify
from tests.crash.explorer import small_sizes

Files = dict[str, bytes]
RUN = "/run"
OLD, NEW = "step-0000000001", "step-0000000002"
DIGESTS: tuple[DigestName, ...] = ("xxh3-128", "sha256", "blake3")
LAYERS = (
    "COMMIT",
    "manifest.json",
    "header",
    "are not what was saved",
    "bytes, but the manifest says",
    "but: ",
    "not a",
)


def state_of(step: int) -> dict[str, Any]:
    """A state with arrays of many kinds, in several segments, and a value."""
    chance = np.random.default_rng(step)
    return {
        "state": {
            "large": chance.standard_normal((64, 128)).astype(np.float32),
            "half": chance.standard_normal(700).astype(ml_dtypes.bfloat16),
            "bytes": chance.integers(0, 256, 5001, np.uint8),
            "one": np.float64(chance.standard_normal()),
            "none": np.zeros((0, 3), np.int16),
            "small": {f"x{n}": chance.integers(0, 9, 5) for n in range(20)},
        },
        "config": JsonValue({"step": step, "text": "x" * 100}),
    }


def raw(found: Mapping[str, Any]) -> dict[str, bytes]:
    """All that was loaded, as bytes by name."""
    state = found["state"]
    leaves = {
        **{k: v for k, v in state.items() if k != "small"},
        **{f"small/{k}": v for k, v in state["small"].items()},
    }
    return {name: np.asarray(leaf).tobytes() for name, leaf in leaves.items()} | {
        "config": repr(found["config"]).encode()
    }


def made(digest: DigestName) -> Files:
    """The files of a run of two steps."""
    backend = MemoryBackend()
    settings = StoreSettings(digest=digest, segment_bytes=8192, staging_bytes=1 << 16, io_threads=1)
    with StepManager(RUN, settings=settings, backend=backend) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait()
    return files_below(backend, RUN)


def files_below(backend: MemoryBackend, directory: str) -> Files:
    """The files below a directory, as they are now."""
    nodes = backend._nodes.items()
    return {path: bytes(node.data) for path, node in nodes if node is not None and path.startswith(f"{directory}/")}


def planted(files: Files) -> MemoryBackend:
    """A back end that holds these files."""
    backend = MemoryBackend()
    for path, data in files.items():
        backend.make_directory(path.rpartition("/")[0], parents=True, sync=False)
        backend.append(path, data)
    return backend


Damage = Callable[[Files, list[str], str, random.Random], None]
"""Changes some of the files; gets those of the newer step, and the one that was chosen."""


def flip(files: Files, names: list[str], name: str, chance: random.Random) -> None:
    """One bit."""
    data = bytearray(files[name])
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    files[name] = bytes(data)


def zero(files: Files, names: list[str], name: str, chance: random.Random) -> None:
    """A range of up to 4 KiB."""
    data = bytearray(files[name])
    start = chance.randrange(len(data))
    stop = min(len(data), start + chance.randint(1, 4096))
    data[start:stop] = bytes(stop - start)
    files[name] = bytes(data)


def truncate(files: Files, names: list[str], name: str, chance: random.Random) -> None:
    """The end is gone."""
    files[name] = files[name][: chance.randrange(len(files[name]))]


def extend(files: Files, names: list[str], name: str, chance: random.Random) -> None:
    """There is more than was written."""
    files[name] += chance.choice((b"\0", chance.randbytes(chance.randint(1, 5000)), files[name]))


def swap(files: Files, names: list[str], name: str, chance: random.Random) -> None:
    """Two files have changed places."""
    other = chance.choice(names)
    files[name], files[other] = files[other], files[name]


def duplicate(files: Files, names: list[str], name: str, chance: random.Random) -> None:
    """One file has the content of another."""
    files[name] = files[chance.choice(names)]


def missing(files: Files, names: list[str], name: str, chance: random.Random) -> None:
    """It is gone."""
    del files[name]


def stale(files: Files, names: list[str], name: str, chance: random.Random) -> None:
    """It is that of the step before."""
    files[name] = files.get(name.replace(NEW, OLD), b"")


KINDS: dict[str, Damage] = {
    each.__name__: each for each in (flip, zero, truncate, extend, swap, duplicate, missing, stale)
}


@dataclasses.dataclass
class Found:
    """What a campaign came to.

    Attributes:
        trials: by kind of damage; "clean" is none.
        unchanged: trials in which the damage was none, such as zeros that were zeros.
        loaded: trials in which the load gave what was saved although a byte was changed that it does not need.
        layers: what noticed it first in a load, by kind.
        problems: what must not be.
    """

    trials: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unchanged: int = 0
    loaded: int = 0
    layers: dict[str, collections.Counter[str]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def campaign(
    trials: int, seed: int, digests: tuple[DigestName, ...] = DIGESTS, settings: StoreSettings | None = None
) -> Found:
    """So many damages, and a tenth as many clean runs."""
    found, chance = Found(), random.Random(seed)
    expected = {1: raw(state_of(1)), 2: raw(state_of(2))}
    pristine = {digest: made(digest) for digest in digests}
    for number in range(trials):
        digest = digests[number % len(digests)]
        kind = chance.choice(list(KINDS))
        files = dict(pristine[digest])
        names = [name for name in files if f"/{NEW}/" in name]
        by_bytes = chance.random() < 0.5
        chosen = chance.choices(names, [len(files[name]) if by_bytes else 1 for name in names])[0]
        KINDS[kind](files, names, chosen, chance)
        is_changed = files != pristine[digest]
        _try(found, kind, f"{kind} {chosen}, {digest}, trial {number}", files, is_changed, expected, settings)
        if number % 10 == 0:
            _try(found, "clean", f"clean {digest}", dict(pristine[digest]), False, expected, settings)
    return found


def _try(
    found: Found, kind: str, subject: str, files: Files, is_changed: bool, expected: Any, settings: StoreSettings | None
) -> None:
    found.trials[kind] += 1
    found.unchanged += kind != "clean" and not is_changed
    backend = planted(files)
    error = _load(found, backend, subject, is_changed, expected, settings)
    if error is not None:
        layer = next((layer for layer in LAYERS if layer in error), error)
        found.layers.setdefault(kind, collections.Counter())[layer] += 1
    try:
        is_found = not verify(backend, f"{RUN}/{NEW}", StoreSettings(io_threads=1)).ok
    except CheckpointError:
        is_found = True
    if is_found != is_changed:
        found.problems.append(f"{subject}: verify {'complains of what is clean' if is_found else 'finds nothing'}")
    before = files_below(backend, f"{RUN}/{NEW}")
    with StepManager(RUN, backend=backend, settings=settings) as manager:
        step = 2 if error is None else 1
        manager.own()
        try:
            if raw(manager.restore()) != expected[step]:
                found.problems.append(f"{subject}: the restore did not give step {step}")
        except CheckpointError as refused:
            found.problems.append(f"{subject}: the restore raised {refused}")
        if manager.steps != [1, 2][:step]:
            found.problems.append(f"{subject}: after the restore of step {step} there are {manager.steps}")
    if files_below(backend, f"{RUN}/{NEW}") != before:
        found.problems.append(f"{subject}: the restore changed files of the damaged step")


def _load(
    found: Found, backend: MemoryBackend, subject: str, is_changed: bool, expected: Any, settings: StoreSettings | None
) -> str | None:
    """The error of a load of the damaged step, if there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_BACKEND", backend)
        try:
            loaded = raw(checkpoint.load_checkpointables(f"{RUN}/{NEW}", settings=settings))
        except CheckpointError as error:
            if not is_changed:
                found.problems.append(f"{subject}: a false alarm: {error}")
            return str(error)
    if loaded != expected[2]:
        found.problems.append(f"{subject}: loaded in silence, and wrong")
    found.loaded += is_changed
    return None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    started = time.monotonic()
    with small_sizes():
        found = campaign(chosen.trials, chosen.seed)
    for kind in (*KINDS, "clean"):
        layers = ", ".join(f"{layer!r} {count}" for layer, count in found.layers.get(kind, {}).items())
        print(f"{kind}: {found.trials[kind]} trials; noticed by {layers or 'nothing'}")
    print(f"{found.unchanged} changed nothing, {found.loaded} changed what a load does not need")
    print(f"{len(found.problems)} problems; {time.monotonic() - started:.0f} s, seed {chosen.seed}")
    for problem in found.problems[:20]:
        print(f"  {problem}")
    if found.problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
