"""Quantized tensors that ranks saved as objects, each its shard, read as whole components."""

from __future__ import annotations

import dataclasses
import errno
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_folders import Box, rows
from quantized_ranks_case import SHAPE
from quantized_shards import CLASSES, KEEP, Class, draw, keep, save_shards, shard, whole
from quantized_streams import stand_ins
from ranks import Ranks
from safetensors.torch import load_file

import migrate
from migrate import formats
from migrate.core.errors import CheckpointError, RunError
from migrate.core.spec import Spec
from migrate.dcp import MigratingReader
from migrate.formats._dcpobjects import Joiner, Shard, UnjoinableError
from migrate.running import publish
from migrate.source.blobs import Stored
from migrate.source.pickle.tree import Composite
from migrate.source.tree import object_encodings, objects_of

DATA = Path(__file__).parent.parent / "data" / "te" / "tensors"
LARGE = (256, 384)
# tensors that are cut on the borders of all blocks
CUTS: dict[str, Sequence[Box]] = {
    "rows": rows(LARGE, [128, 128]),
    "uneven": rows((384, 256), [256, 128, 0]),
    "columns": rows(LARGE, [128, 256], dim=1),
    "both": [((r, c), (128, n)) for r in (0, 128) for c, n in ((0, 128), (128, 256))],
}
Parts = Mapping[str, torch.Tensor]
# changes the components of shard number n, and the flags of its class
Change = Callable[[int, dict[str, torch.Tensor], Class], Class]


