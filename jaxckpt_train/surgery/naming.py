"""Operations on names: leaves get other paths, or a second one, or are left out."""

from __future__ import annotations

import dataclasses

from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.surgery.leaves import Leaves
from jaxckpt_train.surgery.names import check_pattern, check_template, filled, matches
from jaxckpt_train.surgery.operation import Change, Operation
from jaxckpt_train.tree.paths import ROOT, join, key_text, parse_key, split


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
class Copy(Operation):
    """Give leaves a second path, such as the output layer that shares its weights with an embedding.

    Args:
        from_: a path or pattern; written `from` in YAML, JSON and on the command line.
        to: with the same wildcards, in the same order.
    """

    name = "copy"
    from_: str
    to: str

    def __post_init__(self) -> None:
        check_pattern("copy: from", self.from_)
        self._check_patterns("to")
        check_template("copy", self.from_, self.to)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        found = {name: filled(self.to, groups) for name, groups in matches(self.from_, leaves, subject).items()}
        for name, new in found.items():
            if new in leaves:
                raise MismatchError(f"{subject}: leaf {new!r}, a copy of {name!r}, is there already; drop it first")
            leaves[new] = leaves[name]
        return [(f"{name} {leaves[name].text()}", f"{name}, {new}") for name, new in found.items()]


@dataclasses.dataclass(frozen=True)
class Nest(Operation):
    """Make a tree of names that have a separator in them: `Nest(".")` makes `a/b` of the one key `a.b`.

    Args:
        separator: in the names.
        leaves: a path or pattern of those that are looked at.
    """

    name = "nest"
    separator: str = "."
    leaves: str = "**"

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        if not isinstance(self.separator, str) or not self.separator:
            raise SettingsError(f'nest: separator: expected text such as ".", found {self.separator!r}')

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        new = {name: self._nested(name) for name in matches(self.leaves, leaves, subject)}
        found = {name: nested for name, nested in new.items() if nested != name}
        renamed = {found.get(name, name): leaf for name, leaf in leaves.items()}
        if len(renamed) != len(leaves):
            raise MismatchError(f"{subject}: several leaves would get one path; rename them first")
        leaves.clear()
        leaves.update(renamed)
        return list(found.items())

    def _nested(self, name: str) -> str:
        keys = [part for key in split(name) for part in str(parse_key(key)).split(self.separator)]
        path = ROOT
        for key in keys:
            path = join(path, key if key.isdigit() else key_text(key, path))
        return path


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
