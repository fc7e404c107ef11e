"""Names of a distributed checkpoint that change while its data files stay as they are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_folders import rows, save
from torch.distributed.checkpoint import FileSystemReader

import migrate
from migrate.core.errors import CheckpointError
from migrate.source.pickle.dcp_emit import emit_metadata
from migrate.source.pickle.dcp_metadata import read_metadata

HEAD = "id: t\ntitle: t\nlineage: t\nedge: [v1, v2]\n"
RENAME = (
    'rules:\n  - {name: r, from: "layers.{i:int}.w", to: "blocks.{i}.weight"}\nkeep: ["{k...}"]\n'
)
COPIED = "only names change"


def rule(folder: Path, text: str) -> Path:
    path = folder / "rule.yaml"
    path.write_text(HEAD + text)
    return path


def state() -> dict[str, Any]:
    model = {f"layers.{n}.w": torch.full((8, 4), float(n)) for n in range(3)}
    model["norm"] = torch.arange(5.0).requires_grad_()
    return {
        "model": model,
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
        "step": 7,
    }


def source(folder: Path, **options: Any) -> Path:
    boxes = {"model.layers.0.w": rows((8, 4), (3, 5))}
    return save(folder / "old", state(), boxes, files=2, **options)


def described(folder: Path) -> Any:
    """What torch wrote, or what was made of it, as torch reads it."""
    found = FileSystemReader(folder).read_metadata()
    if found.storage_meta is not None:
        # torch draws one each time that it reads
        found.storage_meta.load_id = None
    return found


def data(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.distcp"))}


def loaded(folder: Path, target: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(target, storage_reader=FileSystemReader(folder), no_dist=True)
    return target


def test_data_files_stay_and_names_alone_change(tmp_path: Path) -> None:
    old, text = source(tmp_path), rule(tmp_path, RENAME)
    plan = migrate.plan(old, rules=[text])
    assert plan.document["options"]["data"] == "copied"
    assert [file["tensors"] for file in plan.document["target"]["files"]] == [0, 0]
    answer = migrate.apply(old, tmp_path / "new", rules=[text])
    assert [note for note in answer.notes if COPIED in note] == [
        f"{COPIED}: the data files are copied as they are, and .metadata is new"
    ]
    assert data(tmp_path / "new") == data(old)
    # never hard links
    assert {path.stat().st_nlink for path in (tmp_path / "new").iterdir()} == {1}
    was, now = described(old), described(tmp_path / "new")
    names = {
        key: key.replace("layers", "blocks").replace(".w", ".weight") for key in was.planner_data
    }
    assert list(now.state_dict_metadata) == [names[key] for key in was.planner_data]
    assert now.state_dict_metadata == {
        names[key]: entry for key, entry in was.state_dict_metadata.items()
    }
    assert {(names[i.fqn], i.offset): place for i, place in was.storage_data.items()} == {
        (i.fqn, i.offset): place for i, place in now.storage_data.items()
    }
    assert now.storage_meta == was.storage_meta
    assert now.state_dict_metadata["model.norm"].properties.requires_grad
    target = {
        "model": {"blocks.0.weight": torch.ones(8, 4), "norm": torch.empty(5)},
        "optimizer": {"param_groups": [{"lr": 0, "betas": None}]},
        "step": 0,
    }
    filled = loaded(tmp_path / "new", target)
    assert torch.equal(filled["model"]["blocks.0.weight"], state()["model"]["layers.0.w"])
    assert (filled["step"], filled["optimizer"]) == (7, state()["optimizer"])
    migrate.downgrade(tmp_path / "new", tmp_path / "back", rules=[text])
    assert described(tmp_path / "back") == was
    assert data(tmp_path / "back") == data(old)
    assert migrate.verify(tmp_path / "new", source=old, rules=[text]).equal
    assert migrate.diff(old, tmp_path / "back").equal


def test_values_get_other_names_too(tmp_path: Path) -> None:
    """As those of a flattened optimizer do, of which many are equal."""
    optimizer: dict[str, Any] = {}
    for number, lr in enumerate((0.1, 0.1, -0.0, 0.0, float("nan"))):
        optimizer[f"state.{number}.w.exp_avg"] = torch.full((2,), float(number))
        optimizer[f"param_groups.{number}.w.lr"] = lr
        optimizer[f"param_groups.{number}.w.fused"] = None if number else True
        optimizer[f"param_groups.{number}.w.betas"] = (0.9, 0.9 + number)
    old = save(tmp_path / "old", {"model": {"w": torch.ones(3)}, "optimizer": optimizer})
    text = 'rules:\n  - {name: r, from: "state.{i:int}.w.{s}", to: "state.{i+1}.w.{s}"}\n'
    answer = migrate.apply(old, tmp_path / "new", rules=[rule(tmp_path, text)], at="optimizer")
    assert [note for note in answer.notes if COPIED in note]
    assert data(tmp_path / "new") == data(old)
    target = {
        "model": {"w": torch.empty(3)},
        "optimizer": {
            name.replace(f".{n}.", f".{n + 1}."): torch.empty(2) if "exp_avg" in name else 7
            for n in range(5)
            for name in optimizer
            if f".{n}." in name
        },
    }
    filled = loaded(tmp_path / "new", target)["optimizer"]
    for number in range(5):
        moments = filled[f"state.{number + 1}.w.exp_avg"]
        assert torch.equal(moments, optimizer[f"state.{number}.w.exp_avg"])
        for name in ("lr", "fused", "betas"):
            was = optimizer[f"param_groups.{number}.w.{name}"]
            assert repr(filled[f"param_groups.{number + 1}.w.{name}"]) == repr(was)


OBJECTS = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("name", ["te/tensors/mxfp8_96x160", "torchao/float8_row"])
def test_objects_made_of_tensors_get_other_names_too(name: str, tmp_path: Path) -> None:
    """Their archives stay as they are, whatever the objects are made of."""
    source, old, new = OBJECTS / f"{name}.pt", tmp_path / "old", tmp_path / "new"
    migrate.apply(source, old, output_format="dcp")
    assert migrate.inspect(old).objects
    text = rule(tmp_path, 'rules:\n  - {name: r, from: "{k...}", to: "blocks.{k}"}\n')
    answer = migrate.apply(old, new, rules=[text])
    assert [note for note in answer.notes if COPIED in note]
    assert data(new) == data(old)
    was, now = described(old), described(new)
    assert [f"blocks.{key}" for key in was.state_dict_metadata] == list(now.state_dict_metadata)
    migrate.apply(old, tmp_path / "written", rules=[text], rewrite=True)
    assert migrate.diff(new, tmp_path / "written").equal
    migrate.downgrade(new, tmp_path / "back", rules=[text])
    assert data(tmp_path / "back") == data(old)
    assert migrate.diff(old, tmp_path / "back").equal


def test_the_same_names_may_be_written_into_new_files(tmp_path: Path) -> None:
    old, text = source(tmp_path), rule(tmp_path, RENAME)
    answer = migrate.apply(old, tmp_path / "new", rules=[text], rewrite=True)
    assert not [note for note in answer.notes if COPIED in note]
    assert data(tmp_path / "new") != data(old)
    other = migrate.apply(old, tmp_path / "copied", rules=[text])
    assert other.digest != answer.digest
    assert migrate.diff(tmp_path / "new", tmp_path / "copied").equal


@pytest.mark.parametrize(
    "text",
    [
        '{name: s, from: "layers.{i:int}.w", to: s, via: [{stack: {over: i}}]}',
        '{name: c, from: norm, to: "t{n:int}", via: [{tie: {into: n, count: 2}}]}',
    ],
    ids=["stacked", "copied"],
)
def test_a_rule_that_does_more_than_rename_writes_new_files(tmp_path: Path, text: str) -> None:
    old = source(tmp_path)
    text = f'rules:\n  - {text}\nkeep: ["{{k...}}"]\n'
    plan = migrate.plan(old, rules=[rule(tmp_path, text)])
    assert "data" not in plan.document["options"]


def dropping(share: float) -> dict[str, Any]:
    """A model of which `secret` is so much of the data."""
    secret = torch.full((int(share * 100_000),), 0x5EC7E7, dtype=torch.int32)
    return {"model": {"w": torch.zeros(100_000 - len(secret), dtype=torch.int32), "secret": secret}}


DROP = """rules:
  - {name: r, from: w, to: v}
  - {name: d, from: secret, via: [{drop: {why: unused}}]}
