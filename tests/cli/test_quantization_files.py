"""What rule files do to the configuration of a number format: written, rewritten, removed, and
brought back to the byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import files, folder, refusal, round_trip, side
from commandline import ROOT, contents, done, rules

HEAD = 'keep: ["{k...}"]\nrules: [{name: m, from: old.weight, to: new.weight}]\n'
# two linears that are encoded and two that are not, a norm, and what lies beside codes
MIXED: dict[str, tuple[str, list[int]]] = {
    "old.weight": ("BF16", [4, 4]),
    "l.2.q.weight": ("F8_E4M3", [4, 4]),
    "l.2.q.weight_scale": ("BF16", [4, 1]),
    "l.10.q.weight_packed": ("I32", [4, 2]),
    "l.10.q.weight_scale": ("BF16", [4, 1]),
    "l.10.norm.weight": ("BF16", [4]),
    "l.10.k.weight": ("BF16", [4, 4]),
    "l.2.k.weight": ("F32", [4, 4]),
    "ids": ("I64", [1, 4]),
    "mask.causal": ("BOOL", [4, 4]),
}
CONFIG = {
    "model_type": "m",
    "quantization_config": {"quant_method": "awq", "zero_point": True, "bits": 4},
    "last": 1,
}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"exclude_modules": ["lm_head"]}}


def modelopt_text() -> str:
    # as ModelOpt writes it: four spaces, no newline at the end
    return json.dumps(MODELOPT, indent=4)


def test_a_whole_file_goes_and_returns_to_the_byte(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", MIXED, config=CONFIG, hf_quant_config=modelopt_text())
    file = rules(
        tmp_path,
        "files: {hf_quant_config.json: null, config.json: {quantization_config: null}}\n" + HEAD,
    )
    new = round_trip(source, tmp_path, "--rules", file)
    assert files(new).keys() == {"config.json"}
    assert side(new) == {"model_type": "m", "last": 1}
    plan = done("plan", source, "--rules", file, "--format", "json").json
    changes = {row["path"]: row["change"] for row in plan["patched"]}
    assert changes == {"hf_quant_config.json": "removed", "config.json": "changed"}


def test_a_file_that_is_not_there_need_not_go(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", MIXED, config=CONFIG)
    file = rules(tmp_path, "files: {hf_quant_config.json: null}\n" + HEAD)
    assert files(round_trip(source, tmp_path, "--rules", file)) == files(source)


def test_a_file_is_begun_and_goes_on_the_way_back(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", MIXED, config=CONFIG)
    file = rules(
        tmp_path,
        "files: {hf_quant_config.json: {quantization: {exclude_modules: $plain_modules}}}\n" + HEAD,
    )
    new = round_trip(source, tmp_path, "--rules", file)
    assert side(new, "hf_quant_config") == {
        "quantization": {"exclude_modules": ["l.2.k", "l.10.k", "new"]}
    }


def test_patches_take_the_modules_that_stayed_plain_and_those_that_are_encoded(
    tmp_path: Path,
) -> None:
    source = folder(tmp_path / "old", MIXED, config=CONFIG)
    file = rules(
        tmp_path,
        "files:\n  config.json:\n    quantization_config:\n      ignore: $plain_modules\n"
        "      config_groups: {group_0: {targets: $encoded_modules}}\n" + HEAD,
    )
    new = round_trip(source, tmp_path, "--rules", file)
    assert side(new)["quantization_config"] == {
        "quant_method": "awq",
        "zero_point": True,
        "bits": 4,
        "ignore": ["l.2.k", "l.10.k", "new"],
        "config_groups": {"group_0": {"targets": ["l.2.q", "l.10.q"]}},
    }


DEPENDS = """
params:
  algorithm: {type: str, config: "hf_quant_config.json#quantization.cache", default: none}
  bits: {type: int, config: quantization_config.cache.bits, default: 0}
  strategy: {type: str, config: quantization_config.cache.strategy, optional: true}
files:
  config.json:
    - {quantization_config: null}
    - quantization_config:
        quant_method: new
        list: [1, {$bits: 8, two: 2}, {$bits: 4, three: 3}]
        cache: {$algorithm: [FP8, FP8_STATIC], type: float}
    - quantization_config: {cache: {$bits: 8, $strategy: tensor, type: float}}
    - {$bits: 4, quantization_config: {four: $null}}
