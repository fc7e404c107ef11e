"""`recode` in rule files: parts for parts, there and back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from header_files import NAMES

import migrate
from migrate import codecs, ops
from migrate.core.declaration import NumberFormat
from migrate.core.errors import MigrateError, page
from migrate.core.spec import spec
from migrate.elements.raw import carrier
from migrate.ops.base import Loss, OneWay, OpCall, OpError
from migrate.rules.arguments import as_written, resolve

RECODE: Any = ops.get("recode")
FP8: Any = codecs.get("fp8-block").Args
CODES = "float8_e4m3fn"
BACK = {safetensors: name for name, (safetensors, _) in NAMES.items()}

RULE = """
id: x/b/powers
title: Powers of two in a byte
lineage: x
edge: [a, b]
params: {KEPT: {type: str, default: ue8m0}}
rules:
  - name: blocks
    from: {weight: "{m...}.weight", scale: "{m...}.weight_scale_inv"}
    to: {weight: "{m...}.weight", scale: "{m...}.scale"}
    via:
      - recode: STEP
"""
STEP = (
    "{from: {codec: fp8-block, block: [4, 8], scale: f32}, "
    "to: {codec: fp8-block, block: [4, 8], scale: $KEPT}}"
)


def number_format(codec: str = "fp8-block", **own: Any) -> NumberFormat:
    return NumberFormat(codec, FP8(**own))


def arguments(one: NumberFormat, other: NumberFormat, exact_in: str | None = None) -> Any:
    return RECODE.Args(from_=one, to=other, exact_in=exact_in)


def refused(call: Any) -> OpError:
    with pytest.raises(OpError) as caught:
        call()
    page(caught.value.code)
    return caught.value


def stop(call: Any) -> str:
    with pytest.raises(MigrateError) as caught:
        call()
    return str(caught.value)


def test_a_scale_under_a_name_that_nothing_looks_for_is_refused_with_those_that_are_known(
    tmp_path: Path,
) -> None:
    scales = np.full((2, 1), 0x3F800000, "<u4")
    source = write(
        tmp_path / "in",
        {"l.weight": (CODES, np.zeros((8, 8), "u1")), "l.weight_scale_inv": ("float32", scales)},
    )
    text = RULE.replace('"{m...}.scale"', '"{m...}.factor"').replace("STEP", STEP)
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(MigrateError) as caught:
        migrate.plan(source, rules=[tmp_path / "r.yaml"])
    (found,) = caught.value.diagnostics
    assert found.code == "M408"
    assert "makes l.factor of its scale l.weight_scale_inv" in found.message
    assert found.help is not None
    assert "{w}.weight_scale_inv" in found.help
    assert "dequantize" not in found.help


def write(folder: Path, tensors: dict[str, tuple[str, Any]]) -> Path:
    """A folder with one safetensors file of these, key -> (dtype, raw elements)."""
    folder.mkdir()
    header: dict[str, Any] = {}
    end = 0
    for key, (dtype, array) in tensors.items():
        size = array.nbytes
        places = [end, end + size]
        header[key] = {"dtype": NAMES[dtype][0], "shape": [*array.shape], "data_offsets": places}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    raw = b"".join(array.tobytes() for _, array in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw)
    return folder


def read(folder: Path) -> dict[str, tuple[str, Any]]:
    """key -> (dtype, raw elements) of what `write` or a run wrote."""
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    out = {}
    for key, said in json.loads(data[8 : 8 + size]).items():
        if key != "__metadata__":
            low, high = said["data_offsets"]
            dtype = BACK[said["dtype"]]
            raw = np.frombuffer(data[8 + size + low : 8 + size + high], carrier(dtype))
            out[key] = dtype, raw.reshape(said["shape"])
    return out


def checkpoint(folder: Path, layers: int = 2) -> Path:
    dice = np.random.default_rng(1)
    tensors: dict[str, tuple[str, Any]] = {}
    for layer in range(layers):
        codes = dice.integers(0, 127, (10, 20), "u1")
        powers = (dice.integers(118, 130, (3, 3)) << 23).astype("<u4")
        tensors[f"l.{layer}.weight"] = CODES, codes
        tensors[f"l.{layer}.weight_scale_inv"] = "float32", powers
    return write(folder, tensors)


def rule(folder: Path, step: str = STEP) -> Path:
    path = folder / "rule.yaml"
    path.write_text(RULE.replace("STEP", step))
    return path


def test_scales_become_bytes_and_come_back(tmp_path: Path) -> None:
    source, rules = checkpoint(tmp_path / "old"), rule(tmp_path)
    report = migrate.apply(source, tmp_path / "new", rules=rules)
    assert report.to_json()["downgrade"]["exact"] is True
    made, was = read(tmp_path / "new"), read(source)
    for layer in range(2):
        dtype, scale = made[f"l.{layer}.scale"]
        assert dtype == "float8_e8m0fnu"
        assert (scale == was[f"l.{layer}.weight_scale_inv"][1] >> 23).all()
        dtype, codes = made[f"l.{layer}.weight"]
        assert dtype == CODES
        assert (codes == was[f"l.{layer}.weight"][1]).all()
    assert migrate.verify(tmp_path / "new", source=source, rules=rules).to_json()["equal"] is True
    migrate.downgrade(tmp_path / "new", tmp_path / "back", rules=rules)
    back = read(tmp_path / "back")
    assert back.keys() == was.keys()
    for key, (dtype, raw) in was.items():
        assert back[key][0] == dtype
        assert back[key][1].tobytes() == raw.tobytes()


def test_codes_are_views_in_the_plan_and_only_scales_are_computed(tmp_path: Path) -> None:
    source, rules = checkpoint(tmp_path / "old"), rule(tmp_path)
    changes = {
        row["to"].rpartition(".")[2]: row["change"]
        for row in json.loads(migrate.plan(source, rules=rules).to_json())["rows"]
    }
    assert changes == {"weight": "rearranged", "scale": "computed"}
    # a rename, with the dtype that the scale has
    only = STEP.replace("scale: $KEPT", "scale: f32")
    rows = json.loads(migrate.plan(source, rules=rule(tmp_path, only)).to_json())["rows"]
    assert {row["change"] for row in rows} == {"rearranged"}


def test_what_cannot_be_a_power_is_refused_by_tensor_index_and_value(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "old")
    tensors = {key: (dtype, raw.copy()) for key, (dtype, raw) in read(source).items()}
    tensors["l.1.weight_scale_inv"][1].view("<f4")[2, 1] = 0.3
    odd = write(tmp_path / "odd", tensors)
    said = stop(lambda: migrate.apply(odd, tmp_path / "new", rules=rule(tmp_path)))
    assert "M406" in said
    assert "l.1.weight" in said
    assert "the scale at [2, 1] is 0.300000012, and float8_e8m0fnu holds powers of two" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("step", "code", "words"),
    [
        ("{from: {codec: fp8-block}}", "M101", "`to` is missing"),
        ("{from: {codec: fp8-block}, to: {block: [4, 8]}}", "M101", "`codec` is missing"),
        ("{from: {codec: fp8-block}, to: fp8-block}", "M106", "a mapping is expected"),
        (
            "{from: {codec: fp8-block}, to: {codec: fp8-block, blocks: [4, 8]}}",
            "M103",
            "fp8-block: there is no argument `blocks`",
        ),
        (
            "{from: {codec: fp8-blocks}, to: {codec: fp8-block}}",
            "M308",
            "there is no codec 'fp8-blocks'",
        ),
        (
            "{from: {codec: fp8-block}, to: {codec: fp8-block, scale: f64}}",
            "M308",
            "`scale` is f64",
        ),
        (
            "{from: {codec: fp8-block}, to: {codec: fp8-block}, exact_in: float8_e4m3fn}",
            "M308",
            "`exact_in` is float8_e4m3fn",
        ),
        (
            "{from: {codec: fp8-block}, to: {codec: fp8-block}, into: x}",
            "M103",
            "`into`",
        ),
    ],
)  # fmt: skip
def test_what_a_rule_may_not_say(tmp_path: Path, step: str, code: str, words: str) -> None:
    source = checkpoint(tmp_path / "old")
    said = stop(lambda: migrate.plan(source, rules=rule(tmp_path, step)))
    assert code in said
    assert words in said


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ('scale: "{m...}.scale"}', 'amax: "{m...}.scale"}', "`to` has weight, amax"),
        (
            'from: {weight: "{m...}.weight", scale: "{m...}.weight_scale_inv"}',
            'from: "{m...}.weight"',
            "`from` has no roles",
        ),
        (
            "      - recode",
            "      - dequantize: {codec: fp8-block, dtype: bfloat16}\n      - recode",
            "is not the only op of its rule that takes or makes roles",
        ),
    ],
)
def test_roles_of_both_sides_are_those_of_their_formats(
    tmp_path: Path, was: str, now: str, words: str
) -> None:
    source, path = checkpoint(tmp_path / "old"), rule(tmp_path)
    path.write_text(path.read_text().replace(was, now))
    assert words in stop(lambda: migrate.plan(source, rules=path))


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "old")
    tensors = read(source)
    del tensors["l.0.weight_scale_inv"]
    odd = write(tmp_path / "odd", tensors)
    said = stop(lambda: migrate.plan(odd, rules=rule(tmp_path)))
    assert "M207" in said
    assert "l.0.weight_scale_inv" in said


def test_shapes_that_do_not_fit_are_refused_while_planning(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "old")
    step = STEP.replace("[4, 8]", "[5, 8]")
    said = stop(lambda: migrate.plan(source, rules=rule(tmp_path, step)))
    assert "M310" in said
    assert "[2, 3]" in said


def test_the_inverse_is_the_other_direction() -> None:
    one, other = number_format(scale="f32"), number_format(scale="ue8m0")
    back = RECODE.invert(arguments(one, other, "bfloat16"))
    assert back == OpCall("recode", arguments(other, one, "bfloat16"))
    assert as_written("recode", back.args) == {
        "from": {"codec": "fp8-block", "scale": "ue8m0"},
        "to": {"codec": "fp8-block", "scale": "f32"},
        "exact_in": "bfloat16",
    }
    assert resolve("recode", as_written("recode", back.args), {}) == back.args


def test_what_is_only_decoded_is_no_goal_and_has_no_way_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = type(codecs.get("fp8-block"))
    monkeypatch.setattr(kind, "encodes", property(lambda self: False))
    args = arguments(number_format(), number_format())
    error = refused(lambda: RECODE.validate(args))
    assert error.message == "recode: fp8-block is only decoded, nothing makes its parts"
    back = RECODE.invert(args)
    assert isinstance(back, OneWay)
    assert "fp8-block is only decoded" in back.because


def test_a_codec_without_a_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("migrate.ops.recode.LayoutCodec", int)
    error = refused(lambda: RECODE.validate(arguments(number_format(), number_format())))
    assert "does not say how its parts are stored" in error.message


def test_a_scale_keeps_its_dtype_unless_the_rule_says_another() -> None:
    weight = spec(CODES, (256, 200))
    for dtype in ("float32", "bfloat16", "float8_e8m0fnu"):
        given = [weight, spec(dtype, (2, 2))]
        assert RECODE.infer(arguments(number_format(), number_format()), given) == given
        said = arguments(number_format(), number_format(scale="bf16"))
        assert RECODE.infer(said, given)[1].dtype == "bfloat16"


def test_nothing_is_lost_and_nothing_imports_torch() -> None:
    given = [spec(CODES, (256, 200)), spec("float32", (2, 2))]
    args = arguments(number_format(), number_format(scale="ue8m0"))
    assert RECODE.loss_on(args, given) is Loss.LOSSLESS
    assert RECODE.torch(args, given) is False


NVFP4: Any = codecs.get("nvfp4").Args
SPELLED = {
    "modelopt": NumberFormat("nvfp4", NVFP4("modelopt")),
    "compressed-tensors": NumberFormat("nvfp4", NVFP4("compressed-tensors")),
    "te": NumberFormat("nvfp4", NVFP4("te")),
}


@pytest.mark.parametrize("one", SPELLED)
@pytest.mark.parametrize("other", SPELLED)
def test_nvfp4_keeps_its_codes_and_scales_in_each_spelling(one: str, other: str) -> None:
    shapes = {"modelopt": (), "compressed-tensors": (1,), "te": (1,)}
    scale = ("uint8", (128, 8)) if one == "te" else (CODES, (40, 6))
    given = [spec("uint8", (40, 48)), spec(*scale), spec("float32", shapes[one])]
    args = arguments(SPELLED[one], SPELLED[other], "bfloat16")
    made = RECODE.infer(args, given)
    scale = ("uint8", (128, 8)) if other == "te" else (CODES, (40, 6))
    assert made == [spec("uint8", (40, 48)), spec(*scale), spec("float32", shapes[other])]
    settled = RECODE.settle(args, ("weight", "scale", "global"), given, {})
    copies = [RECODE.copied(settled, given, n) is not None for n in range(3)]
    assert copies == [True, True, one == other]
    # a reciprocal is another number, and may not come back
    lossy = RECODE.loss_on(args, given) is Loss.LOSSY
    assert lossy is (one != other)
    exact = arguments(SPELLED[one], SPELLED[other])
    assert RECODE.loss_on(exact, given) is Loss.LOSSLESS


def test_each_matrix_of_a_stack_keeps_its_own_scale_of_all() -> None:
    given = [spec("uint8", (3, 40, 48)), spec(CODES, (3, 40, 6)), spec("float32", (3,))]
    args = arguments(SPELLED["modelopt"], SPELLED["compressed-tensors"], "bfloat16")
    made = RECODE.infer(args, given)
    assert made[2] == spec("float32", (3,))
    settled = RECODE.settle(args, ("weight", "scale", "global"), given, {})
    whole = np.array([0.25, 2.0, 1 / 3], "<f4").view("<u4")
    out = np.empty(3, "<u4")
    held = [np.zeros((0, 0, 0), "u1"), np.zeros((0, 0, 0), "u1"), whole]
    RECODE.compute(settled, held, given, 2, ((0, 3),), out)
    assert (out.view("<f4") == np.float32(1) / whole.view("<f4")).all()


MXFP4: Any = codecs.get("mxfp4").Args
MXFP8: Any = codecs.get("mxfp8").Args


@pytest.mark.parametrize(
    ("one", "other", "because"),
    [
        (
            NumberFormat("mxfp4", MXFP4()),
            number_format(),
            "one scale of fp8-block stands for several",
        ),
        (
            NumberFormat("mxfp4", MXFP4()),
            SPELLED["modelopt"],
            "recode: there is no exact path from nvfp4 to mxfp4",
        ),
        (NumberFormat("mxfp4", MXFP4("blocks")), NumberFormat("mxfp4", MXFP4()), ""),
        (NumberFormat("mxfp4", MXFP4()), NumberFormat("mxfp8", MXFP8()), ""),
        (number_format(scale="ue8m0"), NumberFormat("mxfp8", MXFP8()), ""),
    ],
)
def test_a_path_that_forgets_has_no_way_back(
    one: NumberFormat, other: NumberFormat, because: str
) -> None:
    back = RECODE.invert(arguments(one, other))
    if because:
        assert isinstance(back, OneWay)
        assert because in back.because
    else:
        assert back == OpCall("recode", arguments(other, one))


OF_FP8: Any = codecs.get("fp8").Args


@pytest.mark.parametrize(
    ("shape", "form", "wanted"),
    [
        ((), "compressed-tensors", (1,)),
        ((1,), "modelopt", ()),
        ((40,), "torchao", (40, 1)),
        ((40, 1), "modelopt", (40,)),
        ((1, 1), "te", (1,)),
    ],
)
def test_fp8_keeps_as_many_scales_as_there_are(
    shape: tuple[int, ...], form: str, wanted: tuple[int, ...]
) -> None:
    target = NumberFormat("fp8", OF_FP8(form=form))
    args = arguments(NumberFormat("fp8", OF_FP8()), target)
    given = [spec(CODES, (40, 48)), spec("float32", shape)]
    codes = "uint8" if form == "te" else CODES
    assert RECODE.infer(args, given) == [spec(codes, (40, 48)), spec("float32", wanted)]
    settled = RECODE.settle(args, ("weight", "scale"), given, {})
    assert all(RECODE.copied(settled, given, n) is not None for n in range(2))


def test_fn_becomes_fnuz_and_says_that_zeros_lose_their_sign() -> None:
    fnuz = NumberFormat("fp8", OF_FP8(codes="float8_e4m3fnuz"))
    fn = NumberFormat("fp8", OF_FP8(codes=CODES))
    args = arguments(fn, fnuz)
    given = [spec(CODES, (2, 4)), spec("float32", (2,))]
    assert RECODE.loss_on(args, given) is Loss.LOSSY
    settled = RECODE.settle(args, ("weight", "scale"), given, {})
    codes = np.array([[0, 0x80, 1, 0x7E], [0x7F, 0xFF, 0x81, 0xFE]], "u1")
    held = [codes, np.array([0.25, 3], "<f4").view("<u4")]
    made = RECODE.eager(settled, held, dtypes=[s.dtype for s in given])
    assert made[0].tolist() == [[0, 0, 1, 0x7E], [0x80, 0x80, 0x81, 0xFE]]
    assert made[1].view("<f4").tolist() == [0.5, 6]
    back = RECODE.invert(args).args
    there = [spec("float8_e4m3fnuz", (2, 4)), spec("float32", (2,))]
    assert RECODE.loss_on(back, there) is Loss.LOSSLESS
    settled = RECODE.settle(back, ("weight", "scale"), there, {})
    out = np.empty((2, 4), "u1")
    needed = RECODE.needs(settled, there, 0, ((0, 2), (0, 4)))
    cut = [a[tuple(slice(*side) for side in b)] for a, b in zip(made, needed, strict=True)]
    RECODE.compute(settled, cut, there, 0, ((0, 2), (0, 4)), out)
    assert out.tolist() == [[0, 0, 1, 0x7E], [0x7F, 0x7F, 0x81, 0xFE]]
    cut[0] = np.where(cut[0] == 0x81, 0x7F, cut[0])
    error = refused(lambda: RECODE.compute(settled, cut, there, 0, ((0, 2), (0, 4)), out))
    assert "the number at [1, 2] has no code in fp8: its code stands for 240" in error.message


def test_codes_stay_what_they_are_unless_the_rule_says_another() -> None:
    args = arguments(NumberFormat("fp8", OF_FP8()), NumberFormat("fp8", OF_FP8(form="torchao")))
    given = [spec("float8_e5m2", (40, 48)), spec("float32", ())]
    assert RECODE.infer(args, given)[0] == given[0]
    to_mx = arguments(NumberFormat("mxfp4", MXFP4()), NumberFormat("mxfp8", MXFP8()))
    packed = [spec("uint8", (40, 48)), spec("uint8", (40, 3))]
    assert RECODE.infer(to_mx, packed)[0] == spec(CODES, (40, 96))


STACKED = """
id: x/b/experts
title: Experts by themselves
lineage: x
edge: [a, b]
rules:
  - name: experts
    from: {weight: "{p...}.{w:up|down}_blocks", scale: "{p...}.{w}_scales"}
    to: {weight: "{p}.{e:int}.{w}.weight_packed", scale: "{p}.{e}.{w}.weight_scale"}
    via:
      - recode: {from: {codec: mxfp4, form: blocks}, to: {codec: mxfp4}}
      - unbind: {into: e, dim: 0, count: 3}
