"""A box of a stored array that is read when its turn comes to be written elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_shape
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import read_box, read_boxes
from jaxckpt_train.store.transaction import Committed


class BoxToCome:
    """A box of an array of an opened checkpoint.

    Args:
        files: what the checkpoint is read from.
        committed: the opened checkpoint.
        array: which array of it.
        box: which part of that.
        settings: how it is verified.
    """

    def __init__(
        self, files: Opener, committed: Committed, array: ArrayRecord, box: Box, settings: StoreSettings
    ) -> None:
        self._files, self._committed, self._array, self._box, self._settings = files, committed, array, box, settings
        self.shape, self.dtype = box_shape(box), DTYPES[array.dtype]
        self.size = box_elements(box)
        self.nbytes = self.size * self.dtype.itemsize

    def fetch(self) -> np.ndarray:
        """Read it, into memory of its own; raises as `read_box`."""
        data = np.empty(self.shape, self.dtype)
        self.read_into(data.reshape(-1).view(np.uint8))
        return data

    def read_with(self, others: Sequence[BoxToCome]) -> list[np.ndarray]:
        """It and others of the same checkpoint, read together, which takes far less than one after the other.

        Raises:
            As `read_boxes`.
        """
        wanted = [Wanted(each._array, [each._box]) for each in (self, *others)]
        return [arrays[0] for arrays in read_boxes(self._files, self._committed, wanted, self._settings)]

    def read_into(self, target: np.ndarray) -> None:
        """Read it into flat bytes of its size; raises as `read_box`."""
        read_box(self._files, self._committed, self._array, self._box, target, self._settings)
