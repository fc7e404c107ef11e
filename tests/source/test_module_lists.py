"""Lists of modules select what their libraries select."""

from __future__ import annotations

import fnmatch
import random
import re

import pytest

from migrate.source.module_lists import (
    LIBRARIES,
    ModuleList,
    RegexError,
    is_class,
    is_pattern,
    list_library,
)

SEGMENTS = ["model", "layers", "1", "10", "mlp", "gate", "gate_proj", "lm_head", "a\n"]


def names(rng: random.Random) -> str:
    return ".".join(rng.choice(SEGMENTS) for _ in range(rng.randrange(1, 5)))


def test_compressed_tensors_takes_names_and_expressions_from_the_start() -> None:
    ignore = ModuleList(["lm_head", "re:.*mlp.gate$", "re:visual", "Linear"], "compressed-tensors")
    assert ignore.selects("lm_head")
    assert not ignore.selects("model.lm_head")
    assert ignore.selects("model.layers.3.mlp.gate")
    assert not ignore.selects("model.layers.3.mlp.gate_proj")
    assert ignore.selects("visual.blocks.0.attn")
    assert not ignore.selects("model.visual")
    assert is_class("Linear")
    assert not is_class("lm_head")
    assert not is_class("re:Linear")


def test_modelopt_takes_globs_of_the_whole_name() -> None:
    exclude = ModuleList(["lm_head", "model.layers.0.self_attn*", "*.gat[ae]"], "modelopt")
    assert exclude.selects("model.layers.0.self_attn.q_proj")
    assert exclude.selects("model.layers.1.mlp.gate")
    assert not exclude.selects("model.layers.1.mlp.gate_proj")
    assert not exclude.selects("model.lm_head")


def test_transformers_takes_what_begins_or_ends_a_name() -> None:
    skip = ModuleList(
        ["lm_head", "model.layers.*.self_attn", "model.layers.1.mlp.gate"], "transformers"
    )
    assert skip.selects("model.lm_head")
    assert skip.selects("model.layers.7.self_attn.q_proj")
    assert skip.selects("model.layers.1.mlp.gate")
    assert not skip.selects("model.layers.1.mlp.gate_proj")
    # a dot of a name stands for any character, as the library has it
    assert skip.selects("model-layers.1.mlp.gate")


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_empty_list_selects_nothing(library: str) -> None:
    assert not ModuleList([], library).selects("lm_head")


def test_globs_select_what_fnmatch_selects() -> None:
    rng = random.Random(2)
    selected = 0
    for _ in range(4000):
        items = ["".join(rng.choice("ab.*?[]!-^\\c") for _ in range(rng.randrange(1, 6)))]
        name = "".join(rng.choice("ab.[]!-^\\c\n") for _ in range(rng.randrange(5)))
        try:
            found = ModuleList(items, "modelopt").selects(name)
        except RegexError:
            # a range from a later to an earlier character: fnmatch lets it select nothing
            assert re.search(r"\[.*(.)-(.)", items[0])
            continue
        assert found is fnmatch.fnmatchcase(name, items[0]), (items, name)
        selected += found
    assert selected > 50


@pytest.mark.libraries
def test_lists_of_transformers_select_what_transformers_skips() -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    rng = random.Random(3)
    selected = 0
    for _ in range(8000):
        items = [
            rng.choice(
                [
                    names(rng),
                    names(rng)[: rng.randrange(1, 9)],
                    names(rng).replace(".", "*"),
                    f".*{rng.choice(SEGMENTS)}",
                    f"{names(rng)}.*",
                    r"(a|m)[a-z]+\.\d",
                ]
            )
            for _ in range(rng.randrange(4))
        ]
        name = names(rng)
        found = ModuleList(items, "transformers").selects(name)
        assert found is not should_convert_module(name, items), (items, name)
        selected += found
    assert selected > 500


def test_what_is_more_than_a_name_is_seen() -> None:
    assert is_pattern("re:.*gate", "compressed-tensors")
    assert not is_pattern("model.layers.*", "compressed-tensors")
    assert is_pattern("model.layers.*", "modelopt")
    assert is_pattern("model.layers.*.mlp", "transformers")
    assert not is_pattern("model.layers.1.mlp", "transformers")
    assert not is_pattern("*", "exact")


def test_an_expression_that_cannot_be_read_is_named() -> None:
    with pytest.raises(RegexError, match=re.escape(r"`(?<=a)b`: `(?<=` at 0")):
        ModuleList(["lm_head", "re:(?<=a)b"], "compressed-tensors")


@pytest.mark.parametrize(
    ("files", "library"),
    [
        ({}, "exact"),
        ({"config.json": {"model_type": "llama"}}, "exact"),
        ({"config.json": {"quantization_config": {"quant_method": "aqlm"}}}, "exact"),
        ({"config.json": {"quantization_config": {"quant_method": "fp8"}}}, "transformers"),
        ({"config.json": {"quantization_config": {"quant_method": "modelopt_fp4"}}}, "modelopt"),
        ({"config.json": {"compression_config": {"config_groups": {}}}}, "compressed-tensors"),
        ({"config.json": {"text_config": {"quantization_config": {"quant_method": "awq"}}}},
         "transformers"),
        ({"hf_quant_config.json": {}, "config.json": {}}, "modelopt"),
        ({"config.json": {"text_config": 3, "quantization_config": 4}}, "exact"),
    ],
)  # fmt: skip
def test_the_configuration_says_who_reads_its_lists(files: dict, library: str) -> None:
    assert list_library(files.get) == library