"""


@pytest.mark.parametrize(
    ("algorithm", "cache", "written"),
    [
        ("FP8", None, {"list": [1], "cache": {"type": "float"}}),
        ("FP8_STATIC", {}, {"list": [1], "cache": {"type": "float"}}),
        ("NVFP4", None, {"list": [1]}),
        (None, {"bits": 8}, {"list": [1, {"two": 2}], "cache": {"type": "float"}}),
        (
            None,
            {"bits": 8, "strategy": "tensor"},
            {"list": [1, {"two": 2}], "cache": {"type": "float"}},
        ),
        ("none", {"bits": 8, "strategy": "channel"}, {"list": [1, {"two": 2}]}),
        (None, {"bits": 4}, {"list": [1, {"three": 3}], "four": None}),
        (None, "FP8", {"list": [1]}),
    ],
)
def test_an_object_with_conditions_is_written_where_they_hold(
    algorithm: str | None, cache: Any, written: dict[str, Any], tmp_path: Path
) -> None:
    said = {"quantization": {"cache": algorithm}}
    config = {"quantization_config": {"quant_method": "old", "cache": cache}}
    source = folder(tmp_path / "old", MIXED, config=config, hf_quant_config=said)
    file = rules(tmp_path, DEPENDS + HEAD)
    new = round_trip(source, tmp_path, "--rules", file)
    assert side(new)["quantization_config"] == {"quant_method": "new", **written}


def test_a_file_of_which_nothing_holds_is_not_begun(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", MIXED, config=CONFIG)
    param = "params: {n: {type: int, default: 1}}\n"
    file = rules(tmp_path, param + "files: {new.json: {$n: 2, a: 1}}\n" + HEAD)
    assert files(round_trip(source, tmp_path, "--rules", file)) == files(source)


def test_on_the_way_back_without_a_stamp_conditions_hold_by_what_the_file_says(
    tmp_path: Path,
) -> None:
    config = {"quantization_config": {"quant_method": "new", "cache": {"bits": 8, "new": True}}}
    source = folder(tmp_path / "new", {**MIXED, "new.weight": MIXED["old.weight"]}, config=config)
    text = (
        DEPENDS.split("files:")[0]
        + """
files:
  config.json:
    - {quantization_config: null}
    - quantization_config: {cache: {$bits: 8, bits: 8}}
files_back:
  config.json:
    - {quantization_config: null}
    - quantization_config: {quant_method: old, cache: {$bits: 8, bits: 8}, other: {$bits: 4, a: 1}}
  hf_quant_config.json: [{quantization: {cache: $null}}, {$bits: 8, quantization: {cache: FP8}}]
