"""Names of the storable dtypes of numpy and ml_dtypes, in the manifest and in safetensors files."""

from __future__ import annotations

import inspect

import ml_dtypes
import numpy as np
import pytest

from jaxckpt_train.errors import FormatVersionError
from jaxckpt_train.formats.safetensors import NAMED
from jaxckpt_train.store.segment import DTYPES, dtype_name, dtype_named, is_storable
from jaxckpt_train.store.segment import safetensors_form as form


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_name_round_trips(name: str) -> None:
    dtype = dtype_named(name, "leaf")
    assert dtype_name(dtype) == name
    assert dtype.isnative
    assert is_storable(dtype)
    stored, shape = form(dtype, (3, 5))
    assert DTYPES[NAMED[stored]].itemsize * np.prod(shape) == dtype.itemsize * 15


def test_every_ml_dtypes_scalar_can_be_stored() -> None:
    scalars = {name for name, value in vars(ml_dtypes).items() if inspect.isclass(value) and name.islower()}
    assert {name for name in scalars if name not in {"finfo", "iinfo"}} <= set(DTYPES)


@pytest.mark.parametrize("name", ["int64", "float32", "complex128", "uint16"])
def test_the_other_byte_order_has_the_same_name(name: str) -> None:
    other = np.dtype(name).newbyteorder()
    assert dtype_name(other) == name
    assert is_storable(other)


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "M8[s]", "m8[s]", "V4", [("a", "i4")]])
def test_non_numeric_dtypes_cannot_be_stored(dtype: object) -> None:
    assert not is_storable(np.dtype(dtype))  # type: ignore[call-overload]


@pytest.mark.parametrize(("name", "hint"), [("float7_e9", "a newer ml_dtypes may have it"), ("object", "")])
def test_an_unknown_name_is_refused(name: str, hint: str) -> None:
    with pytest.raises(FormatVersionError, match=f"leaf: unknown dtype '{name}'.*{hint}"):
        dtype_named(name, "leaf")


def test_dtypes_unknown_to_safetensors_become_bytes() -> None:
    assert form(np.dtype("float32"), (2,)) == ("F32", (2,))
    assert form(np.dtype(ml_dtypes.bfloat16), ()) == ("BF16", ())
    assert form(np.dtype(ml_dtypes.float8_e4m3fn), (2,)) == ("U8", (2,))
    assert form(np.dtype("complex128"), (2,)) == ("U8", (2, 16))
    assert form(np.dtype(">i4"), (2,)) == ("I32", (2,))