def save(
    folder: Path, names: Sequence[str], boxes: Sequence[Box], change: Change | None = None
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint with a tensor of each of these classes, and the components that it stands for.
    An empty shard is a plain tensor.
    """
    m, k = (a + b for a, b in zip(*boxes[-1], strict=True))
    expected: dict[str, torch.Tensor] = {}
    values: dict[str, list[Any]] = {}
    with stand_ins() as modules:
        for name in names:
            cls = CLASSES[name]
            grids = draw(cls, m, k)
            values[name] = []
            for number, box in enumerate(boxes):
                if 0 in box[1]:
                    values[name].append(torch.empty(*box[1], dtype=torch.bfloat16))
                    continue
                parts, own = shard(cls, grids, box), cls
                if change is not None:
                    own = change(number, parts, cls)
                values[name].append(own.object(modules, parts, box[1]))
            expected |= {f"{name}.{n}": value for n, value in whole(cls, grids, m, k).items()}
        save_shards(folder, (m, k), boxes, values, {"b": torch.ones(2)})
    return folder, expected


def same(found: Parts, expected: Parts) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
        assert torch.equal(found[key].view(torch.uint8), value.view(torch.uint8)), key


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        migrate.plan(folder, output_format="safetensors")
    (found,) = caught.value.diagnostics
    assert found.code == "M946"
    return found.message


@pytest.mark.parametrize(
    "cut", [pytest.param(cut, marks=[pytest.mark.thorough] * (cut != "both")) for cut in CUTS]
)
def test_shards_become_the_components_of_the_whole(tmp_path: Path, cut: str) -> None:
    names = [n for n in CLASSES if n != "nvfp4-row" or cut in ("rows", "uneven")]
    folder, expected = save(tmp_path / "in", names, CUTS[cut])
    out = tmp_path / "out.safetensors"
    migrate.apply(folder, out, rules=[keep(tmp_path)])
    same(load_file(out), {**expected, "b": torch.ones(2)})
    assert migrate.verify(out, source=folder, rules=[tmp_path / "keep.yaml"]).equal


def test_the_whole_is_one_object(tmp_path: Path) -> None:
    folder, _ = save(tmp_path / "in", ["mxfp8"], CUTS["rows"])
    with formats.open(folder) as source:
        assert source.index.tree is not None
        value = source.index.tree.parts[0].root.get("mxfp8")
        assert type(value) is Composite
        assert value.encoding.shape == LARGE
        described = migrate.inspect(folder).to_json()
    assert json.dumps(described).count("MXFP8Tensor") == 1
    # as one object it is written again
    migrate.apply(folder, tmp_path / "out.pt", rules=[keep(tmp_path)])
    migrate.apply(folder, tmp_path / "safe", rules=[keep(tmp_path)], output_format="safetensors")


def test_a_run_that_joins_goes_on_where_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["mxfp8-swizzled", "block-2d", "nvfp4"]
    folder, expected = save(tmp_path / "in", names, CUTS["both"])
    words: Any = {
        "rules": [keep(tmp_path)],
        "output_format": "safetensors",
        "max_shard_size": 40_000,
        "fsync": False,
    }
    migrate.apply(folder, tmp_path / "one", **words)
    claims, claim = [], publish.Partial.claim

    def full(*arguments: Any) -> None:
        if len(claims) == 5:
            raise OSError(errno.ENOSPC, "full")
        claims.append(arguments)
        claim(*arguments)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(publish.Partial, "claim", full)
        with pytest.raises(RunError, match="M909"):
            migrate.apply(folder, out, threads=1, **words)
    report = migrate.apply(folder, out, resume=True, **words)
    assert 0 < report.bytes_written < sum(one.nbytes for one in expected.values())
    same(
        {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()},
        {**expected, "b": torch.ones(2)},
    )
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()
    }


def test_what_was_joined_is_renamed_and_comes_back(tmp_path: Path) -> None:
    """Rules work on the components of the whole; the way back makes one object of them again."""
    folder, expected = save(tmp_path / "in", ["mxfp8", "nvfp4-2d"], CUTS["both"])
    (tmp_path / "rename.yaml").write_text(KEEP.replace('keep: ["{k...}"]', "keep: [b]") + BOTH)
    rules, out, back = [tmp_path / "rename.yaml"], tmp_path / "out.pt", tmp_path / "back.pt"
    migrate.apply(folder, out, rules=rules)
    migrate.downgrade(out, back, rules=rules)
    with formats.open(back) as source:
        assert source.index.tree is not None
        root = source.index.tree.parts[0].root
        assert all(type(root.get(name)) is Composite for name in ("mxfp8", "nvfp4-2d"))
    migrate.apply(back, tmp_path / "back.safetensors", rules=[keep(tmp_path)])
    same(load_file(tmp_path / "back.safetensors"), {**expected, "b": torch.ones(2)})
    assert migrate.diff(back, folder).tensors_equal


BOTH = """rules:
  - name: all
    from: "{name:mxfp8|nvfp4-2d}.{k}"
    to: "new.{name}.{k}"
"""


def test_what_the_shards_share_is_in_the_digest(tmp_path: Path) -> None:
    digests = set()
    for number in range(2):

        def change(_: int, parts: dict[str, torch.Tensor], cls: Class) -> Class:
            parts["_scale_inv"].fill_(number + 0.5)
            return cls

        folder, _ = save(tmp_path / "in", ["float8"], CUTS["rows"], change)
        digests.add(migrate.plan(folder, rules=[keep(tmp_path)]).digest)
        folder.rename(tmp_path / f"was{number}")
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("name", "part", "said"),
    [
        ("float8", "_scale_inv", "`_scale_inv` is 3.0 in the chunk of rank 0 at [0, 0], and 7.0"),
        ("nvfp4", "_amax_columnwise", "`_amax_columnwise` is 3.0 in"),
    ],
)
def test_a_scale_or_amax_that_differs(tmp_path: Path, name: str, part: str, said: str) -> None:
    def change(number: int, parts: dict[str, torch.Tensor], cls: Class) -> Class:
        parts[part].fill_(3.0 if number == 0 else 7.0)
        return cls

    found = refused(save(tmp_path / "in", [name], CUTS["rows"], change)[0])
    assert found.startswith(f"{name}: its 2 chunks are quantized each for itself")
    assert said in found
    assert "the chunk of rank 0 at [128, 0]" in found


def test_flags_and_components_that_differ(tmp_path: Path) -> None:
    def swizzled(number: int, _: Any, cls: Class) -> Class:
        return CLASSES["mxfp8-swizzled"] if number else cls

    def one_way(number: int, parts: dict[str, torch.Tensor], cls: Class) -> Class:
        if number:
            del parts["_columnwise_data"], parts["_columnwise_scale_inv"]
        return cls

    found = refused(save(tmp_path / "a", ["mxfp8"], CUTS["rows"], swizzled)[0])
    assert "`with_gemm_swizzled_scales` is False in" in found
    found = refused(save(tmp_path / "b", ["mxfp8"], CUTS["rows"], one_way)[0])
    assert "the list of components is _rowwise_data, _rowwise_scale_inv, _columnwise_data" in found


def of_another_class(_: str, parts: dict[str, torch.Tensor], cls: Class) -> Class:
    other, (m, k) = CLASSES["block-2d"], parts["_rowwise_data"].shape
    parts.clear()
    parts.update(shard(other, draw(other, m, k), ((0, 0), (m, k))))
    return other


def of_another_dtype(_: str, parts: dict[str, torch.Tensor], cls: Class) -> Class:
    return dataclasses.replace(cls, flags={**cls.flags, "dtype": torch.float32})


def with_another_matrix(name: str, parts: dict[str, torch.Tensor], cls: Class) -> Class:
    matrix = torch.eye(16, dtype=torch.bfloat16) * (1 if name == "alike" else -1)
    return dataclasses.replace(cls, quantizer={**cls.quantizer, "rht_matrix": matrix})


def with_a_rounded_scale(_: str, parts: dict[str, torch.Tensor], cls: Class) -> Class:
    parts["_scale_inv"] = parts["_scale_inv"].bfloat16()
    return cls


@pytest.mark.parametrize(
    ("name", "first", "other", "said"),
    [
        ("mxfp8", None, of_another_class, "the class is transformer_engine.pytorch.tensor.mxfp8"),
        ("mxfp8", None, of_another_dtype, "the dtype is bfloat16 in the chunk of"),
        ("nvfp4", with_another_matrix, with_another_matrix, "rht_matrix` is 512 bytes"),
        ("float8", None, with_a_rounded_scale, "`_scale_inv` is bfloat16 [1] in the chunk of"),
    ],
)
def test_one_shard_that_is_unlike_the_other(
    tmp_path: Path, name: str, first: Any, other: Any, said: str
) -> None:
    def change(number: int, parts: dict[str, torch.Tensor], cls: Class) -> Class:
        way = other if number else first
        return cls if way is None else way("" if number else "alike", parts, cls)

    assert said in refused(save(tmp_path / "in", [name], CUTS["rows"], change)[0])
    if first is not None:
        alike = save(tmp_path / "alike", [name], CUTS["rows"], lambda _, p, c: first("alike", p, c))
        with formats.open(alike[0]) as source:
            key = next(key for key in source.index.tensors if key.endswith("rht_matrix"))
            assert source.index.tensors[key].spec.shape == (16, 16)


def test_what_one_shard_leaves_open_another_decides(tmp_path: Path) -> None:
    """7 with five arguments is E4M3 or E5M2; with the function of 2.16 it is E4M3; with four
    arguments it was E5M2, and no program can have written both of the last.
    """

    def folder(name: str, ways: Sequence[str]) -> Path:
        cls, boxes = CLASSES["float8"], CUTS["rows"]
        grids = draw(cls, *LARGE)

        def value(way: str, box: Box) -> Any:
            made = cls.object(modules, shard(cls, grids, box), box[1])
            number = modules["transformer_engine_torch"].DType(7)
            arguments = (made.arguments[0], number, *made.arguments[2:5])
            if way == "function":
                return type(made)(made.function, arguments)
            method = modules["float8_tensor"].Float8Tensor._make_in_reduce_ex
            return method(*arguments[: 4 if way == "four" else 5])

        with stand_ins() as modules:
            values = {"w": [value(way, box) for way, box in zip(ways, boxes, strict=True)]}
            save_shards(tmp_path / name, LARGE, boxes, values)
        return tmp_path / name

    def number(path: Path) -> str | None:
        with formats.open(path) as source:
            (one,) = object_encodings(source.index.tree).values()
            return one.number

    assert number(folder("open", ["five", "five"])) is None
    assert number(folder("new", ["five", "function"])) == "float8_e4m3fn"
    assert number(folder("old", ["five", "four"])) == "float8_e5m2"
    assert "releases that number dtypes differently wrote its chunks" in refused(
        folder("both", ["four", "function"])
    )


def test_a_group_that_is_not_quantized_is_joined_as_the_dense_tensor_that_it_is(
    tmp_path: Path,
) -> None:
    dense = torch.randn(5, 8, 6).bfloat16()
    boxes = [((0, 0, 0), (3, 8, 6)), ((3, 0, 0), (2, 8, 6))]
    with stand_ins() as modules:

        def group(part: torch.Tensor) -> Any:
            fields = dict.fromkeys(("quantizer", "scale_inv", "quantized_tensors", "first_dims"))
            fields |= {"columnwise_data": None, "columnwise_scale_inv": None}
            cls = modules["grouped_tensor"].GroupedTensor
            made = torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype)  # type: ignore[attr-defined]
            made.__dict__.update(
                **fields,
                num_tensors=len(part),
                tensor_shapes=[tuple(part.shape[1:])] * len(part),
                fake_dtype=part.dtype,
                rowwise_data=part.reshape(-1).clone(),
                _with_gemm_swizzled_scales=False,
            )
            return made

        values = [group(dense[at[0] : at[0] + size[0]]) for at, size in boxes]
        save_shards(tmp_path / "in", dense.shape, boxes, {"w": values})
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", rules=[keep(tmp_path)])
    same(load_file(tmp_path / "out.safetensors"), {"w": dense})


@pytest.mark.parametrize(
    ("name", "boxes", "said"),
    [
        ("block-2d", rows(LARGE, [96, 160]), "row 96 lies inside a block of 128 rows"),
        ("mxfp8", rows(LARGE, [32, 352], dim=1), None),
        ("mxfp8", rows(LARGE, [48, 208]), "row 48 lies inside a block of 32 rows"),
        ("nvfp4-2d", rows(LARGE, [24, 232]), "row 24 lies inside a block of 16 rows"),
        ("nvfp4-row", rows(LARGE, [128, 256], dim=1), "column 128 lies inside a block of 384"),
    ],
)
def test_borders(tmp_path: Path, name: str, boxes: Sequence[Box], said: str | None) -> None:
    folder, expected = save(tmp_path / "in", [name], boxes)
    if said is not None:
        assert said in refused(folder)
        return
    with formats.open(folder) as source:
        assert list(source.index.tensors) == [*expected, "b"]


def test_a_rank_that_saved_a_plain_tensor(tmp_path: Path) -> None:
    cls = CLASSES["mxfp8"]
    grids = draw(cls, *LARGE)
    boxes = CUTS["rows"]
    with stand_ins() as modules:
        first = cls.object(modules, shard(cls, grids, boxes[0]), boxes[0][1])
        dense = torch.ones(128, 384, dtype=torch.bfloat16)
        save_shards(tmp_path / "in", LARGE, boxes, {"w": [first, dense]})
        found = refused(tmp_path / "in")
    assert "the chunk of rank 0 at [128, 0] is a plain tensor" in found
    # all of them plain is what they are
    save_shards(tmp_path / "plain", LARGE, boxes, {"w": [dense, dense]})
    with formats.open(tmp_path / "plain") as source:
        assert {k: str(t.spec) for k, t in source.index.tensors.items()} == {
            "w": "bfloat16 [256, 384]"
        }


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_what_ranks_saved_by_stock_torch(
    world: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks(world).run("quantized_ranks_case", "save", str(tmp_path / "in"), *CLASSES)
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", rules=[keep(tmp_path)])
    expected = {"b": torch.ones(2)}
    for name, cls in CLASSES.items():
        made = whole(cls, draw(cls, *SHAPE), *SHAPE)
        expected |= {f"{name}.{part}": value for part, value in made.items()}
    same(load_file(tmp_path / "out.safetensors"), expected)


@pytest.mark.parametrize(
    ("scale", "said"),
    [(0.0123456, False), (float(torch.tensor(0.0123456).bfloat16()), True), (0.0078125, False)],
    ids=["float32", "rounded", "power of two"],
)
@pytest.mark.parametrize(
    "cut",
    [pytest.param(CUTS["rows"], id="shards"), pytest.param([((0, 0), LARGE)], id="whole")],
)
def test_a_scale_that_was_rounded_is_said(
    tmp_path: Path, cut: Sequence[Box], scale: float, said: bool
) -> None:
    def change(_: int, parts: dict[str, torch.Tensor], cls: Class) -> Class:
        parts["_scale_inv"].fill_(scale)
        return cls

    folder, _ = save(tmp_path / "in", ["float8"], cut, change)
    with formats.open(folder) as source:
        notes = [note for note in source.index.notes if "rounded to bfloat16" in note]
    assert bool(notes) == said


def test_a_scale_that_is_a_bfloat16_is_read(tmp_path: Path) -> None:
    def change(_: int, parts: dict[str, torch.Tensor], cls: Class) -> Class:
        parts["_scale_inv"] = torch.full((1,), 0.0123, dtype=torch.bfloat16)
        return cls

    folder, _ = save(tmp_path / "in", ["float8"], CUTS["rows"], change)
    with formats.open(folder) as source:
        assert str(source.index.tensors["float8._scale_inv"].spec) == "bfloat16 [1]"
        assert any("rounded to bfloat16" in note for note in source.index.notes)


def test_the_dtype_of_all_shards_is_decided_once(tmp_path: Path) -> None:
    """5 arguments and 7: E5M2 up to 2.3, E4M3 from 2.4 on. 8 was never anything but E5M2."""
    shape, boxes = LARGE, CUTS["rows"]

    def folder(name: str, codes: Sequence[int], beside: int | None = None) -> Path:
        cls = CLASSES["float8"]
        grids = draw(cls, *shape)

        def value(code: int, box: Box) -> Any:
            made = cls.object(modules, shard(cls, grids, box), box[1])
            number = modules["transformer_engine_torch"].DType(code)
            arguments = (made.arguments[0], number, *made.arguments[2:5])
            return modules["float8_tensor"].Float8Tensor._make_in_reduce_ex(*arguments)

        with stand_ins() as modules:
            values = {"w": [value(c, box) for c, box in zip(codes, boxes, strict=True)]}
            if beside is not None:
                values["v"] = [value(beside, box) for box in boxes]
            save_shards(tmp_path / name, shape, boxes, values)
        return tmp_path / name

    assert "the integer of the dtype is 7 in" in refused(folder("mixed", [7, 8]))

    def numbers(path: Path) -> set[str | None]:
        with formats.open(path) as source:
            return {e.number for e in object_encodings(source.index.tree).values()}

    assert numbers(folder("open", [7, 7])) == {None}
    # another tensor of the same checkpoint decides it
    assert numbers(folder("new", [7, 7], 8)) == {"float8_e4m3fn", "float8_e5m2"}
    assert numbers(folder("old", [7, 7], 6)) == {"float8_e5m2", "float8_e4m3fn"}
    with formats.open(tmp_path / "old") as source:
        assert object_encodings(source.index.tree)["w"].number == "float8_e5m2"


def test_an_object_without_dimensions_is_one_element(tmp_path: Path) -> None:
    """`new_empty([])` is no empty tensor."""
    cls = CLASSES["float8"]
    with stand_ins() as modules:
        parts = {
            "_data": torch.tensor(7, dtype=torch.uint8),
            "_transpose": torch.tensor(7, dtype=torch.uint8),
            "_scale_inv": torch.ones(1),
        }
        value = cls.object(modules, {**parts, "_transpose": None}, ())
        save_shards(tmp_path / "in", (), [((), ())], {"w": [value]})
    with formats.open(tmp_path / "in") as source:
        specs = {key: str(at.spec) for key, at in source.index.tensors.items()}
    assert specs == {"w._data": "uint8 []", "w._scale_inv": "float32 [1]"}


TO_DENSE = """
id: demo/2/dense
title: Plain weights
why: a test
lineage: demo
edge: ["1", "2"]
keep: [b]
rules:
  - name: rowwise
    from: {weight: "{w}._rowwise_data", scale: "{w}._rowwise_scale_inv"}
    to: "{w}"
    via: [{dequantize: {codec: mxfp8, dtype: bfloat16, form: te, codes: float8_e4m3fn}}]
  - name: columnwise
    from: "{w}._columnwise_{part:data|scale_inv}"
    via: [{drop: {why: the other direction of a product has a copy of its own}}]
"""


def test_a_reader_dequantizes_what_ranks_saved(tmp_path: Path) -> None:
    def small(_: int, parts: dict[str, torch.Tensor], cls: Class) -> Class:
        parts["_rowwise_scale_inv"] = parts["_rowwise_scale_inv"] % 16 + 120
        return cls

    folder, _ = save(tmp_path / "in", ["mxfp8"], CUTS["both"], small)
    grids = draw(CLASSES["mxfp8"], *LARGE)
    (tmp_path / "dense.yaml").write_text(TO_DENSE)
    target = {"mxfp8": torch.zeros(LARGE, dtype=torch.bfloat16), "b": torch.zeros(2)}
    reader = MigratingReader(folder, rules=[tmp_path / "dense.yaml"], allow={"drop"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=reader)
    codes = grids["_rowwise_data"].view(torch.float8_e4m3fn).double()
    scales = grids["_rowwise_scale_inv"] % 16 + 120
    powers = torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    expected = (codes * powers).float().bfloat16()
    assert torch.equal(target["mxfp8"].isnan(), expected.isnan())
    assert torch.equal(target["mxfp8"].nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_what_was_joined_is_written_as_one_object(tmp_path: Path, form: str) -> None:
    names = ["mxfp8-swizzled", "block-1d", "nvfp4"]
    folder, expected = save(tmp_path / "in", names, CUTS["both"])
    keep(tmp_path)
    out = tmp_path / ("out" if form == "dcp" else "out.pt")
    migrate.apply(
        folder, out, rules=[tmp_path / "keep.yaml"], output_format=form, rewrite=form == "dcp"
    )
    with formats.open(out) as source:
        assert source.index.tree is not None
        root = source.index.tree.parts[0].root
        assert {name: root.get(name).encoding.shape for name in names} == dict.fromkeys(
            names, LARGE
        )
    assert migrate.verify(out, source=folder, rules=[tmp_path / "keep.yaml"]).equal
    again = tmp_path / "again.safetensors"
    migrate.apply(out, again, rules=[tmp_path / "keep.yaml"])
    same(load_file(again), {**expected, "b": torch.ones(2)})


def test_a_directory_with_other_names_keeps_the_shards(tmp_path: Path) -> None:
    folder, expected = save(tmp_path / "in", ["mxfp8"], CUTS["rows"])
    text = KEEP.replace('keep: ["{k...}"]', "keep: [b]") + RENAME
    (tmp_path / "rename.yaml").write_text(text)
    migrate.apply(folder, tmp_path / "out", rules=[tmp_path / "rename.yaml"])
    raw = [(path / "__0_0.distcp").read_bytes() for path in (folder, tmp_path / "out")]
    assert raw[0] == raw[1]
    migrate.apply(tmp_path / "out", tmp_path / "o.safetensors", rules=[keep(tmp_path)])
    wanted = {f"new.{key}": value for key, value in expected.items()}
    same(load_file(tmp_path / "o.safetensors"), {**wanted, "b": torch.ones(2)})


RENAME = """rules:
  - name: all
    from: "mxfp8.{k}"
    to: "new.mxfp8.{k}"
"""


def test_shards_in_very_many_places_are_refused() -> None:
    """Of a tensor of three dimensions that is cut in the middle, each row of the first."""
    with formats.open(DATA / "float8_current_e4m3.pt") as source:
        assert source.index.tree is not None
        ((_, value),) = objects_of(source.index.tree.parts[0].root)
    shards = [Shard(value, (0, n, 0), (200_000, 1, 4), "__0_0.distcp") for n in range(2)]
    with pytest.raises(UnjoinableError, match="400,000 places"):
        Joiner({}, lambda _: b"").join((200_000, 2, 4), shards)


def test_shards_that_contradict_themselves_are_refused() -> None:
    """What headers can say and no program writes."""
    with formats.open(DATA / "float8_current_e4m3.pt") as source:
        assert source.index.tree is not None
        ((_, value),) = objects_of(source.index.tree.parts[0].root)
        placed = {
            id(record): Stored(Spec("uint8", (1, 4)), 0, 0, (4, 1))
            for _, record in value.components
        }
    encoding = dataclasses.replace(value.encoding, members=2)
    grouped = dataclasses.replace(value, encoding=encoding)
    empty = [Shard(None, (0, 0), (4, 4), "__0_0.distcp"), Shard(value, (4, 0), (0, 4), "__1_0")]
    with pytest.raises(UnjoinableError, match=r"rank 1 at .* is an object"):
        Joiner({}, lambda _: b"").join((4, 4), empty)
    with pytest.raises(UnjoinableError, match="axis for its members"):
        Joiner({}, lambda _: b"").join((), [Shard(grouped, (), (), "__0_0.distcp")])
    few = [Shard(grouped, (n, 0, 0), (2, 1, 4), f"__{n}_0") for n in (0, 2)]
    with pytest.raises(UnjoinableError, match="stored for 2 members"):
        Joiner(placed, lambda _: b"").join((4, 1, 4), few)
