"""Compile programs that many trainings make anew only once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_CACHE_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


def environment(folder: Path) -> dict[str, str]:
    """Return the variables for another process."""
    return {name.upper(): str(value) for name, value in {"jax_compilation_cache_dir": folder, **_CACHE_ALL}.items()}


@contextlib.contextmanager
def compiled_once(folder: Path) -> Iterator[None]:
    """Use a folder as the compilation cache."""
    values = {"jax_compilation_cache_dir": str(folder), **_CACHE_ALL}
    before = {name: getattr(jax.config, name) for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
