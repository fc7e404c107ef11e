"""The README's lines that write another layout while training, on a tiny Mixtral of transformers,
compared with what `downgrade` makes of a `torch.save` of the same step.

    python benchmarks/readme_staging.py README.md

`.ci/run` runs it in an environment that holds the wheel and transformers and nothing else.
"""

from __future__ import annotations

import sys
import tempfile
from os import chdir
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import migrate

STEP = "\n...  # train on"


def lines_of(readme: Path) -> str:
    section = readme.read_text(encoding="utf-8").split("## Write another layout while training")[1]
    lines = section.split("```python\n")[1].split("```")[0]
    if STEP not in lines:
        sys.exit(f"{readme}: the lines of staging do not train between the save and its result")
    return lines.replace(STEP, "\ntrain()")


def main() -> None:
    lines = lines_of(Path(sys.argv[1]).resolve())
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        )
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)

    def train() -> None:
        ids = torch.arange(16).reshape(2, 8)
        before = [one.detach().clone() for one in model.parameters()]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        if any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)):
            sys.exit("a weight did not change while training")

    with tempfile.TemporaryDirectory() as folder:
        chdir(folder)
        torch.save({"model": model.state_dict(), "step": 1000}, "step.pt")
        names = {"torch": torch, "migrate": migrate, "model": model}
        exec(lines, names | {"train": train})
        migrate.downgrade("step.pt", "made", to="hf-mixtral@v4", at="model")
        if not migrate.diff("out/step-1000", "made").equal:
            sys.exit("the export is not what downgrade makes of the same step")
        exported = migrate.inspect("out/step-1000")
        print(f"the export of the staged step is that of its file: {exported.tensors} tensors")
        chdir("/")


if __name__ == "__main__":
    main()
