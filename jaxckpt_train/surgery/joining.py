"""Operations that make one array of several, or several of one: of layers, and along an axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.manifest import MAX_ARRAYS
from jaxckpt_train.surgery.leaves import Leaf, Leaves, array_of, put
from jaxckpt_train.surgery.names import INDEX, check_pattern, check_template, filled, matches, wildcards
from jaxckpt_train.surgery.operation import Change, Operation, axis_of, whole_number
from jaxckpt_train.surgery.views import Joined, Sliced

_MOST_TOLD = 8


@dataclasses.dataclass(frozen=True)
class Stack(Operation):
    """Make one array of those of all layers: `Stack("layers/{}/**", "layers/**")`.

    Args:
        leaves: a pattern in which `{}` stands for the number of the layer, from 0 without gaps.
        to: the same without `{}`.
        axis: the new one.
    """

    name = "stack"
    leaves: str
    to: str
    axis: int = 0

    def __post_init__(self) -> None:
        self._check_patterns("leaves", "to")
        whole_number("stack: axis", self.axis)
        if INDEX not in wildcards(self.leaves):
            raise SettingsError(
                f"stack: expected {INDEX} in leaves, where the number of the layer stands, found {self.leaves!r}; "
                f"write it there, such as {_with_index(self.leaves)!r}"
            )
        if INDEX in wildcards(self.to):
            raise SettingsError(f"stack: expected no {INDEX} in to, which is one array, found {self.to!r}")
        check_template("stack", self.leaves, self.to)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        place = wildcards(self.leaves).index(INDEX)
        groups: dict[str, dict[int, str]] = {}
        for name, texts in matches(self.leaves, leaves, subject).items():
            new = filled(self.to, [text for number, text in enumerate(texts) if number != place])
            groups.setdefault(new, {})[int(texts[place])] = name
        changes: list[Change] = []
        for new, layers in groups.items():
            names = [layers[number] for number in sorted(layers)]
            if sorted(layers) != list(range(len(layers))):
                raise MismatchError(f"{subject}: {new!r}: expected layers 0 to {max(layers)}, found {sorted(layers)}")
            _join(leaves, names, new, self.axis, subject, changes, new=True)
        return changes


def _with_index(pattern: str) -> str:
    """A pattern with the index in the place of what may have been meant by it, or an example of one."""
    keys = pattern.split("/")
    for place, key in enumerate(keys):
        if key == "*" or key.isdigit():
            return "/".join([*keys[:place], INDEX, *keys[place + 1 :]])
    return f"layers/{INDEX}/**"


def _join(
    leaves: Leaves, names: list[str], to: str, axis: int, subject: str, changes: list[Change], *, new: bool
) -> None:
    views = [array_of(leaves[name], name, subject) for name in names]
    first = views[0]
    place = axis_of(axis, len(first.shape) + new, names[0], subject)
    for name, view in zip(names, views, strict=True):
        sizes = [size for number, size in enumerate(view.shape) if new or number != place]
        wanted = [size for number, size in enumerate(first.shape) if new or number != place]
        if view.dtype != first.dtype or len(view.shape) != len(first.shape) or sizes != wanted:
            alike = "of one shape and dtype" if new else f"of one dtype, and of one shape but for axis {place}"
            told = _told(leaves, [*names[:1], name] if new else names)
            raise MismatchError(f"{subject}: leaf {name!r} does not fit {names[0]!r}: expected {alike}, found {told}")
    joined = leaves[names[0]].with_view(Joined(views, place, new=new))
    if new:  # which are all alike
        told = ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")
        told = f"{told} {leaves[names[0]].text()}"
    else:
        told = _told(leaves, names)
    changes.append((told, f"{to} {joined.text()}"))
    put(leaves, {to: joined}, set(names), subject)


@dataclasses.dataclass(frozen=True)
class Unstack(Operation):
    """Make an array for each layer of one for all: `Unstack("layers/**", "layers/{}/**")`.

    Args:
        leaves: a path or pattern.
        to: the same with `{}` for the number of the layer.
        axis: which goes.
    """

    name = "unstack"
    leaves: str
    to: str
    axis: int = 0

    def __post_init__(self) -> None:
        self._check_patterns("leaves", "to")
        check_template("unstack", self.leaves, self.to)
        whole_number("unstack: axis", self.axis)
        if INDEX not in wildcards(self.to) or INDEX in wildcards(self.leaves):
            raise SettingsError(
                f"unstack: expected {INDEX} in to, and not in leaves, found {self.to!r} and {self.leaves!r}"
            )

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        place, changes = wildcards(self.to).index(INDEX), list[Change]()
        for name, texts in matches(self.leaves, leaves, subject).items():
            leaf, view = leaves[name], array_of(leaves[name], name, subject)
            axis = axis_of(self.axis, len(view.shape), name, subject)
            if view.shape[axis] > MAX_ARRAYS:
                raise MismatchError(f"{subject}: leaf {name!r} would become {view.shape[axis]:,}, expected fewer")
            new: Leaves = {}
            for number in range(view.shape[axis]):
                box = list(full_box(view.shape))
                box[axis] = (number, number + 1)
                into = filled(self.to, [*texts[:place], str(number), *texts[place:]])
                new[into] = leaf.with_view(Sliced(view, tuple(box), (axis,)))
            changes.append(
                (f"{name} {leaf.text()}", f"{len(new)} of {filled(self.to, [*texts[:place], INDEX, *texts[place:]])}")
            )
            put(leaves, new, {name}, subject)
        return changes


@dataclasses.dataclass(frozen=True)
class Split(Operation):
    """Cut arrays along an axis: `Split("*/qkv", ["*/q", "*/k", "*/v"], axis=0)`.

    Args:
        leaves: a path or pattern.
        into: with the same wildcards each.
        axis: which is cut.
        sizes: of the parts along it; None: all alike.
    """

    name = "split"
    leaves: str
    into: Sequence[str]
    axis: int = 0
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        object.__setattr__(self, "into", _patterns("split: into", self.into))
        for template in self.into:
            check_template("split", self.leaves, template)
            if self.into.count(template) > 1:
                raise SettingsError(f"split: into: expected another name for each part, found {template!r} again")
        whole_number("split: axis", self.axis)
        if self.sizes is not None:
            sizes = tuple(whole_number("split: sizes", size, least=0) for size in self.sizes)
            if len(sizes) != len(self.into):
                raise SettingsError(f"split: expected a size for each of {len(self.into)} parts, found {len(sizes)}")
            object.__setattr__(self, "sizes", sizes)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        changes: list[Change] = []
        for name, texts in matches(self.leaves, leaves, subject).items():
            leaf, view = leaves[name], array_of(leaves[name], name, subject)
            axis = axis_of(self.axis, len(view.shape), name, subject)
            new, at = dict[str, Leaf](), 0
            for template, size in zip(self.into, self._sizes(view.shape[axis], name, subject), strict=True):
                box = list(full_box(view.shape))
                box[axis], at = (at, at + size), at + size
                new[filled(template, texts)] = leaf.with_view(Sliced(view, tuple(box)))
            told = ", ".join(f"{each} {part.text()}" for each, part in new.items())
            changes.append((f"{name} {leaf.text()}", told))
            put(leaves, new, {name}, subject)
        return changes

    def _sizes(self, width: int, name: str, subject: str) -> Sequence[int]:
        if self.sizes is None:
            if width % len(self.into):
                raise MismatchError(
                    f"{subject}: leaf {name!r}: {width} cannot be cut in {len(self.into)} alike; give sizes"
                )
            return [width // len(self.into)] * len(self.into)
        if sum(self.sizes) != width:
            raise MismatchError(f"{subject}: leaf {name!r}: sizes are {sum(self.sizes)} in all, expected {width}")
        return self.sizes


def _told(leaves: Leaves, names: Sequence[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > _MOST_TOLD else ""
    return ", ".join(f"{name} {leaves[name].text()}" for name in names[:_MOST_TOLD]) + more


def _patterns(subject: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise SettingsError(f"{subject}: expected a list of leaf paths or patterns, found {given!r}")
    for pattern in given:
        check_pattern(subject, pattern)
    return tuple(given)


@dataclasses.dataclass(frozen=True)
class Fuse(Operation):
    """Join arrays along an axis: `Fuse(["*/q", "*/k", "*/v"], "*/qkv", axis=0)`.

    Args:
        leaves: paths or patterns with the same wildcards, in their order.
        to: with these wildcards.
        axis: along which.
    """

    name = "fuse"
    leaves: Sequence[str]
    to: str
    axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "leaves", _patterns("fuse: leaves", self.leaves))
        self._check_patterns("to")
        for pattern in self.leaves:
            check_template("fuse", pattern, self.to)
        whole_number("fuse: axis", self.axis)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        changes: list[Change] = []
        for texts in dict.fromkeys(matches(self.leaves[0], leaves, subject).values()):
            names = [filled(pattern, texts) for pattern in self.leaves]
            missing = [name for name in names if name not in leaves]
            if missing:
                raise MismatchError(f"{subject}: leaf {missing[0]!r} is not there, to be joined with {names[0]!r}")
            _join(leaves, names, filled(self.to, texts), self.axis, subject, changes, new=False)
        return changes
