"""Dtype names of numpy and ml_dtypes, and how safetensors names the same dtypes."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

from jaxckpt_train.errors import FormatVersionError

_NUMPY = ("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128").split()
_ML_DTYPES = (
    "bfloat16 complex32 bcomplex32 int1 int2 int4 uint1 uint2 uint4 float4_e2m1fn float6_e2m3fn float6_e3m2fn "
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu"
).split()
DTYPES: dict[str, np.dtype] = {name: np.dtype(name) for name in _NUMPY} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES if hasattr(ml_dtypes, name)
}
_INEXACT = frozenset(name for name in DTYPES if "float" in name or "complex" in name)
# Only dtypes whose layout is exactly numpy's and that safetensors' own numpy reader accepts: a single float8 tensor
# makes it refuse the whole file. Everything else is stored as U8.
_SAFETENSORS = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64",
}  # fmt: skip
SAFETENSORS_ITEM_BYTES = {stored: DTYPES[name].itemsize for name, stored in _SAFETENSORS.items()}


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """The name of a dtype of either byte order; cached, because numpy computes it anew, which is slow."""
    return dtype.newbyteorder("=").name


@functools.cache
def is_inexact(dtype: np.dtype) -> bool:
    """Whether it is a float or complex dtype of either byte order; numpy and JAX do not know this of all dtypes."""
    return dtype_name(dtype) in _INEXACT


@functools.cache
def is_storable(dtype: np.dtype) -> bool:
    """Whether arrays of this dtype, of either byte order, can be stored."""
    return dtype_name(dtype) in DTYPES and dtype.fields is None


def dtype_named(name: str, subject: str) -> np.dtype:
    """The little-endian numpy dtype with this name.

    Raises FormatVersionError: this installation does not know the dtype; the message starts with `subject`.
    """
    if name not in DTYPES:
        advice = "; a newer ml_dtypes may have it" if name.startswith(("float", "int", "uint")) else ""
        raise FormatVersionError(f"{subject}: unknown dtype {name!r}{advice}")
    return DTYPES[name]


def safetensors_form(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The dtype name and shape of such an array in safetensors; U8 if the dtype has no name there."""
    stored = _SAFETENSORS.get(dtype_name(dtype))
    if stored is not None:
        return stored, shape
    return ("U8", shape) if dtype.itemsize == 1 else ("U8", (*shape, dtype.itemsize))
