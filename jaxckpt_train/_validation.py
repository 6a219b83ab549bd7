"""Checks of values that users pass.

Each check returns the value in the right type, or raises a SettingsError that says what was expected and what was
found.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import ipaddress
import itertools
import math
import numbers
import operator
import os
import re
import signal
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NoReturn

from jaxckpt_train.errors import SettingsError

Check = Callable[[str, Any], Any]
Mode = Literal["min", "max"]
_HIGHER_IS_BETTER = frozenset(
    {"acc", "accuracies", "accuracy", "ap", "auc", "auroc", "bleu", "chrf", "correct", "dice", "elbo", "exactmatch"}
    | {"f1", "f1score", "fbeta", "hitrate", "iou", "jaccard", "kappa", "likelihood", "map", "mcc", "meteor", "miou"}
    | {"mrr", "ndcg", "pearson", "prauc", "precision", "psnr", "r2", "recall", "return", "returns", "rew", "reward"}
    | {"rewards", "rocauc", "rouge", "sacrebleu", "score", "sensitivity", "similarity", "spearman", "specificity"}
    | {"ssim", "successrate", "top1", "top5", "winrate"}
)
# Each of these words also decides for a name with a word from above, such as "dice_loss".
_LOWER_IS_BETTER = frozenset(
    {"err", "error", "errors", "kl", "loss", "losses", "mae", "mse", "neg", "negative", "nll", "rmse", "std"}
    | {"variance"}
)
_URL = re.compile("([A-Za-z][A-Za-z0-9+.-]*):/(.*)", re.DOTALL)  # pathlib removes the second slash
URL_SCHEMES = ("s3", "gs", "az")


def refuse(subject: str, expected: str, found: object) -> NoReturn:
    """Raise a SettingsError that says what was expected of the subject, and what was found."""
    raise SettingsError(f"{subject}: expected {expected}, found {shown(found)}")


def shown(found: object, letters: int = 200) -> str:
    """Return a short representation of a value for a message, without control characters."""
    if isinstance(found, (str, bytes)):
        return repr(found) if len(found) <= letters else f"{found[:letters]!r}..."
    try:
        whole_text = repr(found)
    except Exception:  # noqa: BLE001  # a user's type, or an integer with more digits than Python converts
        return f"an object of {type(found).__name__} that cannot be shown"
    return whole_text if len(whole_text) <= letters else f"{whole_text[:letters]}..."


def text(subject: str, value: Any) -> str:
    """Check for non-empty text."""
    return value if isinstance(value, str) and value else refuse(subject, "text that is not empty", value)


def own_address(subject: str, value: Any) -> str:
    """Check for an address of this host, or its name, at which others can reach it."""
    found = text(subject, value)
    try:
        is_wildcard = ipaddress.ip_address(found).is_unspecified
    except ValueError:
        return found  # a name
    return refuse(subject, "an address at which others reach this host", value) if is_wildcard else found


def unicode_text(subject: str, value: Any) -> str:
    """Check for non-empty text that can be encoded as UTF-8."""
    found = text(subject, value)
    try:
        found.encode()
    except UnicodeEncodeError:
        refuse(subject, "valid Unicode", value)
    return found


def path_text(subject: str, value: Any) -> str:
    """Check for a path of the file system, or a URL of an object store, and return it as text."""
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(found, str) or not found or "\0" in found:
        refuse(subject, "a path or a URL, as text or pathlib.Path", value)
    try:
        os.fsencode(found)
    except UnicodeEncodeError:
        refuse(subject, "a path with characters that the file system accepts", value)
    url = _URL.match(found)
    return found if url is None else _checked_url(subject, *url.groups())


def _checked_url(subject: str, scheme: str, rest: str) -> str:
    """Return a URL in its normal form."""
    bucket, *parts = rest.removeprefix("/").rstrip("/").split("/")
    if scheme not in URL_SCHEMES or not bucket:
        refuse(
            subject,
            "a path, or a URL such as s3://bucket/run, gs://bucket/run or az://container/run",
            _bare(scheme, rest),
        )
    if "@" in bucket or "?" in rest:
        raise SettingsError(
            f"{subject}: expected a URL without a user, a password or a query, found one with them, at "
            f"{_bare(scheme, rest)!r}: pass credentials by the environment, where the cloud's own tools find them"
        )
    if not all(" " <= letter != "\x7f" for letter in rest):
        refuse(subject, "a URL without control characters", _bare(scheme, rest))
    if wrong := [part for part in parts if part in ("", ".", "..")]:
        refuse(subject, f"a URL without the part {wrong[0]!r}", _bare(scheme, rest))
    return f"{scheme}://{'/'.join([bucket, *parts])}"


def _bare(scheme: str, rest: str) -> str:
    """A URL for a message, without a user and a query, which may be secrets."""
    return f"{scheme}://{rest.removeprefix('/').partition('?')[0].rpartition('@')[2]}"


def is_url(path: str) -> bool:
    """Whether a checked path is a URL of an object store."""
    return path.partition("://")[0] in URL_SCHEMES and "://" in path


def absolute_path(subject: str, value: Any, base: str = "") -> str:
    """Return the absolute path, with `~` expanded; a relative path starts at `base` or at the working directory.

    A URL stays as it is.
    """
    found = path_text(subject, value)
    if is_url(found):
        return found
    expanded = os.path.expanduser(found)
    if expanded.startswith("~"):
        raise SettingsError(
            f"{subject} {expanded!r}: expected a user with a home directory after '~', found none; if the name itself "
            "starts with '~', pass the absolute path"
        )
    try:
        return os.path.abspath(os.path.join(base, expanded))
    except OSError as error:
        raise SettingsError(
            f"{subject} {expanded!r}: the path is relative, but the working directory cannot be found ({error}), "
            "perhaps because it was removed; pass an absolute path"
        ) from error


def fraction(subject: str, value: Any) -> float:
    """Check for a fraction of something."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        refuse(subject, "a fraction above 0 and below 1, such as 0.035", value)
    return float(value)


