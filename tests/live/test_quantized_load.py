"""Components of quantized tensors go into live parameters of the same encoding as they are; all
else is their class's own `copy_`, which needs permission.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import quantized_ranks as ranks
import torch
import torch.distributed.checkpoint as dcp
from quantized_classes import installed
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import migrate
from migrate.core.errors import MigrateError

TESTS = Path(__file__).parents[1]
GENUINE = TESTS / "data" / "te" / "tensors"
AO = TESTS / "data" / "torchao"
NAMES = ["float8_current_e4m3", "mxfp8_96x160", "block128x128_pow2", "nvfp4_2d_weight"]


@pytest.fixture(autouse=True)
def libraries():
    with installed():
        yield


def stored(path):
    return torch.load(path, weights_only=True)


def live(value, *, without=()):
    """A module whose weight is like the one that was stored, filled with other bytes."""
    held = {name: torch.full_like(one, 99) for name, one in value.held().items()}
    fields = {**vars(value), **held, **dict.fromkeys(without)}
    module = torch.nn.Module()
    made = type(value)(value.shape, value.dtype, fields)
    module.weight = torch.nn.Parameter(made, requires_grad=False)
    return module


def bits(value):
    return {
        name: (one.dtype, tuple(one.shape), one.reshape(-1).view(torch.uint8).tolist())
        for name, one in value.held().items()
    }


def grids(value):
    """The bytes of components without what fills them up."""
    rows, columns = value.shape
    size = {"MXFP8Tensor": 32, "NVFP4Tensor": 16}.get(type(value).__name__, 128)
    out = {}
    for name, one in value.held().items():
        if name == "_columnwise_scale_inv":
            one = one[: -(-columns // (size if size == 128 else 1)), : -(-rows // size)]
        out[name] = one.contiguous().view(torch.uint8).tolist()
    return out


def refused(module, *arguments, **named):
    before = bits(module.weight)
    with pytest.raises(MigrateError) as caught:
        migrate.load(module, *arguments, **named)
    assert bits(module.weight) == before
    return {d.code: d.render() for d in caught.value.diagnostics}


@pytest.mark.parametrize("name", NAMES)
def test_the_same_encoding_is_copied_into_the_memory_that_is_there(name):
    wanted = stored(GENUINE / f"{name}.pt")["weight"]
    module = live(wanted)
    parameter, held = module.weight, module.weight.held()
    places = {key: (id(one), one.data_ptr()) for key, one in held.items()}
    version = parameter._version
    report = migrate.load(module, GENUINE / f"{name}.pt")
    assert module.weight is parameter
    assert {key: (id(one), one.data_ptr()) for key, one in parameter.held().items()} == places
    assert bits(parameter) == bits(wanted)
    assert parameter._version > version
    assert (report.missing, report.unexpected, report.losses) == ((), (), ())


def test_a_parameter_that_is_renamed_is_filled_too(tmp_path):
    (tmp_path / "rename.yaml").write_text(
        "id: t/b/c\ntitle: t\nwhy: t\nlineage: t\nedge: [a, b]\nrequires: '>=0.1'\n"
        "rules: [{name: r, from: 'weight.{part}', to: 'fc.weight.{part}'}]\n"
    )
    wanted = stored(GENUINE / "mxfp8_96x160.pt")["weight"]
    module = torch.nn.Module()
    module.fc = live(wanted)
    migrate.load(module, GENUINE / "mxfp8_96x160.pt", rules=tmp_path / "rename.yaml")
    assert bits(module.fc.weight) == bits(wanted)


@pytest.mark.parametrize("name", ["block128x128_pow2", "nvfp4_2d_weight"])
def test_square_blocks_determine_the_columnwise_usage(tmp_path, name):
    # the columnwise bytes of a genuine file are those that are derived from its rowwise ones
    wanted = stored(GENUINE / f"{name}.pt")["weight"]
    columnwise = [key for key in wanted.held() if "columnwise" in key]
    one = type(wanted)(wanted.shape, wanted.dtype, {**vars(wanted), **dict.fromkeys(columnwise)})
    torch.save({"weight": one}, tmp_path / "rowwise.pt")
    module = live(wanted)
    report = migrate.load(module, tmp_path / "rowwise.pt")
    assert grids(module.weight) == grids(wanted)
    assert any("derived" in note for note in report.notes)


def test_a_transpose_is_derived_and_not_asked_for_where_it_is_stale(tmp_path):
    path = GENUINE / "float8_current_e4m3.pt"
    module = live(stored(path)["weight"])
    turned = torch.full((64, 48), 99, dtype=torch.uint8)
    module.weight._transpose = turned
    migrate.load(module, path)
    assert torch.equal(turned, module.weight._data.t())
    module.weight._transpose_invalid = True
    turned.fill_(7)
    migrate.load(module, path)
    assert bool((turned == 7).all())


def test_blocks_of_rows_determine_no_columnwise_usage(tmp_path):
    wanted = stored(GENUINE / "mxfp8_96x160.pt")["weight"]
    columnwise = ["_columnwise_data", "_columnwise_scale_inv"]
    one = type(wanted)(wanted.shape, wanted.dtype, {**vars(wanted), **dict.fromkeys(columnwise)})
    torch.save({"weight": one}, tmp_path / "rowwise.pt")
    text = refused(live(wanted), tmp_path / "rowwise.pt")["M960"]
    assert "weight: _columnwise_data, _columnwise_scale_inv" in text


def test_a_usage_that_the_module_lacks_is_left_out_and_needs_permission_if_it_is_lost():
    path = GENUINE / "mxfp8_96x160.pt"
    wanted = stored(path)["weight"]
    columnwise = ["_columnwise_data", "_columnwise_scale_inv"]
    module = live(wanted, without=columnwise)
    assert "weight._columnwise_{data,scale_inv}" in refused(module, path)["M402"]
    report = migrate.load(module, path, allow={"drop"})
    assert bits(module.weight) == {k: v for k, v in bits(wanted).items() if k not in columnwise}
    assert any("weight._columnwise" in note for note in report.notes)
    # where it can be derived again nothing is lost
    path = GENUINE / "block128x128_pow2.pt"
    migrate.load(live(stored(path)["weight"], without=columnwise), path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"_fp8_dtype": "float8_e5m2"}, "float8_e4m3fn, the parameter's is float8_e5m2"),
        ({"_with_gemm_swizzled_scales": True}, "with_gemm_swizzled_scales is False"),
    ],
)
def test_bytes_that_would_mean_other_numbers_are_not_copied(change, said):
    path = GENUINE / "mxfp8_96x160.pt"
    module = live(stored(path)["weight"])
    if "_fp8_dtype" in change:
        change = {"_fp8_dtype": type(module.weight._fp8_dtype)(8)}
    vars(module.weight).update(change)
    assert said in refused(module, path)["M961"]
    other = live(stored(GENUINE / "nvfp4_2d_weight.pt")["weight"])
    assert "te-mxfp8, the parameter's is te-nvfp4" in refused(other, path)["M961"]


def test_components_of_which_nothing_says_what_they_are_are_not_copied():
    wanted = stored(GENUINE / "float8_current_e4m3.pt")["weight"]
    loose = {f"weight.{name}": one for name, one in wanted.held().items()}
    assert "nothing in the checkpoint says" in refused(live(wanted), loose)["M960"]


def test_plain_weights_are_quantized_by_the_class_and_need_permission(tmp_path):
    wanted = stored(GENUINE / "float8_current_e4m3.pt")["weight"]
    module = live(wanted)
    dense = {"weight": torch.randn(48, 64, dtype=torch.bfloat16)}
    torch.save(dense, tmp_path / "dense.pt")
    for source in (dense, tmp_path / "dense.pt"):
        assert "bfloat16 -> Float8Tensor: weight" in refused(module, source)["M961"]
    parameter, data = module.weight, module.weight._data
    migrate.load(module, tmp_path / "dense.pt", allow={"lossy"})
    assert module.weight is parameter
    assert module.weight._data is data
    once = live(wanted)
    once.weight.quantize_(dense["weight"])
    assert bits(module.weight) == bits(once.weight)


def test_an_object_in_memory_is_copied_by_its_components_too():
    wanted = stored(GENUINE / "nvfp4_2d_weight.pt")["weight"]
    module = live(wanted)
    migrate.load(module, {"weight": wanted})
    assert bits(module.weight) == bits(wanted)
    # the class of another encoding quantizes, which is a loss
    module = live(stored(GENUINE / "float8_current_e4m3.pt")["weight"])
    mx = stored(GENUINE / "mxfp8_96x160.pt")["weight"]
    vars(mx)["_rowwise_data"] = mx._rowwise_data[:48, :64].contiguous()
    small = type(mx)((48, 64), mx.dtype, vars(mx))
    assert "MXFP8Tensor" in str(type(small))
    assert "-> Float8Tensor: weight" in refused(module, {"weight": small})["M961"]
    migrate.load(module, {"weight": small}, allow={"lossy"})


def cut(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """An MXFP8 weight [48, 64] that is saved there, and the numbers that it stands for."""
    mx = stored(GENUINE / "mxfp8_96x160.pt")["weight"]
    vars(mx)["_rowwise_data"] = mx._rowwise_data[:48, :64].contiguous()
    vars(mx)["_columnwise_data"] = vars(mx)["_columnwise_scale_inv"] = None
    torch.save({"old.weight": type(mx)((48, 64), mx.dtype, vars(mx))}, path)
    scales = torch.exp2(mx._rowwise_scale_inv[:48, :2].float() - 127)
    numbers = mx._rowwise_data.view(torch.float8_e4m3fn).float()
    return mx, numbers * scales.repeat_interleave(32, 1)


RENAMED = """
id: tests/b
title: t
why: t
lineage: tests
edge: [a, b]
rules: [{name: r, from: "old.{k...}", to: "{k}"}]
"""


def test_an_object_of_a_file_in_another_encoding_is_quantized_by_the_class(tmp_path: Path) -> None:
    _, numbers = cut(tmp_path / "mx.pt")
    (tmp_path / "r.yaml").write_text(RENAMED)
    wanted = stored(GENUINE / "float8_current_e4m3.pt")["weight"]
    module, once = live(wanted), live(wanted)
    how = {"rules": tmp_path / "r.yaml"}
    said = refused(module, tmp_path / "mx.pt", **how)
    assert said.keys() == {"M961"}
    assert "weight: te-mxfp8, the parameter's is te-fp8" in said["M961"]
    parameter, data = module.weight, module.weight._data
    made = migrate.load(module, tmp_path / "mx.pt", **how, allow={"lossy"})
    assert (module.weight is parameter, module.weight._data is data) == (True, True)
    once.weight.quantize_(numbers)
    assert bits(module.weight) == bits(once.weight)
    assert any("decoded, and quantized by the parameter's own" in note for note in made.notes)
    assert made.missing == made.unexpected == ()


def e2m1(data: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor, most: int) -> torch.Tensor:
    """Pairs of E2M1 codes with an E4M3 scale for each 16 and the amax of all, or of each row."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).int()
    signed = table[codes & 7] * (1 - 2 * (codes >> 3))
    each = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    factor = torch.tensor(1 / (6 * most), dtype=torch.float64).float()
    return signed * (each * whole.reshape(-1, 1) * factor)


