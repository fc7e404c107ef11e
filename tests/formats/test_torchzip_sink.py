"""What is written as .pt: bytes as torch's own writer lays them out, checksums, the stamp, ties,
and a run that goes on.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import migrate
from migrate.core.errors import CheckpointError, RunError
from migrate.running import tiles

HEAD = "id: demo/2/x\ntitle: x\nlineage: demo\nedge: ['1', '2']\n"


def write(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def large(seed: int = 0) -> dict[str, torch.Tensor]:
    """About 14 MB in tensors of every size."""
    torch.manual_seed(seed)
    sizes = [1, 0, 17, 1_500_000, 5, 1_048_576, 64, 1_000_003]
    return {
        f"w.{i}": torch.randint(0, 255, (n,), dtype=torch.uint8).repeat(1 + 3 * (n > 10**6))
        for i, n in enumerate(sizes)
    }


def records(path: Path) -> dict[str, tuple[int, bytes]]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {
            info.filename.partition("/")[2]: (info.CRC, archive.read(info))
            for info in archive.infolist()
        }


def test_a_written_archive_is_sound_and_its_data_is_aligned_for_torch_to_map(
    tmp_path: Path,
) -> None:
    migrate.apply(write(tmp_path / "in.pt", large()), tmp_path / "out.pt", output_format="torch")
    found = records(tmp_path / "out.pt")
    names = list(found)
    assert names[:4] == ["data.pkl", ".format_version", ".storage_alignment", "byteorder"]
    assert names[4:12] == [f"data/{i}" for i in range(8)]
    assert names[12:] == ["version", "migrate.history.json"]
    mapped = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert all(t.data_ptr() % 64 == 0 for t in mapped.values() if t.numel())
    assert all(torch.equal(mapped[key], tensor) for key, tensor in large().items())


def test_the_storages_lie_where_torch_itself_would_have_put_them(tmp_path: Path) -> None:
    """Newer readers work the offsets out from sizes instead of reading them."""
    migrate.apply(write(tmp_path / "in.pt", large()), tmp_path / "out.pt", output_format="torch")
    reader = torch._C.PyTorchFileReader(str(tmp_path / "out.pt"))
    told = {f"data/{i}": reader.get_record_offset(f"data/{i}") for i in range(8)}
    raw = (tmp_path / "out.pt").read_bytes()
    for i, tensor in enumerate(large().values()):
        assert raw[told[f"data/{i}"] :][: tensor.nbytes] == tensor.numpy().tobytes()
    from torch.utils.serialization import config

    with config.patch({"load.calculate_storage_offsets": True}):
        found = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert all(torch.equal(found[key], tensor) for key, tensor in large().items())


@pytest.mark.parametrize("threads", [1, 4])
def test_the_bytes_do_not_depend_on_the_threads(threads: int, tmp_path: Path) -> None:
    source = write(tmp_path / "in.pt", large())
    one = migrate.apply(source, tmp_path / "one.pt", output_format="torch", threads=2)
    other = migrate.apply(source, tmp_path / "other.pt", output_format="torch", threads=threads)
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "other.pt").read_bytes()
    hashes = [
        [f["xxh3_128"] for f in answer.to_json()["files"].values()] for answer in (one, other)
    ]
    import xxhash

    assert (
        hashes[0] == hashes[1] == [xxhash.xxh3_128((tmp_path / "one.pt").read_bytes()).hexdigest()]
    )


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_run_that_stopped_goes_on_to_the_same_bytes(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.pt", large())
    migrate.apply(source, tmp_path / "whole.pt", output_format="torch")
    claimed, claim = [], tiles.Partial.claim

    def failing(self: Any, *arguments: Any) -> None:
        if len(claimed) == stop:
            raise OSError(5, "Input/output error")
        claimed.append(arguments)
        claim(self, *arguments)

    monkeypatch.setattr(tiles.Partial, "claim", failing)
    with pytest.raises(RunError):
        migrate.apply(source, tmp_path / "out.pt", output_format="torch")
    monkeypatch.setattr(tiles.Partial, "claim", claim)
    answer = migrate.apply(source, tmp_path / "out.pt", output_format="torch", resume=True)
    assert (answer.bytes_written < (tmp_path / "out.pt").stat().st_size) == (stop > 0)
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()


def damaged(path: Path, key: str) -> Path:
    """Turns one bit of the storage of `key` over."""
    from migrate import formats

    source = formats.open(path)
    at = source.index.tensors[key].offset
    source.close()
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
def test_a_bit_that_turned_in_the_source_is_noticed(out: str, tmp_path: Path) -> None:
    source = damaged(write(tmp_path / "in.pt", large()), "w.3")
    torch.load(source, weights_only=True)
    with pytest.raises(CheckpointError) as caught:
        migrate.apply(
            source, tmp_path / out, output_format="torch" if out.endswith("pt") else "safetensors"
        )
    assert [d.code for d in caught.value.diagnostics] == ["M942"]
    assert "data/3" in caught.value.diagnostics[0].message
    assert sorted(os.listdir(tmp_path)) == ["in.pt"]


def test_a_bit_that_turned_in_what_a_rule_cuts_up_is_noticed(tmp_path: Path) -> None:
    source = damaged(write(tmp_path / "in.pt", {"a": torch.ones(4, 6), "b": torch.zeros(3)}), "a")
    rule = tmp_path / "r.yaml"
    rule.write_text(
        HEAD
        + 'keep: ["b"]\nrules:\n  - {name: t, from: a, to: c, via: [{transpose: {dims: [0, 1]}}]}\n'
    )
    with pytest.raises(CheckpointError) as caught:
        migrate.apply(source, tmp_path / "out.pt", rules=[rule])
    assert [d.code for d in caught.value.diagnostics] == ["M942"]


def test_verify_notices_a_record_whose_checksum_is_wrong(tmp_path: Path) -> None:
    source = write(tmp_path / "in.pt", large())
    migrate.apply(source, tmp_path / "out.pt", output_format="torch")
    damaged(tmp_path / "out.pt", "w.3")
    with pytest.raises(CheckpointError) as caught:
        migrate.verify(tmp_path / "out.pt", source=source)
    assert [d.code for d in caught.value.diagnostics] == ["M942"]


RULES = """keep: ["{k...}.bias"]
lineage: demo
edge: ["1", "2"]
id: demo/2/rename
title: rename
rules:
  - {name: r, from: "{p...}.weight", to: "{p}.kernel"}
