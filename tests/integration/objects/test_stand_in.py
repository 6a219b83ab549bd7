"""The stand-in for object stores, in all dialects through obstore."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, NotModifiedError, PreconditionError
from obstore.store import from_url

from tests.support.objects.access import Access
from tests.support.objects.faults import (
    Action,
    CrashAt,
    CutBody,
    Fail,
    Faults,
    Kind,
    LoseResponse,
    RandomFaults,
    Request,
    Silent,
)
from tests.support.objects.stand_in import StandIn
from tests.support.paths import REPO_ROOT

PART = 5 * 2**20  # obstore refuses smaller ones
NO_RETRY: Any = {"max_retries": 0}


class FaultOf:
    """One fault for all requests of some kinds."""

    def __init__(self, action: Action, *kinds: Kind) -> None:
        self._action, self._kinds = action, kinds

    def decide(self, request: Request) -> Action | None:
        return self._action if request.kind in self._kinds else None


@pytest.fixture(params=["s3", "gcs", "azure"])
def server(request: pytest.FixtureRequest) -> Iterator[StandIn]:
    with StandIn(request.param, page_size=3) as server:
        yield server


@pytest.fixture
def store(server: StandIn) -> Any:
    return server.access.store(retry_config=NO_RETRY)


def version_of(meta: Any) -> Any:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name]}


def kinds(server: StandIn) -> list[str]:
    return [request.kind for request in server.requests]


def test_create_refuses_existing_object(server: StandIn, store: Any) -> None:
    obstore.put(store, "a", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a", b"2", mode="create")
    assert server.objects.content["bucket/a"].data == b"1"


def test_update_refuses_stale_version(server: StandIn, store: Any) -> None:
    version = version_of(obstore.put(store, "a", b"1"))
    obstore.put(store, "a", b"2", mode=version)
    with pytest.raises(PreconditionError):
        obstore.put(store, "a", b"3", mode=version)
    with pytest.raises(PreconditionError):
        obstore.put(store, "missing", b"3", mode=version)
    assert server.objects.content["bucket/a"].data == b"2"
    assert kinds(server) == ["put", "put_update", "put_update", "put_update"]


def test_version_after_equal_content_is_new_except_on_s3(server: StandIn, store: Any) -> None:
    first, second = obstore.put(store, "a", b"1"), obstore.put(store, "a", b"1")
    assert (version_of(first) == version_of(second)) == (server.access.dialect == "s3")


def test_one_of_many_racing_creates_succeeds(store: Any) -> None:
    def create(number: int) -> bool:
        try:
            obstore.put(store, "a", str(number).encode(), mode="create")
        except AlreadyExistsError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(24))) == 1


def test_reads_whole_ranges_and_attributes(server: StandIn, store: Any) -> None:
    obstore.put(store, "a/ü x%.txt", b"0123456789", attributes={"Content-Type": "text/plain", "owner": "me"})
    got = obstore.get(store, "a/ü x%.txt")
    assert bytes(got.bytes()) == b"0123456789"
    assert got.attributes == {"Content-Type": "text/plain", "owner": "me"}
    assert bytes(obstore.get_range(store, "a/ü x%.txt", start=2, end=5)) == b"234"
    assert bytes(obstore.get_range(store, "a/ü x%.txt", start=8, end=20)) == b"89"
    assert obstore.head(store, "a/ü x%.txt")["size"] == 10
    with pytest.raises(GenericError, match="416"):
        obstore.get_range(store, "a/ü x%.txt", start=10, end=11)
    assert [request.range for request in server.requests[2:4]] == ["bytes=2-4", "bytes=8-19"]


def test_reads_depend_on_etag(store: Any) -> None:
    etag = obstore.put(store, "a", b"1")["e_tag"]
    assert etag
    with pytest.raises(NotModifiedError):
        obstore.get(store, "a", options={"if_none_match": etag})
    obstore.get(store, "a", options={"if_match": etag})
    with pytest.raises(PreconditionError):
        obstore.get(store, "a", options={"if_match": '"other"'})


def test_missing_object_is_not_found(server: StandIn, store: Any) -> None:
    for read in (obstore.get, obstore.head):
        with pytest.raises(FileNotFoundError):
            read(store, "missing")
    assert [request.status for request in server.requests] == [404, 404]


def test_listing_continues_over_pages(server: StandIn, store: Any) -> None:
    for number in range(5):
        for key in (f"d/{number}/x", f"d/{number}/y", f"d/f{number}", "e"):
            obstore.put(store, key, b"x")
    names = sorted(name.removeprefix("bucket/") for name in server.objects.content)
    assert [meta["path"] for meta in obstore.list(store).collect()] == names
    assert [meta["path"] for meta in obstore.list(store, offset="d/f1").collect()] == ["d/f2", "d/f3", "d/f4", "e"]
    listed = obstore.list_with_delimiter(store, "d")
    assert listed["common_prefixes"] == [f"d/{number}" for number in range(5)]
    assert [meta["path"] for meta in listed["objects"]] == [f"d/f{number}" for number in range(5)]
    assert server.requests[-1].key == "d/"


def test_deletes_many_keys(server: StandIn, store: Any) -> None:
    keys = [f"d/{number}" for number in range(20)]
    for key in keys:
        obstore.put(store, key, b"x")
    server.requests.clear()
    obstore.delete(store, keys)
    assert not server.objects.content
    assert set(kinds(server)) == {"delete"} if server.access.dialect == "gcs" else {"delete_many"}
    assert server.requests[0].number == 1


def test_multipart_upload_appears_at_its_end(server: StandIn, store: Any) -> None:
    data = os.urandom(2 * PART + 3)
    with obstore.open_writer(store, "a", buffer_size=PART, max_concurrency=2) as writer:
        writer.write(data)
        assert "bucket/a" not in server.objects.content
    assert bytes(obstore.get(store, "a").bytes()) == data
    assert not server.objects.uploads
    assert kinds(server).count("part") == 3


def test_upload_that_was_not_completed_remains(server: StandIn, store: Any) -> None:
    server.faults = FaultOf(Fail(400), "complete", "abort")  # obstore tries to abort then
    with pytest.raises(OSError, match="400"), obstore.open_writer(store, "a", buffer_size=PART) as writer:
        writer.write(bytes(PART + 1))
    assert not server.objects.content
    assert [upload.name for upload in server.objects.uploads.values()] == ["bucket/a"]


def test_copies_and_renames(server: StandIn, store: Any) -> None:
    obstore.put(store, "a b", b"1")
    obstore.copy(store, "a b", "b")
    obstore.rename(store, "b", "c")
    assert sorted(server.objects.content) == ["bucket/a b", "bucket/c"]


def test_copied_map_is_independent(server: StandIn, store: Any) -> None:
    obstore.put(store, "a", b"1")
    objects = server.objects.copy()
    obstore.put(store, "a", b"2")
    with StandIn(server.access.dialect, objects=objects) as other:
        assert bytes(obstore.get(other.access.store(), "a").bytes()) == b"1"


def test_environment_is_enough(server: StandIn, store: Any) -> None:
    obstore.put(store, "a/b", b"1")
    with server.named():
        assert bytes(obstore.get(from_url(server.url("a")), "b").bytes()) == b"1"
        with pytest.raises(GenericError, match="builder error"):
            obstore.get(from_url(server.url("a"), client_options={"timeout": "30s"}), "b")


@pytest.mark.parametrize("response_lost", [False, True])
def test_crash_refuses_requests_until_recovery(server: StandIn, store: Any, response_lost: bool) -> None:
    server.faults = crash = CrashAt(2, response_lost)
    obstore.put(store, "a", b"1")
    for key in "bc":
        with pytest.raises(GenericError):
            obstore.put(store, key, b"1")
    crash.recover()
    assert crash.crashed is server.requests[1]
    assert [meta["path"] for meta in obstore.list(store).collect()] == (["a", "b"] if response_lost else ["a"])
    assert [request.status for request in server.requests[1:3]] == [None, None]


def test_create_with_lost_response_has_effect(server: StandIn, store: Any) -> None:
    server.faults = FaultOf(LoseResponse(), "put_create")
    with pytest.raises(GenericError):
        obstore.put(store, "a", b"1", mode="create")
    assert server.objects.content["bucket/a"].data == b"1"


def test_failure_has_no_effect_and_is_retried(server: StandIn) -> None:
    server.faults = FaultOf(Fail(503, retry_after=0), "put")
    client = server.access.store(retry_config={"max_retries": 1})
    with pytest.raises(GenericError, match="503"):
        obstore.put(client, "a", b"1")
    assert [request.status for request in server.requests] == [503, 503]
    assert not server.objects.content


def test_cut_body_is_an_error(server: StandIn, store: Any) -> None:
    obstore.put(store, "a", b"0123456789")
    server.faults = FaultOf(CutBody(4), "get")
    with pytest.raises(GenericError):
        obstore.get(store, "a").bytes()


def test_silent_server_makes_clients_time_out(server: StandIn, store: Any) -> None:
    server.faults = Silent(2)
    client = server.access.store(client_options={"timeout": "200ms"}, retry_config=NO_RETRY)
    obstore.put(store, "a", b"1")
    with pytest.raises(GenericError, match="Timeout"):
        obstore.put(client, "b", b"1")
    assert list(server.objects.content) == ["bucket/a"]


def test_random_faults_are_repeatable() -> None:
    def drawn(faults: Faults) -> list[Any]:
        return [faults.decide(Request("GET", "get", "a", None, number)) for number in range(300)]

    actions = drawn(RandomFaults(7, fail=0.2, cut=0.1, lose=0.1, stall=0.1))
    assert actions == drawn(RandomFaults(7, fail=0.2, cut=0.1, lose=0.1, stall=0.1))
    assert {type(action).__name__ for action in actions} == {"NoneType", "Fail", "CutBody", "LoseResponse", "Stall"}


def test_serves_other_processes_until_terminated() -> None:
    command = [sys.executable, "-m", "tests.support.objects.stand_in", "--dialect", "s3"]
    with subprocess.Popen(command, cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        client = Access("s3", process.stdout.readline().strip()).store()
        obstore.put(client, "a", b"1")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