def local_directory(subject: str, value: Any, base: str = "") -> str:
    """Return the absolute path of a directory of the file system; a relative one starts as for `absolute_path`."""
    is_text = isinstance(value, str | os.PathLike)
    url = _URL.match(str(value)) if is_text else None
    if url or not is_text or not str(value):
        refuse(subject, "a directory of this host, not a URL", _bare(*url.groups()) if url else value)
    return absolute_path(subject, value, base)


def named(subject: str, value: Any) -> Mapping[str, Any]:
    """Check for a mapping. The caller checks its names."""
    if not isinstance(value, Mapping):
        kind = type(value).__name__  # show only its type: the value may be a whole state
        raise SettingsError(f'{subject}: expected a mapping of names, such as {{"state": state}}, found {kind}')
    return value


def flag(subject: str, value: Any) -> bool:
    """Check for True or False."""
    return value if isinstance(value, bool) else refuse(subject, "true or false", value)


def seconds(subject: str, value: Any) -> float:
    """Check for a finite number of seconds above 0, also of numpy, and return it as a float."""
    number = _real(value)
    return number if 0 < number < math.inf else refuse(subject, "a finite number of seconds above 0", value)


def duration(subject: str, value: Any) -> float:
    """Check for a finite number of seconds, at least 0, and return it as a float."""
    number = _real(value)
    return number if 0 <= number < math.inf else refuse(subject, "a finite number of seconds, at least 0", value)


def time_limit(subject: str, value: Any) -> float | None:
    """Return the seconds to wait, and 0 if the limit has passed; None and infinity stand for no limit."""
    number = math.inf if value is None else _real(value)
    if math.isnan(number):
        refuse(subject, "seconds, or None", value)
    return None if number == math.inf else max(0.0, number)


def _real(value: Any) -> float:
    """Return a number as a float, and nan for anything else."""
    try:
        return float(value) if not isinstance(value, bool) and isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def index_of(value: Any) -> int | None:
    """Return a whole number, also of numpy or JAX, as an int; None for anything else, also for a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # arrays of floats have an __index__ that raises
        return None


def whole(least: int, most: float = math.inf) -> Check:
    """Return a check for a whole number in a range, also of numpy or JAX."""
    wanted = f"a whole number of at least {least}" if most == math.inf else f"a whole number from {least} to {most}"

    def check(subject: str, value: Any) -> int:
        number = index_of(value)
        return number if number is not None and least <= number <= most else refuse(subject, wanted, value)

    return check


def one_of(*choices: str | bool) -> Check:
    """Return a check for one of the given values."""
    wanted = "one of " + ", ".join(map(repr, choices))

    def check(subject: str, value: Any) -> str | bool:
        found = [choice for choice in choices if isinstance(value, type(choice)) and value == choice]
        return found[0] if found else refuse(subject, wanted, value)

    return check


def metric_mode(subject: str, value: object) -> Mode:
    """Check for the direction in which a metric improves."""
    if value == "min":
        return "min"
    if value == "max":
        return "max"
    raise SettingsError(f'{subject}: expected "min" (lower is better) or "max" (higher is better), found {value!r}')


def stated_mode(subject: str, value: object, metric: str) -> Mode:
    """Check for a mode; None means "min", but is refused if the metric's name suggests that higher is better."""
    words = _words(metric)
    if value is None and words & _HIGHER_IS_BETTER and not words & _LOWER_IS_BETTER:
        raise SettingsError(
            f'{subject}: expected "max" or "min" for the metric {metric!r}, whose name suggests that higher is better; '
            "found neither"
        )
    return metric_mode(subject, "min" if value is None else value)