def of_float8(data: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor) -> torch.Tensor:
    return data.view(dtype).float() * scales


DECODED = {
    "te-nvfp4-rows": ({}, lambda d, s, w: e2m1(d, s[:48, :4], w, 448)),
    "te-nvfp4-2d": (
        {"options": {"_nvfp4_e4m3_max": 256, "_nvfp4_use_4over6": True}},
        lambda d, s, w: e2m1(d, s[:48, :4], w, 256),
    ),
    "te-block-2d": (
        {"number": "e5m2"},
        lambda d, s: of_float8(d, torch.float8_e5m2, s[:1, :1]),
    ),
    "te-block-1d": (
        {"number": "e5m2"},
        lambda d, s: of_float8(d, torch.float8_e5m2, s[:1, :48].t()),
    ),
    "ao-int8": ({}, lambda d, s, z: (d.float() - z.float()) * s),
}


@pytest.mark.parametrize("kind", DECODED)
def test_what_is_only_decoded_goes_into_another_encoding(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No codec encodes all of these as their classes do."""
    changes, numbers = DECODED[kind]
    one = dataclasses.replace(ranks.KINDS[kind], shape=(48, 64), **changes)
    # what is drawn is kept by this name
    own = f"decoded-{kind}"
    monkeypatch.setitem(ranks.KINDS, own, one)
    held = dict(ranks.whole(own))
    for name, raw in held.items():
        if raw.shape[-1] == 1:
            # no code is infinite or NaN, no scale negative
            held[name] = raw & (0x33 if "scale" in name else 0xBB)
    value = ranks.wrapped(own, (48, 64), held)
    torch.save({"weight": value}, tmp_path / "in.pt")
    parts = ranks.tensors(own, held)
    names = ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise", "qdata", "scale", "zero_point")
    due = numbers(*(parts[name] for name in names if name in parts))
    wanted = stored(GENUINE / "float8_current_e4m3.pt")["weight"]
    module, once = live(wanted), live(wanted)
    migrate.load(module, tmp_path / "in.pt", allow={"lossy"})
    once.weight.quantize_(due)
    assert bits(module.weight) == bits(once.weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_reader_gives_an_object_of_another_encoding_to_the_class(tmp_path: Path) -> None:
    _, numbers = cut(tmp_path / "mx.pt")
    wanted = stored(GENUINE / "float8_current_e4m3.pt")["weight"]
    module, once = live(wanted), live(wanted)
    reader = migrate.dcp.MigratingReader(tmp_path / "mx.pt")
    before = bits(module.weight)
    with pytest.raises(dcp.api.CheckpointException, match="M961"):
        dcp.load({"old.weight": module.weight.data}, storage_reader=reader)
    assert bits(module.weight) == before
    reader = migrate.dcp.MigratingReader(tmp_path / "mx.pt", allow={"lossy"})
    dcp.load({"old.weight": module.weight.data}, storage_reader=reader)
    once.weight.quantize_(numbers)
    assert bits(module.weight) == bits(once.weight)


def test_an_object_of_another_shape_and_encoding_is_refused() -> None:
    other = live(stored(GENUINE / "float8_current_e4m3.pt")["weight"])
    said = refused(other, GENUINE / "mxfp8_96x160.pt", allow={"lossy"})
    assert "other shapes than the module's" in said["M960"]


def test_components_that_rules_change_are_no_object_of_another_encoding(tmp_path: Path) -> None:
    cut(tmp_path / "mx.pt")
    (tmp_path / "r.yaml").write_text(
        RENAMED.replace(
            "rules: [",
            "rules: [{name: d, from: old.weight._rowwise_data, "
            "to: weight._rowwise_data, via: [{flip: {dim: 0}}]}, ",
        )
    )
    module = live(stored(GENUINE / "float8_current_e4m3.pt")["weight"])
    said = refused(module, tmp_path / "mx.pt", rules=tmp_path / "r.yaml", allow={"lossy"})
    assert "rules change its components" in said["M960"]


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in AO.glob("*.pt") if path.stem != "intx")
)
def test_classes_of_torchao_take_their_components_and_no_plain_tensors(name):
    state = stored(AO / f"{name}.pt")
    key, wanted = next((k, v) for k, v in state.items() if hasattr(v, "held"))
    module = torch.nn.Module()
    owner = module
    *path, last = key.split(".")
    for part in path:
        setattr(owner, part, torch.nn.Module())
        owner = getattr(owner, part)
    setattr(owner, last, live(wanted).weight)
    migrate.load(module, AO / f"{name}.pt", strict=False)
    assert bits(getattr(owner, last)) == bits(wanted)
    dense = {key: torch.zeros(wanted.shape, dtype=wanted.dtype)}
    with pytest.raises(MigrateError) as caught:
        migrate.load(module, dense, allow={"lossy"})
    assert "take no plain tensors" in str(caught.value)


def test_the_checkpoint_says_which_of_two_numberings_was_meant(tmp_path):
    shutil.copy(GENUINE / "mxfp8_96x160.pt", tmp_path / "new.pt")
    module = live(stored(tmp_path / "new.pt")["weight"])
    report = migrate.load(module, tmp_path / "new.pt", params={"te_dtype_numbering": "2.4"})
    assert report.tensors == 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_group_takes_the_bytes_of_its_members(tmp_path: Path) -> None:
    kind = "te-grouped"
    shape = ranks.KINDS[kind].shape
    due = ranks.wrapped(kind, shape, ranks.whole(kind))
    torch.save({"w": due}, tmp_path / "in.pt")
    held = ranks.wrapped(kind, shape, ranks.whole(kind, seed=1))
    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(held, requires_grad=False))
    before, places = module.w, {n: one.data_ptr() for n, one in held.held().items()}
    migrate.load(module, tmp_path / "in.pt")
    assert module.w is before
    assert places == {n: one.data_ptr() for n, one in held.held().items()}
    for name, one in due.held().items():
        assert torch.equal(held.held()[name].view(torch.uint8), one.view(torch.uint8)), name
    again = ranks.wrapped(kind, shape, ranks.whole(kind, seed=1))
    dcp.load({"w": again}, storage_reader=migrate.dcp.MigratingReader(tmp_path / "in.pt"))
    for name, one in due.held().items():
        assert torch.equal(again.held()[name].view(torch.uint8), one.view(torch.uint8)), name


def hollow(value):
    """A module whose weight is like this one, on the meta device."""
    module = torch.nn.Module()
    made = value.like(lambda one: one.to("meta"))
    module.weight = torch.nn.Parameter(made, requires_grad=False)
    assert module.weight.is_meta
    return module


def test_a_usage_is_derived_on_the_meta_device_too(tmp_path):
    wanted = stored(GENUINE / "block128x128_pow2.pt")["weight"]
    columnwise = [key for key in wanted.held() if "columnwise" in key]
    one = type(wanted)(wanted.shape, wanted.dtype, {**vars(wanted), **dict.fromkeys(columnwise)})
    torch.save({"weight": one}, tmp_path / "rowwise.pt")
    module = hollow(wanted)
    report = migrate.load(module, tmp_path / "rowwise.pt")
    assert report.left_on_meta == ()
    assert not module.weight.is_meta
    assert grids(module.weight) == grids(wanted)


def test_a_stale_transpose_on_the_meta_device_keeps_nothing_there():
    path = GENUINE / "float8_current_e4m3.pt"
    wanted = stored(path)["weight"]
    vars(wanted)["_transpose"] = torch.zeros(64, 48, dtype=torch.uint8)
    vars(wanted)["_transpose_invalid"] = True
    module = hollow(wanted)
    assert migrate.load(module, path).left_on_meta == ()
    held = module.weight.held()
    assert torch.equal(held["_data"], wanted._data)
    assert held["_transpose"].device.type == "cpu"
    assert module.weight._transpose_invalid


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_group_on_the_meta_device_gets_runs_of_its_members(tmp_path: Path) -> None:
    due = ranks.wrapped("te-grouped", (11, 64, 32), ranks.whole("te-grouped"))
    torch.save({"weight": due}, tmp_path / "in.pt")
    module = hollow(due)
    assert migrate.load(module, tmp_path / "in.pt").left_on_meta == ()
    assert type(module.weight) is type(due)
    assert bits(module.weight) == bits(due)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["te-mxfp8", "ao-mx"])
def test_several_boxes_of_one_tensor_take_their_bytes(tmp_path: Path, kind: str) -> None:
    shape = ranks.KINDS[kind].shape
    due = ranks.wrapped(kind, shape, ranks.whole(kind))
    torch.save({"w": due, "norm": torch.ones(3)}, tmp_path / "in.pt")
    found = ranks.boxes(ranks.KINDS[kind], 2, "columns")
    held = [ranks.wrapped(kind, ranks.sizes(box), ranks.piece(kind, box, seed=1)) for box in found]
    both = LocalShardsWrapper(held, [tuple(start for start, _ in box) for box in found])
    dcp.load({"w": both}, storage_reader=migrate.dcp.MigratingReader(tmp_path / "in.pt"))
    for box, one in zip(found, held, strict=True):
        part = ranks.wrapped(kind, ranks.sizes(box), ranks.piece(kind, box, zeros=True))
        assert bits(one) == bits(part)


def test_several_boxes_are_no_parameter_that_load_fills(tmp_path: Path) -> None:
    kind = "te-mxfp8"
    found = ranks.boxes(ranks.KINDS[kind], 2, "columns")
    due = ranks.wrapped(kind, ranks.KINDS[kind].shape, ranks.whole(kind))
    torch.save({"w": due}, tmp_path / "in.pt")
    held = [ranks.wrapped(kind, ranks.sizes(box), ranks.piece(kind, box)) for box in found]
    before = [bits(one) for one in held]
    module = torch.nn.Module()
    both = LocalShardsWrapper(held, [tuple(start for start, _ in box) for box in found])
    module.register_parameter("w", torch.nn.Parameter(both, requires_grad=False))
    with pytest.raises(MigrateError, match="in the module and not in the migrated checkpoint: w"):
        migrate.load(module, tmp_path / "in.pt")
    assert [bits(one) for one in held] == before


def tied(kind, seed=2):
    """A module that has one quantized weight under two names."""
    module = torch.nn.Module()
    module.a, module.b = torch.nn.Module(), torch.nn.Module()
    held = ranks.wrapped(kind, ranks.KINDS[kind].shape, ranks.whole(kind, seed))
    module.a.w = module.b.w = torch.nn.Parameter(held, requires_grad=False)
    return module


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["te-mxfp8", "te-grouped"])
def test_a_tied_quantized_parameter_needs_one_tensor(tmp_path: Path, kind: str) -> None:
    shape = ranks.KINDS[kind].shape
    one, other = (ranks.wrapped(kind, shape, ranks.whole(kind, seed)) for seed in (0, 1))
    torch.save({"a.w": one, "b.w": other}, tmp_path / "two.pt")
    module = tied(kind)
    before = bits(module.a.w)
    with pytest.raises(MigrateError, match="which are one in the module"):
        migrate.load(module, tmp_path / "two.pt")
    assert bits(module.a.w) == before
    torch.save({"a.w": one, "b.w": one}, tmp_path / "same.pt")
    for source in ({"a.w": one}, {"b.w": one}, None):
        torch.save(source, tmp_path / "one.pt")
        module = tied(kind)
        report = migrate.load(module, tmp_path / ("one.pt" if source else "same.pt"))
        assert (report.missing, report.unexpected) == ((), ())
        assert bits(module.a.w) == bits(one)
        assert any("under several names" in note for note in report.notes) is bool(source)


@pytest.mark.parametrize("allow", [(), ("lossy",)])
def test_codes_are_not_converted_as_numbers(tmp_path: Path, allow: tuple[str, ...]) -> None:
    kind = "ao-mx"
    shape = ranks.KINDS[kind].shape
    torch.save({"weight": ranks.wrapped(kind, shape, ranks.whole(kind))}, tmp_path / "in.pt")
    held = ranks.wrapped(kind, shape, ranks.whole(kind, seed=1))
    # the same bytes, by another name
    vars(held)["scale"] = held.scale.view(torch.uint8)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(held, requires_grad=False)
    found = refused(module, tmp_path / "in.pt", allow=allow)
    assert "scale is float8_e8m0fnu, the parameter's is uint8" in found["M960"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["pt", "dcp"])
def test_the_reader_fills_objects_of_every_dict_beside_an_optimizer(form, tmp_path):
    """Tensors that rules do not see are objects, too: those of a second model."""
    one, two = (stored(GENUINE / f"{name}.pt")["weight"] for name in NAMES[1:3])
    moment = torch.randn(3)
    saved = {"model": {"w": one}, "ema": {"w": two}, "optimizer": {"state": {0: {"m": moment}}}}
    torch.save(saved, tmp_path / "in.pt")
    source = tmp_path / "in.pt"
    if form == "dcp":
        migrate.apply(source, tmp_path / "in", output_format="dcp", at="model")
        source = tmp_path / "in"
    held = {"model": live(one).weight, "ema": live(two).weight}
    state = {name: {"w": each.data} for name, each in held.items()}
    state["optimizer"] = {"state": {"0": {"m": torch.zeros(3)}}}
    dcp.load(state, storage_reader=migrate.dcp.MigratingReader(source, at="model"))
    assert bits(held["model"]) == bits(one)
    assert bits(held["ema"]) == bits(two)
    assert torch.equal(state["optimizer"]["state"]["0"]["m"], moment)
