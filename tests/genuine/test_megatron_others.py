"""Runs of megatron-core with something of their own: a layout of stages, experts in GroupedMLP, and
layers of which some have no experts. Each is converted, or refused by name.
"""

from __future__ import annotations

from pathlib import Path

import megatron_runs
import pytest
import torch
from safetensors.torch import load_file

import migrate

VOCABULARY = 20
CONVERTED = [
    ("llama", "legacy", "pp2-layout"),
    ("llama", "torch_dist", "pp2-layout"),
    ("mixtral", "legacy", "1-grouped"),
    ("mixtral", "legacy", "tp2-grouped"),
    ("mixtral", "legacy", "ep2-grouped"),
    # here experts are tensors of their own, whatever held them
    ("mixtral", "torch_dist", "1-grouped"),
    ("mixtral", "torch_dist", "tp2-grouped"),
    ("mixtral", "torch_dist", "ep2-grouped"),
]


@pytest.mark.parametrize(("family", "kind", "grid"), CONVERTED)
def test_is_the_model_that_went_in(family: str, kind: str, grid: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    migrate.apply(
        megatron_runs.run_folder(family, kind, grid),
        out,
        to=f"megatron-gpt@{family}",
        params={"vocab": VOCABULARY},
        output_format="safetensors",
        allow=["drop"],
    )
    made = load_file(out / "model.safetensors")
    wanted = load_file(megatron_runs.family(family) / "hf" / "model.safetensors")
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[key], wanted[key]) for key in wanted)


def test_layers_are_where_the_layout_puts_them() -> None:
    plan = migrate.plan(
        megatron_runs.run_folder("llama", "legacy", "pp2-layout"),
        to="megatron-gpt@llama",
        allow=["drop"],
    )
    assert "TP 1 x PP 2 x EP 1, 4 layers" in "".join(plan.document["notes"])
    first = migrate.inspect(
        megatron_runs.checkpoint("llama", "legacy", "pp2-layout") / "mp_rank_00_001"
    )
    # of four layers the last stage has three, as `Et|tttL` says
    (norms,) = (row.keys for row in first.keys if "layers" in row.keys and "norm" in row.keys)
    assert "decoder.layers.{1..3}." in norms


@pytest.mark.parametrize("kind", megatron_runs.FORMATS)
def test_layers_without_experts_are_refused_by_their_number(kind: str) -> None:
    run = megatron_runs.run_folder("mixtral", kind, "1-mixed")
    with pytest.raises(migrate.MigrateError) as refused:
        migrate.plan(run, to="megatron-gpt@mixtral", allow=["drop"])
    (said,) = refused.value.diagnostics
    assert said.code == "M510"
    counted = {note.partition("} in ")[2] for note in said.notes}
    assert "decoder.layers.{n:int}.mlp.router.weight@{r:int} says 3" in counted
    assert "decoder.layers.{n:int}.self_attention.linear_proj.weight@{r:int} says 4" in counted