def _words(metric: str) -> set[str]:
    """Return the words of a name such as "valAcc1" or "mean_io_u", also without trailing digits and joined in pairs."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", metric).lower())
    return {*words, *(word.rstrip("0123456789") for word in words), *map("".join, itertools.pairwise(words))}


def check_fields(subject: str, settings: object) -> None:
    """Check the fields of a frozen dataclass by their types, and convert them.

    A type has choices (`Literal`, bool, None), or is `Annotated` with the check of all other values. Fields of other
    types are not checked.
    """
    for name, check in _checks_of(type(settings)).items():  # type: ignore[arg-type]  # classes are hashable
        object.__setattr__(settings, name, check(f"{subject}.{name}", getattr(settings, name)))


@functools.cache
def _checks_of(settings: type) -> dict[str, Check]:
    hints = dict[str, Any]()
    for each in reversed(settings.__mro__):  # names in a subclass of a user may exist for type checkers only
        if each.__module__.partition(".")[0] == __package__:
            hints |= typing.get_type_hints(each, include_extras=True)
    return {field.name: _check_of(hints[field.name]) for field in dataclasses.fields(settings) if field.name in hints}


def _check_of(hint: Any) -> Check:
    choices, others = list[Any](), list[Check]()
    for each in typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,):
        if each is types.NoneType:
            choices.append(None)
        elif each is bool:
            choices += [True, False]
        elif typing.get_origin(each) is Literal:
            choices += typing.get_args(each)
        else:
            others.append(each.__metadata__[0] if typing.get_origin(each) is typing.Annotated else _anything)
    if others:
        return optional(others[0]) if None in choices else others[0]
    named = sorted((each for each in choices if each is not None), key=lambda choice: isinstance(choice, bool))
    check = flag if named == [True, False] else one_of(*named)
    return optional(check) if None in choices else check


def optional(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda subject, value: None if value is None else check(subject, value)


def texts_by_name(subject: str, value: Any) -> dict[str, str]:
    """Check for a mapping of names to texts, also from YAML, whose values may be secrets: no message shows them."""
    if not isinstance(value, Mapping):
        raise SettingsError(f"{subject}: expected a mapping of names to texts, found {type(value).__name__}")
    for name, each in value.items():
        if not isinstance(name, str) or not isinstance(each, (str, bool, int, float)):
            raise SettingsError(f"{subject}.{name}: expected text, found {type(each).__name__}")
    return HiddenTexts({name: str(each) for name, each in value.items()})


class HiddenTexts(dict[str, str]):
    """Texts by name, whose representation has the names only."""

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: ...' for name in self)}}}"


def endpoint(subject: str, value: Any) -> str:
    """Check for the URL of a service without secrets in it; no message shows a URL with them."""
    found = text(subject, value)
    if "@" in found or "?" in found:
        raise SettingsError(
            f"{subject}: expected a URL without a user, a password or a query, found one with them: pass credentials "
            "by the environment, where the cloud's own tools find them"
        )
    if not found.startswith(("http://", "https://")):
        refuse(subject, "a URL with http:// or https://", found)
    return found


def list_of(what: str) -> Callable[[str, Any], tuple[Any, ...]]:
    """Return a check for a list, which returns it as a tuple. The caller checks its items."""

    def check(subject: str, value: Any) -> tuple[Any, ...]:
        if isinstance(value, (str, Mapping)) or not isinstance(value, Collection):
            refuse(subject, f"a list of {what}", value)
        return tuple(value)

    return check


def leaf_patterns(subject: str, value: Any) -> tuple[str, ...]:
    """Check for a pattern of leaf paths, or a list of them; return them as a tuple."""
    what = 'a pattern of leaf paths such as "params/base/**", or a list of them'
    patterns: tuple[Any, ...] = (value,) if isinstance(value, str) else list_of(what)(subject, value)
    for each in patterns:
        if not isinstance(each, str) or not each:
            refuse(subject, what, each)
    return patterns


def signal_names(subject: str, value: Any) -> tuple[str, ...]:
    """Check for names of signals that a process can catch."""
    catchable = set(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP"}
    names = list_of("signal names, such as [SIGTERM]")(subject, value)
    for name in names:
        if not isinstance(name, str) or name not in catchable:
            refuse(subject, "names of signals that a process can catch, such as SIGTERM", name)
    return names


def _anything(subject: str, value: Any) -> Any:
    return value


def known_keys(subject: str, value: object, valid: Collection[str]) -> dict[str, Any]:
    """Check for a mapping with only valid keys, and return it as keyword arguments."""
    if not isinstance(value, Mapping):
        refuse(subject, "a mapping", value)
    for key in value:
        if key not in valid:
            raise SettingsError(f'{subject}: unknown key "{key}"{nearest(key, valid)}; valid keys: {", ".join(valid)}')
    return dict(value)


def nearest(name: object, valid: Collection[str]) -> str:
    """Return ", did you mean ...?" with the valid names that resemble this one, or an empty string."""
    near = difflib.get_close_matches(str(name), valid)
    return ", did you mean " + " or ".join(f'"{each}"' for each in near) + "?" if near else ""
