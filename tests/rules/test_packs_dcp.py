"""Each shipped pack from distributed checkpoints that stock torch saved, in chunks, and into them.

What must come out is what the packs' other tests compare with: the files of transformers, the
arithmetic of the published converters, the numbers of Transformer Engine's own states.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from dcp_folders import rows, save
from genuine import checkpoint, digest
from resharding import same_bits
from safetensors.torch import load_file
from test_layout_packs import (
    NAMES,
    WRAPPERS,
    convert_llama_weights_to_hf,
    interleaved,
    llama,
    params_json,
    random,
)
from test_te_lineages import ARCHIVES, ATTENTION, MODULES, expected, hashes, loaded, vector
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import migrate
from migrate.rules.families import families
from migrate.rules.packs import Packs

HF = Path(__file__).resolve().parents[1] / "data" / "hf"
RULES = Path(__file__).resolve().parents[2] / "rules"
NONE = torch.tensor(list(b"\x80\x04N."), dtype=torch.uint8)
EMPTY = torch.empty(0, dtype=torch.uint8)
STATE = "v0.8_linear_DelayedScaling.pkl"
SCALED = {"allow": {"delayed-scaling"}}


class Case(NamedTuple):
    """`old` becomes `new` by the question `asked`; a value of `new` may be a check. `back` says
    whether that can be undone exactly, and `side` are files beside, of which the
    rules take away those `removed`.
    """

    old: Mapping[str, Any]
    new: Mapping[str, Any]
    asked: Mapping[str, Any]
    back: bool = True
    side: Mapping[str, Any] = {}
    removed: Collection[str] = ()


def pair(name: str, *to: str, back: bool = True, **asked: Any) -> Case:
    home = HF / name
    old, new = (load_file(home / which / "model.safetensors") for which in ("hub", "v5"))
    config = json.loads((home / "hub" / "config.json").read_text())
    return Case(old, new, {"to": to, **asked}, back, {"config": config})


def genuine(
    name: str, to: str, *allow: str, folder: Path | None = None, side: str = "config"
) -> Case:
    """A checkpoint that a library made becomes what that library decodes it to; its tensors and one
    side file are read from `folder` where they lie there in safetensors.
    """
    found = checkpoint(name)
    folder = folder or found.folder

    def is_decoded(wanted: str) -> Callable[[torch.Tensor], bool]:
        def check(made: torch.Tensor) -> bool:
            named = {torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}[made.dtype]
            raw = made.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return digest(named, tuple(made.shape), raw) == wanted

        return check

    return Case(
        load_file(folder / "model.safetensors"),
        {key: is_decoded(wanted) for key, wanted in found.tensors.items()},
        {"to": to, "allow": set(allow)},
        back=False,
        side={side: json.loads((folder / f"{side}.json").read_text())},
    )


def gguf_llama() -> Case:
    """The tensors and key-values of a GGUF file, which torch saved again."""
    name = "gguf-qwen3"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "out"
        migrate.apply(checkpoint(name).folder, folder, output_format="safetensors")
        case = genuine(name, "gguf-llama@hf", "lossy", folder=folder, side="gguf")
        return case._replace(removed=["gguf"])


def mxfp8() -> Case:
    codes = torch.randint(0, 127, (4, 64), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.randint(120, 134, (4, 2), dtype=torch.uint8)
    factors = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    at, norm = "model.layers.0.mlp.up_proj.weight", {"model.norm.weight": random(4, seed="norm")}
    return Case(
        {at: codes, f"{at}_scale": scales, **norm},
        {at: (codes.float() * factors).bfloat16(), **norm},
        {"to": "mxfp8@bf16"},
        back=False,
    )


def meta_llama() -> Case:
    (old,) = llama(1, 3, 2).values()
    new = convert_llama_weights_to_hf({"one": old}, 3, 2)
    asked = {"to": "meta-llama@hf", "params": {"generation": 3}}
    return Case(old, new, asked, side={"params": params_json(2)})


def megatron() -> Case:
    heads, groups, width = 8, 4, 2
    hidden = heads * width
    q, k, v = (
        random(count * width, hidden, seed=w)
        for w, count in (("q", heads), ("k", groups), ("v", groups))
    )
    mlp = {"decoder.layers.0.mlp.weight": random(3, seed="mlp")}
    at = "model.layers.0.self_attn."
    return Case(
        {
            "decoder.layers.0.self_attention.linear_qkv.weight": interleaved(
                q, k, v, heads, groups, width
            ),
            **mlp,
        },
        {f"{at}q_proj.weight": q, f"{at}k_proj.weight": k, f"{at}v_proj.weight": v, **mlp},
        {"to": "megatron-gqa-qkv@hf"},
        side={
            "config": {
                "num_attention_heads": heads,
                "num_key_value_heads": groups,
                "head_dim": width,
            }
        },
    )


def megatron_gpt() -> Case:
    """One layer of Qwen2 in Transformer Engine's spec."""
    heads, groups, width, ffn = 8, 4, 2, 6
    hidden = heads * width
    rows = {"q": heads * width, "k": groups * width, "v": groups * width}
    layer, hf = "decoder.layers.0.", "model.layers.0."
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    for leaf, more in (("weight", (hidden,)), ("bias", ())):
        parts = {w: random(count, *more, seed=f"{w} {leaf}") for w, count in rows.items()}
        old[f"{layer}self_attention.linear_qkv.{leaf}"] = interleaved(
            *parts.values(), heads, groups, width
        )
        new |= {f"{hf}self_attn.{w}_proj.{leaf}": part for w, part in parts.items()}
    gate, up = (random(ffn, hidden, seed=w) for w in ("gate", "up"))
    old[f"{layer}mlp.linear_fc1.weight"] = torch.cat([gate, up])
    new |= {f"{hf}mlp.gate_proj.weight": gate, f"{hf}mlp.up_proj.weight": up}
    for was, now, shape in (
        (f"{layer}self_attention.linear_proj.weight", f"{hf}self_attn.o_proj.weight", (hidden, 16)),
        (f"{layer}mlp.linear_fc2.weight", f"{hf}mlp.down_proj.weight", (hidden, ffn)),
        (
            f"{layer}self_attention.linear_qkv.layer_norm_weight",
            f"{hf}input_layernorm.weight",
            (hidden,),
        ),
        (
            f"{layer}mlp.linear_fc1.layer_norm_weight",
            f"{hf}post_attention_layernorm.weight",
            (hidden,),
        ),
        ("decoder.final_layernorm.weight", "model.norm.weight", (hidden,)),
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight", (8, hidden)),
    ):
        old[was] = new[now] = random(*shape, seed=was)
    params = {"heads": heads, "groups": groups, "head_dim": width, "padded": 8}
    return Case(old, new, {"to": "megatron-gpt@qwen2", "params": params})


