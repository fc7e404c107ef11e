"""The recipes of docs/staging.md that need a model, a Trainer or ranks, run as they stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from built import V5, module, state_of
from commandline import ROOT
from quantized_ranks import HAS_STAGERS
from ranks import Ranks
from safetensors.torch import load_file
from torch import nn

import migrate

PAGE = ROOT / "docs" / "staging.md"
EVERY = 2


def shown(title: str) -> str:
    """The first Python block of a section of the page; "every 1,000 steps" is every other one."""
    text = PAGE.read_text(encoding="utf-8").split(f"# {title}\n")[1]
    found = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].replace("1000", str(EVERY))


@pytest.mark.libraries
def test_weights_in_the_layout_of_hugging_face_every_so_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = module(state_of(V5))
    batches = range(2 * EVERY + 1)

    def train(model: nn.Module, optimizer: None, step: int) -> None:
        with torch.no_grad():
            for one in model.parameters():
                one.add_(1)
        torch.save({"model": model.state_dict()}, f"{step}.pt")

    names = {"torch": torch, "migrate": migrate, "model": model, "batches": batches}
    exec(
        shown("Weights in the Hugging Face layout every 1,000 steps"),
        {**names, "train": train, "optimizer": None},
    )
    for step in batches:
        if step % EVERY:
            assert not Path(f"weights-{step}").exists()
            continue
        migrate.downgrade(f"{step}.pt", f"made-{step}", to="hf-mixtral@v4", at="model")
        assert migrate.diff(f"weights-{step}", f"made-{step}").equal


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
def test_lightning_writes_the_weights_of_a_step_behind_the_training(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="needs Lightning (test extra)")
    wanted: dict[int, dict[str, torch.Tensor]] = {}

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().sum()
            return loss

        def train_dataloader(self) -> Any:
            data = torch.utils.data.TensorDataset(torch.randn(10, 4))
            return torch.utils.data.DataLoader(data)

        def on_train_batch_end(self, *_: Any) -> None:
            wanted[self.global_step] = {k: x.clone() for k, x in self.state_dict().items()}

    names = {"torch": torch, "migrate": migrate, "pytorch_lightning": lightning}
    exec(shown("Lightning"), names)
    snapshots: Any = names["Snapshots"](tmp_path / "out", every=EVERY)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    # ten batches make five steps
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", accumulate_grad_batches=2, callbacks=[snapshots], **quiet
    )
    trainer.fit(Model())
    assert snapshots.stager.nbytes == 0
    found = {path.name: load_file(path) for path in (tmp_path / "out").iterdir()}
    assert sorted(found) == ["step-2.safetensors", "step-4.safetensors"]
    for step in (2, 4):
        held = found[f"step-{step}.safetensors"]
        assert held.keys() == wanted[step].keys()
        assert all(torch.equal(held[key], x) for key, x in wanted[step].items())
    assert not torch.equal(wanted[2]["layer.weight"], wanted[4]["layer.weight"])


@pytest.mark.ranks
@pytest.mark.skipif(not HAS_STAGERS, reason="torch 2.8 has no async_stager")
def test_fsdp2_is_saved_by_the_loop_of_the_page(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks(2).run("dcp_stager_case", "loops", shown("`torch.distributed.checkpoint`"), str(tmp_path))
