"""Params that the checkpoint knows: from its configuration, its shapes, its stamp; forwards, and
back without a flag.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from checkpoints import CASES, MOVE, files, folder, refusal, round_trip, side, small, stamp
from commandline import SIZES, contents, done, rules

KEEP = 'keep: ["{k...}"]\n'


# --- the cases


def test_grouped_queries_are_split_as_the_configuration_says(tmp_path: Path) -> None:
    heads, groups, dim = 4, 2, 3
    rows = groups * (heads // groups + 2) * dim
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": dim,
        "rope_scaling": None,
    }
    tensors = {
        f"decoder.layers.{n}.self_attention.linear_qkv.weight": ("F32", [rows, 2]) for n in range(2)
    }
    new = round_trip(
        folder(tmp_path / "old", tensors, config=config),
        tmp_path,
        "--rules",
        CASES / "c10-megatron-gqa-qkv.yaml",
    )
    made = contents(new)
    whole = contents(tmp_path / "old")["decoder.layers.1.self_attention.linear_qkv.weight"][2]
    line = 2 * 4
    # the second group: its two queries stand after the first group's queries, key and value
    assert (
        made["model.layers.1.self_attn.q_proj.weight"][2][2 * dim * line :]
        == whole[4 * dim * line : 6 * dim * line]
    )
    assert (
        made["model.layers.1.self_attn.v_proj.weight"][2]
        == whole[3 * dim * line : 4 * dim * line] + whole[7 * dim * line :]
    )
    assert stamp(new)["applied"][0]["params"] == {"heads": heads, "groups": groups, "head_dim": dim}


def test_layers_past_those_of_the_configuration_move(tmp_path: Path) -> None:
    tensors = {f"model.layers.{n}.mlp.weight": ("F32", [2]) for n in range(4)}
    new = round_trip(
        folder(tmp_path / "old", tensors, config={"num_hidden_layers": 3}),
        tmp_path,
        "--rules",
        CASES / "c12b-mtp.yaml",
    )
    assert set(contents(new)) == {
        *(f"model.layers.{n}.mlp.weight" for n in range(3)),
        "mtp_layers.0.mlp.weight",
    }


def test_a_padded_vocabulary_is_cut_and_restored_and_the_configuration_follows(
    tmp_path: Path,
) -> None:
    tensors = {"embedding.word_embeddings.weight": ("F32", [8, 2], bytes(range(40)) + bytes(24))}
    config = {"vocab_size": 5, "tie_word_embeddings": False, "eos_token_id": None}
    new = round_trip(
        folder(tmp_path / "old", tensors, config=config),
        tmp_path,
        "--rules",
        CASES / "c07-megatron-embedding.yaml",
    )
    assert side(new) == {**config, "tie_word_embeddings": True}
    assert contents(new)["lm_head.weight"][1] == (5, 2)
    assert stamp(new)["applied"][0]["params"] == {"vocab": 5, "padded": 8}


@pytest.mark.heavy
def test_the_blocks_of_a_quantized_checkpoint_are_those_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "F8_E4M3", 1)
    scales = struct.pack("<6f", *range(1, 7))
    tensors = {
        "m.o_proj.weight": ("F8_E4M3", [4, 6], bytes(24)),
        "m.o_proj.weight_scale_inv": ("F32", [2, 3], scales),
    }
    config = {
        "a": None,
        "quantization_config": {"weight_block_size": [2, 2], "fmt": "e4m3", "quant_method": "fp8"},
        "z": 1,
    }
    source, rule = (
        folder(tmp_path / "old", tensors, config=config),
        ("--rules", CASES / "c14-fp8.yaml", "--allow", "lossy"),
    )
    done("apply", source, "-o", tmp_path / "new", *rule)
    assert side(tmp_path / "new") == {"a": None, "z": 1}
    assert stamp(tmp_path / "new")["applied"][0]["params"] == {"block": [2, 2]}
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back", *rule)
    assert files(tmp_path / "back") == files(source)
    assert contents(tmp_path / "back")["m.o_proj.weight_scale_inv"][1] == (2, 3)
    other = folder(
        tmp_path / "other", tensors, config={"quantization_config": {"weight_block_size": [4, 2]}}
    )
    error = done("plan", other, *rule, exit=3).err
    assert "blocks of 4 x 2" in error, "scales that do not fit these blocks"
    wrong = folder(
        tmp_path / "wrong", tensors, config={"quantization_config": {"weight_block_size": "2x2"}}
    )
    found = refusal("plan", wrong, *rule, exit=2)
    assert (
        found["message"]
        == "param `block` from config.json#quantization_config.weight_block_size: '2x2' is not a "
        "list"
    )


def test_an_adapter_is_merged_with_the_numbers_of_its_own_configuration(tmp_path: Path) -> None:
    tensors = {
        f"base_model.model.l.lora_{x}.weight": ("F32", shape)
        for x, shape in (("A", [2, 6]), ("B", [4, 2]))
    }
    source = folder(
        tmp_path / "old",
        {"l.weight": ("F32", [4, 6]), **tensors},
        adapter_config={"lora_alpha": 4, "r": 2},
        config={"r": 9},
    )
    planned = done(
        "plan",
        source,
        "--rules",
        CASES / "c17-lora-merge.yaml",
        "--allow",
        "lossy",
        "--format",
        "json",
    ).json
    assert planned["params"] == {"alpha": 4, "rank": 2}


def test_a_configuration_that_counts_more_experts_than_there_are_is_believed(
    tmp_path: Path,
) -> None:
    tensors = {
        f"l.block_sparse_moe.experts.{e}.{w}.weight": ("F32", [2, 2])
        for e in range(2)
        for w in ("w1", "w2", "w3")
    }
    rule = CASES / "c11b-vllm.yaml"
    found = done(
        "plan",
        folder(tmp_path / "a", tensors, config={"num_local_experts": 3}),
        "--rules",
        rule,
        "--format",
        "json",
        exit=3,
    ).json
    assert {d["code"] for d in found["diagnostics"]} == {"M207"}
    round_trip(
        folder(tmp_path / "old", tensors, config={"num_local_experts": 2}),
        tmp_path,
        "--rules",
        rule,
    )


def test_a_single_file_has_no_configuration_and_its_stamp_remembers(tmp_path: Path) -> None:
    tensors = {"decoder.layers.0.self_attention.linear_qkv.weight": ("F32", [24, 2])}
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3}
    source, rule = (
        folder(tmp_path / "old", tensors, config=config),
        CASES / "c10-megatron-gqa-qkv.yaml",
    )
    done("apply", source, "-o", tmp_path / "new.safetensors", "--rules", rule)
    done(
        "downgrade",
        tmp_path / "new.safetensors",
        "-o",
        tmp_path / "back.safetensors",
        "--rules",
        rule,
    )
    assert contents(tmp_path / "back.safetensors") == contents(source)


# --- where a value comes from

PARAM = "params: {n: {type: int, config: sizes.1.rows%s}}\n"
STACK = (
    "rules: [{name: cut, from: old.weight, to: 'new.{i:int}.weight', via: [{split: {into: i, "
    "dim: 0, count: $n}}]}]\n"
)


def test_a_value_is_found_through_objects_and_lists_and_a_default_steps_back(
    tmp_path: Path,
) -> None:
    rule = rules(tmp_path, PARAM % ", default: 4" + STACK)
    source = small(tmp_path / "old", config={"sizes": [{}, {"rows": 2}]})
    new = round_trip(source, tmp_path, "--rules", rule)
    assert set(contents(new)) == {"new.0.weight", "new.1.weight"}
    nobody = small(tmp_path / "nobody", config={"sizes": [{"rows": 2}], "x": 1})
    assert done("plan", nobody, "--rules", rule, "--format", "json").json["params"] == {"n": 4}
    silent = small(tmp_path / "silent", config={"sizes": [0, {"rows": None}]})
    assert done("plan", silent, "--rules", rule, "--format", "json").json["params"] == {"n": 4}


def test_a_value_of_the_wrong_type_names_file_and_place(tmp_path: Path) -> None:
    found = refusal(
        "plan",
        small(tmp_path / "a", config={"sizes": [0, {"rows": "2"}]}),
        "--rules",
        rules(tmp_path, PARAM % "" + STACK),
        exit=2,
    )
    assert found["code"] == "M114"
    assert "`n` from config.json#sizes.1.rows" in found["message"]
    assert found["spans"][0]["line"] == 5


def test_without_a_value_the_message_says_where_it_could_stand(tmp_path: Path) -> None:
    text = (
        "params: {n: {type: int, config: 'params.json#rows', shape: {key: a.weight, dim: 1}}}\n"
        + STACK
    )
    found = refusal("plan", small(tmp_path / "a"), "--rules", rules(tmp_path, text), exit=2)
    assert found["code"] == "M509"
    assert any("params.json#rows" in note for note in found["notes"])
    assert any("axis 1 of a.weight" in note for note in found["notes"])
    assert found["help"] == "--set n=…, an integer"


def test_all_sources_must_agree_and_each_is_shown(tmp_path: Path) -> None:
    text = (
        "params: {n: {type: int, config: rows, shape: {key: [old.weight, absent], dim: -1}}}\n"
        + STACK
    )
    rule = rules(tmp_path, text)
    agreeing = small(tmp_path / "agreeing", config={"rows": 2})
    assert done("plan", agreeing, "--rules", rule, "--set", "n=2", "--format", "json").json[
        "params"
    ] == {"n": 2}
    found = refusal(
        "plan", small(tmp_path / "a", config={"rows": 4}), "--rules", rule, "--set", "n=1", exit=2
    )
    assert found["code"] == "M510"
    assert found["notes"] == [
        "--set says 1",
        "config.json#rows says 4",
        "axis -1 of old.weight says 2",
    ]


def test_a_value_may_stand_in_several_places_and_all_that_speak_must_agree(tmp_path: Path) -> None:
    text = (
        "params: {n: {type: int, config: [text_config.rows, rows, 'params.json#n_rows']}}\n" + STACK
    )
    rule = rules(tmp_path, text)
    for number, sides in enumerate(
        (
            {"config": {"rows": 2}},
            {"config": {"text_config": {"rows": 2}, "rows": 2}},
            {"params": {"n_rows": 2}},
        )
    ):
        work = tmp_path / str(number)
        work.mkdir()
        new = round_trip(small(work / "old", **sides), work, "--rules", rule)
        assert stamp(new)["applied"][0]["params"] == {"n": 2}
        (new / "migrate.history.json").unlink()
        done("downgrade", new, "-o", work / "bare", "--rules", rule)
        assert contents(work / "bare") == contents(work / "old")
    differ = small(tmp_path / "differ", config={"text_config": {"rows": 4}, "rows": 2})
    found = refusal("plan", differ, "--rules", rule, "--set", "n=2", exit=2)
    assert (found["code"], found["notes"]) == (
        "M510",
        ["--set says 2", "config.json#text_config.rows says 4", "config.json#rows says 2"],
    )
    found = refusal("plan", small(tmp_path / "silent", config={}), "--rules", rule, exit=2)
    places = "config.json#text_config.rows, config.json#rows, params.json#n_rows"
    assert (found["code"], found["notes"]) == (
        "M509",
        [f"its places in the configuration are {places}, and nothing is there"],
    )


def test_each_edge_reads_the_places_that_the_edges_before_it_left(tmp_path: Path) -> None:
    pack = three_layouts(tmp_path / "rules")
    for file in (pack / "demo").rglob("v?/*.yaml"):
        file.write_text(re.sub("config: (n|heads)}", "config: [n, heads]}", file.read_text()))
    # the first edge moves the number from one of the places to the other; an old number there
    # contradicts
    source = folder(tmp_path / "old", {"a.w1": ("F32", [4, 6])}, config={"n": 4, "z": 1})
    new = round_trip(source, tmp_path, "--rules", pack, "--to", "demo@v3", back=("--rules", pack))
    assert [entry["params"] for entry in stamp(new)["applied"]] == [{"n": 4}, {"n": 4}]
    stale = folder(tmp_path / "stale", {"a.w1": ("F32", [4, 6])}, config={"n": 4, "heads": 2})
    found = refusal("plan", stale, "--rules", pack, "--to", "demo@v3", exit=2)
    assert (found["code"], found["notes"]) == (
        "M510",
        ["config.json#n says 4", "config.json#heads says 2"],
    )


def test_a_configuration_that_contradicts_the_stamp_is_refused(tmp_path: Path) -> None:
    rule = rules(tmp_path, "params: {n: {type: int, config: rows}}\n" + STACK)
    done(
        "apply",
        small(tmp_path / "old", config={"rows": 2}),
        "-o",
        tmp_path / "new",
        "--rules",
        rule,
    )
    (tmp_path / "new" / "config.json").write_text('{"rows": 4}')
    found = refusal("downgrade", tmp_path / "new", "-o", tmp_path / "back", "--rules", rule, exit=2)
    assert found["code"] == "M510"
    assert found["notes"] == ["the stamp says 2", "config.json#rows says 4"]


def test_several_tensors_that_a_shape_names_must_agree(tmp_path: Path) -> None:
    text = "params: {n: {type: int, shape: {key: '{p...}.norm', dim: 0}}}\n" + KEEP + STACK
    rule = rules(tmp_path, text)
    same = folder(
        tmp_path / "same",
        {"old.weight": ("F32", [4, 2]), "a.norm": ("F32", [2]), "b.norm": ("F32", [2])},
    )
    assert done("plan", same, "--rules", rule, "--format", "json").json["params"] == {"n": 2}
    differ = folder(
        tmp_path / "differ",
        {"old.weight": ("F32", [4, 2]), "a.norm": ("F32", [2]), "b.norm": ("F32", [4])},
    )
    found = refusal("plan", differ, "--rules", rule, exit=2)
    assert found["code"] == "M510"
    assert found["notes"] == ["axis 0 of a.norm says 2", "axis 0 of b.norm says 4"]


def test_on_the_way_back_a_tensor_that_the_rule_makes_again_does_not_speak(tmp_path: Path) -> None:
    cut = "{slice: {dim: 0, stop: 2, of: $of, value: 0}}"
    text = (
        "params: {of: {type: int, shape: {key: a}}}\nrules: [{name: cut, from: a, to: "
        f"a, via: [{cut}]}}]\n"
    )
    source = folder(tmp_path / "old", {"a": ("F32", [4], bytes(16))})
    round_trip(source, tmp_path, "--rules", rules(tmp_path, text))


def test_a_list_of_keys_may_name_the_new_key_for_the_way_back(tmp_path: Path) -> None:
    text = "params: {rows: {type: int, shape: {key: [old.weight, new.weight]}}}\n"
    move = "{rearrange: {pattern: '(r x) i -> (x r) i', axes: {r: $rows // 2}}}"
    rule = rules(
        tmp_path, text + f"rules: [{{name: r, from: old.weight, to: new.weight, via: [{move}]}}]\n"
    )
    source = small(tmp_path / "old")
    there = round_trip(source, tmp_path, "--rules", rule)
    (there / "migrate.history.json").unlink()
    done("downgrade", there, "-o", tmp_path / "bare", "--rules", rule)
    assert contents(tmp_path / "bare") == contents(source)


def test_heads_that_the_groups_do_not_divide_are_refused_with_both_numbers(tmp_path: Path) -> None:
    tensors = {"decoder.layers.0.self_attention.linear_qkv.weight": ("F32", [24, 2])}
    source = folder(
        tmp_path / "old",
        tensors,
        config={"num_attention_heads": 7, "num_key_value_heads": 2, "head_dim": 3},
    )
    found = refusal("plan", source, "--rules", CASES / "c10-megatron-gqa-qkv.yaml", exit=2)
    assert found["code"] == "M111"
    assert "7 is not divisible by 2 in `$heads // $groups * $head_dim`" in found["message"]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ("[]", "M513"),
        ("null", "M513"),
        ("{", "M906"),
        ('{"rows": 2, "rows": 4}', "M906"),
        ("\xff", "M906"),
        ('{"a": ' + "[" * 80 + "]" * 80 + "}", "M914"),
        ("[" * 100_000, "M914"),
        ('{"rows": 2, "x": "' + "x" * 16_000_000 + '"}', "M513"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named(
    tmp_path: Path, config: str, code: str
) -> None:
    source = small(tmp_path / "old")
    (source / "config.json").write_bytes(config.encode("latin-1"))
    rule = rules(tmp_path, "params: {n: {type: int, config: rows, default: 2}}\n" + STACK)
    found = refusal("plan", source, "--rules", rule, exit=3)
    assert found["code"] == code
    assert "config.json" in found["message"]


def test_a_configuration_that_is_not_needed_may_hold_anything(tmp_path: Path) -> None:
    source = small(tmp_path / "old", config="{{{")
    done("apply", source, "-o", tmp_path / "new", "--rules", rules(tmp_path, MOVE))
    assert (tmp_path / "new" / "config.json").read_text() == "{{{"


def test_a_configuration_that_is_left_behind_is_not_silently_absent(tmp_path: Path) -> None:
    source = small(tmp_path / "old")
    with (source / "config.json").open("wb") as file:
        file.truncate(50_000_001)
    found = refusal(
        "plan",
        source,
        "--rules",
        rules(tmp_path, "params: {n: {type: int, config: rows, default: 2}}\n" + STACK),
        exit=3,
    )
    assert found["code"] == "M513"


def test_infinity_in_a_configuration_is_read_and_returns(tmp_path: Path) -> None:
    config = {"time_step_limit": [0.0, float("inf")], "rows": 2, "gone": 1}
    rule = rules(
        tmp_path,
        "params: {n: {type: int, config: rows}}\nfiles: {config.json: {gone: null}}\n" + STACK,
    )
    round_trip(small(tmp_path / "old", config=config), tmp_path, "--rules", rule)


def test_a_default_that_does_not_fit_the_shapes_is_named_and_what_was_said_is_not(
    tmp_path: Path,
) -> None:
    cut = "via: [{split: {into: i, dim: 0, sizes: [$n, $m]}}]"
    params = "params: {n: {type: int, default: 3}, m: {type: int, default: 1}}\n"
    text = params + "rules: [{name: cut, from: old.weight, to: 'new.{i:a|b}', " + cut + "}]\n"
    source, rule = small(tmp_path / "old"), rules(tmp_path, text)
    found = refusal("plan", source, "--rules", rule, "--set", "m=7", exit=3)
    assert found["code"].startswith("M3")
    assert [n for n in found["notes"] if "default" in n] == ["`n` is not given; its default is 3"]


# --- the dtype of tensors

CAST = (
    "rules: [{name: wide, from: a.weight, to: b.weight, via: [{cast: {to: float64, from: "
    "$kind}}]}]\n"
)
KIND = "params: {kind: {type: str, dtype: {key: %s}%s}}\n"


@pytest.mark.heavy
def test_a_dtype_is_read_from_all_tensors_that_a_pattern_fits_and_the_stamp_remembers_it(
    tmp_path: Path,
) -> None:
    rule = rules(tmp_path, KIND % ('"{p...}.weight"', "") + CAST)
    for dtype, name in (("F32", "float32"), ("BF16", "bfloat16")):
        work = tmp_path / name
        work.mkdir()
        source = folder(work / "old", {"a.weight": (dtype, [2], bytes(8 if dtype == "F32" else 4))})
        new = round_trip(
            source,
            work,
            "--rules",
            rule,
            "--allow",
            "lossy",
            back=("--rules", rule, "--allow", "lossy"),
        )
        assert stamp(new)["applied"][0]["params"] == {"kind": name}


def test_dtypes_that_differ_are_shown_with_their_keys_and_what_was_said_must_agree(
    tmp_path: Path,
) -> None:
    rule = rules(tmp_path, KIND % ("[a.weight, '{p...}.norm']", "") + KEEP + CAST)
    differ = folder(
        tmp_path / "a",
        {
            "a.weight": ("F32", [2]),
            "x.norm": ("BF16", [2]),
            "y.norm": ("F32", [2]),
            "z.norm": ("BF16", [2]),
        },
    )
    found = refusal("plan", differ, "--rules", rule, exit=2)
    assert (found["code"], found["notes"]) == (
        "M510",
        ["the dtype of a.weight says 'float32'", "the dtype of x.norm says 'bfloat16'"],
    )
    same = folder(tmp_path / "b", {"a.weight": ("F32", [2])})
    found = refusal("plan", same, "--rules", rule, "--set", "kind=bfloat16", exit=2)
    assert (found["code"], found["notes"]) == (
        "M510",
        ["--set says 'bfloat16'", "the dtype of a.weight says 'float32'"],
    )
    # a dtype may be spelled as it may elsewhere
    planned = done(
        "plan", same, "--rules", rule, "--set", "kind=float", "--allow", "lossy", "--format", "json"
    ).json
    assert planned["params"] == {"kind": "float32"}


def test_a_dtype_that_no_tensor_says_is_the_default_or_asked_for(tmp_path: Path) -> None:
    source = folder(tmp_path / "a", {"a.weight": ("F32", [2])})
    rule = rules(tmp_path, KIND % ("absent", ", default: float32") + CAST)
    assert done("plan", source, "--rules", rule, "--allow", "lossy", "--format", "json").json[
        "params"
    ] == {"kind": "float32"}
    found = refusal(
        "plan", source, "--rules", rules(tmp_path, KIND % ("absent", "") + CAST), exit=2
    )
    assert (found["code"], found["notes"]) == (
        "M509",
        ["it is the dtype of absent, and no such tensor is there"],
    )


def test_a_dtype_that_a_param_cannot_have_is_a_fault_of_the_tensor(tmp_path: Path) -> None:
    source = folder(tmp_path / "a", {"a.weight": ("F16", [2])})
    choices = ", choices: [float32, bfloat16]"
    rule = rules(tmp_path, KIND % ("a.weight", choices) + CAST)
    found = refusal("plan", source, "--rules", rule, exit=3)
    assert found["code"] == "M303"
    assert found["message"] == (
        "a.weight is float16; param `kind`, its dtype, is one of float32, bfloat16"
    )
    # what somebody wrote is a wrong question
    wide = folder(tmp_path / "b", {"a.weight": ("F32", [2])})
    asked = refusal("plan", wide, "--rules", rule, "--set", "kind=float16", exit=2)
    assert asked["code"] == "M114"


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ("type: int, dtype: {key: a}", "M114"),
        ("type: str, dtype: {key: '{a'}", "M201"),
        ("type: str, dtype: {}", "M101"),
    ],
)
def test_a_dtype_is_a_text_of_keys_that_can_be_read(
    tmp_path: Path, written: str, code: str
) -> None:
    rule = rules(tmp_path, f"params: {{kind: {{{written}}}}}\n" + MOVE)
    assert refusal("plan", small(tmp_path / "a"), "--rules", rule, exit=2)["code"] == code


# --- the way back over several edges without a stamp

LINEAGE = """lineage: demo
title: three layouts
ordered: true
layouts:
"""
EDGE = (
    "id: demo/%s\ntitle: t\nlineage: demo\nedge: [%s, %s]\nparams: {n: {type: int, config: "
    "%s}}\nfiles: {config.json: %s}\nrules: [%s]\n"
)
FIRST = (
    '{name: r, from: "{p...}.w1", to: "{p}.w2", via: [{reshape: {to: [$n // 2, 2, 6], from: '
    "[$n, 6]}}]}"
)
UNKNOWN = "on the way there, and no stamp records it"
SECOND = (
    '{name: r, from: "{p...}.w2", to: "{p}.w3", via: [{reshape: {to: [$n, 6], from: [$n // '
    "2, 2, 6]}}]}"
)


def three_layouts(path: Path) -> Path:
    """The first edge moves a number to another place of the configuration, which the second
    overwrites.
    """
    (path / "demo").mkdir(parents=True)
    found = "".join(
        f'  v{n}: {{title: t, detect: {{present: "{{p...}}.w{n}"}}}}\n' for n in (1, 2, 3)
    )
    (path / "demo" / "layouts.yaml").write_text(LINEAGE + found)
    for name, edge, source, patch, rule in (
        ("x", ("v1", "v2"), "n", "{n: null, heads: $n}", FIRST),
        ("y", ("v2", "v3"), "heads", "{heads: 7}", SECOND),
    ):
        (path / "demo" / edge[1]).mkdir()
        (path / "demo" / edge[1] / f"{name}.yaml").write_text(
            EDGE % (name, *edge, source, patch, rule)
        )
    return path


def test_what_a_later_edge_wrote_over_says_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    pack = ("--rules", three_layouts(tmp_path / "rules"))
    source = folder(tmp_path / "old", {"a.w1": ("F32", [4, 6])}, config={"n": 4, "z": 1})
    new = round_trip(source, tmp_path, *pack, "--to", "demo@v3", back=pack)
    assert side(new) == {"z": 1, "heads": 7}
    (new / "migrate.history.json").unlink()
    down = ("downgrade", new, "-o", tmp_path / "bare", *pack, "--to", "demo@v1")
    found = refusal(*down, exit=2)
    assert found["code"] == "M509"
    assert any("config.json#heads, which demo/y changes" in note for note in found["notes"])
    done(*down, "--set", "n=4")
    assert contents(tmp_path / "bare") == contents(source)
    # of one edge alone what its patch wrote is known
    done("apply", source, "-o", tmp_path / "v2", *pack, "--to", "demo@v2")
    (tmp_path / "v2" / "migrate.history.json").unlink()
    done("downgrade", tmp_path / "v2", "-o", tmp_path / "v1", *pack, "--to", "demo@v1")
    assert contents(tmp_path / "v1") == contents(source)


def test_a_default_that_steps_in_for_what_a_later_edge_changed_is_told(tmp_path: Path) -> None:
    pack = three_layouts(tmp_path / "rules")
    for file in (pack / "demo").rglob("v?/*.yaml"):
        file.write_text(re.sub("config: (n|heads)}", r"config: \1, default: 4}", file.read_text()))
    source = folder(tmp_path / "old", {"a.w1": ("F32", [4, 6])}, config={"n": 4})
    done("apply", source, "-o", tmp_path / "new", "--rules", pack, "--to", "demo@v3")
    down = (
        "plan",
        "--downgrade",
        tmp_path / "new",
        "--rules",
        pack,
        "--to",
        "demo@v1",
        "--format",
        "json",
    )
    assert done(*down).json["warnings"] == []
    (tmp_path / "new" / "migrate.history.json").unlink()
    said = [w for w in done(*down).json["warnings"] if "default" in w["message"]]
    assert [(w["code"], w["message"]) for w in said] == [
        (
            "M512",
            (
                f"`n` is taken to be 4, its default: it was at config.json#{at}, which {edge} "
                f"changes {UNKNOWN}"
            ),
        )
        for at, edge in (("heads", "demo/y"), ("n", "demo/x"))
    ]
    assert not [
        w for w in done(*down, "--set", "n=4").json["warnings"] if "default" in w["message"]
    ]


def test_an_optional_param_that_the_stamp_has_not_is_not_given_on_the_way_back(
    tmp_path: Path,
) -> None:
    text = (
        "params: {kind: {type: str, optional: true, config: kind}}\nfiles: {config.json: "
        "{kind: null, was: $kind}}\n"
    )
    rule = rules(tmp_path, text + "rules: [{name: move, from: a.weight, to: b.weight}]\n")
    new = round_trip(
        folder(tmp_path / "old", {"a.weight": ("F32", [2])}, config={"z": 1}),
        tmp_path,
        "--rules",
        rule,
    )
    found = refusal("plan", "--downgrade", new, "--rules", rule, "--set", "kind=x", exit=2)
    assert (found["code"], found["notes"]) == (
        "M510",
        ["--set says x", "the stamp says that it was not set"],
    )
    (new / "migrate.history.json").unlink()
    assert done(
        "plan", "--downgrade", new, "--rules", rule, "--set", "kind=x", "--format", "json"
    ).json["params"] == {"kind": "x"}


def test_an_edge_forwards_does_not_take_what_an_undone_one_left_in_the_configuration(
    tmp_path: Path,
) -> None:
    pack = three_layouts(tmp_path / "rules")
    layouts = pack / "demo" / "layouts.yaml"
    layouts.write_text(layouts.read_text().replace("ordered: true", "ordered: false"))
    for file in (pack / "demo").rglob("v?/*.yaml"):
        file.write_text(file.read_text() + 'keep: ["{p...}.u1"]\n')
    found = "".join(
        f'  {name}: {{title: t, detect: {{present: "{{p...}}.{leaf}"}}}}\n'
        for name, leaf in (("a", "u1"), ("b", "u2"))
    )
    (pack / "other" / "b").mkdir(parents=True)
    (pack / "other" / "layouts.yaml").write_text(LINEAGE.replace("demo", "other") + found)
    # it writes to the place that it reads
    edge = EDGE.replace("demo", "other").replace("{n:", "{m:") + 'keep: ["{k...}"]\n'
    (pack / "other" / "b" / "z.yaml").write_text(
        edge % ("z", "a", "b", "heads", "{heads: 9}", '{name: r, from: "{p...}.u1", to: "{p}.u2"}')
    )
    source = folder(
        tmp_path / "old", {"a.w3": ("F32", [4, 6]), "a.u1": ("F32", [2])}, config={"heads": 7}
    )
    question = (
        "plan",
        source,
        "--rules",
        pack,
        "--to",
        "demo@v2",
        "--to",
        "other@b",
        "--set",
        "n=4",
    )
    refused = refusal(*question, exit=2)
    assert (refused["code"], refused["message"]) == ("M509", "param `m` has no value")
    assert any("config.json#heads, which demo/y changes" in note for note in refused["notes"])
    assert done(*question, "--set", "m=4", "--format", "json").json["params"]["m"] == 4