def wrappers() -> Case:
    old = {name: random(3, seed=name) for name in NAMES}
    new = {".".join(s for s in key.split(".") if s not in WRAPPERS): t for key, t in old.items()}
    return Case(old, new, {"to": "torch-wrappers@plain"}, back=False)


def grouped(kind: str, *shape: int) -> Case:
    whole, other = random(3, *shape, seed=kind), {"norm.weight": random(2, seed="n")}
    old = {f"mlp.fc1.{kind}": whole, **other}
    new = {f"mlp.fc1.{kind}{i}": whole[i] for i in range(3)}
    asked = {
        "to": f"te-grouped-{kind}@multi",
        "from_": f"te-grouped-{kind}@single",
        "params": {"modules": "mlp.fc1"},
    }
    return Case(old, {**new, **other}, asked)


def attention() -> Case:
    offset = ATTENTION["1.8"].replace("_extra_state", "softmax_offset")
    beside = {offset: random(4, seed="offset")}
    old = {ATTENTION["1.6"]: NONE, **beside}
    return Case(old, {ATTENTION["1.8"]: NONE, **beside}, {"to": "te-attention@1.8"})


def states(name: str) -> Case:
    """What a release made of delayed scaling goes to 2.18 with the same numbers."""
    weight = {"layers.fc.weight": random(2, 2, seed="fc")}
    raw = vector(name)
    state: Any = torch.tensor(list(raw), dtype=torch.uint8)
    # the archives of 1.x are streams in the state dict
    old = {**weight, "layers.fc._extra_state": io.BytesIO(raw) if name in ARCHIVES else state}

    def check(made: torch.Tensor) -> bool:
        return hashes(loaded(made.numpy().tobytes())) == expected(name)

    new = {**weight, "layers.fc._extra_state": check}
    return Case(old, new, {"to": "te-extra-state@2.18", **SCALED}, back=False)


def norms() -> Case:
    state = torch.tensor(list(vector(STATE)), dtype=torch.uint8)
    old = {
        "layers.0.layernorm.weight": random(4, seed="w"),
        "layers.0.layernorm.bias": random(4, seed="b"),
        "layers.0.proj._extra_state": state,
    }
    new = {**old, "layers.0.layernorm._extra_state": torch.empty(0)}
    return Case(old, new, {"to": "te-norm-state@1.13", "params": {"modules": "layers.0.layernorm"}})


