"""The arguments of a codec are those that it declares, in rule files, in the schema, in a plan and
in the inverse; those of rules written before have the hashes that they had.
"""

from __future__ import annotations

from pathlib import Path

import acme_codecs
import jsonschema
import numpy as np
import pytest
from rule_text import load_text
from safetensors.numpy import load_file, save_file

import migrate
from migrate import ops
from migrate.core.errors import MigrateError, QuestionError
from migrate.ops.base import OpCall
from migrate.rules import arguments, reference, schema
from migrate.rules.files import shipped_folder
from migrate.rules.loading import load_files
from migrate.rules.model import semantic_hash
from migrate.source import yaml
from migrate.testing import codeckit

HEAD = """id: a/b
title: t
lineage: a
edge: [one, two]
params:
  n: {type: int, optional: true}
  s: {type: str, optional: true}
  l: {type: list, items: int, optional: true}
  b: {type: bool, optional: true}
rules:
"""
DECODE = HEAD + (
    '  - {name: r, from: {weight: "{m...}.codes", scale: "{m...}.scales"}, to: "{m}.weight", '
    "via: [{dequantize: {%s}}]}\n"
)
ENCODE = HEAD + (
    '  - {name: r, from: "{m...}.weight", to: {weight: "{m}.codes", scale: "{m}.scales"}, '
    "via: [{quantize: {%s}}]}\n"
)


@pytest.fixture(scope="module", autouse=True)
def third_parties():
    with acme_codecs.installed(acme_codecs.Ints(), acme_codecs.Table()):
        yield


def test_they_satisfy_the_kit() -> None:
    cases = codeckit.cases(["acme-ints", "acme-table"])
    assert len(cases) == 8
    for name, number in cases:
        codeckit.check_sample(name, number)
    codeckit.check_description("acme-ints")
    codeckit.check_description("acme-table")


def steps_of(text: str) -> dict:
    (rule,) = load_text(text, "r.yaml").model.rules
    return rule.via[0].args


def refused(text: str):
    with pytest.raises(QuestionError) as caught:
        load_text(text, "r.yaml")
    return caught.value.diagnostics


def valid(text: str) -> bool:
    data = yaml.core(yaml.parse(text, "r.yaml").data)
    return jsonschema.Draft202012Validator(schema.rule_file()).is_valid(data)


@pytest.mark.parametrize(
    "written",
    [
        "bits: 4",
        "bits: 4, group: 128, symmetric: false",
        "bits: $n, group: $n, symmetric: $b, dtype_of_shape: $s",
        "bits: 8, group: 2 * $n",
    ],
)
def test_rules_write_them_beside_the_codec(written: str) -> None:
    for form, more in ((DECODE, "dtype: float32, "), (ENCODE, "from: float32, ")):
        text = form % f"codec: acme-ints, {more}{written}"
        assert [*steps_of(text)][2:] == [word.split(":")[0] for word in written.split(", ")]
        assert valid(text)


@pytest.mark.parametrize(
    ("written", "code", "under", "message"),
    [
        ("bits: 4, grop: 3", "M103", "grop", "acme-ints: there is no argument `grop`"),
        ("bits: 4, block: [2, 2]", "M103", "block", "acme-ints: there is no argument `block`"),
        ("bits: 5", "M308", "5", "acme-ints: `bits` is 5, it is one of 4, 8"),
        ("bits: 4, group: 0", "M308", "0", "acme-ints: `group` is 0, it must be at least 1"),
        ("bits: 4, symmetric: 3", "M106", "3", "true or false is expected"),
        ("group: 4", "M101", "", "`bits` is missing"),
    ],
)
def test_what_it_does_not_take_is_refused_where_it_stands(
    written: str, code: str, under: str, message: str
) -> None:
    for form in (DECODE, ENCODE):
        more = "dtype: float32, " if form is DECODE else ""
        text = form % f"codec: acme-ints, {more}{written}"
        (found,) = refused(text)
        assert found.code == code
        assert found.message.startswith(message)
        span = found.spans[0]
        assert span.line == 11
        if under:
            assert span.text[span.column - 1 :].startswith(under)
        assert not valid(text)


def test_a_near_word_is_suggested_and_without_one_all_are_listed() -> None:
    (found,) = refused(DECODE % "codec: acme-ints, dtype: float32, bits: 4, grop: 3")
    assert found.help == "did you mean `group`?"
    (found,) = refused(DECODE % "codec: acme-ints, dtype: float32, bits: 4, x: 3")
    assert found.help == ("its arguments are codec, dtype, bits, group, symmetric, dtype_of_shape")