"""


@pytest.mark.parametrize(("share", "copied"), [(0.05, True), (0.2, False)])
def test_what_is_dropped_stays_without_a_name_where_it_is_little(
    tmp_path: Path, share: float, copied: bool
) -> None:
    old, text = save(tmp_path / "old", dropping(share)), rule(tmp_path, DROP)
    answer = migrate.apply(old, tmp_path / "new", rules=[text], allow=["drop"])
    (content,) = data(tmp_path / "new").values()
    held = (0x5EC7E7).to_bytes(4, "little") in content
    assert held is copied
    unnamed = described(old).storage_data
    (nbytes,) = (p.length for i, p in unnamed.items() if i.fqn == "model.secret")
    said = [note for note in answer.notes if "belong to no entry" in note]
    assert [note.partition(" bytes")[0] for note in said] == [f"{nbytes:,}"] * copied
    rewritten = migrate.apply(old, tmp_path / "other", rules=[text], allow=["drop"], rewrite=True)
    assert not [note for note in rewritten.notes if "belong to no entry" in note]
    assert (0x5EC7E7).to_bytes(4, "little") not in b"".join(data(tmp_path / "other").values())


class Opaque:
    """A class that no allow-list knows; it holds a text that can be looked for."""

    def __init__(self) -> None:
        self.text = "a secret word"


def test_what_was_not_read_is_never_copied(tmp_path: Path) -> None:
    old = save(tmp_path / "old", {"model": {"w": torch.zeros(100_000)}, "args": Opaque()})
    text = rule(tmp_path, "rules:\n  - {name: r, from: w, to: v}\n")
    migrate.apply(old, tmp_path / "new", rules=[text], allow=["opaque"])
    assert b"a secret word" in b"".join(data(old).values())
    assert b"a secret word" not in b"".join(data(tmp_path / "new").values())


def test_the_checksum_of_each_chunk_is_compared(tmp_path: Path) -> None:
    old, text = source(tmp_path), rule(tmp_path, RENAME)
    wanted = torch.full((4,), 2.0).numpy().tobytes()
    (path,) = (path for path in old.glob("*.distcp") if wanted in path.read_bytes())
    content = bytearray(path.read_bytes())
    content[content.rindex(wanted)] ^= 1
    path.write_bytes(content)
    named = rf"{path.name}: the data of layers\.2\.w: its 128 bytes .* CRC-32"
    with pytest.raises(CheckpointError, match=named):
        migrate.apply(old, tmp_path / "new", rules=[text])
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_without_paths_stays_without(tmp_path: Path) -> None:
    old = save(tmp_path / "old", {"layers.0.w": torch.zeros(2), "n": 3})
    sizes = {path.name: path.stat().st_size for path in old.glob("*.distcp")}
    held = read_metadata((old / ".metadata").read_bytes(), ".metadata", sizes)
    (old / ".metadata").write_bytes(
        emit_metadata(type(held)(held.tensors, held.bytes, None, held.files, None, False))
    )
    migrate.apply(old, tmp_path / "new", rules=[rule(tmp_path, RENAME)])
    now = described(tmp_path / "new")
    assert now.planner_data is None
    assert list(now.state_dict_metadata) == ["blocks.0.weight", "n"]
    assert data(tmp_path / "new") == data(old)


def test_metadata_that_is_replaced_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.running import prepare

    old, text = source(tmp_path), rule(tmp_path, RENAME)
    find = prepare.find_path

    def late(*arguments: Any, **options: Any) -> Any:
        content = (old / ".metadata").read_bytes()
        (old / "other").write_bytes(content)
        os.replace(old / "other", old / ".metadata")
        return find(*arguments, **options)

    monkeypatch.setattr(prepare, "find_path", late)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        migrate.apply(old, tmp_path / "new", rules=[text])
    assert not (tmp_path / "new").exists()


def test_a_killed_copy_is_resumed(tmp_path: Path) -> None:
    """Whole files go through the tiles and the journal of any run."""
    big = {"layers.0.w": torch.arange(6_000_000.0), "layers.1.w": torch.arange(10.0)}
    old, text = save(tmp_path / "old", {"model": big}, files=2), rule(tmp_path, RENAME)

    class Stop(BaseException):
        pass

    def progress(done: int, total: int) -> None:
        if done > total // 3:
            raise Stop

    with pytest.raises(Stop):
        migrate.apply(old, tmp_path / "new", rules=[text], progress=progress, threads=1)
    seen: Mapping[str, Any] = {path.name: path for path in tmp_path.iterdir()}
    assert "new.migrate-partial" in seen
    answer = migrate.apply(old, tmp_path / "new", rules=[text], resume=True)
    assert answer.bytes_written < sum(map(len, data(old).values()))
    assert data(tmp_path / "new") == data(old)
