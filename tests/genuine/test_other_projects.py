"""torchtune, OpenCLIP and timm: their own models and functions, which `make .venv-projects/.ready`
installs beside what the other tests need.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from projects import equal, folder, loaded, near, only, package, random, there_and_back
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


# ---------------------------------------------------------------------------------- torchtune


def test_torchtune_s_llama_is_that_of_its_own_function(tmp_path: Path) -> None:
    package("torchtune")
    from torchtune.models.convert_weights import tune_to_hf, tune_to_meta
    from torchtune.models.llama3 import llama3

    sizes = {"vocab_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = random(llama3(**sizes, embed_dim=32, max_seq_len=16, intermediate_dim=48))
    state = model.state_dict()
    said = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 32,
        "intermediate_size": 48,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "model_type": "llama",
    }
    source = folder(state, tmp_path / "tune", config=said)
    out = there_and_back(source, tmp_path, "meta-llama@hf")
    made = only(out)
    assert equal(made, tune_to_hf(dict(state), num_heads=4, num_kv_heads=2, dim=32))
    tokens = torch.arange(14).reshape(2, 7)
    answer = loaded("LlamaForCausalLM", out)(tokens).logits
    expected = model.double()(tokens)
    assert near(answer, expected, 1e-5)
    # rows in the order that torchtune has are far from it
    unmoved = {
        f"model.layers.{n}.self_attn.{w}_proj.weight": state[f"layers.{n}.attn.{w}_proj.weight"]
        for n in range(2)
        for w in "qk"
    }
    wrong = folder(made | unmoved, tmp_path / "wrong", config=said)
    assert not near(loaded("LlamaForCausalLM", wrong)(tokens).logits, expected, 1e-2)
    # and from transformers, which has no stamp, to Meta's names by way of torchtune's
    hf = folder(made, tmp_path / "hf", config=said)
    migrate.apply(hf, tmp_path / "again", to="meta-llama@tune", fsync=False)
    assert equal(only(tmp_path / "again"), state)
    migrate.apply(source, tmp_path / "meta", to="meta-llama@meta", fsync=False)
    assert equal(only(tmp_path / "meta"), tune_to_meta(dict(state)))


# ---------------------------------------------------------------------------------- OpenCLIP


@pytest.mark.parametrize("quick", [False, True])
def test_open_clip_s_features_are_those_of_transformers(tmp_path: Path, quick: bool) -> None:
    open_clip = package("open_clip")
    towers = {
        "embed_dim": 12,
        "vision_cfg": {
            "layers": 2,
            "width": 32,
            "head_width": 8,
            "patch_size": 16,
            "image_size": 32,
        },
        "text_cfg": {
            "context_length": 8,
            "vocab_size": 24,
            "width": 16,
            "heads": 2,
            "layers": 2,
        },
        "quick_gelu": quick,
    }
    model = random(open_clip.CLIP(**towers))
    source = folder(model.state_dict(), tmp_path / "open", open_clip_config={"model_cfg": towers})
    out = there_and_back(source, tmp_path, "open-clip@hf")
    assert not (out / "open_clip_config.json").exists()
    other = loaded("CLIPModel", out)
    model.double()
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    texts = torch.tensor([[1, 5, 9, 23, 0, 0, 0, 0], [1, 7, 3, 4, 8, 2, 6, 23]])
    answer = other(input_ids=texts, pixel_values=images)
    assert near(answer.image_embeds, functional.normalize(model.encode_image(images), dim=-1))
    assert near(answer.text_embeds, functional.normalize(model.encode_text(texts), dim=-1))
    assert near(answer.logits_per_image, model.get_logits(images, texts)[0])


# ---------------------------------------------------------------------------------- timm


@pytest.mark.parametrize("biased", [True, False])
def test_timm_s_logits_are_those_of_transformers(tmp_path: Path, biased: bool) -> None:
    package("timm")
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    model = random(VisionTransformer(**sizes, num_classes=5, qkv_bias=biased))
    said = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 5,
        "num_features": 24,
        "global_pool": "token",
        "pretrained_cfg": {"input_size": [3, 32, 32], "tag": "augreg_in21k"},
    }
    source = folder(model.state_dict(), tmp_path / "timm", config=said)
    out = there_and_back(source, tmp_path, "timm-vit@hf", heads=3)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    answer = loaded("ViTForImageClassification", out)(images).logits
    assert near(answer, model.double()(images))