"""


def test_stacked_blocks_become_experts_by_themselves_and_come_back(tmp_path: Path) -> None:
    dice = np.random.default_rng(2)
    tensors: dict[str, tuple[str, Any]] = {}
    for w in ("up", "down"):
        tensors[f"l.0.{w}_blocks"] = "uint8", dice.integers(0, 256, (3, 6, 2, 16), "u1")
        tensors[f"l.0.{w}_scales"] = "uint8", dice.integers(0, 256, (3, 6, 2), "u1")
    source, rules = write(tmp_path / "old", tensors), tmp_path / "rule.yaml"
    rules.write_text(STACKED)
    plan = json.loads(migrate.plan(source, rules=rules).to_json())
    assert {row["change"] for row in plan["rows"]} == {"rearranged"}
    report = migrate.apply(source, tmp_path / "new", rules=rules)
    assert report.to_json()["downgrade"]["exact"] is True
    made = read(tmp_path / "new")
    assert len(made) == 12
    for e in range(3):
        _, codes = made[f"l.0.{e}.up.weight_packed"]
        assert codes.shape == (6, 32)
        assert codes.tobytes() == tensors["l.0.up_blocks"][1][e].tobytes()
        _, scales = made[f"l.0.{e}.down.weight_scale"]
        assert scales.tobytes() == tensors["l.0.down_scales"][1][e].tobytes()
    migrate.downgrade(tmp_path / "new", tmp_path / "back", rules=rules)
    back = read(tmp_path / "back")
    for key, (_, raw) in tensors.items():
        assert back[key][1].shape == raw.shape
        assert back[key][1].tobytes() == raw.tobytes()