"""
    )
    file = rules(tmp_path, text + HEAD.replace("old.weight", "older.weight"))
    out = tmp_path / "back"
    done("downgrade", source, "-o", out, "--rules", file)
    assert side(out)["quantization_config"] == {"quant_method": "old", "cache": {"bits": 8}}
    assert side(out, "hf_quant_config") == {"quantization": {"cache": "FP8"}}


# modules in three formats, one of which two arguments tell apart
FORMATS: dict[str, tuple[str, list[int]]] = {
    "old.weight": ("BF16", [4, 4]),
    "a.weight": ("F8_E4M3", [64, 64]),
    "a.weight_scale": ("F32", [64, 1]),
    "b.weight": ("F8_E4M3", [64, 64]),
    "b.weight_scale": ("F32", []),
    "c.weight_packed": ("U8", [64, 32]),
    "c.weight_scale": ("F8_E4M3", [64, 4]),
    "c.weight_global_scale": ("F32", [1]),
    "d.weight_packed": ("I32", [64, 8]),
    "d.weight_scale": ("BF16", [64, 2]),
    "d.weight_zero_point": ("I32", [8, 2]),
    "d.weight_shape": ("I64", [2]),
}


def chosen(tmp_path: Path, text: str) -> Any:
    source = folder(tmp_path / "old", FORMATS, config=CONFIG)
    file = rules(tmp_path, f"files: {{config.json: {{quantization_config: {text}}}}}\n" + HEAD)
    new = round_trip(source, tmp_path, "--rules", file)
    return side(new)["quantization_config"]["config_groups"]


def test_patches_take_the_modules_of_each_format(tmp_path: Path) -> None:
    groups = "{group_%s: {targets: {$encoded_modules: {codec: %s}}}}"
    many = ", ".join(
        groups[1:-1] % (n, said)
        for n, said in enumerate(
            ("fp8", "fp8, granularity: channel", "[nvfp4, int-pack]", "int-pack, bits: 4", "mxfp4")
        )
    )
    assert chosen(tmp_path, f"{{config_groups: {{{many}}}}}") == {
        "group_0": {"targets": ["a", "b"]},
        "group_1": {"targets": ["a"]},
        "group_2": {"targets": ["c", "d"]},
        "group_3": {"targets": ["d"]},
        "group_4": {"targets": []},
    }


def test_an_object_is_written_for_each_set_of_arguments_that_occurs(tmp_path: Path) -> None:
    said = "config_groups: {$encoded_modules: {codec: %s, by: [%s]}, each: %s}"
    each = "{targets: $encoded_modules, weights: {num_bits: $bits, group_size: $group}}"
    assert chosen(tmp_path, f"{{{said % ('int-pack, bits: 4', 'bits, group', each)}}}") == {
        "group_0": {"targets": ["d"], "weights": {"num_bits": 4, "group_size": 32}}
    }
    each = "{modules: $encoded_modules, of: $granularity}, most: {modules: $null, more: 1}"
    assert chosen(tmp_path / "b", f"{{{said % ('[fp8, mxfp4]', 'codec, granularity', each)}}}") == {
        "group_0": {"modules": None, "of": "channel", "more": 1},
        "group_1": {"modules": ["b"], "of": "tensor"},
    }
    assert chosen(tmp_path / "c", f"{{{said % ('mxfp4', 'bits', '{x: 1}')}}}") == {}


def test_modules_that_the_rule_encodes_are_of_the_format_that_it_says(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", {**FORMATS, "e.weight": ("BF16", [4, 4])}, config={})
    file = rules(
        tmp_path,
        "files: {config.json: {quantization_config: "
        "{blocks: {$encoded_modules: {codec: fp8-block, like: hf}}, "
        "none: {$encoded_modules: {codec: fp8-block, like: deepseek}}}}}\n"
        'keep: ["{k...}"]\nrules: [{name: m, from: "{m:e|old}.weight", '
        'to: {weight: "{m}.weight", scale: "{m}.weight_scale_inv"}, '
        "via: [{quantize: {codec: fp8-block, like: hf}}]}]\n",
    )
    done("apply", source, "-o", tmp_path / "new", "--rules", file, "--allow", "lossy")
    written = side(tmp_path / "new")["quantization_config"]
    assert (written["blocks"], written["none"]) == (["e", "old"], [])


def test_a_module_of_which_the_format_is_not_certain_is_named(tmp_path: Path) -> None:
    unsure = {k: s for k, s in FORMATS.items() if k != "d.weight_zero_point"}
    source = folder(tmp_path / "old", unsure, config=CONFIG)
    said = "{x: {$encoded_modules: {codec: int-pack, bits: %s}}}"
    file = rules(tmp_path, f"files: {{config.json: {{quantization_config: {said % 8}}}}}\n" + HEAD)
    found = refusal("plan", source, "--rules", file, exit=3)
    assert found["code"] == "M513"
    assert found["message"].startswith("d may be int-pack, bits 4, group 32 or int-pack, bits 8")


def test_a_set_of_which_the_arguments_are_not_certain_is_named(tmp_path: Path) -> None:
    unsure = {k: s for k, s in FORMATS.items() if k != "d.weight_zero_point"}
    source = folder(tmp_path / "old", unsure, config=CONFIG)
    said = "{$encoded_modules: {codec: int-pack, by: [bits]}, each: {bits: $bits}}"
    file = rules(tmp_path, f"files: {{config.json: {{x: {said}}}}}\n" + HEAD)
    found = refusal("plan", source, "--rules", file, exit=3)
    assert found["code"] == "M513"
    assert found["message"].startswith("d may be int-pack, bits 4, group 32 or int-pack, bits 8")
    assert "so `bits` of it are not certain" in found["message"]


def test_patches_in_order_replace_what_one_would_merge_into(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", MIXED, config=CONFIG)
    file = rules(
        tmp_path,
        "files:\n  config.json:\n    - {quantization_config: null}\n"
        "    - {quantization_config: {ignore: [], bits: 8, quant_method: compressed-tensors}}\n"
        + HEAD,
    )
    new = round_trip(source, tmp_path, "--rules", file)
    assert side(new) == {
        "model_type": "m",
        "last": 1,
        "quantization_config": {"quant_method": "compressed-tensors", "bits": 8, "ignore": []},
    }


WRITES = """
files: {config.json: {quantization_config: null}, hf_quant_config.json: null}
files_back:
  config.json: {quantization_config: {quant_method: fp8, modules_to_not_convert: $plain_modules}}
