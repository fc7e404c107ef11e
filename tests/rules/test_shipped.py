"""The rules that ship with migrate: they say which layout a checkpoint is in, name every key, and
do what their tests say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from migrate.core.errors import QuestionError
from migrate.core.keys import parse
from migrate.core.spec import spec
from migrate.rules.lineage import detect, resolve_goal
from migrate.rules.packs import Packs
from migrate.ruletests.checks import FileChecks, RuleCheck
from migrate.ruletests.run import load_rule_files
from migrate.source.blobs import Stored
from migrate.source.index import Index

ROOT = Path(__file__).resolve().parents[2]
PACKS = Packs((), scan=False)
LINEAGES = PACKS.lineages()[0]
FILES = load_rule_files(
    sorted(p for p in (ROOT / "rules").rglob("*.yaml") if p.name != "layouts.yaml")
)
TRIALS = {file.model.id: FileChecks(file, loaded=FILES) for file in FILES}
CHECKS = [
    pytest.param(file, check, id=f"{file.model.id}: {check.name}")
    for file in FILES
    for check in TRIALS[file.model.id].checks()
]

ATTENTION = [f"self_attn.{w}_proj.weight" for w in "qkvo"] + [
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
]
MIXTRAL_V4 = [
    "block_sparse_moe.gate.weight",
    *(f"block_sparse_moe.experts.{e}.w{i}.weight" for e in range(2) for i in (1, 2, 3)),
]
STACKED = ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SHARED = [f"mlp.shared_expert.{w}_proj.weight" for w in ("gate", "up", "down")] + [
    "mlp.shared_expert_gate.weight"
]
SEPARATE = [
    "mlp.gate.weight",
    *(f"mlp.experts.{e}.{w}_proj.weight" for e in range(2) for w in ("gate", "up", "down")),
]
BIASES = [f"self_attn.{w}_proj.bias" for w in "qkv"]
NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
DENSE = [f"mlp.{w}_proj.weight" for w in ("gate", "up", "down")]


def checkpoint(*parts: list[str]) -> list[str]:
    ends = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    return ends + [
        f"model.layers.{n}.{key}" for n in range(2) for part in (ATTENTION, *parts) for key in part
    ]


def held(keys: list[str], model_type: str | None = None) -> list[str]:
    index = Index(
        {
            key: Stored(spec("bfloat16", (2,) if key.endswith("bias") else (2, 2)), 0, 0)
            for key in keys
        },
        ("f",),
    )
    raw = None if model_type is None else json.dumps({"model_type": model_type}).encode()
    found = [
        (name, f)
        for name, lineage in LINEAGES.items()
        for f in detect(lineage, index, lambda path: raw)
    ]
    return [f"{name}@{f.layout}" for name, f in found if f.holds]


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize(
    ("keys", "model_type", "layouts"),
    [
        (checkpoint(MIXTRAL_V4), "mixtral", "hf-mixtral@v4 megatron-gpt@mixtral"),
        (checkpoint(STACKED), "mixtral", "hf-mixtral@v5"),
        (checkpoint(SEPARATE, SHARED, BIASES), "qwen2_moe", "hf-qwen2-moe@v4"),
        (checkpoint(STACKED, SHARED, BIASES), "qwen2_moe", "hf-qwen2-moe@v5"),
        (checkpoint(DENSE), "llama", "megatron-gpt@llama meta-llama@hf"),
        (checkpoint(DENSE, BIASES), "qwen2", "megatron-gpt@qwen2"),
        (checkpoint(DENSE, NORMS), "qwen3", "megatron-gpt@qwen3"),
    ],
)
def test_each_layout_is_told_by_its_keys(
    keys: list[str], model_type: str, layouts: str, config: bool
) -> None:
    assert held(keys, model_type if config else None) == layouts.split()


@pytest.mark.parametrize(
    "keys",
    [
        checkpoint(STACKED, NORMS),  # Qwen3-MoE 5
        checkpoint(STACKED, SHARED, NORMS),  # Qwen3-Next 5
        checkpoint(SEPARATE, SHARED, NORMS),
        checkpoint(STACKED, BIASES),  # Phi-MoE 5
        checkpoint(MIXTRAL_V4, BIASES),  # Phi-MoE 4
        checkpoint(MIXTRAL_V4, NORMS),  # MiniMax-M2
        checkpoint(STACKED, DENSE),
        checkpoint(STACKED, ["mlp.shared_experts.up_proj.weight"]),
        checkpoint(STACKED, ["mlp.gate.e_score_correction_bias"]),
        checkpoint(MIXTRAL_V4, STACKED),
    ],
)
def test_relatives_and_mixtures_are_in_no_layout_of_ours(keys: list[str]) -> None:
    assert held(keys) == []


def test_a_config_that_says_another_model_settles_it() -> None:
    assert held(checkpoint(MIXTRAL_V4), "minimax") == ["hf-minimax@v4"]
    assert held(checkpoint(STACKED, SHARED), "qwen3_next") == ["hf-cohere2-moe@v5"]
    assert held(checkpoint(MIXTRAL_V4), "of_no_lineage") == []


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (
            {"fc1.weight0": (2, 2), "fc1.weight1": (2, 2), "fc1.bias0": (2,)},
            ["te-grouped-bias@multi", "te-grouped-weight@multi"],
        ),
        (
            {"fc1.weight": (2, 2, 2), "fc1.bias": (2, 2)},
            ["te-grouped-bias@single", "te-grouped-weight@single"],
        ),
        (
            {"fc1.weight": (2, 2, 2), "fc1.bias": (2, 1, 2)},
            ["te-grouped-bias@single", "te-grouped-weight@single"],
        ),
        (
            {"fc1.weight": (2, 2, 2), "fc1.bias0": (2,)},
            ["te-grouped-bias@multi", "te-grouped-weight@single"],
        ),
        ({"proj.weight": (2, 2), "proj.bias": (2,)}, []),
    ],
)
def test_grouped_linear_is_told_by_names_and_axes(
    specs: dict[str, tuple[int, ...]], expected: list[str]
) -> None:
    index = Index(
        {key: Stored(spec("bfloat16", shape), 0, 0) for key, shape in specs.items()}, ("f",)
    )
    found = [
        (name, f)
        for name, lineage in LINEAGES.items()
        for f in detect(lineage, index, lambda path: None)
    ]
    assert [f"{name}@{f.layout}" for name, f in found if f.holds] == expected


@pytest.mark.parametrize(
    ("lineage", "keys"),
    [
        (
            "hf-mixtral",
            [*checkpoint(MIXTRAL_V4), "score.weight", "embed_tokens.weight", "norm.weight"],
        ),
        (
            "hf-qwen2-moe",
            [
                *checkpoint(SEPARATE, SHARED, BIASES),
                *(f"model.layers.2.{k}" for k in [*ATTENTION, *DENSE]),
            ],
        ),
    ],
)
def test_every_key_is_named_by_exactly_one_rule_or_kept(lineage: str, keys: list[str]) -> None:
    (file,) = (f.model for f in FILES if f.model.lineage == lineage)
    rules = [parse(pattern) for rule in file.rules for pattern in rule.sources.values()]
    keep = [parse(pattern) for pattern in file.keep]
    for key in keys:
        takers = [p.text for p in rules if p.match(key) is not None]
        kept = [p.text for p in keep if p.match(key) is not None]
        assert len(takers) == 1 or (not takers and kept), key


def test_what_no_rule_of_mixtral_names_is_not_kept() -> None:
    (file,) = (f.model for f in FILES if f.model.lineage == "hf-mixtral")
    for key in (
        "model.layers.0.block_sparse_moe.experts.0.w1.qweight",
        "model.layers.0.mlp.up_proj.weight",
        "model.vision.weight",
    ):
        assert not any(parse(p).match(key) is not None for p in file.keep)


@pytest.mark.heavy
@pytest.mark.parametrize(("file", "check"), CHECKS)
def test_the_rule_files_do_what_their_tests_say(file: Any, check: RuleCheck) -> None:
    outcome = TRIALS[file.model.id].run(check)
    assert outcome.status != "failed", "\n\n".join(d.render() for d in outcome.diagnostics)


UNSEEN = {
    "torch-wrappers": {"plain"},
    "gguf-llama": {"hf"},
    **{
        n: {"bf16"}
        for n in (
            "bnb",
            "compressed-tensors",
            "fp8",
            "kimi-k2",
            "mxfp8",
            "nvfp4",
            "torchao",
        )
    },
    **{n: {"compressed-tensors", "fp16", "bf16"} for n in ("gptq", "awq")},
    "peft-merge": {"joined", "merged"},
}


def test_every_shipped_file_says_why_and_has_an_example() -> None:
    for file in FILES:
        assert file.model.why, file.loaded.path
        assert file.model.tests, file.loaded.path
    for lineage in LINEAGES.values():
        assert all(layout.note and layout.title for layout in lineage.layouts), lineage.name
        # what every other checkpoint is, nothing shows
        unseen = {layout.name for layout in lineage.layouts if not layout.detect}
        assert unseen == UNSEEN.get(lineage.name, set()), lineage.name


def test_every_layout_can_be_reached_from_every_other() -> None:
    from migrate.rules.lineage import path

    for name in LINEAGES:
        lineage = PACKS.load_lineage(name)
        # nothing writes the archives of 1.x
        apart = {"0.x", "1.x"} if name == "te-extra-state" else set()
        assert all(
            path(lineage, a, b)
            for a in lineage.names
            for b in lineage.names
            if a != b and not {a, b} <= apart
        )


NUMBERS = sorted(
    {
        file.model.lineage
        for file in FILES
        for rule in file.model.rules
        for call in rule.via
        if call.op in ("dequantize", "quantize", "recode")
    }
)


@pytest.mark.parametrize("name", NUMBERS)
def test_no_layout_of_numbers_is_the_latest(name: str) -> None:
    lineage = LINEAGES[name]
    assert not lineage.ordered
    for layout in lineage.names:
        for goal in (f"{name}@latest", name, f"{name}@+1", f"{name}@-1"):
            with pytest.raises(QuestionError) as caught:
                resolve_goal(goal, LINEAGES, {name: layout})
            assert [d.code for d in caught.value.diagnostics] == ["M501"]
        # nor is it one, beside another lineage that has a latest
        beside = {name: layout, "hf-deepseek-v3": "v4"}
        assert resolve_goal("latest", LINEAGES, beside).lineage == "hf-deepseek-v3"


def test_lineages_of_numbers_are_all_here() -> None:
    assert {*NUMBERS} >= {
        "awq", "bnb", "compressed-tensors", "deepseek-v3", "deepseek-v4", "fp8", "gguf-llama",
        "gpt-oss", "gptq", "kimi-k2", "mxfp8", "nvfp4", "torchao",
    }  # fmt: skip
