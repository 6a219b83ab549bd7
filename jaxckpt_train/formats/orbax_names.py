"""Leaf paths of Orbax under the names that a target has for the same leaves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

VALUE = "/value"  # of a variable of Flax NNX, which Orbax takes for a container


def names_in_target(names: Mapping[str, str], wanted: Collection[str]) -> dict[str, str]:
    """Names of saved leaves, as far as the target has none of them, in another form that it has.

    Orbax does not say whether a key of a mapping was text or an integer, and saves variables of NNX as mappings.

    Args:
        names: by their paths in the checkpoint.
        wanted: the paths of the target.
    """
    there, taken = set(wanted), set(names.values()) & set(wanted)
    found = {}
    for saved, name in names.items():
        found[saved] = name
        if name in there:
            continue
        other = next((form for form in _forms(name) if form in there and form not in taken), None)
        if other is not None:
            found[saved] = other
            taken.add(other)
    return found


def _forms(name: str) -> Iterator[str]:
    plain = name.removesuffix(VALUE)
    for form in (plain, _with_text_keys(name), _with_text_keys(plain)):
        if form != name:
            yield form


def _with_text_keys(name: str) -> str:
    return "/".join(f"~s{key}" if key.isdigit() else key for key in name.split("/"))
