"""The order of the subjects in a round."""

from __future__ import annotations

import itertools

from benchmarks.rounds import turn_order


def test_every_round_has_its_own_order() -> None:
    orders = [turn_order(8, number, seed) for seed in range(20) for number in range(6)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert turn_order(8, 3, 5) == turn_order(8, 3, 5)
    followed = {(one, other) for order in orders for one, other in itertools.pairwise(order)}
    assert len(followed) == 8 * 7
    assert {order[0] for order in orders} == set(range(8))
