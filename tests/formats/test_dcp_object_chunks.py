"""Quantized tensors that are objects, written for ranks: each chunk an object with its padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import quantized_classes as classes
import quantized_ranks
import torch
from quantized_ranks import KINDS, piece, tensors
from ranks import Ranks
from stored_objects import NAMES, chunks, raw, saved

import migrate
from migrate.core.errors import MigrateError

Start = Callable[[int], Ranks]


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Gives kinds shapes that equal parts for so many ranks cut on borders of blocks."""

    def fit(world: int) -> None:
        quantized_ranks._drawn.cache_clear()
        for name, kind in KINDS.items():
            shape = (kind.unit * world * 2, *kind.shape[1:])
            monkeypatch.setitem(KINDS, name, dataclasses.replace(kind, shape=shape))

    yield fit
    monkeypatch.undo()
    quantized_ranks._drawn.cache_clear()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_each_chunk_is_the_object_that_a_rank_would_have(
    world: int, tmp_path: Path, fitting: Callable[[int], None]
) -> None:
    fitting(world)
    source = saved(tmp_path / "whole.pt", NAMES)
    migrate.apply(source, tmp_path / "out", output_format="dcp", chunks=world)
    for name in NAMES:
        kind = KINDS[name]
        each = kind.shape[0] // world
        with classes.installed():
            found = chunks(tmp_path / "out", f"model.{name}")
        assert [(one.file, one.at[0]) for one in found] == [
            (f"__{n}_0.distcp", n * each) for n in range(world)
        ]
        for (first, *_), value, _ in found:
            box = ((first, first + each), *((0, n) for n in kind.shape[1:]))
            due = tensors(name, piece(name, box, zeros=True))
            assert tuple(value.shape) == (each, *kind.shape[1:])
            assert value.held().keys() == due.keys()
            for part, one in due.items():
                assert value.held()[part].shape == one.shape, (name, part)
                assert raw(value.held()[part]) == raw(one), (name, part)
    # read again they are the whole tensors
    assert migrate.verify(tmp_path / "out", source=source).equal
    migrate.apply(tmp_path / "out", tmp_path / "back.pt", output_format="torch")
    assert migrate.diff(tmp_path / "back.pt", source).equal


def test_a_tensor_that_is_cut_inside_of_a_block_is_refused_by_name(tmp_path: Path) -> None:
    source = saved(tmp_path / "whole.pt", ["te-block-2d", "te-float8"])
    with pytest.raises(MigrateError) as caught:
        migrate.apply(source, tmp_path / "out", output_format="dcp", chunks=2)
    (found,) = caught.value.diagnostics
    assert found.code == "M946"
    assert "model.te-block-2d: row 755 lies inside a block of 128 rows" in found.render()
    assert "te-float8" not in found.render()
    # as one chunk it is written whole
    migrate.apply(source, tmp_path / "out", output_format="dcp")
    assert migrate.verify(tmp_path / "out", source=source).equal


def test_chunks_of_ranks_are_cut_for_other_ranks_and_in_another_form(tmp_path: Path) -> None:
    names = ["te-mxfp8"]
    source = saved(tmp_path / "whole.pt", names)
    migrate.apply(source, tmp_path / "four", output_format="dcp", chunks=4)
    params = {"object_form": "te-2.16"}
    migrate.apply(tmp_path / "four", tmp_path / "three", chunks=3, params=params)
    with classes.installed():
        found = chunks(tmp_path / "three", "model.te-mxfp8")
        assert [one.at[0] for one in found] == [0, 128, 256]
        assert {type(one.value._fp8_dtype).__module__ for one in found} == {
            "transformer_engine_torch"
        }
        joined = torch.cat([one.value.dequantize() for one in found])
        due = torch.load(source)["model"]["te-mxfp8"].dequantize()
        # some of the numbers are NaN
        assert torch.equal(joined.view(torch.int16), due.view(torch.int16))


def test_members_of_a_group_are_dealt_out_to_ranks(tmp_path: Path) -> None:
    source = saved(tmp_path / "whole.pt", ["te-grouped"])
    migrate.apply(source, tmp_path / "out", output_format="dcp", chunks=3)
    with classes.installed():
        found = chunks(tmp_path / "out", "model.te-grouped")
    assert [(one.value.num_tensors, one.value.shape[0]) for one in found] == [
        (4, 4),
        (4, 4),
        (3, 3),
    ]
    assert migrate.verify(tmp_path / "out", source=source).equal


@pytest.mark.ranks
def test_stock_torch_loads_the_chunks_on_so_many_ranks(ranks: Start, tmp_path: Path) -> None:
    source = saved(tmp_path / "whole.pt", ["te-mxfp8", "te-float8"])
    migrate.apply(source, tmp_path / "out", output_format="dcp", chunks=2)
    ranks(2).run("quantized_load_case", "stock", str(tmp_path / "out"))
