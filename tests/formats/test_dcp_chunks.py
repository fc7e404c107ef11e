"""An archive that is recognised by its bytes is read as the general reader reads it."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import rows, save, tensor_of
from marks import thorough

from migrate import formats
from migrate.core.errors import CheckpointError
from migrate.formats import _dcpchunks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DATA = Path(__file__).parents[1] / "data" / "dcp"
RECORDED = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())


def chunked() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    state = {f"w{number}": torch.rand((6, 4), generator=g) for number in range(3)}
    state |= {f"t{number}": torch.rand((4, 6), generator=g).t() for number in range(2)}
    # larger than what is read at once
    state |= {f"large{number}": torch.rand((64, 64), generator=g) for number in range(2)}
    state |= {f"none{number}": torch.ones(0, 3) for number in range(2)}
    return state


def opened(folder: Path) -> Any:
    """What an index says, or what it is refused with."""
    try:
        with formats.open(folder) as source:
            index = source.index
            leaves = {} if index.tree is None else dict(index.tree.parts[0].root.pairs)
            records = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, tuple)}
            return dict(index.tensors), index.sums(), index.notes, records
    except CheckpointError as error:
        return [(d.code, d.message) for d in error.diagnostics]


class Counted:
    """How many archives were recognised, and how many asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.yes = self.no = 0
        recognise = _dcpchunks.recognise

        def counting(*given: Any) -> int:
            found = recognise(*given)
            self.yes += found >= 0
            self.no += found < 0
            return found

        monkeypatch.setattr(_dcpchunks, "recognise", counting)


def by_the_general_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(_dcpchunks, "recognise", lambda *given: -1)
        return opened(folder)


@pytest.mark.parametrize("release", RECORDED)
def test_archives_of_other_releases(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_the_general_reader(DATA / release, monkeypatch)
    counted = Counted(monkeypatch)
    assert opened(DATA / release) == expected
    # b and c after a, half2 after half, none2 after none; t is as long as a, and another form
    assert (counted.yes, counted.no) == (4, 1)
    g = torch.Generator().manual_seed(7)
    with formats.open(DATA / release) as source:
        for name in ("a", "b", "c"):
            found = tensor_of(source, source.index.tensors[name])
            assert torch.equal(found, torch.rand((3, 5), generator=g))
        assert source.index.items == {
            "optimizer.param_groups.0.lr": 0.1,
            "optimizer.param_groups.0.betas.0": 0.9,
            "optimizer.param_groups.0.betas.1": 0.95,
            "step": 7,
        }


@pytest.mark.parametrize("alignment", [64, 1, 4096])
def test_archives_of_this_torch(
    tmp_path: Path, alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.serialization import config

    state = chunked()
    cut = {f"w{number}": rows((6, 4), [3, 3]) for number in range(3)}
    with config.patch("save.storage_alignment", alignment):
        folder = save(tmp_path / "c", state, cut)
    expected = by_the_general_reader(folder, monkeypatch)
    counted = Counted(monkeypatch)
    assert opened(folder) == expected
    assert (counted.yes, counted.no) == (5 + 1 + 1 + 1, 0)
    with formats.open(folder) as source:
        for key, tensor in state.items():
            assert torch.equal(tensor_of(source, source.index.tensors[key]), tensor)


def test_archives_without_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        folder = save(tmp_path / "c", chunked())
    finally:
        torch.serialization.set_crc32_options(True)
    expected = by_the_general_reader(folder, monkeypatch)
    assert opened(folder) == expected
    assert expected[1] == {}
    assert "stored chunks have no checksum" in expected[2][0]


def test_archives_that_were_saved_to_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls the folder in an archive after the file; a stream has no name."""
    real = torch.save
    names = iter(range(1000))

    def to_a_path(value: Any, stream: io.BytesIO, **options: Any) -> None:
        path = tmp_path / f"part{next(names) % 2}.pt"
        real(value, path, **options)
        stream.write(path.read_bytes())

    monkeypatch.setattr(torch, "save", to_a_path)
    folder = save(tmp_path / "c", chunked())
    expected = by_the_general_reader(folder, monkeypatch)
    counted = Counted(monkeypatch)
    assert opened(folder) == expected
    assert counted.no > 0


@pytest.mark.parametrize("seed", thorough(range(8)))
def test_a_changed_archive_is_read_as_the_general_reader_reads_it(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{number}": torch.full((2, 3), float(number)) for number in range(2)}
    whole = save(tmp_path / "c", state)
    data = (whole / "__0_0.distcp").read_bytes()
    # the second of two alike archives
    half = len(data) // 2
    folder = tmp_path / "changed"
    folder.mkdir()
    shutil.copy(whole / ".metadata", folder)
    taken = 0
    for at in range(half + seed, len(data), 8):
        raw = bytearray(data)
        raw[at] ^= 1 << (at % 8)
        (folder / "__0_0.distcp").write_bytes(raw)
        found = opened(folder)
        assert found == by_the_general_reader(folder, monkeypatch), at - half
        taken += not isinstance(found, list)
    # the elements, and padding
    assert taken > 0
