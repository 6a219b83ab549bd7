"""The boxes in which an array is copied."""

from __future__ import annotations

import pytest

from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.store.copy import chunk_boxes


def test_boxes_tile_an_array() -> None:
    assert chunk_boxes((5, 2), 4, "it", 16) == [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((4, 5), (0, 2))]
    assert chunk_boxes((0, 1 << 60), 4, "it") == []


def test_array_with_billions_of_boxes_is_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match="it: cannot copy 2,305,843,009,213,693,952 bytes"):
        chunk_boxes((1 << 61,), 1, "it")
