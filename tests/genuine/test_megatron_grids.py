"""Runs that megatron-core wrote, cut for other tensor-parallel ranks: what megatron-core itself
makes of them, to the bit; and the padding of the vocabulary, which comes back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron_runs
import pytest
import torch
from marks import thorough

import migrate

VOCABULARY = 20
FAMILIES = sorted(megatron_runs.RUNS)
# digests of what megatron-core makes of the same models for four ranks; make_megatron.py writes it
OF_FOUR = json.loads((megatron_runs.ARCHIVES / "tp4.json").read_text())


@pytest.fixture(autouse=True)
def _enums(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.load finds in the place of megatron-core's enums."""
    for name in ("megatron.core.enums", "megatron.core.transformer.enums"):
        module = ModuleType(name)
        module.ModelType = module.AttnBackend = int  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def models(run: Path) -> list[dict[str, Any]]:
    """The dict of the model of each part."""
    parts = sorted(run.glob("*/mp_rank_*/model_optim_rng.pt"))
    return [torch.load(part, weights_only=False)["model"] for part in parts]


def digests(run: Path) -> list[str]:
    return [megatron_runs.digest(model) for model in models(run)]


def regridded(run: Path, out: Path, **params: Any) -> Path:
    migrate.apply(run, out, to="megatron-gpt@mcore", params=params, allow=["drop"])
    return out


@pytest.mark.parametrize(("there", "grid", "tp"), [("1", "tp2", 2), ("tp2", "1", 1)])
@pytest.mark.parametrize("family", thorough(FAMILIES))
def test_other_ranks_have_what_megatron_core_gives_them(
    family: str, there: str, grid: str, tp: int, tmp_path: Path
) -> None:
    run = megatron_runs.run_folder(family, "legacy", there)
    made = models(regridded(run, tmp_path / "out", tp=tp, vocab=VOCABULARY))
    wanted = models(megatron_runs.run_folder(family, "legacy", grid))
    assert [list(part) for part in made] == [list(part) for part in wanted]
    for one, other in zip(made, wanted, strict=True):
        for key, value in other.items():
            assert one[key] is None if value is None else torch.equal(one[key], value), key


@pytest.mark.parametrize("there", ["1", "tp2"])
@pytest.mark.parametrize("family", thorough(FAMILIES))
def test_more_ranks_than_query_groups_have_what_megatron_core_gives_them(
    family: str, there: str, tmp_path: Path
) -> None:
    run = megatron_runs.run_folder(family, "legacy", there)
    assert digests(regridded(run, tmp_path / "out", tp=4, vocab=VOCABULARY)) == OF_FOUR[family]


def test_a_run_comes_back_from_other_ranks_and_says_so(tmp_path: Path) -> None:
    run = megatron_runs.run_folder("llama", "legacy", "tp2")
    out = regridded(run, tmp_path / "out", tp=1, vocab=VOCABULARY)
    again = regridded(out, tmp_path / "again", tp=4)
    applied = migrate.history(again).applied
    assert [(edge.from_, edge.to, edge.params["tp"]) for edge in applied] == [
        ("mcore", "mcore", 1),
        ("mcore", "mcore", 4),
    ]
    migrate.downgrade(again, tmp_path / "one", allow=["drop"])
    assert [megatron_runs.digest(m) for m in models(tmp_path / "one")] == [
        megatron_runs.digest(m) for m in models(out)
    ]
    assert len(migrate.history(tmp_path / "one").applied) == 3
    migrate.downgrade(tmp_path / "one", tmp_path / "back", allow=["drop"])
    # eight rows of padding were cut, and are there again
    assert [megatron_runs.digest(m) for m in models(tmp_path / "back")] == [
        megatron_runs.digest(m) for m in models(run)
    ]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_other_spec_has_other_names_and_the_same_numbers(family: str, tmp_path: Path) -> None:
    run = megatron_runs.run_folder(family, "legacy", "tp2")
    asked = {"impl": "te", **({"experts": "grouped"} if family == "mixtral" else {})}
    out = regridded(run, tmp_path / "out", **asked)
    (made, _), (wanted, _) = models(out), models(run)
    layer = "decoder.layers.1."
    assert torch.equal(
        made[f"{layer}self_attention.linear_qkv.layer_norm_weight"],
        wanted[f"{layer}input_layernorm.weight"],
    )
    if family == "mixtral":
        first, second = (
            made[f"{layer}mlp.experts.weight{n}"].view(4, *shape)
            for n, shape in ((1, (16, 24)), (2, (12, 16)))
        )
        for expert in range(4):
            there = f"{layer}mlp.experts.local_experts.{expert}."
            assert torch.equal(first[expert], wanted[f"{there}linear_fc1.weight"].T)
            assert torch.equal(second[expert], wanted[f"{there}linear_fc2.weight"].T)
    migrate.downgrade(out, tmp_path / "back", allow=["drop"])
    back = models(tmp_path / "back")
    assert all(
        torch.equal(one[key], value)
        for one, other in zip(back, models(run), strict=True)
        for key, value in other.items()
        if value is not None
    )