def missing() -> Case:
    old = {f"{m}.{key}": random(2, seed=f"{m}{key}") for m, keys in MODULES.items() for key in keys}
    new = {**old, **{f"{m}._extra_state": EMPTY for m in MODULES}}
    asked = {"to": "te-missing-state@complete", "params": {"modules": ",".join(MODULES)}}
    return Case(old, new, asked)


def complete() -> Case:
    case = missing()
    return Case(case.new, case.old, {"to": "te-missing-state@incomplete"}, back=False)


def operation() -> Case:
    weight, bias = random(2, 3, seed="w"), random(2, seed="b")
    at = "mlp.fc1.basic_ops."
    new = {f"{at}0.weight": weight, f"{at}1.bias": bias}
    return Case(
        {"mlp.fc1.weight": weight, "mlp.fc1.bias": bias, "mlp.fc1._extra_state": EMPTY},
        {**new, f"{at}0._extra_state": EMPTY, f"{at}1._extra_state": EMPTY},
        {
            "to": "te-ops-linear@ops",
            "from_": "te-ops-linear@module",
            "params": {"modules": "mlp.fc1"},
        },
    )


def example(path: str, *kept: str, back: bool = True, **asked: Any) -> Case:
    """The test of a rule file, with tensors of random numbers where it has none; what begins with
    a word of `kept` stays, of which the test says nothing.
    """
    file = yaml.safe_load((RULES / f"{path}.yaml").read_text(encoding="utf-8"))
    test = file["tests"][0]
    old = {
        key: torch.tensor(one["values"], dtype=torch.float32)
        if "values" in one
        else random(*one["shape"], seed=key)
        for key, one in test["given"].items()
    }
    new = {
        key: old[one["same_as"]]
        if "same_as" in one
        else torch.tensor(one["values"], dtype=torch.float32)
        for key, one in test["expect"].items()
    }
    new |= {key: one for key, one in old.items() if kept and key.startswith(kept)}
    before, after = (f"{file['lineage']}@{layout}" for layout in file["edge"])
    asked = {"to": after, "from_": before, "params": test.get("params", {}), **asked}
    side = {name.removesuffix(".json"): one for name, one in test.get("side", {}).items()}
    return Case(old, new, asked, back, side)


