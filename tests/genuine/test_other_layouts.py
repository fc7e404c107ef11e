"""nanoGPT, FLUX, Mamba and PEFT against their models, which are written here by their published
equations where they cannot be installed, and against what diffusers, transformers and PEFT do.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from projects import State, equal, folder, loaded, near, only, random, there_and_back
from torch import nn
from torch.nn import functional

import migrate

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("_without_gradients"),
]


@pytest.fixture
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


# ---------------------------------------------------------------------------------- nanoGPT


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=bias) for _ in range(2))
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width, bias), "c_proj": nn.Linear(width, width, bias)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width, bias), "c_proj": nn.Linear(4 * width, width, bias)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.reshape(b, t, self.heads, -1).transpose(1, 2)
            for part in self.attn["c_attn"](self.ln_1(x)).split(c, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    """Names and equations of nanoGPT's model.py."""

    def __init__(self, width: int, heads: int, layers: int, words: int, bias: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(words, width),
                "wpe": nn.Embedding(8, width),
                "h": nn.ModuleList(NanoBlock(width, heads, bias) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width, bias=bias),
            }
        )
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"].weight[: tokens.shape[1]]
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


@pytest.mark.parametrize("bias", [True, False])
def test_nano_gpt_s_logits_are_those_of_transformers(tmp_path: Path, bias: bool) -> None:
    model = random(NanoGPT(16, 2, 2, 24, bias))
    args = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "bias": bias}
    checkpoint = {"model": model.state_dict(), "model_args": args, "iter_num": 3}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    out = tmp_path / "hf"
    migrate.apply(tmp_path / "ckpt.pt", out, to="gpt2@hf", output_format="safetensors", fsync=False)
    tokens = torch.arange(14).reshape(2, 7)
    answer = loaded("GPT2LMHeadModel", out)(tokens).logits
    assert near(answer, model.double()(tokens))
    # the way back of what transformers itself saves
    gpt2 = loaded("GPT2LMHeadModel", out).float()
    gpt2.save_pretrained(tmp_path / "saved")
    migrate.apply(tmp_path / "saved", tmp_path / "nano", to="gpt2@nanogpt", fsync=False)
    again = only(tmp_path / "nano")
    whole = random(NanoGPT(16, 2, 2, 24, True))
    whole.load_state_dict(again, strict=True)
    assert near(whole.double()(tokens), answer)


