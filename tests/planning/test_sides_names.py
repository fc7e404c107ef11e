"""Names that follow their keys: modules, parts of keys, modules that become one, and what cannot be
said.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rule_text import load_text
from work import steps

from migrate.core.errors import Report
from migrate.planning.bind import Provenance, StepResult
from migrate.planning.module_names import rename
from migrate.planning.sides import SideFiles


def renamed(
    engine: Any,
    keys: list[str],
    names: Any,
    *rules: str,
    at: str = "names",
    keep: tuple[str, ...] = ("{k...}",),
) -> Any:
    """The list after the rules, or the messages of what is refused; and the notes."""
    ckpt = {key: [0.0, 0.0] for key in keys}
    text = f"id: t/r\ntitle: t\nlineage: t\nedge: [a, b]\nnames: ['config.json#{at}']\nrules: []\n"
    bound = made(engine, ckpt, rules, keep)
    config: Any = names
    for part in reversed(at.split(".")):
        config = {part: config} if not part.isdigit() else [config]
    sides, report = SideFiles({"config.json": json.dumps(config).encode()}.get), Report()
    notes = rename(load_text(text, "r.yaml"), sides, bound, {}, set(), report)
    if report.diagnostics:
        return [d.message for d in report.diagnostics], notes
    return sides.value_at("config.json", at.split(".")), notes


def made(
    engine: Any, ckpt: dict[str, Any], rules: tuple[str, ...], keep: tuple[str, ...]
) -> StepResult:
    arrays = {key: np.float32(value) for key, value in ckpt.items()}
    bound: StepResult = engine.apply(
        engine.rules(*rules, keep=keep), arrays, prove=False
    ).composition.steps[0][1]
    return bound


LAYER = [f"m.{n}.{w}.weight" for n in range(2) for w in ("q", "k", "v", "o")]
FUSE = (
    'from: "m.{n:int}.{w:q|k|v}.weight", to: "m.{n}.qkv.weight", via: [{concat: {over: w, dim: 0}}]'
)


def test_modules_that_become_one_become_one_name(engine: Any) -> None:
    assert renamed(engine, LAYER, ["m.0.q", "m.0.k", "m.0.v", "m.1.o"], FUSE)[0] == [
        "m.0.qkv",
        "m.1.o",
    ]
    assert renamed(engine, LAYER, ["k", "o", "q", "v"], FUSE)[0] == ["qkv", "o"]


def test_a_module_that_joins_others_which_are_not_named_is_refused(engine: Any) -> None:
    message = renamed(engine, LAYER, ["m.0.q", "m.0.v", "o"], FUSE)[0][0]
    assert "m.0.qkv.weight is made of m.0.q.weight and of m.0.k.weight" in message


def test_a_module_that_is_split_becomes_all_its_parts(engine: Any) -> None:
    split = 'from: "{p...}.qkv.weight", to: "{p}.{w:q|k}.weight", via: [{split: {into: w, dim: 0}}]'
    assert renamed(engine, ["m.0.qkv.weight", "m.0.o.weight"], ["m.0.qkv", "m.0.o"], split)[0] == [
        "m.0.q",
        "m.0.k",
        "m.0.o",
    ]


def test_experts_that_become_one_tensor_become_its_name(engine: Any) -> None:
    keys = [f"m.moe.experts.{e}.{w}.weight" for e in range(2) for w in ("w1", "w2")] + [
        "m.moe.gate.weight"
    ]
    stack = (
        'from: "m.moe.experts.{e:int}.{w:w1|w2}.weight", to: "m.mlp.experts.{w}", via: '
        "[{stack: {over: e}}]"
    )
    gate = 'from: "m.moe.gate.weight", to: "m.mlp.gate.weight"'
    every = [f"m.moe.experts.{e}.w1" for e in range(2)]
    assert renamed(engine, keys, every, stack, gate)[0] == ["m.mlp.experts.w1"]
    assert renamed(engine, keys, ["m.moe.experts"], stack, gate)[0] == ["m.mlp.experts"]
    assert renamed(engine, keys, ["m.moe"], stack, gate)[0] == ["m.mlp"]
    assert "which the list does not name" in renamed(engine, keys, every[:1], stack, gate)[0][0]


def test_a_module_whose_keys_part_is_refused_with_both_ways(engine: Any) -> None:
    rules = ('from: "m.0.q.weight", to: "a.q.weight"', 'from: "m.0.k.weight", to: "b.q.weight"')
    ((message,), _) = renamed(engine, LAYER, ["m.0"], *rules)
    assert "m.0" in message


def test_a_name_follows_wherever_its_list_stands(engine: Any) -> None:
    move = 'from: "m.{n:int}.{w:q|k}.weight", to: "x.{n}.{w}.weight"'
    assert renamed(engine, LAYER, ["m.1.q"], move, at="a.0.b")[0] == ["x.1.q"]


@pytest.mark.parametrize(
    "name", ["re:.*m.0.*", "m.0.*", "vision.tower", "", "m.0.q.weight.x", "m.0.qq"]
)
def test_what_stands_for_no_key_stays_and_is_noted(engine: Any, name: str) -> None:
    move = 'from: "m.{n:int}.{w:q|k}.weight", to: "x.{n}.{w}.weight"'
    found, notes = renamed(engine, LAYER, [name, "m.0.q.weight"], move)
    assert found == [name, "x.0.q.weight"]
    assert "no key is below them" in notes[0]


def test_a_copy_that_a_rule_makes_beside_its_source_is_no_new_name(engine: Any) -> None:
    rule = "from: m.0.q.weight, to: head.weight, keep_source: true"
    assert renamed(engine, LAYER, ["m.0.q"], rule)[0] == ["m.0.q"]


@pytest.mark.parametrize("names", ["m.0", ["m.0", None], [["m.0"]], 7])
def test_what_is_no_list_of_names_is_refused(engine: Any, names: Any) -> None:
    ((message,), _) = renamed(engine, LAYER, names, FUSE)
    assert "not a list of names" in message


def test_names_over_keys_take_work_as_there_are_more_of_both() -> None:
    few, many = renaming(2), renaming(16)
    assert steps(many) < 1.5 * 8 * steps(few)


def renaming(layers: int, experts: int = 16) -> Callable[[], None]:
    """Of a checkpoint with so many layers, every name is renamed."""
    bound = StepResult()
    tensors: Any = {}
    rule: Any = SimpleNamespace(keep_source=False)
    for n in range(layers):
        for w in ("w1", "w2", "w3"):
            key = f"n.{n}.mlp.experts.{w}"
            tensors[key] = None
            bound.provenance[key] = Provenance(
                rule, tuple(f"m.{n}.experts.{e}.{w}.weight" for e in range(experts))
            )
    bound.tensors = tensors
    names = [
        f"m.{n}.experts.{e}.{w}"
        for n in range(layers)
        for e in range(experts)
        for w in ("w1", "w2", "w3")
    ]
    sides = SideFiles({"config.json": json.dumps({"x": names}).encode()}.get)
    file = load_text(
        "id: t/r\ntitle: t\nlineage: t\nedge: [a, b]\nnames: ['config.json#x']\nrules: []\n",
        "r.yaml",
    )

    def go() -> None:
        assert rename(file, sides, bound, {}, set(), Report()) == []
        assert sides.value_at("config.json", ["x"]) == list(tensors)

    return go


# expressions of libraries, objects, and places with `*`

COMPRESSED = {"quant_method": "compressed-tensors"}
LAYERS = [f"model.layers.{n}.mlp.{w}.weight" for n in (0, 1, 10) for w in ("gate", "up")]
SAME = 'from: "model.layers.{n:int}.mlp.{w}.weight", to: "model.h.{n}.mlp.{w}.weight"'
SWAP = (
    'from: "model.layers.{n:int}.mlp.{w:gate|up}.weight", to: "model.layers.{n}.ffn.{w}.weight", '
    "map: {w: {gate: router, up: up}}"
)


def configured(engine: Any, quantization: Any, place: str, *rules: str) -> Any:
    """The configuration after the rules, or the messages of what is refused; and the notes."""
    bound = made(engine, {key: [0.0, 0.0] for key in LAYERS}, rules, ("{k...}",))
    text = f"id: t/r\ntitle: t\nlineage: t\nedge: [a, b]\nnames: ['{place}']\nrules: []\n"
    config = json.dumps({"quantization_config": quantization}).encode()
    sides, report = SideFiles({"config.json": config}.get), Report()
    notes = rename(load_text(text, "r.yaml"), sides, bound, {}, set(), report)
    if report.diagnostics:
        return [d.message for d in report.diagnostics], notes
    return sides.value_at("config.json", ("quantization_config",)), notes


IGNORE = "config.json#quantization_config.ignore"


def test_an_expression_stays_where_it_selects_what_its_modules_become(engine: Any) -> None:
    ignore = ["re:.*gate$", "re:.*\\.up", "lm_head"]
    found, notes = configured(engine, {**COMPRESSED, "ignore": ignore}, IGNORE, SAME)
    assert found["ignore"] == ignore
    assert notes == [f"{IGNORE}: lm_head stay as they are: no key is below them"]


def test_an_expression_becomes_names_where_it_would_select_something_else(engine: Any) -> None:
    ignore = ["re:.*gate$", "re:model.layers.1\\..*up"]
    found, notes = configured(engine, {**COMPRESSED, "ignore": ignore}, IGNORE, SWAP)
    assert found["ignore"] == [
        *(f"model.layers.{n}.ffn.router" for n in (0, 1, 10)),
        "re:model.layers.1\\..*up",
    ]
    assert notes == [f"{IGNORE}: `re:.*gate$` is now spelled as 3 names"]


def test_globs_of_modelopt_follow_as_its_readers_match_them(engine: Any) -> None:
    ignore = ["model.layers.1*", "*.up"]
    found, _ = configured(engine, {"quant_method": "modelopt", "ignore": ignore}, IGNORE, SAME)
    assert found["ignore"] == [f"model.h.{n}.mlp.{w}" for n in (1, 10) for w in ("gate", "up")] + [
        "*.up"
    ]


def test_the_names_of_an_object_follow_with_their_values(engine: Any) -> None:
    layers = {"model.layers.0.mlp.up": {"quant_algo": "FP8"}, "model.layers.10": 1, "other": 2}
    quantization = {"quant_method": "modelopt", "quantized_layers": layers}
    place = "config.json#quantization_config.quantized_layers"
    found, _ = configured(engine, quantization, place, SAME)
    assert found["quantized_layers"] == {
        "model.h.0.mlp.up": {"quant_algo": "FP8"},
        "model.h.10": 1,
        "other": 2,
    }


def test_the_expressions_of_gptq_follow_with_their_signs(engine: Any) -> None:
    dynamic = {r"-:.*\.gate": {}, r"+:model\.layers\.1\.": {"bits": 8}, ".*up": {"bits": 2}}
    quantization = {"quant_method": "gptq", "dynamic": dynamic}
    place = "config.json#quantization_config.dynamic"
    found, notes = configured(engine, quantization, place, SAME)
    assert found["dynamic"] == {
        r"-:.*\.gate": {},
        r"+:model\.h\.1\.mlp\.gate$": {"bits": 8},
        r"+:model\.h\.1\.mlp\.up$": {"bits": 8},
        ".*up": {"bits": 2},
    }
    assert len(notes) == 1


def test_a_star_in_a_place_is_every_name_of_an_object_or_item_of_a_list(engine: Any) -> None:
    groups = {f"group_{n}": {"targets": [f"model.layers.{n}.mlp.up", "Linear"]} for n in (0, 1)}
    quantization = {**COMPRESSED, "config_groups": groups}
    place = "config.json#quantization_config.config_groups.*.targets"
    found, _ = configured(engine, quantization, place, SAME)
    assert [group["targets"] for group in found["config_groups"].values()] == [
        ["model.h.0.mlp.up", "Linear"],
        ["model.h.1.mlp.up", "Linear"],
    ]
    found, _ = configured(engine, [{"t": ["model.layers.0"]}], "config.json#*.*.t", SAME)
    assert found == [{"t": ["model.h.0"]}]


JOIN = (
    'from: "model.layers.{n:int}.mlp.{w:gate|up}.weight", to: "model.layers.{n}.mlp.weight", '
    "via: [{concat: {over: w, dim: 0}}]"
)


@pytest.mark.parametrize(
    ("ignore", "rule", "words"),
    [
        (["re:(a)\\1"], SAME, "`(a)\\1`: `\\1` at 3"),
        (["re:.*layers.0.*up$"], JOIN, "which the list does not name"),
    ],
)
def test_an_expression_that_cannot_follow_is_refused(
    engine: Any, ignore: list[str], rule: str, words: str
) -> None:
    found, _ = configured(engine, {**COMPRESSED, "ignore": ignore}, IGNORE, rule)
    assert words in found[0]


def test_two_names_of_an_object_that_become_one_need_one_value(engine: Any) -> None:
    layers = {f"model.layers.0.mlp.{w}": {"algo": n} for n, w in enumerate(("gate", "up"))}
    quantization = {"quant_method": "modelopt", "quantized_layers": layers}
    place = "config.json#quantization_config.quantized_layers"
    found, _ = configured(engine, quantization, place, JOIN)
    assert "another value is under `model.layers.0.mlp` then" in found[0]