"""


def pack(folder: Path) -> Path:
    (folder / "rules" / "demo" / "2").mkdir(parents=True)
    (folder / "rules" / "demo" / "layouts.yaml").write_text(
        'lineage: demo\ntitle: demo\nordered: true\nlayouts:\n  "1": {title: one, status: '
        'supported, detect: {present: "{p...}.weight"}}\n'
        '  "2": {title: two, status: current, detect: {present: "{p...}.kernel"}}\n'
    )
    (folder / "rules" / "demo" / "2" / "rename.yaml").write_text(RULES)
    return folder / "rules"


def test_the_stamp_is_a_record_of_the_archive_and_the_way_back_restores_all(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3))
    source = write(tmp_path / "in.pt", {"model": model.state_dict(), "epoch": 3})
    rules = pack(tmp_path)
    migrate.apply(source, tmp_path / "new.pt", to="demo@2", rules=[rules])
    made = torch.load(tmp_path / "new.pt", weights_only=True)
    assert list(made["model"]) == ["0.kernel", "0.bias", "1.kernel", "1.bias"]
    assert made["epoch"] == 3
    assert migrate.history(tmp_path / "new.pt").to_json()["layouts"] == {"demo": "2"}
    assert migrate.verify(tmp_path / "new.pt", source=source, rules=[rules]).equal
    migrate.downgrade(tmp_path / "new.pt", tmp_path / "back.pt", rules=[rules])
    assert migrate.diff(source, tmp_path / "back.pt").equal
    again = torch.load(tmp_path / "back.pt", weights_only=True)["model"]
    assert list(again) == list(model.state_dict())
    assert again._metadata == model.state_dict()._metadata


def test_versions_of_modules_follow_the_names(tmp_path: Path) -> None:
    state = torch.nn.Sequential(
        torch.nn.BatchNorm1d(2), torch.nn.ReLU(), torch.nn.Linear(2, 2)
    ).state_dict()
    rule = tmp_path / "r.yaml"
    rule.write_text(HEAD + 'rules:\n  - {name: r, from: "{n:int}.{k...}", to: "net.{n}.{k}"}\n')
    migrate.apply(write(tmp_path / "in.pt", state), tmp_path / "out.pt", rules=[rule])
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert made._metadata == {
        "": {"version": 1},
        "net.0": {"version": 2},
        "1": {"version": 1},
        "net.2": {"version": 1},
    }


def test_ties_are_kept_made_and_undone_as_the_rules_say(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    source = write(tmp_path / "in.pt", {"a": weight, "b": weight, "c": torch.ones(2)})
    rule = tmp_path / "r.yaml"
    rule.write_text(
        HEAD
        + 'keep: ["{k:a|b}"]\nrules:\n  - {name: t, from: c, to: "{k:x|y}", via: [{tie: {into: '
        "k}}]}\n"
    )
    migrate.apply(source, tmp_path / "out.pt", rules=[rule])
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert made["a"].data_ptr() == made["b"].data_ptr()
    assert made["x"].data_ptr() == made["y"].data_ptr() != made["a"].data_ptr()
    assert len([n for n in records(tmp_path / "out.pt") if n.startswith("data/")]) == 2


def test_ties_that_were_torn_apart_meanwhile_are_not_tied_again(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    migrate.apply(
        write(tmp_path / "in.pt", {"a": weight, "b": weight}),
        tmp_path / "st",
        output_format="safetensors",
    )
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "st" / "model.safetensors")
    tensors["b"] += 1
    save_file(tensors, tmp_path / "st" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        migrate.apply(tmp_path / "st", tmp_path / "out.pt")
    assert [d.code for d in caught.value.diagnostics] == ["M404"]


def test_shards_are_written_with_an_index_and_ties_stay_together(tmp_path: Path) -> None:
    weight = torch.ones(100)
    state = {
        **{f"l.{i}": torch.full((100,), float(i)) for i in range(5)},
        "tied": weight,
        "z": weight,
    }
    migrate.apply(
        write(tmp_path / "in.pt", state),
        tmp_path / "out",
        output_format="torch",
        max_shard_size=900,
    )
    names = sorted(p.name for p in (tmp_path / "out").glob("*.bin"))
    assert names[0] == "pytorch_model-00001-of-00003.bin"
    found: dict[str, torch.Tensor] = {}
    for name in names:
        found.update(torch.load(tmp_path / "out" / name, weights_only=True))
    assert found.keys() == state.keys()
    assert found["tied"].data_ptr() == found["z"].data_ptr()
    assert migrate.diff(tmp_path / "in.pt", tmp_path / "out").equal


def test_one_safetensors_file_holds_what_is_text_and_refuses_what_is_not(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    migrate.apply(
        write(tmp_path / "a.pt", {"model": state, "epoch": 1}), tmp_path / "a.safetensors"
    )
    migrate.apply(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt", weights_only=True)["epoch"] == 1
    nested = write(tmp_path / "c.pt", {"model": state, "rng": torch.ones(2), "epoch": 1})
    with pytest.raises(CheckpointError) as caught:
        migrate.apply(nested, tmp_path / "c.safetensors")
    assert [d.code for d in caught.value.diagnostics] == ["M916"]
    answer = migrate.apply(nested, tmp_path / "c.safetensors", allow=["drop"])
    assert any("dropped" in note and "/rng" in note for note in answer.to_json()["notes"])
    assert migrate.inspect(tmp_path / "c.safetensors").to_json()["items"] == []


def test_items_written_for_other_tensors_are_left_alone(tmp_path: Path) -> None:
    migrate.apply(
        write(tmp_path / "in.pt", {"model": {"w": torch.ones(2)}, "epoch": 1}),
        tmp_path / "st",
        output_format="safetensors",
    )
    from safetensors.torch import save_file

    save_file(
        {"v": torch.ones(2)}, tmp_path / "st" / "model.safetensors", metadata={"format": "pt"}
    )
    found = migrate.inspect(tmp_path / "st")
    assert found.to_json()["items"] == []
    assert any("other tensors" in note for note in found.to_json()["notes"])


def test_a_state_dict_in_memory_is_written_with_its_plain_values_and_ties(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    state = {"a": weight, "b": weight, "epoch": 3, "args": {"lr": (0.1, None), "names": {"x"}}}
    migrate.apply(state, tmp_path / "out.pt", output_format="torch")
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert made["a"].data_ptr() == made["b"].data_ptr()
    assert {key: made[key] for key in ("epoch", "args")} == {
        key: state[key] for key in ("epoch", "args")
    }
    with pytest.raises(CheckpointError, match="plain values only") as caught:
        migrate.apply({**state, "path": Path("x")}, tmp_path / "no.pt", output_format="torch")
    assert [d.code for d in caught.value.diagnostics] == ["M916"]


def test_tensors_that_share_a_part_of_their_bytes_are_written_apart_and_that_is_said(
    tmp_path: Path,
) -> None:
    base = torch.arange(10.0)
    answer = migrate.apply(
        write(tmp_path / "in.pt", {"a": base, "b": base[2:5], "c": torch.ones(1)}),
        tmp_path / "out.pt",
        output_format="torch",
    )
    assert answer.to_json()["notes"] == [
        "2 tensors share a part of their memory with another one; each is written apart"
    ]
    assert len([n for n in records(tmp_path / "out.pt") if n.startswith("data/")]) == 3