def test_gpt_2_of_the_hub_gets_the_names_of_the_whole_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=24, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model = random(transformers.GPT2LMHeadModel(config))
    state = model.transformer.state_dict()
    for n in range(2):
        state[f"h.{n}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    source = folder(state, tmp_path / "hub", config=config.to_dict())
    out = tmp_path / "out"
    migrate.apply(source, out, to="gpt2@hf", allow=["drop"], fsync=False)
    model.save_pretrained(tmp_path / "own")
    assert equal(
        only(out),
        only(tmp_path / "own"),
    )


# ---------------------------------------------------------------------------------- FLUX


def test_flux_is_that_of_diffusers_own_function(tmp_path: Path) -> None:
    """It knows FLUX.1 alone, whose width is 3072; rows count, so there are few columns."""
    pytest.importorskip("diffusers")
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    width, inner = 3072, 4 * 3072
    shapes = {f"{m}.{i}_layer": (width, 1) for m in ("time_in", "vector_in") for i in ("in", "out")}
    shapes |= {f"guidance_in.{i}_layer": (width, 1) for i in ("in", "out")}
    shapes |= {"img_in": (width, 1), "txt_in": (width, 1), "final_layer.linear": (4, 1)}
    shapes["final_layer.adaLN_modulation.1"] = (2 * width, 1)
    scales = []
    for n in range(2):
        for s in ("img", "txt"):
            at = f"double_blocks.{n}.{s}"
            shapes |= {f"{at}_mod.lin": (6 * width, 1), f"{at}_attn.qkv": (3 * width, 1)}
            shapes |= {f"{at}_attn.proj": (width, 1), f"{at}_mlp.0": (inner, 1)}
            shapes[f"{at}_mlp.2"] = (width, 1)
            scales += [f"{at}_attn.norm.{w}_norm.scale" for w in ("query", "key")]
        at = f"single_blocks.{n}"
        shapes |= {f"{at}.linear1": (3 * width + inner, 1), f"{at}.linear2": (width, 1)}
        shapes[f"{at}.modulation.lin"] = (3 * width, 1)
        scales += [f"{at}.norm.{w}_norm.scale" for w in ("query", "key")]
    made = torch.Generator().manual_seed(7)
    state = {f"{m}.weight": torch.randn(shape, generator=made) for m, shape in shapes.items()}
    state |= {f"{m}.bias": torch.randn(shape[0], generator=made) for m, shape in shapes.items()}
    state |= {key: torch.randn(128, generator=made) for key in scales}
    for variant in ("dev", "schnell"):
        if variant == "schnell":
            state = {key: t for key, t in state.items() if not key.startswith("guidance_in")}
        source = folder(state, tmp_path / variant / "bfl")
        out = there_and_back(source, tmp_path / variant, "flux@diffusers")
        expected = convert_flux_transformer_checkpoint_to_diffusers(dict(state))
        assert equal(only(out), expected)


def timesteps(t: torch.Tensor, width: int = 256) -> torch.Tensor:
    rates = torch.exp(-math.log(10000) * torch.arange(width // 2).double() / (width // 2))
    angles = 1000 * t[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class FluxOriginal:
    """FLUX.1 by the names and equations of Black Forest Labs, of a state dict."""

    def __init__(self, state: State, heads: int, axes: tuple[int, ...]) -> None:
        self.state = {key: t.double() for key, t in state.items()}
        self.heads, self.axes = heads, axes

    def linear(self, at: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.state[f"{at}.weight"], self.state[f"{at}.bias"])

    def embedded(self, at: str, x: torch.Tensor) -> torch.Tensor:
        return self.linear(f"{at}.out_layer", functional.silu(self.linear(f"{at}.in_layer", x)))

    def modulation(self, at: str, vec: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
        return self.linear(at, functional.silu(vec))[:, None].chunk(parts, dim=-1)

    def mlp(self, at: str, x: torch.Tensor) -> torch.Tensor:
        return self.linear(
            f"{at}.2", functional.gelu(self.linear(f"{at}.0", x), approximate="tanh")
        )

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], eps=1e-6)

    def split(self, at: str, qkv: torch.Tensor) -> list[torch.Tensor]:
        b, n, _ = qkv.shape
        q, k, v = qkv.reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        normed = [
            x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-6) * self.state[f"{at}.{w}.scale"]
            for x, w in ((q, "query_norm"), (k, "key_norm"))
        ]
        return [*normed, v]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> Any:
        angles = torch.cat(
            [
                ids[:, a, None] / 10000 ** (torch.arange(0, width, 2).double() / width)
                for a, width in enumerate(self.axes)
            ],
            dim=-1,
        )
        turned = []
        for x in (q, k):
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
            turn = torch.polar(torch.ones_like(angles), angles)
            turned.append(torch.view_as_real(pairs * turn).flatten(-2))
        y = functional.scaled_dot_product_attention(*turned, v)
        return y.transpose(1, 2).flatten(2)

    def __call__(
        self,
        img: torch.Tensor,
        txt: torch.Tensor,
        pooled: torch.Tensor,
        t: torch.Tensor,
        guidance: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        vec = self.embedded("time_in", timesteps(t)) + self.embedded("vector_in", pooled)
        vec = vec + self.embedded("guidance_in", timesteps(guidance))
        img, txt = self.linear("img_in", img), self.linear("txt_in", txt)
        words = txt.shape[1]
        for n in range(2):
            at, streams, said = f"double_blocks.{n}", {"txt": txt, "img": img}, {}
            parts = []
            for s, x in streams.items():
                said[s] = self.modulation(f"{at}.{s}_mod.lin", vec, 6)
                shift, scale, *_ = said[s]
                qkv = self.linear(f"{at}.{s}_attn.qkv", self.normed(x) * (1 + scale) + shift)
                parts.append(self.split(f"{at}.{s}_attn.norm", qkv))
            q, k, v = (torch.cat(pair, dim=2) for pair in zip(*parts, strict=True))
            y = self.attend(q, k, v, ids)
            for s, part in (("txt", y[:, :words]), ("img", y[:, words:])):
                _, _, gate, shift, scale, gate_mlp = said[s]
                x = streams[s] + gate * self.linear(f"{at}.{s}_attn.proj", part)
                moved = self.normed(x) * (1 + scale) + shift
                streams[s] = x + gate_mlp * self.mlp(f"{at}.{s}_mlp", moved)
            txt, img = streams["txt"], streams["img"]
        x = torch.cat([txt, img], dim=1)
        for n in range(2):
            at = f"single_blocks.{n}"
            shift, scale, gate = self.modulation(f"{at}.modulation.lin", vec, 3)
            joined = self.linear(f"{at}.linear1", self.normed(x) * (1 + scale) + shift)
            width = x.shape[-1]
            q, k, v = self.split(f"{at}.norm", joined[..., : 3 * width])
            mlp = functional.gelu(joined[..., 3 * width :], approximate="tanh")
            both = torch.cat([self.attend(q, k, v, ids), mlp], dim=-1)
            x = x + gate * self.linear(f"{at}.linear2", both)
        shift, scale = self.modulation("final_layer.adaLN_modulation.1", vec, 2)
        return self.linear("final_layer.linear", self.normed(x[:, words:]) * (1 + scale) + shift)


def test_flux_gives_what_the_model_of_diffusers_gives(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = random(
        diffusers.FluxTransformer2DModel(
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=12,
            pooled_projection_dim=10,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        )
    )
    source = folder(model.state_dict(), tmp_path / "diffusers")
    out = there_and_back(source, tmp_path, "flux@bfl")
    original = FluxOriginal(only(out), 2, (4, 6, 6))
    model.double()
    img, txt = torch.randn(2, 5, 4).double(), torch.randn(2, 3, 12).double()
    pooled, t = torch.randn(2, 10).double(), torch.tensor([0.001, 0.002]).double()
    guidance = torch.tensor([0.003, 0.001]).double()
    ids = torch.tensor(
        [[0, 0, 0]] * 3 + [[0, r, c] for r, c in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))]
    )
    answer = model(
        hidden_states=img,
        encoder_hidden_states=txt,
        pooled_projections=pooled,
        timestep=t,
        guidance=guidance,
        txt_ids=ids[:3].double(),
        img_ids=ids[3:].double(),
    ).sample
    # diffusers makes the waves of time steps in float32, which is near where these are small
    assert near(original(img, txt, pooled, t, guidance, ids.double()), answer, 1e-6)


# ---------------------------------------------------------------------------------- Mamba


def scanned(state: State, tokens: torch.Tensor, layers: int) -> torch.Tensor:
    """Mamba's logits by its equations, step by step, of a state dict with its authors' names."""
    state = {key: t.double() for key, t in state.items()}

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-5) * weight

    x = state["backbone.embedding.weight"][tokens]
    for n in range(layers):
        at = f"backbone.layers.{n}"
        w = {key.removeprefix(f"{at}.mixer."): t for key, t in state.items() if key.startswith(at)}
        u, gate = functional.linear(
            normed(x, state[f"{at}.norm.weight"]), w["in_proj.weight"]
        ).chunk(2, dim=-1)
        u = functional.conv1d(
            functional.pad(u.transpose(1, 2), (3, 0)),
            w["conv1d.weight"],
            w["conv1d.bias"],
            groups=u.shape[-1],
        ).transpose(1, 2)
        u = functional.silu(u)
        rank, size = w["dt_proj.weight"].shape[1], w["A_log"].shape[1]
        dt, b, c = functional.linear(u, w["x_proj.weight"]).split([rank, size, size], dim=-1)
        dt = functional.softplus(functional.linear(dt, w["dt_proj.weight"], w["dt_proj.bias"]))
        a, h, ys = -w["A_log"].exp(), torch.zeros(*u.shape[::2], size).double(), []
        for i in range(u.shape[1]):
            step = dt[:, i, :, None]
            h = (step * a).exp() * h + step * b[:, i, None] * u[:, i, :, None]
            ys.append((h * c[:, i, None]).sum(-1) + w["D"] * u[:, i])
        y = torch.stack(ys, dim=1) * functional.silu(gate)
        x = x + functional.linear(y, w["out_proj.weight"])
    return normed(x, state["backbone.norm_f.weight"]) @ state["lm_head.weight"].T


def test_mamba_s_logits_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(
        vocab_size=24, hidden_size=16, state_size=4, num_hidden_layers=2, expand=2
    )
    model = random(transformers.MambaForCausalLM(config))
    state = {
        key.replace("backbone.embeddings.", "backbone.embedding."): t
        for key, t in model.state_dict().items()
    }
    # transformers renames this one itself as it loads
    twin = transformers.MambaForCausalLM(config)
    twin.load_state_dict(dict(state), strict=True)
    said = {
        "d_model": 16,
        "n_layer": 2,
        "vocab_size": 24,
        "ssm_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
    }
    source = folder(state, tmp_path / "ssm", config=said)
    out = there_and_back(source, tmp_path, "mamba@hf")
    other = loaded("MambaForCausalLM", out)
    assert equal(other.float().state_dict(), twin.state_dict())
    tokens = torch.arange(14).reshape(2, 7)
    answer = other.double()(tokens).logits
    # transformers scans in float32
    assert near(answer, scanned(state, tokens, 2), 1e-5)
    # the way back of what transformers itself saves
    other.float().save_pretrained(tmp_path / "saved")
    migrate.apply(tmp_path / "saved", tmp_path / "again", to="mamba@ssm", fsync=False)
    assert equal(only(tmp_path / "again"), state)


# ---------------------------------------------------------------------------------- PEFT


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(8, 6), "o": nn.Linear(6, 8)}) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["o"](functional.silu(layer["q"](x)))
        return self.head(x)


