"""Index files that are wrong in a way that no digest of theirs shows: `python -m tests.nightly.faults.wrong_indexes`.

In each trial, one process of a job writes the parts of arrays, and lists them wrongly: it leaves one out, lists one of
another process, or another box. Or its index file is missing, is that of another process, or of another save of the
same job. A reader of all arrays, a complete manifest and a verification must refuse each.
"""

from __future__ import annotations

import argparse
import random
import sys

import msgspec
import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.committed import Committed, completed, index_files
from jaxckpt_train.store.index_files import WHOLE_AXIS, encode_index_file, index_name
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord
from jaxckpt_train.store.process_index import packed, unpacked
from jaxckpt_train.store.verify import files_by_index
from tests.support.indexed import DIGEST, DIRECTORY, SEED, Indexed, PlannedJob, Written, part_index_of, put
from tests.support.memory_backend import MemoryBackend

KINDS = ("hole", "overlap", "moved", "hidden", "missing", "swapped", "swapped in the tables", "stale")
_PRIME = (1 << 31) - 1


def some_job(chance: random.Random) -> PlannedJob:
    """A job of 2 to 5 processes, whose arrays are cut along one axis; each process has a part of each."""
    processes = chance.randint(2, 5)
    arrays, written = list[ArrayRecord](), [Written() for _ in range(processes)]
    for number in range(chance.randint(1, 3)):
        rows = chance.randint(1, 3)
        rest = tuple(chance.randint(1, 4) for _ in range(chance.randint(0, 2)))
        arrays.append(ArrayRecord(f"a{number}", (rows * processes, *rest), "float32", ()))
        for process, own in enumerate(written):
            own[number] = [((rows * process, rows * (process + 1)), *full_box(rest))]
    part = PartRecord("state", "pytree", tuple(arrays), (), msgspec.Raw(b"null"))
    return PlannedJob([part], [[own] for own in written])


def refused(kind: str, seed: int) -> bool:
    """Return whether all readers refuse a checkpoint that is wrong in this way."""
    chance = random.Random(seed)
    job = some_job(chance)
    process, other = chance.sample(range(len(job.written)), 2)
    if kind in ("hole", "overlap", "moved"):
        written = _listed_wrongly(kind, job, process, other, chance)
    elif kind == "hidden":  # the tables say that the index file covers nothing
        written = Indexed.of(job)
        summary = written.summaries()[process]
        hidden = msgspec.structs.replace(summary, cover=packed(np.full_like(unpacked(summary.cover), WHOLE_AXIS)))
        written.messages[process] = msgspec.structs.replace(written.messages[process], summary=hidden)
    elif kind == "swapped in the tables":
        written = Indexed.of(job)
        content = dict(written.files)
        for one, another in ((process, other), (other, process)):
            written.replace_file(one, content[another])
    else:
        written = Indexed.of(job)
    backend, committed = written.commit()
    name = index_name("state", process)
    if kind == "missing":
        backend.remove(f"{DIRECTORY}/{name}")
    elif kind == "swapped":
        put(backend, name, written.files[other])
    elif kind == "stale":
        put(backend, name, Indexed.of(job, salt=1).files[process])
    return all(_refuses(reader, backend, committed) for reader in (_load, _load_together, completed, _verify))


def _listed_wrongly(kind: str, job: PlannedJob, process: int, other: int, chance: random.Random) -> Indexed:
    """As all processes write it, but one lists something else; the sums of the weights are made right."""
    own, theirs = (dict(job.written[number][0]) for number in (process, other))
    array = chance.choice(sorted(own))
    if kind == "hole":
        del own[array]
        if not own:
            own[array] = []
    elif kind == "overlap":
        own[array] = [*own[array], *theirs[array]]
    else:
        own[array] = theirs[array]
    written, good = Indexed.of(job), Indexed.of(job)
    divided = part_index_of(job.parts[0], own, process)[1]
    summary, data = encode_index_file(job.parts, [divided], SEED, DIGEST)
    summary = msgspec.structs.replace(summary, weights=good.summaries()[process].weights)
    if not data:  # the others take over its weights
        first = good.summaries()[other]
        sums = (unpacked(first.weights) + unpacked(summary.weights)) % _PRIME
        moved = msgspec.structs.replace(first, weights=packed(sums))
        written.messages[other] = msgspec.structs.replace(written.messages[other], summary=moved)
        del written.files[process]
    else:
        written.files[process] = data
    written.messages[process] = msgspec.structs.replace(written.messages[process], summary=summary)
    return written


def _refuses(reader: object, backend: MemoryBackend, committed: Committed) -> bool:
    assert callable(reader)
    try:
        reader(backend, committed)
    except CorruptCheckpointError:
        return True
    return False


def _load(backend: MemoryBackend, committed: Committed) -> None:
    """What a process does that loads all arrays."""
    indexes, arrays = index_files(backend, committed), committed.manifest.parts[0].arrays
    assert indexes is not None
    wanted = {array.name: [full_box(array.shape)] for array in arrays}
    indexes.manifest_with("state", wanted, indexes.contents(indexes.covering("state", wanted)))


def _load_together(backend: MemoryBackend, committed: Committed) -> None:
    """What each process of a job does if they read the index files together."""
    indexes, arrays = index_files(backend, committed), committed.manifest.parts[0].arrays
    assert indexes is not None
    wanted = {array.name: [full_box(array.shape)] for array in arrays}
    contents = list(indexes.contents(indexes.covering("state", wanted)))
    indexes.manifest_with("state", wanted, contents, keeps_all=True)


def _verify(backend: MemoryBackend, committed: Committed) -> None:
    for _ in files_by_index(backend, committed):
        pass


def main() -> int:
    """Run trials of all kinds, and print how many were not refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    accepted = []
    for trial in range(options.trials):
        kind, seed = KINDS[trial % len(KINDS)], options.seed + trial
        if not refused(kind, seed):
            accepted.append((kind, seed))
    print(f"{options.trials} trials, {len(accepted)} accepted: {accepted[:20]}")
    return 1 if accepted else 0


if __name__ == "__main__":
    sys.exit(main())
