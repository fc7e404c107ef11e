"""The reader and the writer of safetensors against the safetensors library."""

import itertools
import json
import struct
import sys
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from migrate import formats
from migrate.core.errors import CheckpointError, MigrateError, QuestionError
from migrate.core.spec import Spec, spec
from migrate.formats._header import DTYPES, NAMES
from migrate.formats.safetensors import describe

TORCH = {d: getattr(torch, d if d != "float4_e2m1fn" else "float4_e2m1fn_x2", None) for d in NAMES}
GB = 10**9


def sample(dtype: str, seed: int = 0) -> torch.Tensor:
    """A [4, 6] tensor of any bits."""
    raw = torch.randint(
        0,
        256,
        (4, 6 * TORCH[dtype].itemsize),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return (raw & 1).bool() if dtype == "bool" else raw.view(TORCH[dtype])


def packed(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


def read(source, key: str) -> bytes:
    stored = source.index.tensors[key]
    buffer = bytearray(stored.spec.nbytes)
    source.blobs[stored.blob].readinto(stored.offset, memoryview(buffer))
    return bytes(buffer)


def write(folder: Path, target, data: dict[str, bytes]) -> None:
    """What the engine does with a target, in the plainest way."""
    folder.mkdir(exist_ok=True)
    for file in target.files:
        at = len(file.header)
        with (folder / file.name).open("wb") as out:
            out.write(file.header)
            for key, offset, nbytes, _ in file.tensors:
                assert offset == at
                assert len(data[key]) == nbytes
                out.write(data[key])
                at += nbytes
        assert at == file.size
    for name, content in target.small.items():
        (folder / name).write_bytes(content)


def raw_file(path: Path, header, data: bytes = b"", pad: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) + len(pad)) + text + pad + data)
    return path


