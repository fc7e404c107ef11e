"""The blocks of docs/how-to/frameworks.md, run as they stand; each framework's own code
says what is right.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import migrate

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "frameworks.md").read_text(encoding="utf-8")
HUB = ROOT / "tests" / "data" / "hf" / "mixtral__v4" / "hub"
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]


def shown(title, kind):
    """The only block of this kind in a section of the page."""
    text = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    (block,) = re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return block


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(title, **names):
    exec(compile(shown(title, "python"), f"docs/how-to/frameworks.md, {title}", "exec"), names)
    return names


def test_transformers_gives_the_logits_of_from_pretrained(place):
    transformers = pytest.importorskip("transformers")
    shutil.copytree(HUB, "OLD")
    reference = transformers.MixtralForCausalLM.from_pretrained("OLD", dtype=torch.float32).eval()
    model = run("transformers")["model"].eval()
    tokens = torch.arange(8).reshape(1, 8) % model.config.vocab_size
    with torch.no_grad():
        expected = reference(tokens).logits
        assert torch.equal(model.float()(tokens).logits, expected)
        streamed = transformers.MixtralForCausalLM(model.config).eval()
        migrate.load(streamed, "OLD", to="hf-mixtral@v5")
        assert torch.equal(streamed(tokens).logits, expected)
        with torch.device("meta"):
            made = transformers.MixtralForCausalLM(model.config).eval()
        (line,) = re.findall(r"`(model\.model\.rotary_emb = [^`]+)`", PAGE)
        exec(line, {"model": made})
        migrate.load(made, "OLD", to="hf-mixtral@v5")
        assert torch.equal(made(tokens).logits, expected)
    migrate.save(streamed, "FOR_V4", to="hf-mixtral@v4")
    said = json.loads(Path("FOR_V4/config.json").read_text())
    assert "rope_parameters" in said
    assert "rope_theta" not in said
    shutil.copy("OLD/config.json", "FOR_V4")
    again = transformers.MixtralForCausalLM.from_pretrained("FOR_V4", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)


def test_lightning_migrates_in_its_own_hook(place):
    pl = pytest.importorskip("pytorch_lightning")

    class Old(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

        def training_step(self, batch, _):
            return (self.gate(batch[0]) * self.up(batch[0])).sum()

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(2, 4)))

    folder = place / "rules" / "demo" / "v2"
    folder.mkdir(parents=True)
    (folder.parent / "layouts.yaml").write_text(
        "lineage: demo\ntitle: t\nordered: true\nlayouts:\n"
        '  v1: {title: a, status: supported, detect: {present: "gate.weight"}}\n'
        '  v2: {title: b, status: current, detect: {present: "gate_up.weight"}}\n'
    )
    (folder / "fuse.yaml").write_text(
        'id: demo/v2/fuse\ntitle: t\nwhy: t\nlineage: demo\nedge: [v1, v2]\nrequires: ">=0.1"\n'
        'rules: [{name: r, from: "{w:gate|up}.weight", to: gate_up.weight, via: [{concat: {over: '
        "w, dim: 0}}]}]\n"
    )
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", **quiet)
    old = Old()
    trainer.fit(old)
    trainer.save_checkpoint("old.ckpt")
    new = run("Lightning", pl=pl, torch=torch, migrate=migrate)["New"]
    loaded = new.load_from_checkpoint("old.ckpt", weights_only=True)
    assert torch.equal(loaded.gate_up.weight, torch.cat([old.gate.weight, old.up.weight]))
    # what is new already passes
    torch.save(
        {"state_dict": loaded.state_dict(), "pytorch-lightning_version": pl.__version__}, "new.ckpt"
    )
    assert torch.equal(
        new.load_from_checkpoint("new.ckpt", weights_only=True).gate_up.weight,
        loaded.gate_up.weight,
    )
    # the page says that migrate takes the file itself
    with pytest.raises(migrate.MigrateError, match="M410"):
        migrate.apply("old.ckpt", "migrated.ckpt", to="demo@v2", rules=["rules"])
    migrate.apply(
        "old.ckpt",
        "migrated.ckpt",
        to="demo@v2",
        rules=["rules"],
        params={"optimizer": "drop"},
        allow={"drop"},
    )
    assert torch.equal(
        torch.load("migrated.ckpt", weights_only=True)["state_dict"]["gate_up.weight"],
        loaded.gate_up.weight,
    )


def test_diffusers_gets_what_its_own_conversion_gives(place):
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8
    )
    model.save_pretrained("OLD")
    file = place / "OLD" / "diffusion_pytorch_model.safetensors"
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    old = {}
    for key, tensor in load_file(file).items():
        for new_name, name in names.items():
            key = key.replace(f"attentions.0.{new_name}.", f"attentions.0.{name}.")
        old[key] = tensor
    assert sum("proj_attn" in key for key in old) == 4
    save_file(old, file)
    (place / "rules.yaml").write_text(shown("diffusers", "yaml"))
    made = run("diffusers")["model"].state_dict()
    reference = diffusers.AutoencoderKL.from_pretrained("OLD").state_dict()
    assert list(made) == list(reference)
    assert all(torch.equal(made[key], reference[key]) for key in reference)


class Blocks(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.add_module(
            name, nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(4, 4)}) for _ in range(2)])
        )

    def forward(self, x):
        for block in getattr(self, self.name):
            x = block["q_proj"](x)
        return x


def test_peft_loads_an_adapter_of_the_old_names(place):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    base, renamed = Blocks("h"), Blocks("layers")
    renamed.load_state_dict(
        {key.replace("h.", "layers."): tensor for key, tensor in base.state_dict().items()}
    )
    old = peft.get_peft_model(base, config)
    (place / "OLD").mkdir()
    save_file(peft.get_peft_model_state_dict(old), "OLD/adapter_model.safetensors")
    model = peft.get_peft_model(renamed, config)
    x = torch.randn(3, 4)
    assert not torch.equal(model(x), old(x))
    (place / "rules.yaml").write_text(shown("PEFT", "yaml"))
    outcome = run("PEFT", model=model)["outcome"]
    assert outcome.unexpected_keys == []
    assert torch.equal(model(x), old(x))


def test_torchtune_gets_what_its_own_function_gives(place):
    pytest.importorskip(
        "torchtune",
        reason="torchtune is not installed: its last release needs torchao 0.9",
        exc_type=ImportError,
    )
    from torchtune.models.convert_weights import meta_to_tune
    from torchtune.models.llama3 import llama3

    def build():
        return llama3(
            vocab_size=32, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=16, max_seq_len=32
        )

    names = {
        "attn.q_proj": "attention.wq",
        "attn.k_proj": "attention.wk",
        "attn.v_proj": "attention.wv",
        "attn.output_proj": "attention.wo",
        "mlp.": "feed_forward.",
        "sa_norm.scale": "attention_norm.weight",
        "mlp_norm.scale": "ffn_norm.weight",
        "norm.scale": "norm.weight",
    }
    old = {}
    for key, tensor in build().state_dict().items():
        for tune, meta in names.items():
            if tune in key:
                key = key.replace(tune, meta)
                break
        old[key] = torch.randn_like(tensor)
    torch.save(old, "consolidated.00.pth")
    (place / "rules.yaml").write_text(shown("torchtune", "yaml"))
    model = run("torchtune", model=build())["model"]
    expected = meta_to_tune(old)
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
