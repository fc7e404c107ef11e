"""`bnb-4bit` beside bitsandbytes itself: what it encodes, what it and transformers load, and what
becomes of its live modules.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commandline import done
from genuine import checkpoint

import migrate
from migrate.codecs import get
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec
from migrate.testing import codeckit

pytestmark = [pytest.mark.libraries, pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]

FOUR: Any = get("bnb-4bit")
ASKED = ("--to", "bnb@bf16", "--allow", "lossy")
BITS = {"float32": "<i4", "bfloat16": "<i2", "float16": "<i2"}


@pytest.fixture(scope="module")
def bnb() -> Any:
    import bitsandbytes

    return bitsandbytes


def random_tensor(shape: tuple[int, ...], dtype: str, kind: str) -> Any:
    import torch

    made = torch.randn(shape, generator=torch.Generator().manual_seed(len(kind) + sum(shape)))
    flat = made.view(-1)
    if kind == "wide":
        flat.mul_(torch.exp2(torch.arange(flat.numel()) % 80 - 40.0))
    elif kind == "zeros":
        flat[: 3 * flat.numel() // 4] = 0
        flat[::7] = -0.0
    elif kind == "tiny":
        flat.mul_(1e-5)
        flat[::100] = 1
    elif kind == "subnormal":
        flat.mul_(1e-39)
    return made.to(getattr(torch, dtype))


SHAPES = [(64, 64), (7, 50), (3, 33), (1, 1), (1, 5), (5, 13), (130, 200), (2, 4099), (0, 8)]


@pytest.mark.parametrize("kind", ["normal", "wide", "zeros", "tiny", "subnormal"])
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("form", ["nf4", "fp4"])
def test_random_numbers_are_encoded_bit_for_bit(bnb: Any, form: str, dtype: str, kind: str) -> None:
    import torch

    compared = 0
    for shape in SHAPES:
        for blocksize in (32, 64, 256, 4096):
            given = random_tensor(shape, dtype, kind)
            codes, state = bnb.functional.quantize_4bit(given, blocksize=blocksize, quant_type=form)
            parts = {f"{k}": v for k, v in state.as_dict(packed=True).items()}
            args = FOUR.Args(form=form, blocksize=blocksize, non_finite="keep")
            raw = given.view(torch.int32 if dtype == "float32" else torch.int16).numpy()
            made = dict(
                zip(
                    FOUR.parts,
                    codeckit.encoded(FOUR, args, raw.view(f"<u{raw.itemsize}"), Spec(dtype, shape)),
                    strict=True,
                )
            )
            where = (shape, blocksize)
            wanted = {
                "weight": codes,
                "absmax": parts["absmax"],
                "map": parts["quant_map"],
                "state": parts[f"quant_state.bitsandbytes__{form}"],
            }
            for role, one in wanted.items():
                assert made[role].shape == tuple(one.shape), (where, role)
                assert made[role].tobytes() == one.numpy().tobytes(), (where, role)
            compared += 1
    assert compared == 4 * len(SHAPES)


def test_many_random_numbers_are_encoded_bit_for_bit(bnb: Any) -> None:
    """So many that quotients and products with a reciprocal differ for some."""
    import torch

    given = torch.randn(2048, 2049, generator=torch.Generator().manual_seed(0))
    blocks = given.view(-1)[: given.numel() // 64 * 64].view(-1, 64)
    largest = blocks.abs().amax(1, True)
    assert (blocks / largest != blocks * (1 / largest)).any()
    raw = given.numpy().view("<u4")
    for form in ("nf4", "fp4"):
        codes, state = bnb.functional.quantize_4bit(given, quant_type=form)
        made = codeckit.encoded(FOUR, FOUR.Args(form=form), raw, Spec("float32", (2048, 2049)))
        assert made[0] is not None
        assert made[0].tobytes() == codes.numpy().tobytes()
        assert made[1] is not None
        assert made[1].tobytes() == state.absmax.numpy().tobytes()


def test_the_offset_of_nested_scales_depends_on_the_number_of_threads(bnb: Any) -> None:
    """Why nested scales are not encoded: with one more thread the bits are others."""
    import torch

    scales = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.1
    threads, found = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3, 4, 5, 7, 8):
            torch.set_num_threads(count)
            found.add(scales.mean().item())
    finally:
        torch.set_num_threads(threads)
    assert len(found) > 1


def logits(folder: Path, dequantize: bool = False) -> Any:
    """Of a few tokens; nothing is missing, left over or of another shape."""
    transformers = pytest.importorskip("transformers")
    import torch

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map="cpu", output_loading_info=True
    )
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    model = model.dequantize() if dequantize else model
    with torch.no_grad():
        return model.eval()(torch.arange(8).reshape(2, 4)).logits


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-nf4-plain", "bnb-fp4"])
def test_the_logits_are_those_of_the_dequantized_model(bnb: Any, name: str, tmp_path: Path) -> None:
    import torch

    folder = checkpoint(name).folder
    done("apply", folder, "-o", tmp_path / "out", *ASKED)
    made = logits(tmp_path / "out")
    assert made.abs().max() > 0
    assert torch.equal(made, logits(folder, dequantize=True))


@pytest.mark.parametrize("form", ["nf4", "fp4"])
def test_what_is_encoded_transformers_loads_as_its_own(bnb: Any, form: str, tmp_path: Path) -> None:
    """A folder without a stamp: the configuration that is written, and the parts."""
    import torch

    name = {"nf4": "bnb-nf4-plain", "fp4": "bnb-fp4"}[form]
    plain, made = tmp_path / "plain", tmp_path / "made"
    done("apply", checkpoint(name).folder, "-o", plain, *ASKED)
    (plain / "migrate.history.json").unlink()
    done(
        "apply", plain, "-o", made, "--from", "bnb@bf16", "--to", "bnb@4bit", "--allow", "lossy",
        "--set", f"form={form}",
    )  # fmt: skip
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_quant_type"] == form
    found = logits(made, dequantize=True)
    assert torch.equal(found, logits(plain))


RENAMED = """
id: a/b/c
title: t
lineage: a
edge: [x, y]
keep: ["{k...}"]
rules: [{name: r, from: "old.{a...}", to: "proj.{a}"}]
"""
KINDS = ("4bit", "8bit")


class Model:
    """A layer of 64 by 64 between names, as `kind` of bitsandbytes or plain, quantized or not."""

    def __init__(self, bnb: Any) -> None:
        import torch

        self.kinds: dict[str, Any] = {
            "plain": partial(torch.nn.Linear, dtype=torch.bfloat16),
            "4bit": partial(bnb.nn.Linear4bit, quant_type="nf4", compress_statistics=False),
            "8bit": partial(bnb.nn.Linear8bitLt, has_fp16_weights=False),
        }
        torch.manual_seed(0)
        self.plain = self.make("plain")

    def make(self, kind: str) -> Any:
        import torch

        return torch.nn.ModuleDict({"proj": self.kinds[kind](64, 64, bias=False)})

    def quantized(self, kind: str) -> Any:
        made = self.make(kind)
        made.load_state_dict(self.plain.state_dict())
        return made.to("cpu")


@pytest.fixture
def models(bnb: Any) -> Model:
    return Model(bnb)


@pytest.fixture
def renamed(tmp_path: Path) -> Path:
    (tmp_path / "rule.yaml").write_text(RENAMED)
    return tmp_path / "rule.yaml"


def old(state: Any) -> dict[str, Any]:
    return {key.replace("proj.", "old."): value for key, value in state.items()}


def numbers_of(bnb: Any, layer: Any) -> Any:
    """The numbers of a quantized layer, by its own library."""
    import torch

    if layer.weight.dtype == torch.uint8:
        made = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    else:
        made = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
    return made.to(torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_a_quantized_module_fits_a_plain_one(
    bnb: Any, models: Model, kind: str, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    given, plain = models.quantized(kind), models.make("plain")
    migrate.attach(plain, to="bnb@bf16", allow={"lossy"})
    assert plain.load_state_dict(given.state_dict()) == ([], [])
    assert torch.equal(plain.proj.weight, numbers_of(bnb, given.proj))
    # from a file, and of the live module
    save_file(given.state_dict(), tmp_path / "m.safetensors")
    again = models.make("plain")
    migrate.load(again, tmp_path / "m.safetensors", to="bnb@bf16", allow={"lossy"})
    assert torch.equal(again.proj.weight, plain.proj.weight)
    migrate.save(given, tmp_path / "out", to="bnb@bf16", allow={"lossy"})
    third = models.make("plain")
    migrate.load(third, tmp_path / "out", rules=[])
    assert torch.equal(third.proj.weight, plain.proj.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_is_not_quantized_yet_takes_plain_weights(
    models: Model, kind: str, renamed: Path, tmp_path: Path
) -> None:
    """And bitsandbytes quantizes them afterwards."""
    import torch
    from safetensors.torch import save_file

    one, other = models.make(kind), models.make(kind)
    migrate.attach(one, rules=renamed)
    assert one.load_state_dict(old(models.plain.state_dict())) == ([], [])
    save_file(old(models.plain.state_dict()), tmp_path / "m.safetensors")
    migrate.load(other, tmp_path / "m.safetensors", rules=renamed)
    wanted = models.quantized(kind).state_dict()
    for made in (one, other):
        found = made.to("cpu").state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_module_is_refused_by_name(
    models: Model, kind: str, own: bool, strict: bool, renamed: Path, tmp_path: Path
) -> None:
    """Also the codes that it holds itself: the scales would be those that are there."""
    import torch
    from safetensors.torch import save_file

    target = models.quantized(kind)
    given = models.quantized(kind) if own else models.plain
    save_file(old(given.state_dict()), tmp_path / "m.safetensors")
    before = target.proj.weight.clone()
    with pytest.raises(MigrateError) as caught:
        migrate.load(
            target, tmp_path / "m.safetensors", rules=renamed, strict=strict, allow={"lossy"}
        )
    found = [d for d in caught.value.diagnostics if "bitsandbytes" in d.message]
    assert [d.code for d in found] == ["M960"]
    assert "keeps the scales elsewhere: proj.weight" in found[0].message
    assert torch.equal(target.proj.weight, before)


@pytest.mark.parametrize("own", [True, False])
def test_a_hook_refuses_a_layer_of_four_bits_that_is_quantized(
    models: Model, own: bool, renamed: Path
) -> None:
    import torch

    target = models.quantized("4bit")
    before = target.proj.weight.clone()
    given = models.quantized("4bit") if own else models.plain
    migrate.attach(target, rules=renamed)
    with pytest.raises(RuntimeError, match="keeps the scales elsewhere") as caught:
        target.load_state_dict(old(given.state_dict()), strict=False)
    assert "While copying" not in str(caught.value)
    assert torch.equal(target.proj.weight, before)


def test_a_layer_of_eight_bits_takes_its_codes_and_scales_itself(
    bnb: Any, models: Model, renamed: Path
) -> None:
    """`Linear8bitLt` loads `SCB` and `weight_format`, for which it has no slots."""
    import torch

    target = models.quantized("8bit")
    given = models.quantized("8bit")
    with torch.no_grad():
        given.proj.weight.SCB.mul_(2)
    migrate.attach(target, rules=renamed)
    assert target.load_state_dict(old(given.state_dict())) == ([], [])
    assert torch.equal(target.proj.weight, given.proj.weight)
    assert torch.equal(numbers_of(bnb, target.proj), numbers_of(bnb, given.proj))
