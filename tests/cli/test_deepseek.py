"""DeepSeek-V3 from FP8 to bfloat16 and from transformers 4 to 5, as one run, against what
transformers 5.23 itself loads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commandline import DATA, contents, done, fingerprint, run
from safetensors.torch import load_file, save_file

PAIR = DATA / "fp8_dequant_deepseek_v3"
HUB = PAIR / "hub"
BOTH = ("--to", "hf-deepseek-v3@v5", "--to", "deepseek-v3@bf16")
FP8 = torch.float8_e4m3fn


def folder(path: Path, *shards: dict[str, torch.Tensor], config: Any = None) -> Path:
    """A checkpoint of these shards, with the configuration of the released one unless another is
    given.
    """
    path.mkdir()
    weights = {}
    for number, tensors in enumerate(shards, 1):
        name = (
            f"model-{number:05}-of-{len(shards):05}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        save_file(tensors, path / name)
        weights.update(dict.fromkeys(tensors, name))
    if len(shards) > 1:
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weights})
        )
    (path / "config.json").write_text(
        (HUB / "config.json").read_text() if config is None else json.dumps(config)
    )
    return path


def assert_equal(made: Path, wanted: Path) -> None:
    one, other = contents(made), contents(wanted)
    assert one.keys() == other.keys()
    for key in other:
        assert one[key] == other[key], key


@pytest.mark.parametrize(
    "order", [BOTH, BOTH[2:] + BOTH[:2]], ids=["stacked first", "decoded first"]
)
def test_the_two_edges_make_what_transformers_5_loads(
    order: tuple[str, ...], tmp_path: Path, device: str
) -> None:
    before = fingerprint(HUB)
    done("apply", HUB, "-o", tmp_path / "new", *order, "--allow", "lossy", "--device", device)
    assert_equal(tmp_path / "new", PAIR / "v5")
    config = json.loads((HUB / "config.json").read_text())
    del config["quantization_config"]
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == config
    assert (
        done("verify", tmp_path / "new", "--source", HUB, "--format", "json").json["equal"] is True
    )
    assert fingerprint(HUB) == before


def test_the_way_back_quantizes_as_deepseek_does_and_restores_the_configuration(
    tmp_path: Path, device: str
) -> None:
    done("apply", HUB, "-o", tmp_path / "new", *BOTH, "--allow", "lossy", "--device", device)
    undo = ["downgrade", tmp_path / "new", "-o", tmp_path / "back", "--allow", "lossy"]
    done(*undo, "--device", device)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (HUB / "config.json").read_text()
    )
    back, hub, plain = (
        load_file(p / "model.safetensors") for p in (tmp_path / "back", HUB, PAIR / "v5")
    )
    # the router bias stays as wide as transformers 5 has it
    wider = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {k: (t.dtype, t.shape) for k, t in back.items() if k != wider} == {
        k: (t.dtype, t.shape) for k, t in hub.items() if k != wider
    }
    number = plain["model.layers.0.self_attn.kv_b_proj.weight"].float().view(8, 4, 2, 4)
    amax = number.abs().amax((1, 3), keepdim=True).clamp(1e-4)
    scale = amax / 448
    assert torch.equal(
        back["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"], scale.view(8, 2)
    )
    codes = (number * (1.0 / scale)).to(FP8).view(32, 8)
    assert torch.equal(
        back["model.layers.0.self_attn.kv_b_proj.weight"].view(torch.uint8), codes.view(torch.uint8)
    )
    assert (
        done("verify", tmp_path / "back", "--source", tmp_path / "new", "--format", "json").json[
            "equal"
        ]
        is True
    )


def test_numbers_are_read_once_because_scales_lie_behind_their_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.running.workspace import Workspace

    done("apply", HUB, "-o", tmp_path / "plain", "--to", "deepseek-v3@bf16", "--allow", "lossy")
    read, way = [], Workspace.input
    monkeypatch.setattr(
        Workspace,
        "input",
        lambda self, number, tensor, *box: (
            read.append(tensor.spec) or way(self, number, tensor, *box)
        ),
    )
    done("downgrade", tmp_path / "plain", "-o", tmp_path / "back", "--allow", "lossy")
    assert sum(s.numel for s in read) == sum(
        t.numel() for t in load_file(HUB / "model.safetensors").values() if t.dtype == FP8
    )
    data = (tmp_path / "back" / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    starts = {
        dtype: [x["data_offsets"][0] for x in header.values() if x.get("dtype") == dtype]
        for dtype in ("F32", "F8_E4M3")
    }
    assert min(starts["F32"]) > max(starts["F8_E4M3"])
    assert not any(start % 4 for start in starts["F32"])


def test_only_the_experts_can_be_stacked_and_their_scales_go_with_them(tmp_path: Path) -> None:
    done("apply", HUB, "-o", tmp_path / "new", "--to", "hf-deepseek-v3@v5")
    new, hub = (
        load_file(tmp_path / "new" / "model.safetensors"),
        load_file(HUB / "model.safetensors"),
    )
    experts = [f"model.layers.1.mlp.experts.{e}" for e in range(4)]
    for role, name in (("weight", "gate_up_proj"), ("weight_scale_inv", "gate_up_proj_scale_inv")):
        rows = [
            torch.cat([hub[f"{x}.{w}_proj.{role}"].view(torch.uint8) for w in ("gate", "up")])
            for x in experts
        ]
        assert torch.equal(
            new[f"model.layers.1.mlp.experts.{name}"].view(torch.uint8), torch.stack(rows)
        )
    assert (tmp_path / "new" / "config.json").read_bytes() == (HUB / "config.json").read_bytes()
    done(
        "apply",
        tmp_path / "new",
        "-o",
        tmp_path / "plain",
        "--to",
        "deepseek-v3@bf16",
        "--allow",
        "lossy",
    )
    assert_equal(tmp_path / "plain", PAIR / "v5")


def test_scales_may_stand_in_another_file_than_their_weights(tmp_path: Path) -> None:
    hub = load_file(HUB / "model.safetensors")
    scales = {key: t for key, t in hub.items() if key.endswith("_scale_inv")}
    split = folder(tmp_path / "split", {k: t for k, t in hub.items() if k not in scales}, scales)
    done("apply", split, "-o", tmp_path / "new", *BOTH, "--allow", "lossy")
    assert_equal(tmp_path / "new", PAIR / "v5")


def test_a_missing_scale_is_refused_by_its_name(tmp_path: Path) -> None:
    hub = load_file(HUB / "model.safetensors")
    lost = "model.layers.1.self_attn.q_b_proj.weight_scale_inv"
    del hub[lost]
    damaged = folder(tmp_path / "damaged", hub)
    for goal in (BOTH, BOTH[2:]):
        refused = run(
            "apply", damaged, "-o", tmp_path / "new", *goal, "--allow", "lossy", "--format", "json"
        )
        assert (refused.exit, refused.codes) == (3, ["M207"])
        assert f"missing: {lost}" in refused.json["diagnostics"][0]["message"]
    assert not (tmp_path / "new").exists()


def test_values_change_only_where_that_is_allowed(tmp_path: Path) -> None:
    refused = run("apply", HUB, "-o", tmp_path / "new", *BOTH, "--format", "json")
    assert (refused.exit, set(refused.codes)) == (3, {"M401"})


def test_the_block_of_the_configuration_outweighs_no_other(tmp_path: Path) -> None:
    refused = run(
        "apply",
        HUB,
        "-o",
        tmp_path / "new",
        *BOTH,
        "--set",
        "block=128,128",
        "--allow",
        "lossy",
        "--format",
        "json",
    )
    assert (refused.exit, refused.codes) == (2, ["M510"])


def test_scales_of_another_block_size_are_refused(tmp_path: Path) -> None:
    hub = load_file(HUB / "model.safetensors")
    config = json.loads((HUB / "config.json").read_text())
    del config["quantization_config"]["weight_block_size"]
    odd = folder(tmp_path / "odd", hub, config=config)
    refused = run(
        "apply",
        odd,
        "-o",
        tmp_path / "new",
        "--to",
        "deepseek-v3@bf16",
        "--allow",
        "lossy",
        "--format",
        "json",
    )
    assert (refused.exit, set(refused.codes)) == (3, {"M310"})
    assert "`block: [4, 4]` would fit" in refused.json["diagnostics"][0]["help"]
    # who knows better may say so
    done("apply", odd, "-o", tmp_path / "new", *BOTH, "--set", "block=4,4", "--allow", "lossy")
    assert_equal(tmp_path / "new", PAIR / "v5")


def test_a_number_that_is_not_finite_is_refused_on_the_way_back(tmp_path: Path) -> None:
    done("apply", HUB, "-o", tmp_path / "new", *BOTH, "--allow", "lossy")
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "new", broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.experts.gate_up_proj"][2, 17, 5] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    refused = run(
        "downgrade", broken, "-o", tmp_path / "back", "--allow", "lossy", "--format", "json"
    )
    assert (refused.exit, refused.codes) == (3, ["M406"])
    text = json.dumps(refused.json["diagnostics"])
    assert "at [2, 17, 5] is nan" in text
    assert "experts.gate_up_proj" in text
    assert not (tmp_path / "back").exists()


def test_rows_that_are_no_multiple_of_the_block_decode_by_their_own_scales(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    key = "model.layers.0.self_attn.kv_a_proj_with_mqa"
    codes = torch.randint(0, 256, (576, 200), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale = torch.rand(5, 2, generator=generator) * 1e-3
    source = folder(
        tmp_path / "source",
        {f"{key}.weight": codes.view(FP8), f"{key}.weight_scale_inv": scale},
        config={
            "model_type": "deepseek_v3",
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
    )
    done("apply", source, "-o", tmp_path / "new", "--to", "deepseek-v3@bf16", "--allow", "lossy")
    made = load_file(tmp_path / "new" / "model.safetensors")[f"{key}.weight"]
    by_element = scale.numpy()[np.arange(576)[:, None] // 128, np.arange(200)[None] // 128]
    wanted = torch.from_numpy(codes.view(FP8).float().numpy() * by_element).to(torch.bfloat16)
    assert torch.equal(made.view(torch.int16), wanted.view(torch.int16))


def test_each_rule_tells_what_it_did_to_the_numbers(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done("apply", HUB, "-o", tmp_path / "new", *BOTH, "--allow", "lossy", "--report", report)
    rules = {
        (r["op"], r["rule"].partition(" (")[0]): r for r in json.loads(report.read_text())["rules"]
    }
    linears = rules["dequantize", "linears"]
    assert linears["tensors"] == 16
    assert 0 < linears["max_relative_error"] < 2**-8
    assert 50 < linears["sqnr_db"] < 60
    assert rules["cast", "router bias"]["exact"] is True


def test_on_the_way_back_the_error_is_that_of_weights_and_not_of_scales(tmp_path: Path) -> None:
    done("apply", HUB, "-o", tmp_path / "new", "--to", "deepseek-v3@bf16", "--allow", "lossy")
    report = tmp_path / "report.json"
    done(
        "downgrade",
        tmp_path / "new",
        "-o",
        tmp_path / "back",
        "--allow",
        "lossy",
        "--report",
        report,
    )
    (linears,) = json.loads(report.read_text())["rules"]
    assert (linears["op"], linears["tensors"], linears["elements_measured"]) == (
        "quantize",
        28,
        linears["elements"],
    )
    assert 30 < linears["sqnr_db"] < 35
    # half a step below the largest code, and the rounding of the scale
    assert linears["max_relative_error"] < 1.00001 / 28


def layouts_of(path: Path) -> set[str]:
    """The layouts of our two lineages that `inspect` finds."""
    found = done("inspect", path, "--format", "json").json["layouts"]
    return {
        f"{x['lineage']}@{x['layout']}"
        for x in found
        if x["lineage"] in ("deepseek-v3", "hf-deepseek-v3")
    }


def test_each_state_is_told_from_the_others(tmp_path: Path) -> None:
    done("apply", HUB, "-o", tmp_path / "stacked", "--to", "hf-deepseek-v3@v5")
    done("apply", HUB, "-o", tmp_path / "plain", "--to", "deepseek-v3@bf16", "--allow", "lossy")
    for path in (tmp_path / "stacked", tmp_path / "plain"):
        (path / "migrate.history.json").unlink()
    assert layouts_of(HUB) == {"deepseek-v3@fp8", "hf-deepseek-v3@v4"}
    assert layouts_of(tmp_path / "stacked") == {"deepseek-v3@fp8", "hf-deepseek-v3@v5"}
    assert layouts_of(tmp_path / "plain") == {"deepseek-v3@bf16", "hf-deepseek-v3@v4"}


def test_a_model_that_was_trained_in_bfloat16_is_encoded_with_its_configuration(
    tmp_path: Path,
) -> None:
    done("apply", HUB, "-o", tmp_path / "plain", "--to", "deepseek-v3@bf16", "--allow", "lossy")
    (tmp_path / "plain" / "migrate.history.json").unlink()
    said = json.loads((HUB / "config.json").read_text())["quantization_config"]
    done(
        "apply", tmp_path / "plain", "-o", tmp_path / "coded", "--to", "deepseek-v3@fp8",
        "--set", f"block={json.dumps(said['weight_block_size'])}", "--allow", "lossy",
    )  # fmt: skip
    written = json.loads((tmp_path / "coded" / "config.json").read_text())["quantization_config"]
    plain = written.pop("modules_to_not_convert")
    assert written == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": said["weight_block_size"],
    }
    coded = load_file(tmp_path / "coded" / "model.safetensors")
    assert set(plain) == {
        key.removesuffix(".weight")
        for key, tensor in coded.items()
        if tensor.ndim > 1 and tensor.dtype != FP8 and key.endswith(".weight")
    }
    assert "lm_head" in plain
    again = done("plan", tmp_path / "coded", "--to", "deepseek-v3@bf16", "--allow", "lossy")
    assert "M315" not in again.err + again.out
    assert "M519" not in again.err + again.out


def test_latest_never_changes_numbers(tmp_path: Path) -> None:
    answer = done("apply", HUB, "-o", tmp_path / "new", "--to", "latest")
    steps = json.loads((tmp_path / "new" / "migrate.history.json").read_text())["applied"]
    assert [step["lineage"] for step in steps] == ["hf-deepseek-v3"], answer.out


def test_deepseek_v3_2_is_not_taken_for_v3(tmp_path: Path) -> None:
    tensors = load_file(HUB / "model.safetensors")
    tensors["model.layers.0.self_attn.indexer.wk.weight"] = torch.zeros(2, 2)
    assert layouts_of(folder(tmp_path / "newer", tensors)) == set()


def test_case_c14_goes_to_bfloat16_and_back_by_the_published_arithmetic(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(14)
    config = {
        "a": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 8]},
        "z": None,
    }
    names = [
        f"model.layers.0.{m}.{w}_proj"
        for m, w in (("self_attn", "o"), ("mlp", "gate"), ("mlp", "down"))
    ]
    codes = {name: torch.randn(40, 20, generator=generator).to(FP8) for name in names}
    scales = {name: torch.rand(3, 3, generator=generator) + 0.5 for name in names}
    plain = {
        "model.norm.weight": torch.ones(20),
        "model.layers.0.self_attn.q_a_proj.weight": torch.randn(4, 4, dtype=torch.bfloat16),
    }
    weights = {f"{name}.weight": code for name, code in codes.items()}
    # the scales stand in the other shard; the last blocks are ragged on both sides; a projection
    # that was left unquantized stays
    source = folder(
        tmp_path / "old",
        {**weights, **plain},
        {f"{n}.weight_scale_inv": s for n, s in scales.items()},
        config=config,
    )
    rule = ("--rules", DATA.parent / "cases" / "c14-fp8.yaml", "--allow", "lossy")
    done("apply", source, "-o", tmp_path / "new", *rule)
    made = load_all(tmp_path / "new")
    assert made.keys() == weights.keys() | plain.keys()
    for name in names:
        by_element = scales[name].repeat_interleave(16, 0)[:40].repeat_interleave(8, 1)[:, :20]
        wanted = (codes[name].float() * by_element).bfloat16()
        assert torch.equal(made[f"{name}.weight"].view(torch.int16), wanted.view(torch.int16)), name
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == {"a": 1, "z": None}
    assert (
        done("verify", tmp_path / "new", "--source", source, *rule, "--format", "json").json[
            "equal"
        ]
        is True
    )

    del made["model.layers.0.self_attn.q_a_proj.weight"]
    short = folder(tmp_path / "short", made, config={"a": 1, "z": None})
    done("downgrade", short, "-o", tmp_path / "back", *rule, "--set", "block=16,8")
    back = load_all(tmp_path / "back")
    for name in names:
        number = torch.nn.functional.pad(made[f"{name}.weight"].float(), (0, 4, 0, 8)).view(
            3, 16, 3, 8
        )
        scale = number.abs().amax((1, 3), keepdim=True).clamp(1e-4) / 448
        assert torch.equal(back[f"{name}.weight_scale_inv"], scale.view(3, 3)), name
        wanted = (number * (1.0 / scale)).to(FP8).view(48, 24)[:40, :20]
        assert torch.equal(
            back[f"{name}.weight"].view(torch.uint8), wanted.reshape(40, 20).view(torch.uint8)
        ), name
    assert torch.equal(back["model.norm.weight"], plain["model.norm.weight"])


def load_all(path: Path) -> dict[str, torch.Tensor]:
    return {
        key: tensor
        for file in sorted(path.glob("*.safetensors"))
        for key, tensor in load_file(file).items()
    }


# ---------------------------------------------------------------------- back to what it was

V5 = ("--to", "hf-deepseek-v3@v5")
BF16 = ("--to", "deepseek-v3@bf16")
ORDERS = pytest.mark.parametrize(
    "order", [BF16, V5 + BF16, BF16 + V5], ids=["decoded", "stacked first", "decoded first"]
)


def stored_with(path: Path, change: Any, **quantization: Any) -> Path:
    """The released checkpoint with other scales: `change` makes the tensors of its own."""
    config = json.loads((HUB / "config.json").read_text())
    config["quantization_config"].update(quantization)
    return folder(path, change(load_file(HUB / "model.safetensors")), config=config)


def scaled(dtype: torch.dtype, power: bool = True) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scales = {key: t for key, t in tensors.items() if key.endswith("_scale_inv")}
        return tensors | {
            key: (torch.exp2(t.log2().round()) if power else t).to(dtype)
            for key, t in scales.items()
        }

    return change


@ORDERS
@pytest.mark.parametrize(
    ("dtype", "power", "said"),
    [
        (torch.float32, False, {}),
        (torch.float32, False, {"scale_fmt": "float"}),
        (torch.float32, True, {"scale_fmt": "ue8m0"}),
        (torch.bfloat16, False, {}),
        (torch.float8_e8m0fnu, True, {"scale_fmt": "ue8m0"}),
        (torch.float8_e8m0fnu, True, {}),
    ],
    ids=["f32", "f32 as transformers has it", "f32 as v3.1", "bf16", "e8m0 as v4", "e8m0"],
)
def test_scales_come_back_as_they_were_stored(
    order: tuple[str, ...], dtype: torch.dtype, power: bool, said: Any, tmp_path: Path
) -> None:
    source = stored_with(tmp_path / "source", scaled(dtype, power), **said)
    done("apply", source, "-o", tmp_path / "new", *order, "--allow", "lossy")
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back", "--allow", "lossy")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    back, before = load_all(tmp_path / "back"), load_all(source)
    # the router bias stays as wide as transformers 5 has it
    assert {k: t.dtype for k, t in back.items() if "bias" not in k} == {
        k: t.dtype for k, t in before.items() if "bias" not in k
    }
    scales = torch.cat([t.float().flatten() for k, t in back.items() if k.endswith("_scale_inv")])
    assert scales.dtype == torch.float32
    assert bool((scales.frexp().mantissa == 0.5).all()) is power
    assert (
        done("verify", tmp_path / "back", "--source", tmp_path / "new", "--format", "json").json[
            "equal"
        ]
        is True
    )


def test_scales_of_two_dtypes_are_refused_by_name_and_it_can_be_said_how_they_return(
    tmp_path: Path,
) -> None:
    one, other = (f"model.layers.{n}.self_attn.o_proj.weight_scale_inv" for n in (0, 1))
    mixed = stored_with(
        tmp_path / "mixed", lambda tensors: tensors | {other: tensors[other].bfloat16()}
    )
    refused = run("plan", mixed, *BF16, "--allow", "lossy", "--format", "json")
    assert (refused.exit, refused.codes) == (2, ["M510"])
    notes = refused.json["diagnostics"][0]["notes"]
    assert [note.rpartition(" says ")[2] for note in notes] == ["'float32'", "'bfloat16'"]
    assert notes[1] == f"the dtype of {other} says 'bfloat16'"
    assert one not in notes[1]
    assert refused.json["diagnostics"][0]["help"].startswith(
        "--set scale=float32|bfloat16 says which one counts"
    )
    for said, was in (("float32", "bfloat16"), ("bfloat16", "float32")):
        question = (*BF16, "--allow", "lossy", "--set", f"scale={said}")
        planned = done("plan", mixed, *question, "--format", "json").json["downgrade"]
        assert planned["exact"] is False
        assert any(
            f"{was} [4, 4] returns as {said} [4, 4]" in reason for reason in planned["because"]
        ), planned["because"]
        done("apply", mixed, "-o", tmp_path / said, *question)
        done("verify", tmp_path / said, "--source", mixed)
    done("diff", tmp_path / "float32", tmp_path / "bfloat16")
    done("downgrade", tmp_path / "float32", "-o", tmp_path / "back", "--allow", "lossy")
    assert {
        t.dtype for k, t in load_all(tmp_path / "back").items() if k.endswith("_scale_inv")
    } == {torch.float32}
    assert run("plan", mixed, *BF16, "--set", "scale=float8_e8m0fnu", "--format", "json").codes == [
        "M510"
    ]


def test_without_a_stamp_it_can_be_said_how_scales_are_stored(tmp_path: Path) -> None:
    done("apply", HUB, "-o", tmp_path / "new", *BF16, "--allow", "lossy")
    (tmp_path / "new" / "migrate.history.json").unlink()
    down = (
        "downgrade",
        tmp_path / "new",
        "--to",
        "deepseek-v3@fp8",
        "--allow",
        "lossy",
        "--set",
        "block=4,4",
    )
    for options, dtype, power in (
        ((), torch.float32, False),
        (("--set", "scale_fmt=ue8m0"), torch.float32, True),
        (("--set", "scale=float8_e8m0fnu"), torch.float8_e8m0fnu, True),
    ):
        out = tmp_path / f"back{len(list(tmp_path.iterdir()))}"
        done(*down, "-o", out, *options)
        scale = load_all(out)["model.layers.0.self_attn.o_proj.weight_scale_inv"]
        assert scale.dtype == dtype
        assert bool((scale.float().frexp().mantissa == 0.5).all()) is power


@ORDERS
def test_what_was_not_converted_stays_plain_on_the_way_back(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    plain = ("o_proj", "shared_experts")

    def without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        left = {key: t for key, t in tensors.items() if any(name in key for name in plain)}
        kept = {key: t.float().bfloat16() for key, t in left.items() if key.endswith(".weight")}
        return {key: t for key, t in tensors.items() if key not in left} | kept

    source = stored_with(tmp_path / "source", without, modules_to_not_convert=list(plain))
    done("apply", source, "-o", tmp_path / "new", *order, "--allow", "lossy")
    planned = done(
        "plan", "--downgrade", tmp_path / "new", "--allow", "lossy", "--format", "json"
    ).json
    assert not any("keep" in note for note in planned["notes"])
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back", "--allow", "lossy")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    back, before = load_all(tmp_path / "back"), load_all(source)
    assert back.keys() == before.keys()
    for key, tensor in before.items():
        if any(name in key for name in plain):
            assert torch.equal(back[key].view(torch.int16), tensor.view(torch.int16)), key
            assert back[key].dtype == tensor.dtype
    assert (
        done("verify", tmp_path / "back", "--source", tmp_path / "new", "--format", "json").json[
            "equal"
        ]
        is True
    )


def test_what_was_not_converted_and_was_joined_since_is_named(tmp_path: Path) -> None:
    def without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        left = {key: t for key, t in tensors.items() if ".experts." in key}
        kept = {key: t.float().bfloat16() for key, t in left.items() if key.endswith(".weight")}
        return {key: t for key, t in tensors.items() if key not in left} | kept

    source = stored_with(tmp_path / "source", without, modules_to_not_convert=["experts"])
    done("apply", source, "-o", tmp_path / "plain", *BF16, "--allow", "lossy")
    done("apply", tmp_path / "plain", "-o", tmp_path / "new", *V5)
    # the names that the stamp remembers are those before the experts were stacked
    refused = run(
        "plan",
        "--downgrade",
        tmp_path / "new",
        "--to",
        "deepseek-v3@fp8",
        "--allow",
        "lossy",
        "--format",
        "json",
    )
    assert (refused.exit, refused.codes) == (3, ["M405"])
    assert (
        refused.json["diagnostics"][0]["help"]
        == "downgrade the later edge first: --to hf-deepseek-v3@v4"
    )
    done(
        "downgrade",
        tmp_path / "new",
        "-o",
        tmp_path / "back",
        "--allow",
        "lossy",
        "--to",
        "hf-deepseek-v3@v4",
    )
    done(
        "downgrade",
        tmp_path / "back",
        "-o",
        tmp_path / "fp8",
        "--allow",
        "lossy",
        "--to",
        "deepseek-v3@fp8",
    )
    assert {k: t.dtype for k, t in load_all(tmp_path / "fp8").items() if ".experts." in k} == {
        k: t.dtype for k, t in load_all(source).items() if ".experts." in k
    }