def test_where_the_codec_is_a_param_any_argument_may_stand_until_it_has_a_value(
    tmp_path: Path,
) -> None:
    text = DECODE % "codec: $s, dtype: float32, bits: 8, group: 2"
    assert steps_of(text) == {"codec": "$s", "dtype": "float32", "bits": 8, "group": 2}
    assert valid(text)
    rule = tmp_path / "r.yaml"
    rule.write_text(text)
    given = {
        "a.codes": np.array([[128, 130, 127]], "u1"),
        "a.scales": np.array([[2, 3]], "f4"),
    }
    made = migrate.apply(given, rules=[rule], params={"s": "acme-ints"}, allow=["lossy"])
    assert made["a.weight"].tolist() == [[0, 4, -3]]
    with pytest.raises(MigrateError) as caught:
        migrate.apply(given, rules=[rule], params={"s": "fp8-block"}, allow=["lossy"])
    assert "fp8-block: there is no argument `bits`" in str(caught.value)
    assert caught.value.diagnostics[0].spans[0].file == str(rule)


NAMED = HEAD.replace("params:\n", "params:\n  c: {type: str}\n")


@pytest.mark.parametrize(
    ("sides", "call", "message"),
    [
        (
            'from: "{m...}.w", to: {weight: "{m}.codes"}',
            "quantize: {codec: $c}",
            "quantize makes the roles weight, scale; `to` has weight",
        ),
        (
            'from: {weight: "{m...}.w", scael: "{m...}.s"}, to: "{m}.x"',
            "dequantize: {codec: $c, dtype: float32}",
            "dequantize takes the roles weight, scale; `from` has weight, scael",
        ),
        (
            'from: "{m...}.w", to: "{m}.x"',
            "dequantize: {codec: $c, dtype: float32}",
            "dequantize takes the roles weight, scale; `from` has none",
        ),
    ],
)
def test_the_roles_of_a_codec_that_a_param_names_are_those_of_the_rule(
    sides: str, call: str, message: str, tmp_path: Path
) -> None:
    rule = tmp_path / "r.yaml"
    rule.write_text(NAMED + f"  - {{name: r, {sides}, via: [{{{call}}}]}}\n")
    given = {"a.w": np.ones((2, 2), "f4"), "a.s": np.ones((1, 1), "f4")}
    for codec, said in (("fp8-block", message), ("fp9", "there is no codec 'fp9'")):
        with pytest.raises(QuestionError) as caught:
            migrate.apply(given, rules=[rule], params={"c": codec}, allow=["lossy"])
        (found,) = caught.value.diagnostics
        assert found.message == said
        assert found.spans[0].line == 12


def test_a_part_that_no_role_is_for_is_missed_before_anything_else(tmp_path: Path) -> None:
    rule = tmp_path / "r.yaml"
    for codec in ("fp8-block", "$c"):
        rule.write_text(
            NAMED + '  - {name: r, from: {weight: "{m...}.w"}, to: "{m}.x", '
            f"via: [{{dequantize: {{codec: {codec}, dtype: float32}}}}]}}\n"
        )
        with pytest.raises(MigrateError) as caught:
            migrate.apply(
                {"a.w": np.ones((2, 2), "f4")},
                rules=[rule],
                params={"c": "fp8-block"},
                allow=["lossy"],
            )
        (found,) = caught.value.diagnostics
        assert found.code == "M408"
        assert "fp8-block cannot be decoded without its scale" in found.message


def test_the_schema_says_of_each_codec_what_it_takes() -> None:
    form, named = schema.rule_file()["$defs"]["Step"]["properties"]["quantize"], {}
    while "if" in form:
        which = form["if"]["properties"]["codec"]
        named[which.get("const") or which["description"]] = form["then"]
        form = form.get("else", {})
    assert [*named["acme-ints"]["properties"]] == [
        "codec", "from", "bits", "group", "symmetric", "dtype_of_shape",
    ]  # fmt: skip
    assert named["acme-ints"]["required"] == ["bits"]
    assert named["acme-ints"]["properties"]["symmetric"]["default"] is True
    assert "bits" not in named["fp8-block"]["properties"]
    # of a codec that a param names
    assert {"bits", "block"} <= {*named["a param"]["properties"]}
    assert {*named["a codec that is only decoded"]["properties"]} == {"codec"}


def test_the_reference_lists_them() -> None:
    from migrate import codecs

    said = reference.about_codec(codecs.get("acme-ints"))
    assert "| `bits` | `4` \\| `8` | needed | bits of a code |" in said
    assert "| `symmetric` | true, false or `$param` | `true` | for encoding: codes have" in said
    assert "only decoded" in reference.about_codec(codecs.get("acme-table"))


