"""Operations written on the command line equal those of Python and YAML."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.transforms.apply import parse_operation, parse_operations
from jaxckpt_train.transforms.operations import (
    OPERATIONS,
    Add,
    Cast,
    Copy,
    Drop,
    Fuse,
    Nest,
    Pad,
    Rename,
    Reshape,
    Split,
    Stack,
    Transpose,
    Truncate,
    Unstack,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rename model/** params/**", Rename("model/**", "params/**")),
        ("rename leaves=a to=b", Rename("a", "b")),
        ("copy embed head", Copy("embed", "head")),
        ("copy from=a/* to=b/*", Copy("a/*", "b/*")),
        ('{"op": "copy", "from": "a/**", "to": "b/**"}', Copy("a/**", "b/**")),
        ("nest", Nest()),
        ("nest .", Nest(".")),
        ("drop 'a b/**'", Drop("a b/**")),
        ("stack layers/{}/** layers/**", Stack("layers/{}/**", "layers/**")),
        ("stack layers/{} layers axis=-1", Stack("layers/{}", "layers", -1)),
        ("unstack layers layers/{} 1", Unstack("layers", "layers/{}", 1)),
        ("split */qkv */q,*/k,*/v axis=1 sizes=8,2,2", Split("*/qkv", ["*/q", "*/k", "*/v"], 1, [8, 2, 2])),
        ("fuse */q,*/k */qk", Fuse(["*/q", "*/k"], "*/qk")),
        ("transpose */kernel", Transpose("*/kernel")),
        ("transpose */kernel 1,0", Transpose("*/kernel", [1, 0])),
        ("reshape a 3,-1", Reshape("a", [3, -1])),
        ("reshape a 12", Reshape("a", [12])),
        ("cast ** bfloat16", Cast("**", "bfloat16")),
        ("pad embed 16,none value=0.5", Pad("embed", [16, None], 0.5)),
        ("pad embed 16,None,NULL", Pad("embed", [16, None, None])),
        ("truncate embed 4,none", Truncate("embed", [4, None])),
        ("add lora/a 4,8 dtype=bfloat16 init=ones", Add("lora/a", [4, 8], "bfloat16", "ones")),
        *((f"add lora/c {shape} init=1", Add("lora/c", [], init=1)) for shape in ("[]", "()", "shape=()", "shape=[]")),
        ("add lora/a '(4, 8)'", Add("lora/a", [4, 8])),
        ("add lora/a [4,]", Add("lora/a", [4])),
        ("pad embed [16,none]", Pad("embed", [16, None])),
        ("reshape a shape=[]", Reshape("a", [])),
        ("transpose scalar axes=()", Transpose("scalar", [])),
        ("split a [p],(q)", Split("a", ["[p]", "(q)"])),
        ('{"op": "drop", "leaves": "a"}', Drop("a")),
    ],
)
def test_a_line_is_an_operation(text: str, expected: Any) -> None:
    assert parse_operation(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one of rename, nest, "),
        ("renam a b", "found 'renam', did you mean \"rename\""),
        ("drop a b", "expected at most 1 arguments \\(leaves\\)"),
        ("rename a", r"\(rename\): expected to"),
        ("drop 'a", "No closing quotation"),
        ("{", "expected JSON"),
        ("cast a float31", r"^'cast a float31': operation 1 of 1 \(cast\): dtype: expected a dtype"),
        ("cast a bf16", "found 'bf16', did you mean \"bfloat16\"\\?$"),
        ("cast a f32", 'did you mean "float32"\\?$'),
        ("add a 3 dtype=f64", 'did you mean "float64"\\?$'),
        ("transpose x axis=0,1", r'\(transpose\): unknown argument "axis", did you mean "axes"\?'),
        ("rename a too=b", r'\(rename\): unknown argument "too", did you mean "to"\?'),
        ("split a p,p,q axis=1", r"\(split\): into: expected .* found 'p' twice"),
        ("add a 3 init=normal", r"\(add\): init: expected zeros, ones or a number, found 'normal'"),
        ("cast ids int32 dtype=int8", r"\(cast\): dtype: expected it once, found 'int32' and then 'int8'$"),
        ("cast ids dtype=int8 dtype=int8", r"\(cast\): dtype: expected it once"),
        ("cast dtype=int8 ids", r"\(cast\): dtype: expected it once, found 'int8' and then 'ids'$"),
        ("add a shape= init=1", r"\(add\): shape: expected a whole number from 0, found None"),
        ("add a [4", r"\(add\): shape: expected a whole number from 0, found '\[4'"),
        ("transpose a 1,x", r"\(transpose\): axes: expected a whole number from 0, found 'x'"),
    ],
)
def test_invalid_line_is_refused(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_operation(text)


@pytest.mark.parametrize("leaves", [{"a", "b"}, {"a": 1}.keys(), np.array(["a", "b"]), [], "a"])
def test_paths_without_an_order_are_refused(leaves: Any) -> None:
    """The order of a set, in which arrays would be joined, differs from process to process."""
    with pytest.raises(SettingsError, match="fuse: leaves: expected a list of paths"):
        Fuse(leaves, "c")


def test_operations_are_registered_by_their_name() -> None:
    assert all(kind.name == name for name, kind in OPERATIONS.items())
    assert parse_operations("transforms", None) == ()
    assert parse_operations("transforms", [Drop("a"), {"op": "nest"}]) == (Drop("a"), Nest())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"op": "copy", "to": "b"}, "expected from$"),
        ({"op": "copy", "from_": "a", "to": "b"}, 'unknown key "from_", did you mean "from"'),
        ({"op": "copy", "from": "a/*", "to": "b"}, "expected the wildcards"),
        ({"op": "copy", "from": 3, "to": "b"}, "from: expected a leaf path"),
    ],
)
def test_copy_errors_name_the_written_keys(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_operations("transforms", [given])
