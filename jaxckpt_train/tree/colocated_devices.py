"""Whose devices are on other hosts than this one process that drives them all, and the CPU devices beside them."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.extend.backend import backends

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.settings import Colocated


def is_single_controller(runtime_type: str) -> bool:
    """Whether a runtime drives devices of many hosts from one process, as JAX names it (`device.client.runtime_type`).

    Those are "pathways" and "proxy/pathways".
    """
    return "pathways" in runtime_type.split("/")


def has_single_controller() -> bool:
    """Whether one of the runtimes of this process is of that kind; there may be one of its own CPU beside it."""
    return any(is_single_controller(client.runtime_type) for client in backends().values())


def runs_on_hosts(sharding: jax.sharding.Sharding, setting: Colocated) -> bool:
    """Whether arrays of this sharding are saved and loaded by the hosts of its devices.

    Raises:
        SettingsError: it was asked for in a job of several processes, each of which has its own devices already.
    """
    if setting == "auto":
        devices: Any = sharding.device_set  # all of one client
        return is_single_controller(next(iter(devices)).client.runtime_type)
    if setting and jax.process_count() > 1:
        raise SettingsError(
            f"StoreSettings.colocated: True is for one process that drives all devices; this job has "
            f"{jax.process_count()} processes, each of which saves and loads what its own devices hold: leave it out"
        )
    return setting


@functools.cache
def cpu_beside(device: jax.Device) -> jax.Device:
    """The CPU device on the host of a device: what is called with its arrays runs there.

    Raises:
        SettingsError: the runtime has none.
    """
    if device.device_kind == "cpu":
        return device  # asked for one device alone, JAX 0.10 may name another one of the same process
    from jax.experimental import colocated_python

    try:
        (found,) = colocated_python.colocated_cpu_devices((device,))
    except (ValueError, AttributeError, RuntimeError) as error:
        raise SettingsError(
            f"{device}: its runtime shows no CPU device on the same host ({error}), so nothing can be run there; start "
            "it with Colocated Python, or bring all arrays through this process by StoreSettings(colocated=False)"
        ) from error
    return found
