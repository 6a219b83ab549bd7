"""Checks of values that users give: each gives its value back in the right type, or says what is wrong with it."""

from __future__ import annotations

import difflib
import itertools
import math
import numbers
import operator
import os
import re
import signal
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
_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]*:/")  # one slash is all that pathlib leaves of two


_LOWER_IS_BETTER = frozenset(  # also of "dice_loss"
    {
        "err",
        "error",
        "errors",
        "kl",
        "loss",
        "losses",
        "mae",
        "mse",
        "neg",
        "negative",
        "nll",
        "rmse",
        "std",
        "variance",
    }
)


def refuse(subject: str, expected: str, found: object) -> NoReturn:
    """Raise a SettingsError: what was expected of the subject, and what was found."""
    raise SettingsError(f"{subject}: expected {expected}, found {shown(found)}")


def shown(found: object, letters: int = 200) -> str:
    """How a message tells of a value, however long that is; nothing in it moves the cursor of a terminal."""
    if isinstance(found, (str, bytes)):
        return repr(found) if len(found) <= letters else f"{found[:letters]!r}..."
    try:
        told = repr(found)
    except Exception:  # noqa: BLE001  # a type of the user's own, or a number of more digits than Python writes
        return f"one {type(found).__name__} that cannot be shown"
    return told if len(told) <= letters else f"{told[:letters]}..."


def text(subject: str, value: Any) -> str:
    """Text that is not empty."""
    return value if isinstance(value, str) and value else refuse(subject, "text that is not empty", value)


def unicode_text(subject: str, value: Any) -> str:
    """Text that is not empty, and that a file can hold."""
    found = text(subject, value)
    try:
        found.encode()
    except UnicodeEncodeError:
        refuse(subject, "valid Unicode", value)
    return found


def path_text(subject: str, value: Any) -> str:
    """The text of a path of the file system."""
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(found, str) or not found or "\0" in found:
        refuse(subject, "a path, as text or pathlib.Path", value)
    try:
        os.fsencode(found)
    except UnicodeEncodeError:
        refuse(subject, "a path of characters that a file system takes", value)
    if _URL.match(found):
        refuse(subject, "a path of the file system: other stores cannot be read or written yet", str(value))
    return found


def absolute_path(subject: str, value: Any, base: str = "") -> str:
    """The absolute path, `~` expanded; a relative one begins at `base`, or at the working directory.

    Raises:
        SettingsError: it is no path, or is relative to a home that nobody has, or to a removed working directory.
    """
    expanded = os.path.expanduser(path_text(subject, value))
    if expanded.startswith("~"):
        raise SettingsError(
            f"{subject} {expanded!r}: expected a user with a home directory after '~', found none; of another name "
            "that begins so pass the absolute path"
        )
    try:
        return os.path.abspath(os.path.join(base, expanded))
    except OSError as error:
        raise SettingsError(
            f"{subject} {expanded!r}: expected a working directory for a relative path, but it cannot be found "
            f"({error}); was it removed? Pass an absolute path"
        ) from error


def named(subject: str, value: Any) -> Mapping[str, Any]:
    """A mapping; whoever takes it checks the names."""
    if not isinstance(value, Mapping):
        kind = type(value).__name__  # a whole state is no good text
        raise SettingsError(f'{subject}: expected a mapping of names, as {{"state": state}}, found one {kind}')
    return value


def flag(subject: str, value: Any) -> bool:
    """True or False."""
    return value if isinstance(value, bool) else refuse(subject, "true or false", value)


def seconds(subject: str, value: Any) -> float:
    """A finite number of seconds above 0, as a float; numpy's are taken too."""
    number = _real(value)
    return number if 0 < number < math.inf else refuse(subject, "a finite number of seconds above 0", value)


def time_limit(subject: str, value: Any) -> float | None:
    """Seconds to wait, 0 if they are over already; None: no limit, for which infinity stands as well."""
    number = math.inf if value is None else _real(value)
    if math.isnan(number):
        refuse(subject, "seconds, or None", value)
    return None if number == math.inf else max(0.0, number)


def _real(value: Any) -> float:
    """A number as a float; nan for anything else."""
    try:
        return float(value) if not isinstance(value, bool) and isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def index_of(value: Any) -> int | None:
    """The whole number that a value is, also one of numpy or JAX; None: it is none, as a truth value is."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # arrays of floats have an __index__, too
        return None


def whole(least: int, most: float = math.inf) -> Check:
    """A check for a whole number in a range; those of numpy and JAX are taken too."""
    wanted = f"a whole number of at least {least}" if most == math.inf else f"a whole number from {least} to {most}"

    def check(subject: str, value: Any) -> int:
        number = index_of(value)
        return number if number is not None and least <= number <= most else refuse(subject, wanted, value)

    return check


def one_of(*choices: str | bool) -> Check:
    """A check for one of some values."""
    wanted = "one of " + ", ".join(map(repr, choices))

    def check(subject: str, value: Any) -> str | bool:
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return choice
        refuse(subject, wanted, value)

    return check


def metric_mode(subject: str, value: object) -> Mode:
    """`value` as the direction in which a metric gets better."""
    if value == "min":
        return "min"
    if value == "max":
        return "max"
    raise SettingsError(f'{subject}: expected "min" (lower is better) or "max" (higher is better), found {value!r}')


def stated_mode(subject: str, value: object, metric: str) -> Mode:
    """`value` as a mode; None: "min", unless the name of the metric says that higher may be better."""
    words = _words(metric)
    if value is None and words & _HIGHER_IS_BETTER and not words & _LOWER_IS_BETTER:
        raise SettingsError(
            f'{subject}: expected "max" or "min" for the metric {metric!r}, whose name says that higher is better; '
            "found neither"
        )
    return metric_mode(subject, "min" if value is None else value)


def _words(metric: str) -> set[str]:
    """The words of a name such as "valAcc1" or "mean_io_u", also without a number at their end, or two as one."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", metric).lower())
    return {*words, *(word.rstrip("0123456789") for word in words), *map("".join, itertools.pairwise(words))}


def optional(check: Check) -> Check:
    """A check that also takes None."""
    return lambda subject, value: None if value is None else check(subject, value)


def signals(subject: str, value: Any) -> list[str]:
    """Names of signals that a process can catch."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Collection):
        refuse(subject, "a list of names of signals, such as [SIGTERM]", value)
    catchable = set(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP"}
    for name in value:
        if not isinstance(name, str) or name not in catchable:
            refuse(subject, "names of signals that a process can catch, such as SIGTERM", name)
    return list(value)


def anything(subject: str, value: Any) -> Any:
    """Whatever it is."""
    return value


def known_keys(subject: str, value: object, valid: Collection[str]) -> dict[str, Any]:
    """`value` as keyword arguments, if it is a mapping with no other keys than the valid ones."""
    if not isinstance(value, Mapping):
        refuse(subject, "a mapping", value)
    for key in value:
        if key not in valid:
            raise SettingsError(f'{subject}: unknown key "{key}"{nearest(key, valid)}; valid keys: {", ".join(valid)}')
    return dict(value)


def nearest(name: object, valid: Collection[str]) -> str:
    """A question that names the valid names that look like this one; empty if none does."""
    near = difflib.get_close_matches(str(name), valid)
    return ", did you mean " + " or ".join(f'"{one}"' for one in near) + "?" if near else ""
