"""A state is judged by what it holds: what looks stateless and keeps something is never called
stateless.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from te_streams import (
    TE,
    dumps,
    found,
    made,
    mapping,
    number,
    recipe,
    scaling,
    stream,
    text,
    transformer_engine,
)
from work import steps

from migrate.core.errors import CheckpointError
from migrate.extra_state.decode import decode
from migrate.extra_state.verdict import judge

STATELESS = (
    "MXFP8BlockScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "NVFP4BlockScaling",
    "CustomRecipe",
)
BOOKKEEPING = {"fp8_checkpoint": True, "num_gemms": 1, "fp8_max_fwd": 448, "fp8_max_bwd": 57344}


def verdict(payload: bytes) -> str:
    """The verdict, or "refused" for what is no state that is known."""
    try:
        return judge(decode(payload, "x")).sort
    except CheckpointError as error:
        code = error.diagnostics[0].code
        return "refused" if code in ("M930", "M931", "M932", "M950") else code


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_recipe_without_state_is_stateless_in_every_protocol(name: str, protocol: int) -> None:
    with transformer_engine() as te:
        for extras in ({}, BOOKKEEPING):
            assert (
                verdict(
                    dumps({"recipe": recipe(te, name), "extra_fp8_variables": extras}, protocol)
                )
                == "stateless"
            )


def test_what_holds_nothing_is_stateless() -> None:
    for held in (
        None,
        {},
        {"extra_fp8_variables": {}},
        {"forward": {}, "backward": {}},
        {"input": None, "param": None},
    ):
        assert verdict(dumps(held)) == "stateless"
    assert verdict(b"") == "stateless"


def with_te(build: Callable[[ModuleType], Any], protocol: int = 4) -> bytes:
    with transformer_engine() as te:
        return dumps(build(te), protocol)


def mx(te: ModuleType, **held: Any) -> dict[str, Any]:
    return {"recipe": recipe(te, "MXFP8BlockScaling"), **held}


def delayed(te: ModuleType) -> Any:
    return recipe(te, "DelayedScaling", margin=0)


DELAYED: dict[str, Callable[[ModuleType], Any]] = {
    "the recipe alone": lambda te: {"recipe": delayed(te)},
    "scales without a recipe": lambda te: scaling(),
    "one scale": lambda te: {"scale_bwd": torch.ones(1)},
    "beside a stateless recipe": lambda te: mx(te, **scaling()),
    "beside a custom recipe": lambda te: {"recipe": recipe(te, "CustomRecipe"), **scaling()},
    "in local_recipes": lambda te: mx(
        te, extra_fp8_variables={"local_recipes": [recipe(te, "MXFP8BlockScaling"), delayed(te)]}
    ),
    "deep in the extras": lambda te: mx(te, extra_fp8_variables={"x": [{"y": (delayed(te),)}]}),
    "in one mode": lambda te: {"forward": mx(te), "backward": {"scale_bwd": torch.ones(1)}},
    "in one mode of 1.13": lambda te: {"input": None, "param": {"scale_fwd": torch.ones(1)}},
}


@pytest.mark.parametrize("what", DELAYED)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_delayed_state_is_found_wherever_it_stands_with_and_without_a_memo(
    what: str, protocol: int
) -> None:
    assert verdict(with_te(DELAYED[what], protocol)) == "delayed"


@pytest.mark.parametrize("what", DELAYED)
@pytest.mark.parametrize("protocol", [0, 1])
def test_delayed_state_in_a_protocol_that_no_release_writes_is_refused(
    what: str, protocol: int
) -> None:
    assert verdict(with_te(DELAYED[what], protocol)) == "refused"


@pytest.mark.parametrize(
    "name", ["scale_fwd", "amax_history_bwd", "scale_inv_fwd", "global_fp8_buffer"]
)
def test_a_setting_that_is_called_like_state_is_none(name: str) -> None:
    assert (
        verdict(with_te(lambda te: {"recipe": recipe(te, "MXFP8BlockScaling", **{name: 1.5})}))
        == "refused"
    )
    inner = {name: 1.5}
    assert (
        verdict(
            with_te(
                lambda te: {
                    "recipe": recipe(te, "MXFP8BlockScaling", q=recipe(te, "MMParams", **inner))
                }
            )
        )
        == "refused"
    )


@pytest.mark.parametrize("field", ["qfactory", "amax_compute_algo"])
def test_a_function_stands_in_the_recipes_alone_that_have_the_field(field: str) -> None:
    assert (
        verdict(
            with_te(lambda te: {"recipe": recipe(te, "MXFP8BlockScaling", **{field: os.system})})
        )
        == "refused"
    )
    assert (
        verdict(
            with_te(
                lambda te: mx(
                    te, extra_fp8_variables={"x": recipe(te, "MMParams", **{field: os.system})}
                )
            )
        )
        == "refused"
    )
    assert (
        verdict(with_te(lambda te: {"recipe": recipe(te, "CustomRecipe", qfactory=os.system)}))
        == "stateless"
    )


def test_inverses_alone_and_variables_alone_are_legacy() -> None:
    assert verdict(dumps({"scale_inv_fwd": torch.ones(3)})) == "legacy"
    assert verdict(dumps({"extra_fp8_variables": {"num_gemms": 1}})) == "legacy"
    assert verdict(dumps({"global_fp8_buffer": {"FWD_AMAX_1": [torch.ones(2)]}})) == "legacy"


@pytest.mark.parametrize(
    "extras",
    [
        {"amaxes": [1.0, 2.0]}, {"state": b"\x00\x01"}, {"state": torch.ones(3)},
        {"state": "1.0 2.0"}, {"num_gemms": 1.5},
        {"num_gemms": [1]}, {"steps": 100}, {"local_recipes": [3.0]}, {"local_recipes": {"a": 1}},
        {"fp8_checkpoint": 2},
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", STATELESS)
def test_an_extra_that_may_be_state_beside_a_stateless_recipe_is_not_stateless(
    name: str, extras: dict[str, Any]
) -> None:
    payload = with_te(lambda te: {"recipe": recipe(te, name), "extra_fp8_variables": extras})
    assert verdict(payload) in ("unknown", "refused")


def test_a_buffer_or_an_inverse_beside_a_stateless_recipe_is_not_stateless() -> None:
    for held in ({"global_fp8_buffer": {"x": [torch.ones(2)]}}, {"scale_inv_fwd": torch.ones(2)}):
        assert verdict(with_te(lambda te, held=held: mx(te, **held))) == "unknown"  # type: ignore[misc]


# what a scanner of opcodes takes for stateless, or for harmless; by the name of the trick

FORMAT = found(TE, "Format")
MX = made("MXFP8BlockScaling", {"margin": b"K\x00"})
LATE = found(TE, "DelayedScaling") + b")\x81"
ONES = b"]" + number(1.0) + b"a"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def keyed(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


TRICKS: dict[str, bytes] = {
    # MX is read first and its module put into the memo; the second recipe has the module from there
    "recipe by the module of another": mapping(
        {
            "recipe": text(TE) + b"\x94" + text("MXFP8BlockScaling") + b"\x93)\x81",
            "extra_fp8_variables": mapping({"r": b"h\x00" + text("DelayedScaling") + b"\x93)\x81"}),
        }
    ),
    "keys made by str": keyed(
        (text("recipe"), MX),
        (call(found("builtins", "str"), b"C\x09scale_fwd", text("ascii")), ONES),
    ),
    "keys made by concat": keyed(
        (text("recipe"), MX),
        (call(found("_operator", "concat"), text("scale_"), text("fwd")), ONES),
    ),
    "an unknown key with numbers": mapping({"recipe": MX, "scales_of_tomorrow": ONES}),
    "no name at all but state": mapping({"scale_fwd": ONES, "amax_history_fwd": ONES}),
    "bytes as state": mapping({"amax": b"C\x04\x00\x00\x80?"}),
    "INST": mapping(
        {
            "recipe": MX,
            "extra_fp8_variables": mapping({"r": b"(i" + TE.encode() + b"\nDelayedScaling\n"}),
        }
    ),
    "OBJ": mapping(
        {
            "recipe": MX,
            "extra_fp8_variables": mapping({"r": b"(" + found(TE, "DelayedScaling") + b"o"}),
        }
    ),
    "EXT1": mapping({"recipe": MX, "extra_fp8_variables": mapping({"r": b"\x82\x01"})}),
    "BUILD twice": mapping({"recipe": MX + mapping({"amax": number(1.0)}) + b"b"}),
    "POP": LATE + b"0" + mapping({"recipe": MX}),
    "POP of a call": call(found("posix", "getpid")) + b"0" + mapping({"recipe": MX}),
    "a dotted name": mapping({"recipe": found(TE, "sys.modules") + b")\x81"}),
    "a dotted name in a recipe": mapping({"recipe": found(TE, "MXFP8BlockScaling.x") + b")\x81"}),
    "state that is not a dict": mapping(
        {
            "recipe": found(TE, "MXFP8BlockScaling")
            + b")\x81"
            + b"N"
            + mapping({"x": ONES})
            + b"\x86b"
        }
    ),
    "__setstate__ in the state": mapping(
        {"recipe": made("MXFP8BlockScaling", {"__setstate__": found("posix", "system")})}
    ),
    "__class__ in the state": mapping(
        {"recipe": made("MXFP8BlockScaling", {"__class__": b"K\x00"})}
    ),
    "arguments for a recipe": mapping(
        {"recipe": found(TE, "MXFP8BlockScaling") + b"(" + ONES + b"t\x81"}
    ),
    "a recipe by REDUCE": mapping({"recipe": call(found(TE, "MXFP8BlockScaling"), ONES)}),
    "items of a recipe": mapping({"recipe": MX + b"(" + number(1.0) + b"e"}),
    "pairs of a recipe": mapping({"recipe": MX + text("scale") + number(1.0) + b"s"}),
    "_load_from_bytes in the extras": mapping(
        {
            "recipe": MX,
            "extra_fp8_variables": mapping(
                {"x": call(found("torch.storage", "_load_from_bytes"), b"C\x03abc")}
            ),
        }
    ),
    "a call in the extras": mapping(
        {
            "recipe": MX,
            "extra_fp8_variables": mapping({"x": call(found("posix", "system"), text("true"))}),
        }
    ),
    "the name of a function in the extras": mapping(
        {"recipe": MX, "extra_fp8_variables": mapping({"x": found("posix", "system")})}
    ),
    "a name in the memo that is swapped": text("posix")
    + b"\x940"
    + mapping({"recipe": b"h\x00" + text("system") + b"\x93)\x81"}),
    "a key twice": keyed((text("recipe"), MX), (text("recipe"), LATE)),
    "attributes of an OrderedDict": call(found("collections", "OrderedDict"))
    + text("recipe")
    + MX
    + b"s"
    + mapping({"scale": ONES})
    + b"b",
    "getattr of something else": mapping(
        {
            "recipe": made(
                "MXFP8BlockScaling",
                {"f": call(found("builtins", "getattr"), FORMAT, text("__class__"))},
            )
        }
    ),
    "a format that is a list": mapping(
        {"recipe": made("MXFP8BlockScaling", {"f": call(FORMAT, ONES)})}
    ),
    "a recipe as the key": keyed((text("recipe"), MX), (LATE, ONES)),
    "a set": mapping(
        {
            "recipe": MX,
            "extra_fp8_variables": mapping({"local_recipes": b"\x8f(" + number(1.0) + b"\x90"}),
        }
    ),
    "a deque": mapping(
        {
            "recipe": MX,
            "extra_fp8_variables": mapping(
                {"num_gemms": call(found("collections", "deque")) + number(1.0) + b"a"}
            ),
        }
    ),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_no_trick_makes_a_state_stateless(trick: str) -> None:
    assert verdict(stream(TRICKS[trick])) in ("delayed", "unknown", "refused")


def test_what_the_tricks_are_made_of_is_stateless_without_them() -> None:
    """So the cases above are refused for their tricks."""
    assert verdict(stream(mapping({"recipe": MX}))) == "stateless"
    assert (
        verdict(
            stream(mapping({"recipe": MX, "extra_fp8_variables": mapping({"num_gemms": b"K\x01"})}))
        )
        == "stateless"
    )
    assert verdict(stream(keyed((text("recipe"), MX)))) == "stateless"
    assert (
        verdict(stream(call(found("collections", "OrderedDict")) + text("recipe") + MX + b"s"))
        == "stateless"
    )
    format_ = call(found("builtins", "getattr"), FORMAT, text("E4M3"))
    assert (
        verdict(stream(mapping({"recipe": made("MXFP8BlockScaling", {"fp8_format": format_})})))
        == "stateless"
    )


@pytest.mark.parametrize(
    "broken",
    [
        b"\x80\x04h\x00.",
        b"\x80\x040.",
        b"\x80\x09}.",
        stream(b"}") + b"x",
        b"\x80\x04" + b"(" * 1000 + b"}.",
        b"not a pickle",
        b"\x80\x04}",
    ],
)
def test_what_no_machine_accepts_is_not_stateless(broken: bytes) -> None:
    assert verdict(broken) == "refused"


def test_a_key_as_a_value_is_no_key() -> None:
    payload = with_te(
        lambda te: {
            "recipe": recipe(te, "MXFP8BlockScaling", text="scale_fwd"),
            "extra_fp8_variables": {},
        }
    )
    assert verdict(payload) == "stateless"


def doubled(depth: int, entry: int = 0) -> bytes:
    """A list that holds the same list twice, and so on: few parts, 2 ** depth places."""
    if not depth:
        return b"]"
    return (
        b"]\x94("
        + doubled(depth - 1, entry + 1)
        + (b"h" + bytes([entry + 1]) if depth > 1 else number(1.0))
        + b"e"
    )


def test_parts_that_share_each_other_cost_no_more_than_they_are_long() -> None:
    def judged(depth: int) -> None:
        assert (
            verdict(
                stream(
                    mapping({"recipe": MX, "extra_fp8_variables": mapping({"x": doubled(depth)})})
                )
            )
            == "unknown"
        )
        for key in ("recipe", "global_fp8_buffer"):
            assert verdict(stream(mapping({key: doubled(depth)}))) != "stateless"

    assert steps(lambda: judged(18)) < 3 * steps(lambda: judged(9))