def test_the_inverse_has_them_all_and_only_the_codec_file_says_so(tmp_path: Path) -> None:
    said = {"codec": "acme-ints", "dtype": "float32", "bits": 4, "group": 3, "symmetric": False}
    call = arguments.resolve("dequantize", said, {})
    back = ops.get("dequantize").invert(call)
    assert isinstance(back, OpCall)
    assert arguments.as_written("quantize", back.args) == {
        "codec": "acme-ints", "from": "float32", "bits": 4, "group": 3, "symmetric": False,
    }  # fmt: skip
    rule = tmp_path / "r.yaml"
    rule.write_text(ENCODE % "codec: acme-ints, from: float32, bits: 8, group: 2")
    given = {"a.weight": np.array([[127, -127, 254]], "f4")}
    save_file(given, tmp_path / "a.safetensors")
    how = {"rules": [rule], "allow": ["lossy"]}
    migrate.apply(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **how)
    made = load_file(tmp_path / "b.safetensors")
    assert {key: array.tolist() for key, array in made.items()} == {
        "a.codes": [[255, 1, 255]],
        "a.scales": [[1, 2]],
    }
    migrate.downgrade(
        tmp_path / "b.safetensors", tmp_path / "c.safetensors", rules=[rule], allow=["lossy"]
    )
    assert load_file(tmp_path / "c.safetensors")["a.weight"].tolist() == given["a.weight"].tolist()


# of the release before codecs declared their arguments
EVERY = (
    "codec: fp8-block, dtype: float16, block: [128, 128], like: deepseek, scale: f32, "
    "scale_fmt: float, non_finite: refuse"
)
REFERENCES = (
    "codec: fp8-block, dtype: $s, block: $l, like: $s, scale: $s, scale_fmt: $s, non_finite: $s"
)
ENCODING = (
    "codec: fp8-block, from: bfloat16, block: [128, 128], like: hf, scale: ue8m0, "
    "scale_fmt: ue8m0, non_finite: keep"
)
HASHES = {
    ("dequantize", "codec: fp8-block, dtype: bfloat16"): (
        "m1:41f7de2d215a057b7ab7dc64f0be3c92d9d60bdefe7e0e88765610a303d1f05a"
    ),
    ("dequantize", EVERY): "m1:10c6031247d010c28d76afd6cea9829cc4321aab3d5205f28a2a1112227cd795",
    ("dequantize", REFERENCES): (
        "m1:1fe3bd932e04f9a6288bc043b3591311531d2fe0a3d2e1e160d9294d8fd1e817"
    ),
    (
        "dequantize",
        "non_finite: saturate, block: [$n, 2 * $n], dtype: bfloat16, codec: fp8-block",
    ): "m1:43bf16b330457d1697db86918877059d92987e1068f9fbcafe2d82ee3cade0fc",
    ("quantize", "codec: fp8-block"): (
        "m1:cfc257ed5f6933e500231b37c9d28bef5a3db4d5d34ca2126ec83590288c0857"
    ),
    ("quantize", ENCODING): "m1:81e6198f3342e65ef99633a6d0e7fdce85f761df1e3de0dac9557e1a15b6147e",
    ("quantize", "codec: fp8-block, from: $s, non_finite: $s"): (
        "m1:a4dc121b4558c1370bfb417c26f6a0df60ce1579d674a5b42e324e236c9a020c"
    ),
}
PARAMS = (
    "params: {n: {type: int, optional: true}, s: {type: str, optional: true}, l: {type: list, "
    "items: int, optional: true}}\n"
)
OLD = f"id: a/b\ntitle: t\nlineage: a\nedge: [one, two]\n{PARAMS}rules:\n"
SIDES = {
    "dequantize": 'from: {weight: "{m...}.weight", scale: "{m...}.weight_scale_inv"}, '
    'to: "{m}.weight"',
    "quantize": 'from: "{m...}.weight", to: {weight: "{m}.weight", scale: "{m}.weight_scale_inv"}',
}


@pytest.mark.parametrize(("op", "written"), HASHES)
def test_rules_written_before_mean_what_they_meant(op: str, written: str) -> None:
    text = f"{OLD}  - {{name: r, {SIDES[op]}, via: [{{{op}: {{{written}}}}}]}}\n"
    assert semantic_hash(load_text(text, "r").model) == HASHES[op, written]


def test_the_rule_that_ships_has_the_hash_that_stamps_of_it_hold() -> None:
    path = shipped_folder() / "deepseek-v3" / "bf16" / "dequantize.yaml"
    wanted = "m1:35f5b24a8088b62b00d44b328ab895497440fd5c63dfa9a1b729370a9f03af96"
    (loaded,) = load_files([path])
    assert semantic_hash(loaded.model) == wanted