"""


def test_the_way_back_writes_what_it_says_where_no_stamp_says_more(tmp_path: Path) -> None:
    plain = {"old.weight" if k == "new.weight" else k: s for k, s in MIXED.items()}
    plain["new.weight"] = plain.pop("old.weight")
    source = folder(tmp_path / "trained", plain, config={"model_type": "m"})
    file = rules(tmp_path, WRITES + HEAD)
    answer = done("downgrade", source, "-o", tmp_path / "coded", "--rules", file)
    assert side(tmp_path / "coded") == {
        "model_type": "m",
        "quantization_config": {
            "quant_method": "fp8",
            "modules_to_not_convert": ["l.2.k", "l.10.k", "old"],
        },
    }
    # what the rule file says nothing of is said to be unknown
    assert "hf_quant_config.json cannot be downgraded: no stamp says whether it was" in (
        " ".join(answer.err.split())
    )
    assert "config.json cannot" not in answer.err.replace("hf_quant_config.json cannot", "")
    done("apply", tmp_path / "coded", "-o", tmp_path / "again", "--rules", file)
    assert files(tmp_path / "again") == files(source)


def test_a_stamp_says_more_than_the_rule_file(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", MIXED, config=CONFIG)
    new = round_trip(source, tmp_path, "--rules", rules(tmp_path, WRITES + HEAD))
    assert side(new) == {"model_type": "m", "last": 1}


def test_what_a_stamp_restores_may_be_said_otherwise_where_it_is_there(tmp_path: Path) -> None:
    static = {"in": {"static": True}}
    groups = {"a": static, "b": {"in": None}, "c": {}, "d": {"in": {"static": 0}}}
    config = {**CONFIG, "groups": groups, "list": [{"static": True}], "left": 1, "empty": 2}
    source = folder(tmp_path / "old", MIXED, config=config, hf_quant_config=modelopt_text())
    file = rules(
        tmp_path,
        "files: {config.json: {groups: null, list: null, left: null, empty: null, last: null},"
        " hf_quant_config.json: null}\n"
        "files_restored:\n"
        "  hf_quant_config.json: null\n"
        "  config.json:\n"
        '    groups: {"*": {in: {static: false}}}\n'
        '    list: {"*": {static: false}}\n'
        "    left: null\n"
        "    empty: $null\n"
        "    absent: {deep: 1}\n" + HEAD,
    )
    done("apply", source, "-o", tmp_path / "new", "--rules", file)
    asked = ("downgrade", tmp_path / "new", "--rules", file, "--format", "json", "-o")
    notes = done(*asked, tmp_path / "back").json["notes"]
    now = {**groups, "a": {"in": {"static": False}}, "d": {"in": {"static": False}}}
    wanted = {**config, "groups": now, "empty": None}
    del wanted["left"]
    assert files(tmp_path / "back").keys() == {"config.json"}
    assert side(tmp_path / "back") == wanted
    assert {n for n in notes if n.startswith("config.json ")} == {
        f"config.json {says}, as what is written is; it said {was} before"
        for says, was in (
            ("says false at groups.a.in.static", "true"),
            ("says false at groups.d.in.static", "0"),
            ("has nothing at left", "1"),
            ("says null at empty", "2"),
        )
    }


def test_a_file_that_was_made_again_since_it_went_is_named(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", MIXED, hf_quant_config=modelopt_text())
    file = rules(tmp_path, "files: {hf_quant_config.json: null}\n" + HEAD)
    done("apply", source, "-o", tmp_path / "new", "--rules", file)
    (tmp_path / "new" / "hf_quant_config.json").write_text('{"other": 1}')
    question = ("--downgrade", tmp_path / "new", "--rules", file)
    plan = done("plan", *question, "--format", "json").json
    assert plan["downgrade"]["exact"] is False
    assert any("hf_quant_config.json was edited since" in r for r in plan["downgrade"]["because"])
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back", "--rules", file)
    assert files(tmp_path / "back") == files(source)


def test_a_stamp_with_a_text_that_is_no_object_is_refused_by_the_name_of_the_file(
    tmp_path: Path,
) -> None:
    source = folder(tmp_path / "old", MIXED, hf_quant_config=modelopt_text())
    file = rules(tmp_path, "files: {hf_quant_config.json: null}\n" + HEAD)
    done("apply", source, "-o", tmp_path / "new", "--rules", file)
    history = tmp_path / "new" / "migrate.history.json"
    stamped = json.loads(history.read_text())
    (undo,) = stamped["applied"][0]["files"]["hf_quant_config.json"]
    assert undo == {"at": [], "was": modelopt_text()}
    undo["was"] = "[1]"
    history.write_text(json.dumps(stamped))
    found = refusal("plan", "--downgrade", tmp_path / "new", "--rules", file, exit=3)
    assert (found["code"], "hf_quant_config.json" in found["message"]) == ("M513", True)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (
            "params: {plain_modules: {type: list}}\n",
            "M114",
            "has a meaning of its own in patches of side files",
        ),
        ("files: {config.json: []}\n", "M114", "an empty list changes nothing"),
        ("files: {config.json: [{a: 1}, null]}\n", "M106", "a mapping is expected"),
        ("files_back: {config.json: {a: $n}}\n", "M112", "`$n` is not a param"),
        ("params: {n: {type: int, modules: true}}\n", "M114", "`modules` is for lists of text"),
        ("files: {config.json: {a: {$n: 1, b: 2}}}\n", "M112", "`$n` is not a param"),
        *[
            (
                f"params: {{n: {{type: {kind}}}}}\nfiles: {{config.json: {{a: {said}}}}}\n",
                code,
                words,
            )
            for kind, said, code, words in (
                ("int", "{$n: x, b: 2}", "M114", "`$n` is never that"),
                ("bool", "[{$n: [true, 3], b: 2}]", "M114", "`$n` is never that"),
                ("list", "{$n: 1}", "M114", "`$n` is a list"),
                ("int", "{$n: null}", "M106", "`$n` in an object of a patch is a condition"),
                ("int", "{$n: []}", "M106", "`$n` in an object of a patch is a condition"),
                ("int", "{$n: {min: 1}}", "M106", "`$n` in an object of a patch is a condition"),
                ("int", "{$null: 1}", "M114", "`$null` is no param"),
                ("int", "{$encoded_modules: {codec: fp8}, $n: 1}", "M114", "`$encoded_modules` is"),
            )
        ],
        *[
            (
                f"files_back: {{config.json: [{{a: {{$encoded_modules: {said}}}}}]}}\n",
                "M114",
                "`$encoded_modules` is narrowed by an object with the name of a codec",
            )
            for said in (
                "nvfp4",
                "{}",
                "{bits: 4}",
                "{codec: null}",
                "{codec: []}",
                "{codec: {not: fp8}}",
            )
        ],
        *[
            (f"files: {{config.json: {{a: {{$encoded_modules: {said}}}}}}}\n", code, words)
            for said, code, words in (
                ("{codec: fp8}, each: {b: 1}", "M114", "`each` is an object for each set"),
                ("{codec: fp8, by: []}, each: {b: 1}", "M114", "`each` is an object for each"),
                ("{codec: fp8, by: [bits]}, each: 1", "M114", "`each` is an object for each"),
                ("{by: [bits]}, each: {b: 1}", "M114", "`each` is an object for each set"),
                ("{codec: fp8, by: [bits]}, each: {b: $group}", "M112", "`$group` is not a param"),
                ("{codec: fp8, by: [bits]}, each: {b: 1}, most: {c: $n}", "M112", "`$n` is not"),
            )
        ],
    ],
)
def test_what_a_patch_may_not_say(tmp_path: Path, text: str, code: str, words: str) -> None:
    source = folder(tmp_path / "old", MIXED)
    file = rules(tmp_path, text + HEAD)
    found = refusal("plan", source, "--rules", file, exit=2)
    assert found["code"] == code
    assert words in found["message"]


def test_lists_of_modules_are_for_patches_alone(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", MIXED)
    file = rules(
        tmp_path, 'keep: ["{k...}"]\nrules: [{name: m, from: "{m}.weight", to: "{m}.w", '
        "where: {m: $plain_modules}}]\n"
    )  # fmt: skip
    assert refusal("plan", source, "--rules", file, exit=2)["code"] == "M112"
    # they are of what comes out, and a stamp restores what was there
    file = rules(tmp_path, "files_restored: {config.json: {ignore: $plain_modules}}\n" + HEAD)
    assert refusal("plan", source, "--rules", file, exit=2)["code"] == "M112"


def test_two_files_of_an_edge_may_not_both_say_what_becomes_of_a_file(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", MIXED, hf_quant_config=modelopt_text())
    one = rules(tmp_path / "a", "files: {hf_quant_config.json: null}\n" + HEAD)
    text = 'files: {hf_quant_config.json: {a: 1}}\nkeep: ["{k...}"]\nrules: []\n'
    two = tmp_path / "b" / "rules.yaml"
    rules(tmp_path / "b", text)
    two.write_text(two.read_text().replace("id: demo/v2/rules", "id: demo/v2/other"))
    found = refusal("plan", source, "--rules", one, "--rules", two, exit=2)
    assert found["code"] == "M516"


# what rules take of a mixed checkpoint


def ignoring(tmp_path: Path, more: str = "not: $ignored") -> Path:
    return rules(
        tmp_path,
        "params:\n  ignored: {type: list, items: str, modules: true, optional: true, "
        "config: [quantization_config.ignore, quantization_config.modules_to_not_convert]}\n"
        'keep: ["{k...}"]\n'
        f'rules: [{{name: m, from: "{{m...}}.weight", to: "{{m}}.w", where: {{m: {{{more}}}}}}}]\n',
    )


LINEARS: dict[str, Any] = {
    f"model.{name}.weight": ("BF16", [2, 2])
    for name in ("0.gate", "0.gate_proj", "1.gate", "1.gate_proj", "lm_head")
}


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*gate$", "model.lm_head"]},
         ["0.gate", "1.gate", "lm_head"]),
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head", "Linear"]}, []),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.0.gate"]},
         ["0.gate", "lm_head"]),
        ({"quant_method": "modelopt", "ignore": ["*.lm_head", "model.0*"]},
         ["0.gate", "0.gate_proj", "lm_head"]),
        ({"quant_method": "unknown", "ignore": ["model.0*", "model.1.gate"]}, ["1.gate"]),
        (None, []),
    ],
)  # fmt: skip
def test_a_list_in_the_configuration_leaves_out_what_its_library_reads_in_it(
    tmp_path: Path, config: Any, left: list[str]
) -> None:
    source = folder(tmp_path / "old", LINEARS, config={"quantization_config": config})
    new = round_trip(source, tmp_path, "--rules", ignoring(tmp_path))
    taken = {key for key in contents(new) if key.endswith(".w")}
    assert {key.removeprefix("model.").removesuffix(".weight") for key in contents(new)} - {
        key.removeprefix("model.") for key in taken
    } == set(left)


def test_an_expression_that_needs_backtracking_is_refused_by_its_text(tmp_path: Path) -> None:
    config = {"quant_method": "compressed-tensors", "ignore": [r"re:(a)\1"]}
    source = folder(tmp_path / "old", LINEARS, config={"quantization_config": config})
    found = refusal("plan", source, "--rules", ignoring(tmp_path), exit=3)
    assert found["code"] == "M513"
    assert r"`(a)\1`" in found["message"]


def test_values_may_be_left_out_of_a_capture_with_alternatives(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", LINEARS)
    text = (
        'keep: ["{k...}"]\nrules: [{name: m, from: "model.{n:int}.{w:gate|gate_proj}.weight", '
        'to: "model.{n}.{w}.w", where: {w: {not: gate}, n: {min: 1, not: 7}}}]\n'
    )
    new = round_trip(source, tmp_path, "--rules", rules(tmp_path, text))
    assert {key for key in contents(new) if key.endswith(".w")} == {"model.1.gate_proj.w"}
    wrong = rules(tmp_path / "wrong", text.replace("{not: gate}", "{not: up}"))
    assert refusal("plan", source, "--rules", wrong, exit=2)["code"] == "M114"


# whether what is written describes what comes out

WRITE = "files: {config.json: {quantization_config: %s}}\n" + HEAD


def warned(source: Path, *question: object) -> list[str]:
    plan = done("plan", source, *question, "--format", "json").json
    return [w["message"] for w in plan["warnings"] if w["code"] == "M519"]


GROUPS = "config_groups: {g: {targets: [Linear], weights: {type: float}}}"
LAYERS = "{new: {quant_algo: FP8}, l.2.q: {quant_algo: FP8}, l.10.q: {quant_algo: FP8}}"
THERE = "config.json#quantization_config"


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{quant_method: fp8, modules_to_not_convert: $plain_modules}", None),
        (f"{{quant_method: compressed-tensors, ignore: $plain_modules, {GROUPS}}}", None),
        ("null", "2 modules (l.2.q, l.10.q) are encoded, and no configuration says how"),
        (
            "{quant_method: fp8, modules_to_not_convert: [q]}",
            f"2 modules (l.2.q, l.10.q) are encoded, and plain by {THERE}",
        ),
        (
            f"{{quant_method: modelopt, quant_algo: MIXED_PRECISION, quantized_layers: {LAYERS}}}",
            f"1 module (new) is plain, and fp8, 8 bits, a scale for each tensor by {THERE}",
        ),
    ],
)
def test_a_configuration_that_does_not_describe_the_output_is_warned_of(
    tmp_path: Path, written: str, words: str | None
) -> None:
    source = folder(tmp_path / "old", MIXED, config={"quantization_config": {"quant_method": "x"}})
    found = warned(source, "--rules", rules(tmp_path, WRITE % written))
    assert found == ([] if words is None else [words])


STATIC = (
    "{quant_method: compressed-tensors, ignore: $plain_modules, "
    "config_groups: {g: {targets: [Linear], weights: {type: float}, input_activations: %s}}}"
)
PLAIN = "modules_to_not_convert: $plain_modules"


@pytest.mark.parametrize(
    ("written", "place"),
    [
        (STATIC % "{dynamic: true}", None),
        (STATIC % "null", None),
        (STATIC % "{num_bits: 8}", "config_groups.g.input_activations.dynamic is False"),
        (STATIC % "{dynamic: false}", "config_groups.g.input_activations.dynamic is False"),
        (STATIC % "{dynamic: local}", "config_groups.g.input_activations.dynamic is local"),
        (
            f"{{quant_method: fp8, activation_scheme: static, {PLAIN}}}",
            "activation_scheme is static",
        ),
        (
            "{quant_method: modelopt, quant_algo: NVFP4, ignore: $plain_modules}",
            "quant_algo is NVFP4",
        ),
        ("{quant_method: modelopt, quant_algo: FP8_PB_WO, ignore: $plain_modules}", None),
    ],
)
def test_scales_of_inputs_that_are_declared_and_not_there_are_warned_of(
    tmp_path: Path, written: str, place: str | None
) -> None:
    said = {"quantization_config": {"quant_method": "x"}}
    asked = ("--rules", rules(tmp_path, WRITE % written))
    found = warned(folder(tmp_path / "old", MIXED, config=said), *asked)
    why = "inputs are scaled by numbers that are stored, and no tensor that comes out is one"
    assert found == ([] if place is None else [f"{THERE}.{place}: {why}"])
    beside = MIXED | {"l.2.q.input_scale": ("F32", [])}
    assert warned(folder(tmp_path / "with", beside, config=said), *asked) == []


def test_a_configuration_that_stays_is_not_looked_at(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": "four"}, "size": 1}
    source = folder(tmp_path / "old", MIXED, config=config)
    file = rules(tmp_path, "files: {config.json: {size: 2}}\n" + HEAD)
    assert warned(source, "--rules", file) == []


def test_a_configuration_that_stays_though_nothing_is_encoded_is_warned_of(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", LINEARS | {"old.weight": ("BF16", [2])}, config=CONFIG)
    file = rules(tmp_path, "files: {config.json: {quantization_config: {bits: 8}}}\n" + HEAD)
    assert warned(source, "--rules", file) == [
        "config.json#quantization_config says awq, 8 bits, with zero points, and no module is"
    ]


def shown_rules(tmp_path: Path) -> Path:
    """The rule file of the page that explains all this."""
    page = (ROOT / "docs" / "how-to" / "quantization-config.md").read_text()
    file = tmp_path / "shown.yaml"
    file.write_text(page.split("```yaml\n")[1].split("```")[0])
    return file


@pytest.mark.heavy
def test_the_rules_of_the_page_encode_a_trained_model_and_decode_it_again(tmp_path: Path) -> None:
    trained = folder(
        tmp_path / "trained",
        {
            "model.q.weight": ("BF16", [4, 6], bytes(range(1, 49))),
            "model.norm.weight": ("BF16", [4]),
        },
        config={"model_type": "m"},
    )
    question = ("--rules", shown_rules(tmp_path), "--set", "block=2,2", "--allow", "lossy")
    done("downgrade", trained, "-o", tmp_path / "coded", *question)
    assert contents(tmp_path / "coded")["model.q.weight"][:2] == ("F8_E4M3", (4, 6))
    assert side(tmp_path / "coded")["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [2, 2],
        "modules_to_not_convert": [],
    }
    done("apply", tmp_path / "coded", "-o", tmp_path / "again", *question)
    assert files(tmp_path / "again") == files(trained)


@pytest.mark.heavy
def test_a_module_that_the_list_leaves_out_stays_in_its_format(tmp_path: Path) -> None:
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [2, 2],
        "modules_to_not_convert": ["head"],
    }
    source = folder(
        tmp_path / "old",
        {
            "m.q.weight": ("F8_E4M3", [2, 2], bytes([0x38, 0x40, 0x30, 0xB8])),
            "m.q.weight_scale_inv": ("F32", [1, 1], b"\0\0\0\x40"),
            "m.head.weight": ("BF16", [2, 2]),
        },
        config={"quantization_config": quantization},
    )
    question = ("--rules", shown_rules(tmp_path), "--allow", "lossy")
    done("apply", source, "-o", tmp_path / "new", *question)
    new = contents(tmp_path / "new")
    # 1, 2, 0.5 and -1, twice as large
    assert new["m.q.weight"] == ("BF16", (2, 2), bytes.fromhex("00408040803f00c0"))
    assert new["m.head.weight"] == contents(source)["m.head.weight"]
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back", *question)
    assert files(tmp_path / "back") == files(source)
    back = contents(tmp_path / "back")
    assert {key: made[:2] for key, made in back.items()} == {
        key: was[:2] for key, was in contents(source).items()
    }
    assert back["m.head.weight"] == contents(source)["m.head.weight"]


# whether what is decoded is what the configuration says

CODED: dict[str, tuple[str, list[int]]] = {
    "m.q.weight": ("F8_E4M3", [4, 4]),
    "m.q.weight_scale_inv": ("F32", [2, 2]),
    "m.k.weight": ("F8_E4M3", [4, 4]),
    "m.k.weight_scale_inv": ("F32", [2, 2]),
    "head.weight": ("BF16", [4, 4]),
}


def decoded(tmp_path: Path, quantization: Any, exit: int = 0) -> Any:
    source = folder(tmp_path / "old", CODED, config={"quantization_config": quantization})
    question = ("--rules", shown_rules(tmp_path), "--set", "block=2,2", "--allow", "lossy")
    return done("plan", source, *question, "--format", "json", exit=exit).json


def test_what_is_decoded_and_contradicts_the_configuration_is_refused(tmp_path: Path) -> None:
    said = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}  # fmt: skip
    (found,) = decoded(tmp_path, said, exit=3)["diagnostics"]
    assert found["code"] == "M315"
    assert found["message"] == (
        "m.q is fp8-block, blocks of 2 x 2 by its tensors, and fp8, 8 bits, a scale for each "
        "channel, compressed-tensors by config.json#quantization_config.config_groups.g.weights"
    )
    assert found["notes"] == ["2 tensors are like it"]


def test_what_is_decoded_and_plain_by_the_configuration_is_warned_of(tmp_path: Path) -> None:
    said = {"quant_method": "compressed-tensors", "ignore": ["m.k"], "config_groups": {"g": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "block",
        "block_structure": [2, 2]}}}}  # fmt: skip
    (found,) = [w for w in decoded(tmp_path, said)["warnings"] if w["code"] == "M519"]
    assert found["message"] == (
        "m.k is fp8-block, blocks of 2 x 2 by its tensors, and plain by the configuration"
    )


def test_a_configuration_that_cannot_be_read_is_refused_where_it_is_decoded(tmp_path: Path) -> None:
    (found,) = decoded(tmp_path, {"quant_method": "fp8", "fmt": "e9m9"}, 3)["diagnostics"]
    assert (found["code"], "quantization_config.fmt" in found["message"]) == ("M513", True)


TESTED = """files: {hf_quant_config.json: %s}
rules: [{name: m, from: old.weight, to: new.weight}]
tests:
  - name: the file goes
    given: {old.weight: {shape: [2], dtype: float32, fill: 1}}
    side: {hf_quant_config.json: {quantization: {}}}
    expect: {new.weight: {shape: [2], dtype: float32, fill: 1}}
    expect_side: {hf_quant_config.json: null}
