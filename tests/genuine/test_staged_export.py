"""The three lines of the README behind the training of a Mixtral of transformers: what they export
is what the command makes of the same step, and transformers' old layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import ROOT, done
from safetensors.torch import load_file
from work import HANG

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]

EXPERTS = 4


@pytest.fixture(scope="module")
def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        vocab_size=64,
    )
    return transformers.MixtralForCausalLM(config).to(torch.bfloat16)


def trains(model: Any) -> None:
    """Steps that leave no weight as it was."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        tokens = torch.randint(0, 64, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    with torch.no_grad():
        for one in model.parameters():
            one.add_(1)


@pytest.mark.parametrize("apart", [False, True])
def test_the_lines_of_the_readme_export_the_step_while_every_weight_changes(
    mixtral: Any, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import migrate

    section = (ROOT / "README.md").read_text(encoding="utf-8").split("# Write another layout")[1]
    lines = section.split("```python\n")[1].split("```")[0]
    if apart:
        assert lines.count("Stager(") == 1
        lines = lines.replace("Stager(", "Stager(process=True, ")
    before, after = lines.split("\n... ")
    monkeypatch.chdir(tmp_path)
    was = {key: one.clone() for key, one in mixtral.state_dict().items()}
    torch.save({"model": mixtral.state_dict(), "step": 1000}, "step.pt")
    names: dict[str, Any] = {"torch": torch, "migrate": migrate, "model": mixtral}
    exec(before, names)
    trains(mixtral)
    exec("... " + after, names)
    now = mixtral.state_dict()
    assert all(not torch.equal(one, now[key]) for key, one in was.items())
    report = names["job"].result(HANG)
    assert report.layouts["hf-mixtral"] == "v4"
    to = ("--to", "hf-mixtral@v4", "--at", "model", "--output-format", "safetensors")
    done("downgrade", "step.pt", "-o", "made", *to)
    made, found = ({one.name: one.read_bytes() for one in Path(folder).iterdir()}
                   for folder in ("made", "out/step-1000"))  # fmt: skip
    assert found == made
    exported = load_file("out/step-1000/model.safetensors")
    for layer in range(2):
        stacked = was[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        down = was[f"model.layers.{layer}.mlp.experts.down_proj"]
        assert stacked.shape == (EXPERTS, 96, 32)
        for e in range(EXPERTS):
            old = f"model.layers.{layer}.block_sparse_moe.experts.{e}"
            assert torch.equal(exported[f"{old}.w1.weight"], stacked[e, :48])
            assert torch.equal(exported[f"{old}.w3.weight"], stacked[e, 48:])
            assert torch.equal(exported[f"{old}.w2.weight"], down[e])
