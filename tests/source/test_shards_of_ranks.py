"""Checkpoints that several ranks wrote: which files are theirs, what keys are called, and how files
are called on the way out.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from migrate import formats
from migrate.core.errors import MigrateError
from migrate.core.spec import spec
from migrate.formats.safetensors import describe
from migrate.source.shards import Naming, by_rank, naming


def save(path: Path, **tensors: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            name.replace("__", "."): torch.full((2,), value, dtype=torch.int64)
            for name, value in tensors.items()
        },
        path,
    )


def held(path: Path) -> dict[str, int]:
    """key -> the number that all its elements are."""
    source = formats.open(path)
    out = {}
    for key, stored in source.index.tensors.items():
        buffer = bytearray(stored.spec.nbytes)
        source.blobs[stored.blob].readinto(stored.offset, memoryview(buffer))
        out[key] = int.from_bytes(buffer[:8], "little")
    source.close()
    return out


def refused(path: Path, code: str) -> str:
    with pytest.raises(MigrateError) as caught:
        formats.open(path)
    assert [d.code for d in caught.value.diagnostics] == [code], str(caught.value)
    assert caught.value.exit_code == 3
    return caught.value.diagnostics[0].message


def test_a_key_of_several_files_has_its_rank_and_one_of_the_first_file_alone_has_none(
    tmp_path: Path,
) -> None:
    save(tmp_path / "consolidated.00.safetensors", both__w=0, first__w=1)
    save(tmp_path / "consolidated.01.safetensors", both__w=10, second__w=11)
    (tmp_path / "params.json").write_text("{}")
    assert held(tmp_path) == {"both.w@0": 0, "first.w": 1, "both.w@1": 10, "second.w@1": 11}
    source = formats.open(tmp_path)
    assert source.index.files == ("consolidated.00.safetensors", "consolidated.01.safetensors")
    assert [f.path for f in source.index.side_files] == ["params.json"]
    assert source.index.left_out == ()
    source.close()


def test_ranks_are_ordered_by_number_beyond_two_digits(tmp_path: Path) -> None:
    for rank in range(101):
        save(tmp_path / f"consolidated.{rank:02}.safetensors", w=rank)
    assert held(tmp_path) == {f"w@{rank}": rank for rank in range(101)}


def test_the_file_of_a_single_rank_is_a_checkpoint_like_others(tmp_path: Path) -> None:
    save(tmp_path / "consolidated.00.safetensors", a__w=1)
    assert held(tmp_path) == {"a.w": 1}


@pytest.mark.parametrize("name", ["model.safetensors", "model_states.safetensors"])
def test_a_folder_for_each_rank_holds_one_file(tmp_path: Path, name: str) -> None:
    for rank in range(2):
        save(tmp_path / f"mp_rank_{rank:02}" / name, w=rank)
        (tmp_path / f"mp_rank_{rank:02}" / "args.json").write_text("{}")
    assert held(tmp_path) == {"w@0": 0, "w@1": 1}
    source = formats.open(tmp_path)
    assert source.index.files == (f"mp_rank_00/{name}", f"mp_rank_01/{name}")
    assert [f.path for f in source.index.side_files] == [
        "mp_rank_00/args.json",
        "mp_rank_01/args.json",
    ]
    source.close()


def sharded(folder: Path, start: int, index: bool) -> None:
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    save(folder / names[0], a=start)
    save(folder / names[1], b=start + 1)
    if index:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict(zip("ab", names, strict=True))})
        )


@pytest.mark.parametrize("index", [True, False])
def test_a_folder_for_each_rank_holds_shards(tmp_path: Path, index: bool) -> None:
    for rank in range(2):
        sharded(tmp_path / f"mp_rank_{rank:02}", 10 * rank, index)
    assert held(tmp_path) == {"a@0": 0, "b@0": 1, "a@1": 10, "b@1": 11}
    source = formats.open(tmp_path)
    assert source.index.left_out == ()
    source.close()
    (tmp_path / "mp_rank_01" / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refused(tmp_path, "M908")


def test_an_index_of_one_rank_that_disagrees_with_its_files_is_refused_by_its_path(
    tmp_path: Path,
) -> None:
    for rank in range(2):
        sharded(tmp_path / f"mp_rank_{rank:02}", 10 * rank, True)
    wrong = {
        "a": "model-00002-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00001-of-00002.safetensors",
    }
    (tmp_path / "mp_rank_01" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": wrong})
    )
    with pytest.raises(MigrateError) as caught:
        formats.open(tmp_path)
    assert {d.code for d in caught.value.diagnostics} == {"M915"}
    assert all(
        "mp_rank_01/model.safetensors.index.json" in d.message for d in caught.value.diagnostics
    )


@pytest.mark.parametrize(
    ("present", "absent"), [((0, 2, 5), (1, 3, 4)), ((1, 2), (0,)), ((3,), (0, 1, 2))]
)
@pytest.mark.parametrize(
    "form", ["consolidated.{:02}.safetensors", "mp_rank_{:02}/model.safetensors"]
)
def test_all_ranks_that_are_missing_are_named_at_once(
    tmp_path: Path, present: tuple[int, ...], absent: tuple[int, ...], form: str
) -> None:
    for rank in present:
        save(tmp_path / form.format(rank), w=rank)
    message = refused(tmp_path, "M920")
    assert message.endswith(
        f"ranks are missing: {', '.join(form.format(r).partition('/')[0] for r in absent)}"
    )


def test_a_folder_of_a_rank_without_weights_is_missing(tmp_path: Path) -> None:
    for rank in (0, 2):
        save(tmp_path / f"mp_rank_{rank:02}" / "model.safetensors", w=rank)
    (tmp_path / "mp_rank_01").mkdir()
    assert "mp_rank_01" in refused(tmp_path, "M920")


@pytest.mark.parametrize(
    "other",
    [
        "model.safetensors",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "mp_rank_00/model.safetensors",
    ],
)
def test_other_weights_beside_those_of_ranks_are_ambiguous_and_named(
    tmp_path: Path, other: str
) -> None:
    for rank in range(2):
        save(tmp_path / f"consolidated.{rank:02}.safetensors", w=rank)
    save(tmp_path / other, w=2)
    message = refused(tmp_path, "M915")
    assert other.partition("/")[0] in message
    assert "consolidated.00.safetensors" in message
    if "/" not in other and not other.endswith(".json"):
        assert held(tmp_path / other) == {"w": 2}


def test_two_files_of_one_rank_and_stages_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    for name in ("consolidated.00", "consolidated.000"):
        save(tmp_path / "a" / f"{name}.safetensors", w=1)
    assert "consolidated.000.safetensors" in refused(tmp_path / "a", "M915")
    for stage in range(2):
        save(tmp_path / "b" / f"mp_rank_00_{stage:03}" / "model.safetensors", w=1)
    assert "pipeline" in refused(tmp_path / "b", "M915")


def test_folders_of_ranks_without_weights_of_the_format_do_not_make_ranks(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", w=1)
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00" / "notes.txt").write_text("")
    assert held(tmp_path) == {"w": 1}


def test_a_vast_rank_is_refused_and_not_counted_to(tmp_path: Path) -> None:
    save(tmp_path / "consolidated.99999.safetensors", w=1)
    refused(tmp_path, "M914")


def test_a_key_of_a_file_that_ends_like_a_rank_is_refused_by_name(tmp_path: Path) -> None:
    for rank in range(2):
        save_file(
            {"w@1": torch.zeros(1), "x@01": torch.zeros(1)},
            tmp_path / f"consolidated.{rank:02}.safetensors",
        )
    message = refused(tmp_path, "M921")
    assert "w@1" in message
    assert "x@01" not in message


def test_a_folder_of_a_rank_that_is_a_link_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "in" / "mp_rank_00" / "model.safetensors", w=0)
    save(tmp_path / "elsewhere" / "model.safetensors", w=1)
    os.symlink(tmp_path / "elsewhere", tmp_path / "in" / "mp_rank_01")
    assert "mp_rank_01" in refused(tmp_path / "in", "M907")


def test_a_key_in_two_shards_of_one_rank_is_refused_and_in_two_ranks_is_not(tmp_path: Path) -> None:
    for rank in range(2):
        sharded(tmp_path / f"mp_rank_{rank:02}", 10 * rank, False)
    save(tmp_path / "mp_rank_01" / "model-00002-of-00002.safetensors", a=5)
    message = refused(tmp_path, "M915")
    assert (
        "a (in mp_rank_01/model-00001-of-00002.safetensors and "
        "mp_rank_01/model-00002-of-00002.safetensors)" in message
    )


# ---------------------------------------------------------------------- the way out


def target(keys: list[str], ranks: Naming | None = None, **options):
    specs = {key: spec("float32", (2,)) for key in keys}
    settings = {"folder": True, "max_shard_size": 8, "metadata": {}, "stamp": None, **options}
    return describe(specs, ranks=ranks, **settings)


def test_each_rank_has_its_file_whatever_its_size_and_keys_stand_in_it_without_their_rank(
    tmp_path: Path,
) -> None:
    made = target(["a", "b@0", "b@1", "c@2"], stamp="{}")
    assert [f.name for f in made.files] == [f"consolidated.{r:02}.safetensors" for r in range(3)]
    assert [[p.key for p in f.tensors] for f in made.files] == [["a", "b@0"], ["b@1"], ["c@2"]]
    assert list(made.small) == ["migrate.history.json"]
    for file in made.files:
        (tmp_path / file.name).write_bytes(file.header + bytes(file.size - len(file.header)))
        assert set(load_file(tmp_path / file.name)) == {
            p.key.partition("@")[0] for p in file.tensors
        }
    source = formats.open(tmp_path)
    assert set(source.index.tensors) == {"a", "b@0", "b@1", "c@2"}
    source.close()


def test_a_rank_between_others_that_holds_nothing_has_an_empty_file() -> None:
    made = target(["a", "b@2"])
    assert [len(f.tensors) for f in made.files] == [1, 0, 1]


def test_files_are_called_as_is_asked_for_even_a_single_one() -> None:
    called = Naming("mp_rank_", 2, "/model_states")
    assert [f.name for f in target(["a@0", "a@1"], called).files] == [
        f"mp_rank_{r:02}/model_states.safetensors" for r in range(2)
    ]
    assert [f.name for f in target(["a"], called).files] == ["mp_rank_00/model_states.safetensors"]
    assert [f.name for f in target(["a"]).files] == ["model.safetensors"]


def test_one_file_cannot_hold_ranks() -> None:
    with pytest.raises(MigrateError) as caught:
        target(["a@0", "a@1"], folder=False)
    assert [d.code for d in caught.value.diagnostics] == ["M916"]
    assert target(["a"], Naming(), folder=False).files[0].name == "model.safetensors"


def test_keys_that_would_be_one_in_a_file_are_refused() -> None:
    with pytest.raises(MigrateError) as caught:
        by_rank(["a", "a@0", "b@0"])
    assert caught.value.diagnostics[0].message.endswith("a, a@0")


def test_the_headers_of_ranks_are_padded_like_the_source() -> None:
    asked = []

    def origins(key: str):
        asked.append(key)
        return [(4096 + 1024, 1 << 21)]

    describe(
        {"w@0": spec("uint8", (1 << 21,)), "w@1": spec("uint8", (1 << 21,))},
        folder=True, max_shard_size=1, metadata={}, stamp=None, origins=origins,
    )  # fmt: skip
    assert asked == ["w@0", "w@1"]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["consolidated.00.pth", "consolidated.01.pth"], Naming("consolidated.", 2, "")),
        (["consolidated.000.safetensors"], Naming("consolidated.", 3, "")),
        (
            ["mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"],
            Naming("mp_rank_", 2, "/model_optim_rng"),
        ),
        (
            [
                "mp_rank_00/model-00001-of-00002.safetensors",
                "mp_rank_00/model-00002-of-00002.safetensors",
            ],
            Naming("mp_rank_", 2, "/model"),
        ),
        (["mp_rank_00/../x.safetensors"], None),
        (["mp_rank_00/..safetensors"], None),
        (["mp_rank_00.safetensors"], None),
        (["consolidated.00/x.safetensors"], None),
        (["consolidated.00"], None),
        (["model.safetensors"], None),
        ([], None),
    ],
)
def test_names_of_files_say_how_ranks_are_called(files: list[str], found: Naming | None) -> None:
    assert naming(files) == found
    if found is not None and len(files) < 3 and "-of-" not in files[0]:
        suffix = files[0][files[0].rindex(".") :]
        assert [found.name(rank, suffix) for rank in range(len(files))] == files
