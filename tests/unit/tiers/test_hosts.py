"""Who keeps whose copies and parity."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxckpt_train.tiers.hosts import LARGEST_SET, Host, Hosts, Redundancy


def hosts_of(*processes: int) -> Hosts:
    """Hosts with these numbers of processes."""
    names = [f"h{host}" for host, count in enumerate(processes) for _ in range(count)]
    return Hosts([Host(process, name) for process, name in enumerate(names)])


@pytest.mark.parametrize("wanted", ["partner", "xor", "p+q"])
@pytest.mark.parametrize("processes", [(1, 1), (1, 1, 1), (2, 2), (4, 2, 3), (1,) * 9, (2,) * 17, (8, 1), (3, 3, 3, 1)])
def test_every_process_is_protected_on_another_host(wanted: Redundancy, processes: tuple[int, ...]) -> None:
    hosts = hosts_of(*processes)
    found = hosts.protection(wanted)
    domains = [each.domain for each in hosts.all]
    in_sets = [process for members in found.sets for process in members]
    assert sorted([*in_sets, *found.copies]) == list(range(sum(processes)))
    for process, keeper in found.copies.items():
        assert domains[process] != domains[keeper]
    for members in found.sets:
        assert 2 <= len(members) <= LARGEST_SET
        assert max(Counter(domains[process] for process in members).values()) == 1
        assert wanted != "p+q" or len(members) >= 3
    assert found.survives() == (2 if wanted == "p+q" and not found.copies else 1)


@pytest.mark.parametrize("wanted", ["none", "partner", "xor", "p+q"])
def test_one_host_has_nobody(wanted: Redundancy) -> None:
    found = hosts_of(4).protection(wanted)
    assert (found.copies, found.sets, found.survives()) == ({}, (), 0)


def test_copies_are_spread_evenly() -> None:
    found = hosts_of(2, 2, 2, 2).protection("partner")
    assert Counter(found.copies.values()) == Counter(range(8))


def test_first_process_of_each_host_leads() -> None:
    hosts = Hosts([Host(0, "a"), Host(1, "b"), Host(2, "a"), Host(3, "b")])
    assert hosts.leaders() == [0, 1]
    assert [hosts.leader(process) for process in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("wanted", ["partner", "xor", "p+q"])
def test_machines_of_one_domain_lead_but_do_not_protect_each_other(wanted: Redundancy) -> None:
    racks = ["a", "a", "b", "b", "b", "c", "c"]
    hosts = Hosts([Host(process, rack, f"m{process}") for process, rack in enumerate(racks)])
    assert hosts.leaders() == [*range(7)]
    found = hosts.protection(wanted)
    assert all(racks[process] != racks[keeper] for process, keeper in found.copies.items())
    assert all(len({racks[process] for process in members}) == len(members) for members in found.sets)
    assert sorted([*found.copies, *(process for members in found.sets for process in members)]) == [*range(7)]
