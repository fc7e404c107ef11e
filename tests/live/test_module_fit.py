"""What a comparison of migrated tensors with a module says: places, names left over, shapes,
casts.
"""

from __future__ import annotations

import torch
from torch import nn

from migrate.core.spec import spec
from migrate.live.module import fit, slots

NONE = frozenset()


def test_equal_specs_have_a_place_and_nothing_to_say():
    module = nn.Linear(3, 2)
    found = fit(
        {"weight": spec("float32", (2, 3)), "bias": spec("float32", (2,))}, (), slots(module), NONE
    )
    assert found.places == {"weight": "weight", "bias": "bias"}
    assert (found.missing, found.unexpected, found.problems, found.notes) == ((), (), (), ())
    assert found.left_over() is None


def test_names_left_over_are_told_both_ways_with_the_nearest():
    found = fit(
        {"wieght": spec("float32", (2, 3)), "bias": spec("float32", (2,))},
        ["extra"],
        slots(nn.Linear(3, 2)),
        NONE,
    )
    assert (found.missing, found.unexpected) == (("weight",), ("wieght", "extra"))
    said = found.left_over()
    assert said.code == "M960"
    assert (
        said.message
        == "1 key of the module would not be filled and 2 keys of the checkpoint would have no "
        "place"
    )
    text = said.render()
    assert "in the module and not in the migrated checkpoint: weight" in text
    assert "in the migrated checkpoint and not in the module: {wieght,extra}" in text
    assert "did you mean `weight`" in text


def test_another_shape_is_named_with_both():
    found = fit({"weight": spec("float32", (3, 3))}, (), slots(nn.Linear(3, 2)), NONE)
    assert [d.code for d in found.problems] == ["M960"]
    assert "weight: [3, 3], the module's is [2, 3]" in found.problems[0].render()


def test_a_dtype_that_holds_all_values_is_said_and_one_that_rounds_is_refused():
    module = nn.Linear(3, 2)
    wide = fit({"weight": spec("bfloat16", (2, 3))}, (), slots(module), NONE)
    assert wide.problems == ()
    assert wide.notes == ("cast bfloat16 -> float32: weight",)
    narrow = fit({"weight": spec("float64", (2, 3))}, (), slots(module), NONE)
    assert [d.code for d in narrow.problems] == ["M961"]
    assert "float64 -> float32: weight" in narrow.problems[0].render()
    allowed = fit({"weight": spec("float64", (2, 3))}, (), slots(module), frozenset({"lossy"}))
    assert allowed.problems == ()
    assert allowed.notes == ("cast float64 -> float32: weight",)
    assert (
        fit({"weight": spec("float64", (2, 3))}, (), slots(module), NONE, cast=False).problems == ()
    )


def test_a_lazy_parameter_takes_any_shape():
    found = fit({"weight": spec("float32", (7, 9))}, (), slots(nn.LazyLinear(3)), NONE)
    assert found.places == {"weight": "weight"}
    assert found.problems == ()


def test_an_output_goes_to_the_slot_that_the_wrapper_named():
    module = nn.Sequential(torch.compile(nn.Linear(3, 2), backend="eager"))
    found = fit(
        {"0.weight": spec("float32", (2, 3)), "0.bias": spec("float32", (2,))},
        (),
        slots(module),
        NONE,
    )
    assert found.places == {"0.weight": "0._orig_mod.weight", "0.bias": "0._orig_mod.bias"}
    assert found.left_over() is None


def test_a_value_that_is_no_tensor_is_none_for_a_parameter():
    module = nn.Linear(3, 2)
    found = fit({"weight": spec("float32", (2, 3))}, ["bias"], slots(module), NONE)
    assert [d.code for d in found.problems] == ["M960"]
    assert (
        "values that are not tensors stand for parameters or buffers of the module: bias"
        in found.problems[0].render()
    )
    assert (
        fit(
            {"weight": spec("float32", (2, 3))}, ["bias"], slots(module), NONE, loose={"bias"}
        ).problems
        == ()
    )


class Params4bit(nn.Parameter):
    """As bitsandbytes': codes are in the parameter, and scales in an attribute."""

    __module__ = "bitsandbytes.nn.modules"
    quant_state = None


def test_a_parameter_whose_scales_are_elsewhere_takes_no_codes():
    module = nn.Module()
    module.weight = Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    given = {"weight": spec("uint8", (8, 1))}
    (problem,) = fit(given, (), slots(module), NONE).problems
    assert problem.code == "M960"
    assert "bitsandbytes has quantized 1 parameter" in problem.message
    assert "weight" in problem.message
    # in another dtype, as FSDP has them
    module.weight = Params4bit(torch.zeros(2, 2))
    given = {"weight": spec("float32", (2, 2))}
    assert fit(given, (), slots(module), NONE).problems == ()
    module.weight.quant_state = object()
    assert [d.code for d in fit(given, (), slots(module), NONE).problems] == ["M960"]
