"""Where a fresh run takes its state from: which checkpoint, of whatever origin, which leaves of it, and how changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.value_checks import known_keys, path_text

_OPTIONS = ("only", "rename", "cast", "missing", "surgery")


def initial_state(subject: str, value: Any) -> Any:
    """A path, or a mapping with `path` and what `jaxckpt_train.load` takes: only, rename, cast, missing, surgery.

    Raises:
        SettingsError: it is neither, or an option is wrong.
    """
    if not isinstance(value, Mapping):
        return path_text(subject, value)
    # Which need JAX: a configuration is looked at without.
    from jaxckpt_train.surgery.parsing import operations_of
    from jaxckpt_train.tree.restore import LoadOptions

    given = known_keys(subject, value, ("path", *_OPTIONS))
    if "path" not in given:
        raise SettingsError(f"{subject}: expected path, of a checkpoint, found {', '.join(given) or 'nothing'}")
    found = {"path": path_text(f"{subject}.path", given.pop("path")), **given}
    found["surgery"] = operations_of(f"{subject}.surgery", given.get("surgery"))
    try:
        LoadOptions(**{name: option for name, option in given.items() if name != "surgery"})
    except SettingsError as error:
        raise SettingsError(f"{subject}: {error}") from error
    return found


def path_and_options(value: Any) -> tuple[Any, dict[str, Any]]:
    """Both as `jaxckpt_train.load` takes them."""
    checked = initial_state("init_from", value)
    if not isinstance(checked, dict):
        return checked, {}
    return checked["path"], {name: option for name, option in checked.items() if name != "path"}