def refused(path, code: str, **options) -> str:
    with pytest.raises(MigrateError) as caught:
        formats.open(path, **options)
    assert {d.code for d in caught.value.diagnostics} == {code}, str(caught.value)
    assert caught.value.exit_code == (2 if code == "M917" else 3)
    return str(caught.value)


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    tensors = {
        "a": torch.arange(4),
        "b": torch.ones(2, 3),
        "c": torch.zeros(5, dtype=torch.bfloat16),
    }
    save_file({"a": tensors["a"], "b": tensors["b"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"c": tensors["c"]}, folder / "model-00002-of-00002.safetensors")
    files = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    index(folder, files)
    return tensors


def index(folder: Path, weight_map, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(
        json.dumps({"metadata": {"total_size": 1.0}, "weight_map": weight_map})
    )


# reading


def test_the_dtype_table_is_the_library_s_own(tmp_path):
    path = raw_file(
        tmp_path / "x.safetensors", {"a": {"dtype": "NONE", "shape": [], "data_offsets": [0, 0]}}
    )
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.safe_open(path, "pt")
    text = str(caught.value)
    if "expected one of" in text:
        assert set(text.split("expected one of")[1].split("`")[1::2]) == set(DTYPES)
    assert len(set(DTYPES.values())) == len(DTYPES) == 22


@pytest.mark.parametrize("dtype", [d for d in NAMES if TORCH[d] is not None])
def test_every_dtype_that_the_library_writes_is_read_bit_for_bit(tmp_path, dtype):
    tensor = sample(dtype)
    save_file(
        {
            "x": tensor,
            "empty": tensor[:0],
            "row": tensor[0].view(torch.uint8).clone().view(tensor.dtype),
        },
        tmp_path / "m.safetensors",
    )
    with formats.open(tmp_path / "m.safetensors") as source:
        logical = (4, 12) if dtype == "float4_e2m1fn" else (4, 6)
        assert source.index.tensors["x"].spec == Spec(dtype, logical)
        assert source.index.tensors["empty"].spec.shape == (0, logical[1])
        assert read(source, "x") == packed(tensor)
        assert read(source, "row") == packed(tensor[0])
        assert source.index.tensors["x"].storage is None


@pytest.mark.parametrize("dtype", sorted(NAMES))
def test_every_dtype_is_written_so_that_the_library_reads_it(tmp_path, dtype):
    shape = (4, 8)
    data = bytes(
        i % 2 if dtype == "bool" else i * 37 % 256 for i in range(spec(dtype, shape).nbytes)
    )
    target = describe(
        {"x": spec(dtype, shape)}, folder=False, max_shard_size=GB, metadata={}, stamp=None
    )
    write(tmp_path, target, {"x": data})
    raw = safetensors.deserialize((tmp_path / "model.safetensors").read_bytes())
    assert [
        (name, entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in raw
    ] == [("x", NAMES[dtype], shape, data)]
    if TORCH[dtype] is not None:
        loaded = load_file(tmp_path / "model.safetensors")["x"]
        assert loaded.dtype == TORCH[dtype]
        assert packed(loaded) == data


def test_metadata_is_read_without_the_stamp(tmp_path):
    save_file(
        {"x": torch.ones(1)},
        tmp_path / "m.safetensors",
        metadata={"format": "pt", "migrate.history": '{"a": 1}', "ü": "\n"},
    )
    with formats.open(tmp_path / "m.safetensors") as source:
        assert source.index.metadata == {"format": "pt", "ü": "\n"}
        assert source.history == b'{"a": 1}'
        assert source.index.side_files == ()


def test_a_file_is_known_by_its_head_when_its_name_says_nothing(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "weights")
    with formats.open(tmp_path / "weights") as source:
        assert source.format == "safetensors"


def test_a_folder_an_index_and_its_path_give_the_same_checkpoint(tmp_path):
    tensors = sharded(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        with formats.open(path) as source:
            assert set(source.index.tensors) == set(tensors)
            assert list(source.index.tensors)[-1] == "c"
            assert source.index.files == (
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
            )
            for key, tensor in tensors.items():
                assert read(source, key) == packed(tensor)


def test_numbered_files_need_no_index_but_all_their_numbers(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with formats.open(tmp_path) as source:
        assert set(source.index.tensors) == {"a", "b", "c"}
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors" in refused(tmp_path, "M908")


def test_the_only_file_of_a_folder_and_model_safetensors_are_taken(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "adapter.safetensors")
    with formats.open(tmp_path) as source:
        assert source.index.files == ("adapter.safetensors",)
    save_file({"y": torch.ones(1)}, tmp_path / "model.safetensors")
    with formats.open(tmp_path) as source:
        assert list(source.index.tensors) == ["y"]
        assert source.index.left_out == ("adapter.safetensors",)


def test_files_that_nothing_joins_are_refused(tmp_path):
    for name in ("a", "b"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    assert "a.safetensors, b.safetensors" in refused(tmp_path, "M915")


def test_a_numbered_file_beyond_its_total_is_refused(tmp_path):
    for number in (1, 2, 3):
        save_file(
            {str(number): torch.ones(1)}, tmp_path / f"model-{number:05}-of-00002.safetensors"
        )
    refused(tmp_path, "M915")


def test_an_empty_file_and_an_empty_folder_and_nothing_are_no_checkpoints(tmp_path):
    (tmp_path / "weights").write_bytes(b"")
    (tmp_path / "deep").mkdir()
    refused(tmp_path / "weights", "M917")
    refused(tmp_path, "M917")
    save_file({"x": torch.ones(1)}, tmp_path / "deep" / "model.safetensors")
    assert "there are weights in deep" in refused(tmp_path, "M917")
    assert "did you mean `weights`" in refused(tmp_path / "weihgts", "M917")
    with pytest.raises(QuestionError):
        formats.open(tmp_path / "weihgts")


# the index against the files


def test_all_missing_shards_are_named_at_once(tmp_path):
    tensors = sharded(tmp_path)
    index(
        tmp_path,
        {
            **dict.fromkeys(tensors, "x.safetensors"),
            "d": "y.safetensors",
            "e": "model-00001-of-00002.safetensors",
        },
    )
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = refused(tmp_path, "M908")
    assert "x.safetensors" in message
    assert "y.safetensors" in message


def test_keys_that_index_and_files_do_not_share_are_named_on_either_side(tmp_path):
    sharded(tmp_path)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index(tmp_path, {"a": one, "b": two, "gone": two})
    message = refused(tmp_path, "M915")
    assert "b (it is in model-00001-of-00002.safetensors)" in message
    assert "gone" in message
    assert "holds keys that the index does not name: c" in message


def test_a_key_in_two_files_is_named_with_both(tmp_path):
    sharded(tmp_path)
    save_file(
        {"c": torch.ones(1), "a": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors"
    )
    assert (
        "a (in model-00001-of-00002.safetensors and model-00002-of-00002.safetensors)"
        in refused(tmp_path, "M915")
    )


def test_two_indexes_are_ambiguous_until_one_is_passed(tmp_path):
    sharded(tmp_path)
    index(tmp_path, {"c": "model-00002-of-00002.safetensors"}, "other.safetensors.index.json")
    assert "2 indexes" in refused(tmp_path, "M915")
    refused(tmp_path / "other.safetensors.index.json", "M915")
    with formats.open(tmp_path / "model.safetensors.index.json") as source:
        assert "other.safetensors.index.json" in source.index.left_out


def test_files_beside_an_index_that_could_be_meant_are_refused_and_others_listed(tmp_path):
    sharded(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    with formats.open(tmp_path) as source:
        assert source.index.left_out == ("consolidated.safetensors",)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    assert "does not name model.safetensors" in refused(tmp_path, "M915")


def test_shards_of_another_number_beside_an_index_could_be_meant_unless_the_index_is_passed(
    tmp_path,
):
    sharded(tmp_path)
    stale = tmp_path / "model-00003-of-00003.safetensors"
    save_file({"x": torch.ones(1)}, stale)
    assert "does not name model-00003-of-00003.safetensors beside it" in refused(tmp_path, "M915")
    with formats.open(tmp_path / "model.safetensors.index.json") as source:
        assert source.index.left_out == (stale.name,)
    # as Mistral's releases have them: the same weights under another name
    stale.rename(tmp_path / "consolidated-00003-of-00003.safetensors")
    with formats.open(tmp_path) as source:
        assert source.index.left_out == ("consolidated-00003-of-00003.safetensors",)


def test_a_folder_says_which_side_files_travel(tmp_path):
    sharded(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "params.json").write_text("[]")
    (tmp_path / "original" / "consolidated.00.pth").write_text("x")
    (tmp_path / "migrate.history.json").write_text('{"h": 1}')
    with formats.open(tmp_path) as source:
        assert source.index.side_files == (("config.json", 2), ("original/params.json", 2))
        assert source.index.left_out == ("original/consolidated.00.pth",)
        assert source.history == b'{"h": 1}'
        assert source.side_file("original/params.json") == b"[]"
        with pytest.raises(KeyError):
            source.side_file("migrate.history.json")


# writing


def test_shards_and_index_are_huggingface_hub_s(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    sizes = itertools.cycle([3, 40, 7, 7, 1, 90, 12])
    specs = {f"layers.{i}.w": spec("uint8", (next(sizes),)) for i in range(30)}
    target = describe(specs, folder=True, max_shard_size=50, metadata={}, stamp='{"s": 1}')
    data = {k: bytes([i] * s.nbytes) for i, (k, s) in enumerate(specs.items())}
    write(tmp_path, target, data)
    tensors = {k: torch.zeros(s.shape, dtype=torch.uint8) for k, s in specs.items()}
    theirs = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=50)
    assert {f.name: {t.key for t in f.tensors} for f in target.files} == {
        n: set(k) for n, k in theirs.filename_to_tensors.items()
    }
    content = json.loads(target.small["model.safetensors.index.json"])
    assert content["metadata"] == {"total_size": sum(s.nbytes for s in specs.values())}
    assert list(content["weight_map"]) == sorted(specs)
    assert content["weight_map"] == theirs.tensor_to_filename
    with formats.open(tmp_path) as source:
        assert {k: read(source, k) for k in specs} == data
        assert source.history == b'{"s": 1}'
        assert source.index.side_files == ()
        assert source.index.metadata == {"format": "pt"}
    for file in target.files:
        assert {k: packed(v) for k, v in load_file(tmp_path / file.name).items()} == {
            t.key: data[t.key] for t in file.tensors
        }


def test_tensors_of_a_file_lie_aligned_to_their_elements_and_data_to_64():
    specs = {f"k.{i}": spec(d, (3, 4)) for i, d in enumerate(sorted(NAMES))}
    (file,) = describe(specs, folder=False, max_shard_size=1, metadata={}, stamp=None).files
    assert len(file.header) % 64 == 0
    for key, offset, nbytes, _ in file.tensors:
        assert offset % max(1, {"complex64": 8}.get(specs[key].dtype, nbytes // 12)) == 0


def test_a_header_is_padded_so_that_most_bytes_lie_as_in_the_source_within_their_page(tmp_path):
    specs = {
        "a": spec("bfloat16", (1 << 20,)),
        "b": spec("bfloat16", (3 << 19,)),
        "c": spec("bfloat16", (10,)),
    }
    plain = describe(specs, folder=False, max_shard_size=1, metadata={}, stamp=None)
    # a and b stand in two files of other phases, b is the larger
    places = {"a": [(8 + 80, 2 << 20)], "b": [(1000, 5 << 19), (2000, 1 << 19)], "c": []}
    target = describe(
        specs, folder=False, max_shard_size=1, metadata={}, stamp=None, origins=places.__getitem__
    )
    (file,) = target.files
    starts = {p.key: p.offset for p in file.tensors}
    assert starts["b"] % 4096 == 1000
    assert [(p.key, p.offset - len(file.header)) for p in file.tensors] == [
        (p.key, p.offset - len(plain.files[0].header)) for p in plain.files[0].tensors
    ]
    assert file.header[8:].rstrip(b" ") == plain.files[0].header[8:].rstrip(b" ")
    data = {k: bytes(s.nbytes) for k, s in specs.items()}
    write(tmp_path, target, data)
    assert load_file(tmp_path / "model.safetensors").keys() == specs.keys()
    assert {
        k: t.offset for k, t in formats.open(tmp_path / "model.safetensors").index.tensors.items()
    } == starts
    again = describe(
        specs, folder=False, max_shard_size=1, metadata={}, stamp=None, origins=places.__getitem__
    )
    assert again.files == target.files


@pytest.mark.parametrize("place", [(88, (1 << 20) - 1), (4, 1 << 21), (0, 0)])
def test_a_header_is_as_ever_when_little_could_be_shared_or_elements_would_lie_unaligned(place):
    specs = {"a": spec("float64", (1 << 18,))}
    plain = describe(specs, folder=False, max_shard_size=1, metadata={}, stamp=None)
    asked = describe(
        specs, folder=False, max_shard_size=1, metadata={}, stamp=None, origins=lambda key: [place]
    )
    assert asked.files == plain.files


def test_every_phase_of_a_page_is_reached_with_less_than_a_page():
    specs = {"a": spec("uint8", (1 << 20,))}
    for phase in range(0, 4096, 8):
        places = [(phase + 8192, 1 << 20)]
        (file,) = describe(
            specs,
            folder=False,
            max_shard_size=1,
            metadata={},
            stamp=None,
            origins=lambda key, p=places: p,
        ).files
        assert len(file.header) % 4096 == phase
        assert int.from_bytes(file.header[:8], "little") == len(file.header) - 8
        assert len(file.header) - len(file.header.rstrip(b" ")) < 4096


def test_the_stamp_of_one_file_stands_in_its_metadata_and_the_source_s_metadata_stays():
    target = describe(
        {},
        folder=False,
        max_shard_size=1,
        metadata={"format": "np", "migrate.history": "old", "x": "ü"},
        stamp="new",
    )
    header = json.loads(target.files[0].header[8:])
    assert header == {"__metadata__": {"format": "np", "x": "ü", "migrate.history": "new"}}
    assert target.small == {}
    assert not target.folder


def test_one_file_is_written_whatever_the_size_and_a_folder_of_one_has_no_index():
    specs = {"a": spec("uint8", (100,)), "b": spec("uint8", (100,))}
    (file,) = describe(specs, folder=False, max_shard_size=10, metadata={}, stamp=None).files
    assert file.name == "model.safetensors"
    target = describe(specs, folder=True, max_shard_size=200, metadata={}, stamp=None)
    assert [f.name for f in target.files] == ["model.safetensors"]
    assert target.small == {}


def test_everything_that_safetensors_cannot_hold_is_named():
    specs = {
        "a": spec("complex128", (1,)),
        "b": spec("complex32", (1,)),
        "c": spec("float4_e2m1fn", (3,)),
        "__metadata__": spec("uint8", (1,)),
        "half\ud800": spec("uint8", (1,)),
        "fine": spec("uint8", (1,)),
    }
    with pytest.raises(CheckpointError) as caught:
        describe(specs, folder=True, max_shard_size=10, metadata={}, stamp=None)
    assert {d.code for d in caught.value.diagnostics} == {"M916"}
    for word in ("complex128", "complex32", "hold c:", "__metadata__", "half\\ud800"):
        assert word in str(caught.value)
    assert "fine" not in str(caught.value)


@pytest.mark.thorough
def test_a_header_above_the_format_s_limit_is_refused():
    specs = dict.fromkeys((f"{i}{'x' * 2_000_000}" for i in range(50)), spec("uint8", (1,)))
    with pytest.raises(CheckpointError, match="safetensors allows 100000000"):
        describe(specs, folder=False, max_shard_size=10, metadata={}, stamp=None)
    assert len(describe(specs, folder=True, max_shard_size=10, metadata={}, stamp=None).files) == 5


def test_keys_of_any_text_survive(tmp_path):
    specs = {
        k: spec("uint8", (1,))
        for k in (
            "",
            "a\nb",
            '"',
            "\\",
            "ü",
            "\U0001f600",
            "../../x",
            "\x00",
            "\u202e",
            "__metadata__x",
        )
    }
    data = {k: bytes([i]) for i, k in enumerate(specs)}
    write(tmp_path, describe(specs, folder=False, max_shard_size=1, metadata={}, stamp=None), data)
    assert {k: packed(v) for k, v in load_file(tmp_path / "model.safetensors").items()} == data
    with formats.open(tmp_path / "model.safetensors") as source:
        assert {k: read(source, k) for k in specs} == data


def test_neither_torch_nor_numpy_is_imported_to_read_and_write(tmp_path):
    import subprocess

    save_file({"x": torch.ones(1)}, tmp_path / "m.safetensors")
    code = (
        "import sys; from migrate import formats; from migrate.formats.safetensors import "
        "describe; from migrate.core.spec import spec;"
        f"formats.open({str(tmp_path)!r}).close();"
        "describe({'a': spec('uint8', (1,))}, folder=True, max_shard_size=9, metadata={}, "
        "stamp=None);"
        "sys.exit(bool({'torch', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