def gpt2() -> Case:
    at = "transformer.h.0."
    biases = [
        f"{at}{name}.bias" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    kept = ("transformer.wpe", "transformer.ln_f", f"{at}ln_", *biases)
    return example("gpt2/hf/nanogpt", *kept, back=False, allow={"drop"})


CASES: dict[str, Callable[[], Case]] = {
    "hf-mixtral": lambda: pair("mixtral__v4", "hf-mixtral@v5"),
    "hf-qwen2-moe": lambda: pair("qwen2_moe__v4", "hf-qwen2-moe@v5"),
    "hf-deepseek-v3 deepseek-v3": lambda: pair(
        "fp8_dequant_deepseek_v3",
        "hf-deepseek-v3@v5",
        "deepseek-v3@bf16",
        back=False,
        allow={"lossy"},
    ),
    "gpt-oss": lambda: pair("mxfp4_dequant_gpt_oss", "gpt-oss@bf16", back=False),
    "mxfp8": mxfp8,
    "compressed-tensors": lambda: genuine("ct-w4a16", "compressed-tensors@bf16", "lossy"),
    "kimi-k2": lambda: genuine("kimi-k2", "kimi-k2@bf16", "lossy"),
    "deepseek-v4": lambda: genuine("deepseek-v4", "deepseek-v4@bf16"),
    "fp8": lambda: genuine("hf-fp8-block", "fp8@bf16", "lossy"),
    "nvfp4": lambda: genuine("ct-nvfp4", "nvfp4@bf16", "lossy", "drop"),
    "gptq": lambda: genuine("gptq-v2-dynamic", "gptq@fp16", "lossy"),
    "awq": lambda: genuine("awq-gemm", "awq@fp16", "lossy"),
    "torchao": lambda: genuine("torchao-intx", "torchao@bf16", "lossy"),
    "bnb": lambda: genuine("bnb-nf4", "bnb@bf16", "lossy"),
    "gguf-llama": gguf_llama,
    "meta-llama": meta_llama,
    "megatron-gqa-qkv": megatron,
    "megatron-gpt": megatron_gpt,
    "torch-wrappers": wrappers,
    "te-grouped-weight": lambda: grouped("weight", 4, 2),
    "te-grouped-bias": lambda: grouped("bias", 4),
    "te-attention": attention,
    "te-extra-state": lambda: states(STATE),
    "te-extra-state 1.x": lambda: states(ARCHIVES[0]),
    "te-norm-state": norms,
    "te-missing-state": missing,
    "te-missing-state dropped": complete,
    "te-ops-linear": operation,
    "flux": lambda: example("flux/diffusers/transformer"),
    "gpt2": gpt2,
    "mamba": lambda: example("mamba/hf/mamba", "backbone.layers", "backbone.norm_f"),
    "open-clip": lambda: example("open-clip/hf/clip", "logit_scale")._replace(
        removed=["open_clip_config"]
    ),
    "peft-lora": lambda: example("peft-lora/file/names"),
    "peft-merge": lambda: example("peft-merge/merged/wrapped", back=False, allow={"lossy", "drop"}),
    "timm-vit": lambda: example("timm-vit/hf/vit"),
}


def test_every_pack_is_here() -> None:
    named = {word for name in CASES for word in name.split()}
    # families of transformers differ in names and numbers alone, and have tests of their own
    assert named >= Packs((), scan=False).lineages()[0].keys() - families().keys()


def written(folder: Path, case: Case) -> Path:
    """Saved by torch as two ranks have it, tensors cut along one axis or another."""
    boxes = {}
    for number, (key, one) in enumerate(case.old.items()):
        if isinstance(one, torch.Tensor) and one.ndim and one.numel():
            dim = number % one.ndim
            size = one.shape[dim]
            boxes[f"model.{key}"] = rows(one.shape, (size - size // 2, size // 2), dim)
    held = {
        key: one.contiguous() if isinstance(one, torch.Tensor) else one
        for key, one in case.old.items()
    }
    boxes = {key: [box for box in cut if 0 not in box[1]] for key, cut in boxes.items()}
    save(folder, {"model": held, "step": 3}, boxes)
    for name, value in case.side.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def read(folder: Path) -> Any:
    out = folder.with_name(f"{folder.name}.read.pt")
    dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=True)


def assert_holds(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, one in wanted.items():
        if isinstance(one, torch.Tensor):
            assert same_bits(found[key], one), key
        elif isinstance(one, io.BytesIO):
            assert found[key].getvalue() == one.getvalue(), key
        else:
            assert one(found[key]), key


@pytest.mark.parametrize("name", CASES)
def test_a_pack_runs_from_a_distributed_checkpoint_to_one_and_back(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]()
    source, out, back = written(tmp_path / "in", case), tmp_path / "out", tmp_path / "back"
    answer = migrate.apply(source, out, **case.asked, chunks=2, fsync=False)
    assert migrate.inspect(out).format == "dcp"
    held = read(out)
    assert held["step"] == 3
    assert_holds(held["model"], case.new)
    assert migrate.verify(out, source=source, **_again(case)).equal
    assert {one.lineage for one in migrate.history(out).applied} <= set(name.split())
    assert answer.downgrade.exact == case.back, answer.downgrade
    if case.back:
        migrate.downgrade(out, back, **_again(case, "allow"), fsync=False)
        assert_holds(read(back)["model"], case.old)
        assert migrate.diff(source, back).equal


@pytest.mark.parametrize("name", CASES)
def test_a_pack_runs_from_one_to_safetensors_and_from_there_into_one(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]()
    source = written(tmp_path / "in", case)
    migrate.apply(source, tmp_path / "hf", **case.asked, output_format="safetensors", fsync=False)
    assert_holds(load_file(tmp_path / "hf" / "model.safetensors"), case.new)
    for side in case.side:
        assert (tmp_path / "hf" / f"{side}.json").exists() != (side in case.removed)
    if any(not isinstance(one, torch.Tensor) for one in case.old.values()):
        # streams stand in files of torch.save alone
        migrate.apply(source, tmp_path / "plain", output_format="torch", fsync=False)
    else:
        migrate.apply(source, tmp_path / "plain", output_format="safetensors", fsync=False)
    migrate.apply(
        tmp_path / "plain",
        tmp_path / "dcp",
        **case.asked,
        output_format="dcp",
        chunks=3,
        fsync=False,
    )
    assert_holds(read(tmp_path / "dcp")["model"], case.new)


def _again(case: Case, *words: str) -> dict[str, Any]:
    """Of the question what a stamp does not remember."""
    return {key: value for key, value in case.asked.items() if key in words}
