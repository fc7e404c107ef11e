"""A float8 weight is not cast while what looks like its scale lies beside it under a name that no
producer uses.
"""

from __future__ import annotations

import pytest
from test_pairs import composed, composition
from work import steps

from migrate.core.errors import MigrateError
from migrate.core.spec import spec
from migrate.planning.unscaled import Neighbours, likely_scale
from migrate.running.number_formats import describe_formats

E4M3, F32, BF16 = "float8_e4m3fn", "float32", "bfloat16"
CAST = "from: '{p}.q.weight', to: '{p}.q.weight', via: [{cast: {to: bfloat16%s}}]"
WEIGHT = {"a.q.weight": (E4M3, (256, 512))}


def cast(engine, beside, said="", rule=CAST):
    return composed(engine, engine.rules(rule % said, keep=["{k...}"]), WEIGHT | beside)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("a.q.weight_scales", F32, (256,)),
        ("a.q.weight_s", F32, (256, 1)),
        ("a.q.s", F32, ()),
        ("a.q.deq_scale", BF16, (2, 4)),
        ("a.q.factors", F32, (2, 4)),
        ("a.q.factor", F32, (1,)),
        ("a.q.exponents", "float8_e8m0fnu", (256, 16)),
        ("a.q.weight_amax", F32, (1, 1)),
    ],
)
def test_a_cast_beside_what_looks_like_a_scale_is_refused(engine, name, dtype, shape):
    with pytest.raises(MigrateError) as caught:
        cast(engine, {name: (dtype, shape)})
    (found,) = caught.value.diagnostics
    assert found.code == "M409"
    assert found.message == (
        f"rule 'r0' makes numbers of a.q.weight ({spec(E4M3, (256, 512))}) alone, and "
        f"{name} ({spec(dtype, shape)}) is all but certainly its scale"
    )
    assert "unscaled: true" in (found.help or "")
    assert "cast" in found.spans[0].text


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("a.q.bias", BF16, (256,)),
        ("a.q.input_scale", F32, ()),
        ("a.q.lora_A", BF16, (16, 512)),
        ("a.k.weight_scales", F32, (256,)),
        ("a.q.steps", "int64", ()),
        ("a.q.scale_of_rope", F32, (300, 5)),
    ],
)
def test_what_is_no_scale_of_the_weight_does_not_hinder_a_cast(engine, name, dtype, shape):
    assert cast(engine, {name: (dtype, shape)})["a.q.weight"] == "bfloat16 [256, 512]"


def test_a_rule_may_say_that_the_numbers_are_meant_as_they_are(engine):
    made = cast(engine, {"a.q.factors": (F32, (2, 4))}, ", unscaled: true")
    assert made["a.q.weight"] == "bfloat16 [256, 512]"


def test_a_weight_that_is_decoded_with_what_looks_like_its_scale_is_well(engine):
    rule = (
        "from: {weight: '{p}.q.weight', scale: '{p}.q.factors'}, to: '{p}.q.weight', "
        "via: [{dequantize: {codec: fp8-block, dtype: bfloat16}}]"
    )
    made = composed(engine, engine.rules(rule), WEIGHT | {"a.q.factors": (F32, (2, 4))})
    assert made == {"a.q.weight": "bfloat16 [256, 512]"}


def test_a_weight_that_only_moves_is_no_matter(engine):
    rule = "from: '{p}.q.weight', to: '{p}.k.weight'"
    assert composed(
        engine, engine.rules(rule, keep=["{k...}"]), WEIGHT | {"a.q.factors": (F32, (2, 4))}
    )


def test_of_several_the_one_whose_name_says_so_is_named():
    module = {
        "a.weight": spec(E4M3, (256, 512)), "a.grid": spec(F32, (2, 4)),
        "a.my_scale": spec(F32, (2, 4)),
    }  # fmt: skip
    assert likely_scale("a.weight", module) == "a.my_scale"
    assert likely_scale("a.weight", module, {"a.my_scale"}) == "a.grid"


def test_a_cast_beside_nothing_that_looks_like_a_scale_is_a_note(engine):
    rule = engine.rules(CAST % "", keep=["{k...}"])
    ((_, bound),) = composition(engine, rule, WEIGHT).steps
    assert [note for note in bound.notes if "float8 numbers of a.q.weight are taken" in note]
    rule = engine.rules(CAST % ", unscaled: true", keep=["{k...}"])
    ((_, bound),) = composition(engine, rule, WEIGHT).steps
    assert not [note for note in bound.notes if "float8" in note]


def test_in_a_module_of_very_many_tensors_those_of_the_next_names_are_looked_at():
    def look(count):
        specs = {f"w{n:06}_{w}": spec(E4M3, (256, 512)) if w == "b" else spec(F32, (2, 4))
                 for n in range(count) for w in ("a", "b")}  # fmt: skip
        return lambda: describe_formats(specs)

    assert steps(look(1600)) < 1.5 * 8 * steps(look(200))
    groups = look(200)()["number_formats"]
    assert [g["parts"][1]["name"] for g in groups] == [f"w{n:06}_a" for n in range(200)]
    assert len(Neighbours(f"k{n}" for n in range(1000)).of("k500")) == 64
