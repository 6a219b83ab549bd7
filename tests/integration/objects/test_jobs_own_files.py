"""Objects that write their own files in jobs of several processes, on object stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import jaxckpt_train as jct
from jaxckpt_train.distributed.jax_service import current
from tests.integration.objects.test_own_files import FileWriter
from tests.support.jobs.job import Job, running
from tests.support.objects.stand_in import StandIn

LARGE = 10 << 20  # takes an upload in parts, which has no condition


@pytest.fixture(scope="module")
def job(shared_cloud: StandIn) -> Iterator[Job]:
    with running(2) as started:
        yield started


def save_files(path: str, common: str) -> str | list[str]:
    """Save a file of each process and a common one, and load them; return the names, or the class of the error."""
    process = current().process
    content = bytes([process if common == "different" else 7]) * LARGE
    try:
        jct.save_checkpointables(path, {"own": FileWriter({f"of-{process}": b"%d" % process, "common": content})})
    except jct.CheckpointError as error:
        return type(error).__name__
    own = FileWriter()
    jct.load_checkpointables(path, {"own": own})
    assert own.files["common"] == content
    return sorted(own.files)


def test_processes_upload_their_files(shared_cloud: StandIn, job: Job) -> None:
    assert job.call(save_files, shared_cloud.url("one"), "same") == [["common", "of-0", "of-1"]] * 2
    assert jct.verify(shared_cloud.url("one")).ok


def test_different_files_of_one_name_are_refused(shared_cloud: StandIn, job: Job) -> None:
    assert "MismatchError" in job.call(save_files, shared_cloud.url("two"), "different")
    with pytest.raises(jct.NotACheckpointError):
        jct.load(shared_cloud.url("two"))