@pytest.mark.parametrize("family", thorough(FAMILIES))
def test_padding_comes_back_from_a_folder_of_transformers(family: str, tmp_path: Path) -> None:
    run, out = megatron_runs.run_folder(family, "legacy", "tp2"), tmp_path / "hf"
    migrate.apply(run, out, to=f"megatron-gpt@{family}", params={"vocab": VOCABULARY})
    migrate.downgrade(out, tmp_path / "back")
    back, wanted = models(tmp_path / "back"), models(run)
    for one, other in zip(back, wanted, strict=True):
        for key, value in other.items():
            assert value is None or torch.equal(one[key], value), key
    # rows that are kept are given to as many ranks as there shall be, and the rest is zeros
    params = {"tp": 4, "divisible": 10}
    migrate.apply(out, tmp_path / "four", to="megatron-gpt@mcore", params=params, allow=["drop"])
    name = "embedding.word_embeddings.weight"
    made = torch.cat([part[name] for part in models(tmp_path / "four")])
    before = torch.cat([part[name] for part in wanted])
    assert made.shape == (40, 16)
    assert torch.equal(made[: len(before)], before)
    assert not made[len(before) :].any()
    # and what has no place stays kept
    params = {"tp": 1, "padded": 22}
    less = tmp_path / "less"
    migrate.apply(out, less, to="megatron-gpt@mcore", params=params, allow=["drop"])
    kept = torch.load(next(less.glob("*/mp_rank_00/model_optim_rng.pt")), weights_only=False)
    assert torch.equal(kept["model"][name], before[:22])
    assert torch.equal(kept["migrate.kept"][f"megatron-gpt/{family}/gpt embedding"], before[22:])


def test_what_is_cut_needs_a_word_where_the_output_has_no_place_for_it(tmp_path: Path) -> None:
    run = megatron_runs.run_folder("qwen2", "legacy", "1")
    asked: dict[str, Any] = {
        "to": "megatron-gpt@qwen2",
        "params": {"vocab": VOCABULARY},
        "output_format": "safetensors",
    }
    with pytest.raises(migrate.MigrateError) as refused:
        migrate.apply(run, tmp_path / "one.safetensors", **asked)
    assert "M402" in {d.code for d in refused.value.diagnostics}


@pytest.mark.parametrize(
    ("params", "code", "said"),
    [
        ({"tp": 3}, "M114", "uneven"),
        ({"tp": 0}, "M114", "minimum 1"),
        ({"tp": 8}, "M114", "uneven"),
        ({"impl": "fused"}, "M114", "te, local"),
        ({"experts": "moe"}, "M114", "te, local, grouped"),
        ({"experts": "te"}, "M115", "would change nothing"),
        ({"tp": 4, "padded": 30}, "M302", "split"),
    ],
)
def test_what_cannot_be_cut_so_is_refused(params: dict[str, Any], code: str, said: str) -> None:
    run = megatron_runs.run_folder("llama", "legacy", "1")
    with pytest.raises(migrate.MigrateError, match=said) as refused:
        migrate.plan(run, to="megatron-gpt@mcore", params=params, allow=["drop"])
    assert code in {d.code for d in refused.value.diagnostics}


def test_what_is_there_already_is_nothing_to_do() -> None:
    run = megatron_runs.run_folder("llama", "legacy", "tp2")
    plan = migrate.plan(run, to="megatron-gpt@mcore", params={"tp": 2})
    assert plan.document["path"] == []
    with pytest.raises(migrate.MigrateError, match="would change nothing"):
        migrate.plan(run, to="megatron-gpt@mcore", params={"tp": 2, "impl": "local"})
