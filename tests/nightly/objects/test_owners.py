"""A sample of races of owners on object stores, and of owners that wake after another one has taken over."""

from __future__ import annotations

import pytest

from tests.nightly.objects.owners import SERVERS, race, races_of_puts, stopped, stopped_processes
from tests.support.objects.stand_in import StandIn


def test_one_of_racing_owners_wins() -> None:
    with StandIn("s3") as server:
        assert not race(server.access, 20).problems


@pytest.mark.parametrize("name", SERVERS)
def test_one_of_racing_owners_wins_on_real_server(name: str) -> None:
    missing = SERVERS[name].install()
    if missing is not None:
        pytest.skip(missing)
    with SERVERS[name]() as server:
        assert not race(server.access, 10).problems or races_of_puts(server.access, 100)


def test_owner_held_at_each_request_commits_nothing() -> None:
    with StandIn("s3") as server:
        assert not stopped(server, 20).problems


def test_stopped_process_commits_nothing() -> None:
    with StandIn("s3") as server:
        assert not stopped_processes(server.access, 2).problems
