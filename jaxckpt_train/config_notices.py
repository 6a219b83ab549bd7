"""Builds the sources of preemption notices that a configuration names, or describes by `_target_`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxckpt_train.config_nodes import Wanted, instantiated
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.notices.source import NoticeSource
from jaxckpt_train.value_checks import nearest, refuse

NAMES = {"gce": "GceNotice", "aws": "AwsNotice", "slurm": "SlurmNotice", "kubernetes": "KubernetesNotice"}
_METHODS = ("start", "stop", "notice")
_WANTED = f"one of {', '.join(map(repr, NAMES))}, a node with _target_, or an object that has start, stop and notice"


def notice_list(subject: str, value: Any) -> list[Any]:
    """A list of what `build_notices` takes, as a check of `jaxckpt_train.value_checks`."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Collection):
        refuse(subject, "a list of sources of notices, such as [slurm]", value)
    for position, one in enumerate(value):
        if isinstance(one, str) and one not in NAMES:
            raise SettingsError(f"{subject}[{position}]: expected {_WANTED}, found {one!r}{nearest(one, NAMES)}")
        if isinstance(one, Mapping) and "_target_" not in one:
            refuse(f"{subject}[{position}]", _WANTED, dict(one))
        if not isinstance(one, (str, Mapping)) and not _is_source(one):
            refuse(f"{subject}[{position}]", _WANTED, one)
    return list(value)


def build_notices(subject: str, value: Any) -> tuple[NoticeSource, ...]:
    """The sources, built where they are only named or described.

    Raises:
        SettingsError: one cannot be built, or is none.
    """
    return tuple(_built(f"{subject}[{position}]", one) for position, one in enumerate(notice_list(subject, value)))


def _built(subject: str, one: Any) -> NoticeSource:
    source = {"_target_": f"{__package__}.{NAMES[one]}"} if isinstance(one, str) else one
    if isinstance(source, Mapping):
        wanted = Wanted(
            "source of notices", "has start, stop and notice", _is_source, lambda found: hasattr(found, "notice")
        )
        source = instantiated(subject, source, wanted)
    if not _is_source(source):
        refuse(subject, _WANTED, one)
    built: NoticeSource = source
    return built


def _is_source(value: Any) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, method, None)) for method in _METHODS)
