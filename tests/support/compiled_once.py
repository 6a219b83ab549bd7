"""Programs that are made again and again, by each training anew, are compiled once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_CACHE_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


def environment(folder: Path) -> dict[str, str]:
    """What has another process do so, too."""
    return {name.upper(): str(value) for name, value in {"jax_compilation_cache_dir": folder, **_CACHE_ALL}.items()}


@contextlib.contextmanager
def compiled_once(folder: Path) -> Iterator[None]:
    """Within: what is compiled is kept in a folder, and looked for there."""
    wanted = {"jax_compilation_cache_dir": str(folder), **_CACHE_ALL}
    before = {name: getattr(jax.config, name) for name in wanted}
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