"""


def test_a_test_of_rules_can_say_that_a_file_is_gone(tmp_path: Path) -> None:
    done("test", rules(tmp_path / "a", TESTED % "null"))
    failed = done("test", rules(tmp_path / "b", TESTED % "{a: 1}"), exit=1)
    assert "side file hf_quant_config.json is made" in failed.out + failed.err


@pytest.mark.parametrize(
    ("text", "code"),
    [("{", "M906"), ("[]", "M513"), ('{"a":' * 200 + "1" + "}" * 200, "M914")],
)
def test_a_broken_file_of_modelopt_is_refused_by_name(tmp_path: Path, text: str, code: str) -> None:
    source = folder(tmp_path / "old", MIXED, hf_quant_config=text)
    file = rules(tmp_path, "files: {hf_quant_config.json: null}\n" + HEAD)
    found = refusal("plan", source, "--rules", file, exit=3)
    assert (found["code"], "hf_quant_config.json" in found["message"]) == (code, True)


@pytest.mark.libraries
def test_what_is_written_for_transformers_means_the_same_to_it(tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizers_utils import should_convert_module

    source = folder(tmp_path / "old", MIXED, config={"model_type": "m"})
    file = rules(
        tmp_path,
        "files: {config.json: {quantization_config: {quant_method: fp8, weight_block_size: "
        "[128, 128], modules_to_not_convert: $plain_modules}}}\n" + HEAD,
    )
    done("apply", source, "-o", tmp_path / "new", "--rules", file)
    config = FineGrainedFP8Config(**side(tmp_path / "new")["quantization_config"])
    converted = {
        module: should_convert_module(module, config.modules_to_not_convert)
        for module in ("new", "l.2.k", "l.10.k", "l.2.q", "l.10.q")
    }
    assert converted == {
        "new": False,
        "l.2.k": False,
        "l.10.k": False,
        "l.2.q": True,
        "l.10.q": True,
    }


def test_experts_of_deepseek_v4_are_what_its_configuration_says(tmp_path: Path) -> None:
    tensors: dict[str, tuple[str, list[int]]] = {
        "l.0.experts.0.w1.weight": ("I8", [64, 32]),
        "l.0.experts.0.w1.scale": ("F8_E8M0", [64, 2]),
        "l.0.attn.wq.weight": ("F8_E4M3", [256, 256]),
        "l.0.attn.wq.scale": ("F8_E8M0", [2, 2]),
    }
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    config = {"expert_dtype": "fp4", "quantization_config": quantization}
    formats = done("inspect", folder(tmp_path / "v4", tensors, config=config), "--format", "json")
    found = {f["readings"][0]["format"]: f["contradiction"] for f in formats.json["number_formats"]}
    assert found == {"mxfp4": None, "fp8-block": None}
