"""Operations on names: leaves get other paths, or are left out."""

from __future__ import annotations

import dataclasses

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.surgery.leaves import Leaves
from jaxckpt_train.surgery.names import check_template, filled, matches
from jaxckpt_train.surgery.operation import Change, Operation


@dataclasses.dataclass(frozen=True)
class Rename(Operation):
    """Give leaves other paths: `Rename("model/**", "params/**")`.

    Args:
        leaves: a path or pattern.
        to: with the same wildcards, in the same order.
    """

    name = "rename"
    leaves: str
    to: str

    def __post_init__(self) -> None:
        self._check_patterns("leaves", "to")
        check_template("rename", self.leaves, self.to)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        found = {name: filled(self.to, groups) for name, groups in matches(self.leaves, leaves, subject).items()}
        for name, new in found.items():
            if new in leaves and new not in found:
                raise MismatchError(f"{subject}: leaf {name!r} would become {new!r}, which is there already")
        if len(set(found.values())) != len(found):
            raise MismatchError(f"{subject}: several leaves would get one path; {self.to!r} lacks wildcards")
        renamed = {found.get(name, name): leaf for name, leaf in leaves.items()}
        leaves.clear()
        leaves.update(renamed)
        return list(found.items())


@dataclasses.dataclass(frozen=True)
class Drop(Operation):
    """Leave leaves out.

    Args:
        leaves: a path or pattern.
    """

    name = "drop"
    leaves: str

    def __post_init__(self) -> None:
        self._check_patterns("leaves")

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        found = matches(self.leaves, leaves, subject)
        return [(f"{name} {leaves.pop(name).text()}", "nothing") for name in found]