def adapted(**more: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q", "o"], r=2, lora_alpha=8, init_lora_weights=False, **more
    )
    return peft.get_peft_model(Small(), config).eval()


def test_peft_s_names_are_those_of_its_own_functions(tmp_path: Path) -> None:
    """Also those of DoRA and of an adapted embedding."""
    model = adapted(use_dora=True)
    import peft

    embedded = peft.get_peft_model(
        Small(), peft.LoraConfig(target_modules=["embed"], r=2, init_lora_weights=False)
    )
    for n, one in enumerate((model, embedded)):
        expected = peft.get_peft_model_state_dict(one, save_embedding_layers=False)
        inside = {key: t for key, t in one.state_dict().items() if ".default" in key}
        source = folder(inside, tmp_path / f"{n}" / "module")
        out = there_and_back(source, tmp_path / f"{n}", "peft-lora@file")
        assert equal(only(out), expected)


def whole_numbers(model: Any) -> Any:
    """Numbers of which every sum is exact, so that nothing is rounded in whatever order."""
    made = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-8, 8, parameter.shape, generator=made).float())
    return model


def test_adapters_are_merged_as_peft_merges_them(tmp_path: Path) -> None:
    model = whole_numbers(adapted(modules_to_save=["head"]))
    said = {"lora_alpha": 8, "r": 2, "use_rslora": False, "fan_in_fan_out": False}
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    source = folder(model.state_dict(), tmp_path / "wrapped", adapter_config=said)
    out = tmp_path / "merged"
    migrate.apply(source, out, to="peft-merge@merged", allow=["lossy", "drop"], fsync=False)
    assert migrate.verify(out, source=source).equal
    assert equal(only(out), merged)
    with pytest.raises(migrate.MigrateError, match="M405"):
        migrate.downgrade(out, tmp_path / "back", fsync=False)


def test_an_adapter_file_is_merged_beside_its_base(tmp_path: Path) -> None:
    model = adapted()
    model.save_pretrained(tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    file = only(tmp_path / "adapter")
    base = {
        key.removeprefix("base_model.model.").replace(".base_layer", ""): t
        for key, t in model.state_dict().items()
        if ".lora_" not in key
    }
    source = folder({**base, **file}, tmp_path / "joined", adapter_config=said)
    out = tmp_path / "merged"
    migrate.apply(
        source,
        out,
        from_="peft-merge@joined",
        to="peft-merge@merged",
        allow=["lossy"],
        fsync=False,
    )
    plain = Small()
    plain.load_state_dict(only(out), strict=True)
    tokens = torch.arange(12).reshape(2, 6)
    made, expected = plain.double()(tokens), model.double()(tokens)
    # the merged weights are float32
    assert near(made, expected, 1e-6)
    assert not near(made, expected)
