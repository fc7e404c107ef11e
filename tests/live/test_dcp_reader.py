"""`dcp.load` through a reader that migrates, in one process, and the planner that executes
nothing.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import built
import dcp_reader_case as case
import gguf_files
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.utils import _DistWrapper

import migrate
from migrate.core.errors import MigrateError
from migrate.dcp import MigratingReader, SafeLoadPlanner
from migrate.live import filling
from migrate.planning import compose

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


NEW = case.new_layout(case.old_layout())


def zeros(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(one.shape, dtype=dtype) for key, one in NEW.items()}


def cause(error: BaseException) -> BaseException:
    """What went wrong on the one rank that there is."""
    assert isinstance(error, CheckpointException)
    ((found, _),) = error.failures.values()
    return found


def refused(state: dict[str, Any], reader: MigratingReader, **others: Any) -> str:
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=reader, **others)
    found = cause(raised.value)
    assert isinstance(found, MigrateError), repr(found)
    return str(found)


def test_import_migrate_imports_no_torch() -> None:
    code = "import sys, migrate; assert 'dcp' in dir(migrate); assert 'torch' not in sys.modules\n"
    code += "migrate.dcp.MigratingReader; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_any_format_is_read_by_the_rules(old: str, rules: str, tmp_path: Path) -> None:
    torch.save({"model": case.old_layout(), "step": 7}, tmp_path / "old.pt")
    dcp.save({"model": case.old_layout(), "step": 7}, checkpoint_id=tmp_path / "old")
    for source in (tmp_path / "old.pt", tmp_path / "old"):
        state: dict[str, Any] = {"model": zeros(), "step": 0}
        dcp.load(state, storage_reader=MigratingReader(source, rules=rules))
        case.same(state["model"], NEW)
        assert state["step"] == 7
    # the shortest step comes first there
    there = {
        key: gguf_files.Tensor(one.shape[::-1], gguf_files.F32, one.numpy().tobytes())
        for key, one in case.old_layout().items()
    }
    (tmp_path / "old.gguf").write_bytes(gguf_files.gguf(there))
    for given in (old, case.old_layout(), tmp_path / "old.gguf"):
        flat = zeros()
        reader = MigratingReader(given, rules=rules)
        dcp.load(flat, storage_reader=reader)
        case.same(flat, NEW)
    assert reader.report is not None
    assert reader.report.tensors == len(NEW)
    assert reader.report.bytes_written == sum(one.nbytes for one in NEW.values())


JOINED = """\
id: toy/v2/joined
title: One file for all ranks
why: the new trainer shards by itself
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
keep: [iteration, checkpoint_version]
rules:
  - {name: rows, from: "up.weight@{r:int}", to: "up.weight", via: [{concat: {over: r, dim: 0}}]}
  - {name: columns, from: "down.weight@{r:int}", to: "down", via: [{concat: {over: r, dim: 1}}]}
  - {name: norm, from: "norm.weight@{r:int}", to: "norm.weight", via: [{same: {over: r}}]}
"""


@pytest.mark.parametrize("form", ["consolidated.{:02}.pth", "mp_rank_{:02}/model_optim_rng.pt"])
def test_files_of_ranks_are_joined_by_rules(form: str, tmp_path: Path) -> None:
    """As the ranks of tensor parallelism of Meta's Llama and of Megatron-LM leave them."""
    (tmp_path / "joined.yaml").write_text(JOINED)
    held = [
        {"up.weight": torch.randn(4, 6), "down.weight": torch.randn(5, 2), "norm.weight": ones}
        for ones in [torch.ones(6)] * 3
    ]
    nested = "mp_rank" in form
    for rank, one in enumerate(held):
        path = tmp_path / "old" / form.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": one, "iteration": 9} if nested else one, path)
    expected = {
        "up.weight": torch.cat([one["up.weight"] for one in held]),
        "down": torch.cat([one["down.weight"] for one in held], 1),
        "norm.weight": torch.ones(6),
    }
    model = {key: torch.zeros_like(one) for key, one in expected.items()}
    state: dict[str, Any] = {"model": model, "iteration": 0} if nested else model
    rules = str(tmp_path / "joined.yaml")
    dcp.load(state, storage_reader=MigratingReader(tmp_path / "old", rules=rules))
    case.same(model, expected)
    assert state.get("iteration", 9) == 9
    # what stands in no file alone is no entry of a distributed checkpoint
    said = refused(model, MigratingReader(tmp_path / "old"))
    assert "M916" in said
    (tmp_path / "old" / form.format(1)).unlink()
    assert "M920" in refused(state, MigratingReader(tmp_path / "old", rules=rules))


def test_an_identity_reader_gives_what_torch_gives(tmp_path: Path) -> None:
    saved = {
        "model": {"a": torch.randn(7, 5), "b": torch.randn(3).bfloat16(), "s": torch.tensor(3)},
        "epoch": 3,
        "empty": torch.zeros(0, 4),
        "list": [1, 2.5, {"x": torch.ones(2), "t": (1, "two", None)}],
        "bool": torch.tensor([True, False]),
        "half": torch.randn(4, 2, dtype=torch.complex64),
        "pair": (torch.arange(3), {"k": [b"bytes"]}),
    }
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    both = []
    for reader in (dcp.FileSystemReader(tmp_path / "saved"), MigratingReader(tmp_path / "saved")):
        state: dict[str, Any] = {}
        planner = _EmptyStateDictLoadPlanner()
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
        both.append(state)
    assert repr(both[0]) == repr(both[1])
    assert repr(both[1]) == repr(saved)
    one: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys={"model"})
    reader = MigratingReader(tmp_path / "saved")
    _load_state_dict(one, storage_reader=reader, planner=planner, no_dist=True)
    assert one.keys() == {"model"}
    assert reader.report is not None
    assert "pair" in reader.report.unexpected


def test_a_checkpoint_without_tensors_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    dcp.save({"bytes0": [1], "bytes1": "string"}, checkpoint_id=tmp_path / "saved")
    state = {"bytes0": [2], "bytes1": "other"}
    dcp.load(state, storage_reader=MigratingReader(tmp_path / "saved"))
    assert state == {"bytes0": [1], "bytes1": "string"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": {"a": torch.zeros(2, 3), "nothing": torch.zeros(1)}},
        {"model": {"a": torch.zeros(3)}},
    ],
)
def test_failures_of_the_planner_are_the_planners(wrong: dict[str, Any], tmp_path: Path) -> None:
    dcp.save({"model": {"a": torch.ones(2, 3)}}, checkpoint_id=tmp_path / "saved")
    said = []
    for reader in (dcp.FileSystemReader(tmp_path / "saved"), MigratingReader(tmp_path / "saved")):
        with pytest.raises(CheckpointException) as raised:
            dcp.load(wrong, storage_reader=reader)
        said.append(repr(cause(raised.value)))
    assert said[0] == said[1]


def test_targets_may_be_views_in_any_strides(old: str, rules: str, device: str) -> None:
    wide = torch.zeros(4, 9, 7, dtype=torch.float64, device=device)
    turned = torch.zeros(5, 7, device=device)
    state = {"layers.0.up": wide[:, 2:8, 1:6], "head.weight": turned.T}
    dcp.load(state, storage_reader=MigratingReader(old, rules=rules))
    assert torch.equal(wide[:, 2:8, 1:6].cpu(), NEW["layers.0.up"].double())
    assert torch.equal(turned.T.cpu(), NEW["head.weight"])
    wide[:, 2:8, 1:6] = 0
    assert not wide.any()


ON_DEVICE = """\
id: toy/device
title: What is copied, computed, transposed and stacked
lineage: toy
edge: [old, new]
rules:
  - {name: copied, from: copied, to: copied}
  - {name: cast, from: cast, to: cast, via: [{cast: {to: float32}}]}
  - {name: turned, from: turned, to: turned, via: [{transpose: {dims: [0, 1]}}]}
  - {name: stacked, from: "one.{e:int}", to: stacked, via: [{stack: {over: e}}]}
"""


def test_targets_on_a_device_hold_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """What is copied, computed, transposed and stacked, in several turns of the two buffers, into
    the dtype of the checkpoint and into another one.
    """
    monkeypatch.setattr(filling, "AT_ONCE", 1 << 14)
    generator = torch.Generator().manual_seed(1)
    old = {
        name: torch.randn(300, 200, generator=generator).bfloat16()
        for name in ("copied", "cast", "turned", "one.0", "one.1")
    }
    save_file(old, tmp_path / "old.safetensors")
    rules = tmp_path / "device.yaml"
    rules.write_text(ON_DEVICE)
    new = {
        "copied": old["copied"],
        "cast": old["cast"].float(),
        "turned": old["turned"].T.contiguous(),
        "stacked": torch.stack([old["one.0"], old["one.1"]]),
    }
    for dtype in (None, torch.float64):
        state = {
            key: torch.zeros(one.shape, dtype=dtype or one.dtype, device=device)
            for key, one in new.items()
        }
        dcp.load(state, storage_reader=MigratingReader(tmp_path / "old.safetensors", rules=rules))
        found = {key: one.cpu() for key, one in state.items()}
        case.same(found, {key: one.to(dtype or one.dtype) for key, one in new.items()})


def test_dtypes_are_cast_as_torch_does_where_nothing_is_migrated(tmp_path: Path) -> None:
    held = torch.randn(300, 40)
    save_file({"a": held, "b": held.bfloat16()}, tmp_path / "a.safetensors")
    state = {"a": torch.zeros(300, 40).bfloat16(), "b": torch.zeros(300, 40)}
    dcp.load(state, storage_reader=MigratingReader(tmp_path / "a.safetensors"))
    assert torch.equal(state["a"], held.bfloat16())
    assert torch.equal(state["b"], held.bfloat16().float())


def test_rounding_in_a_migration_needs_permission(old: str, rules: str) -> None:
    state = zeros(torch.bfloat16)
    said = refused(state, MigratingReader(old, rules=rules))
    assert "M961" in said
    assert "float32 -> bfloat16: " in said
    assert not any(one.any() for one in state.values())
    dcp.load(state, storage_reader=MigratingReader(old, rules=rules, allow="lossy"))
    case.same(state, {key: one.bfloat16() for key, one in NEW.items()})
    wide = zeros(torch.float64)
    dcp.load(wide, storage_reader=MigratingReader(old, rules=rules))
    case.same(wide, {key: one.double() for key, one in NEW.items()})


def test_a_load_that_is_refused_leaves_no_file_open(old: str, rules: str) -> None:
    reader = MigratingReader(old, rules=rules)
    assert "M961" in refused(zeros(torch.bfloat16), reader)
    assert not case.opened(old)


def test_a_planner_that_fails_leaves_no_file_open(old: str, rules: str) -> None:
    class Fails(DefaultLoadPlanner):  # type: ignore[misc]
        def create_local_plan(self) -> Any:
            raise OSError("no plan")

    reader = MigratingReader(old, rules=rules)
    with pytest.raises(CheckpointException, match="no plan"):
        dcp.load(zeros(), storage_reader=reader, planner=Fails())
    assert not case.opened(old)
    state = zeros()
    dcp.load(state, storage_reader=reader)
    case.same(state, NEW)


def test_a_file_that_is_replaced_while_ranks_agree_is_refused(
    old: str, rules: str, tmp_path: Path
) -> None:
    class Replaces(DefaultLoadPlanner):  # type: ignore[misc]
        def finish_plan(self, *arguments: Any) -> Any:
            other = shutil.copyfile(old, tmp_path / "other")
            os.replace(other, old)
            return super().finish_plan(*arguments)

    state = zeros()
    assert "M905" in refused(state, MigratingReader(old, rules=rules), planner=Replaces())
    assert not any(one.any() for one in state.values())
    assert not case.opened(old)


def test_keys_that_nobody_asks_for(old: str, rules: str) -> None:
    some = {"head.weight": torch.zeros(7, 5)}
    reader = MigratingReader(old, rules=rules)
    dcp.load(some, storage_reader=reader)
    assert reader.report is not None
    assert set(reader.report.unexpected) == NEW.keys() - some.keys()
    with pytest.warns(UserWarning, match="no rank asks for 6 keys of the migrated checkpoint"):
        dcp.load(some, storage_reader=MigratingReader(old, rules=rules, unexpected="warn"))
    some["head.weight"].zero_()
    said = refused(some, MigratingReader(old, rules=rules, unexpected="error"))
    assert "M960" in said
    assert "layers.{0,1}.up" in said
    assert not some["head.weight"].any()
    with pytest.raises(MigrateError, match="`unexpected` cannot be 'no'"):
        MigratingReader(old, unexpected="no")


def test_a_key_that_the_checkpoint_lacks_comes_with_the_nearest(old: str, rules: str) -> None:
    wrong = {"layers.0.ups": torch.zeros(4, 6, 5)}
    with (
        pytest.warns(UserWarning, match=r"has no layers\.0\.ups.*layers\.0\.up"),
        pytest.raises(CheckpointException) as raised,
    ):
        dcp.load(wrong, storage_reader=MigratingReader(old, rules=rules))
    assert "Missing key in checkpoint state_dict: layers.0.ups" in str(cause(raised.value))
    state = {**wrong, "head.weight": torch.zeros(7, 5)}
    reader = MigratingReader(old, rules=rules)
    with pytest.warns(UserWarning, match="has no"):
        dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(state["head.weight"], NEW["head.weight"])
    assert reader.report is not None
    assert reader.report.missing == ("layers.0.ups",)


def test_what_speaks_against_the_migration_comes_out_of_the_load(tmp_path: Path, old: str) -> None:
    assert "M917" in refused(zeros(), MigratingReader(tmp_path / "nothing"))
    reader = MigratingReader(old, to="hf-mixtral@v5")
    assert "M5" in refused(zeros(), reader)
    metadata = reader.read_metadata()
    for look in (len, list, lambda held: held.items(), lambda held: "a" in held):
        with pytest.raises(MigrateError, match="M5"):
            look(metadata.state_dict_metadata)
    with pytest.raises(MigrateError, match="M115"):
        MigratingReader(old, allow="anything")


def test_a_param_that_no_rule_has_comes_out_of_the_load(old: str) -> None:
    reader = MigratingReader(old, params={"requantise": "norm.weight"})
    said = refused(case.old_layout(), reader)
    assert "M115" in said
    assert "no rules are applied" in said
    assert "requantise" in said


def test_a_load_that_stops_says_what_is_written(old: str, rules: str) -> None:
    class Stops(DefaultLoadPlanner):  # type: ignore[misc]
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            if read_item.dest_index.fqn == "layers.1.up":
                raise OSError("the disk is gone")

    said = refused(zeros(), MigratingReader(old, rules=rules), planner=Stops())
    assert "M965" in said
    assert "loading stopped at layers.1.up: the state dict is written in part" in said
    assert "OSError: the disk is gone" in said
    assert "written: " in said


def test_a_checkpoint_id_is_read_instead(old: str, rules: str, tmp_path: Path) -> None:
    state = zeros()
    reader = MigratingReader(tmp_path / "another", rules=rules)
    dcp.load(state, storage_reader=reader, checkpoint_id=old)
    case.same(state, NEW)
    assert reader.checkpoint_id == old


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def plant(folder: Path, key: str, place: Path) -> None:
    """Puts code into the byte entry `key` of a saved checkpoint."""
    dcp.save({"w": torch.ones(2), key: Planted(place)}, checkpoint_id=folder)


def test_code_in_byte_entries_is_refused_and_never_run(tmp_path: Path) -> None:
    place = tmp_path / "executed"
    plant(tmp_path / "saved", "bad", place)
    state: dict[str, Any] = {"w": torch.zeros(2), "bad": None}
    assert "M935" in refused(state, MigratingReader(tmp_path / "saved"))
    del state["bad"]
    dcp.load(state, storage_reader=MigratingReader(tmp_path / "saved", allow="opaque"))
    assert torch.equal(state["w"], torch.ones(2))
    assert not place.exists()
    state = {"w": torch.zeros(2), "bad": None}
    reader = dcp.FileSystemReader(tmp_path / "saved")
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=reader, planner=SafeLoadPlanner())
    assert "M935" in str(cause(raised.value))
    assert not place.exists()
    # the plant works: torch's own planner runs it
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "saved"))
    assert place.exists()


def test_code_in_metadata_is_refused_and_never_run(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "saved")
    at = tmp_path / "saved" / ".metadata"
    held = pickle.loads(at.read_bytes())
    held.planner_data = {"w": Planted(tmp_path / "executed")}
    at.write_bytes(pickle.dumps(held))
    assert "M93" in refused({"w": torch.zeros(2)}, MigratingReader(tmp_path / "saved"))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("flatten", [True, False])
def test_the_safe_planner_reads_what_torch_reads(flatten: bool, tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "step": 3,
        "rate": {"lr": 0.1, "betas": (0.9, 0.999)},
        "many": [1, "two", None, {3}],
        "order": OrderedDict(a=1),
        "pair": (torch.arange(6).reshape(2, 3).T, torch.ones(2, dtype=torch.bfloat16)),
        "w": torch.randn(3),
    }
    flat = {**saved, "rate": 0.1, "order": 2, "many": 3} if not flatten else saved
    dcp.save(flat, checkpoint_id=tmp_path / "saved")
    both = []
    for planner in (DefaultLoadPlanner, SafeLoadPlanner):
        state = {key: torch.zeros(3) if key == "w" else None for key in flat}
        if flatten:
            state |= {"rate": {"lr": None, "betas": None}, "order": {"a": None}}
        reader = dcp.FileSystemReader(tmp_path / "saved")
        dcp.load(state, storage_reader=reader, planner=planner(flatten, flatten))
        both.append(state)
    assert repr(both[0]) == repr(both[1])
    assert repr(both[1]["pair"]) == repr(flat["pair"])


def test_a_damaged_stream_is_refused(tmp_path: Path) -> None:
    from migrate.live.stream_values import decode_stream

    made = io.BytesIO()
    torch.save((torch.arange(64), 1), made)
    data = bytearray(made.getvalue())
    assert torch.equal(decode_stream(bytes(data), "x")[0], torch.arange(64))
    at = bytes(data).index(torch.arange(64).numpy().tobytes())
    data[at + 8] ^= 1
    with pytest.raises(MigrateError, match="M942"):
        decode_stream(bytes(data), "x")
    with pytest.raises(MigrateError, match="M9"):
        decode_stream(b"not an archive", "x")


def test_heads_are_read_of_the_chunks_that_are_read(tmp_path: Path) -> None:
    saved = {f"w{n}": torch.full((32, 32), float(n)) for n in range(200)}
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    state = {"w7": torch.zeros(32, 32), "w150": torch.zeros(32, 32)}
    reader = MigratingReader(tmp_path / "saved")
    with case.counted() as few:
        dcp.load(state, storage_reader=reader)
    assert torch.equal(state["w150"], saved["w150"])
    size = (tmp_path / "saved" / ".metadata").stat().st_size
    with case.counted() as every:
        migrate.inspect(tmp_path / "saved")
    # two tensors, their archives' heads and tails, and those of the one that the others are like
    assert few.data < size + 2 * 4096 + 3 * 8192
    assert every.data > size + 200 * 1500
    assert few.calls < 40 < 200 < every.calls


def test_a_chunk_that_is_not_like_the_others_is_read_as_it_is(tmp_path: Path) -> None:
    saved = {f"w{n}": torch.randn(16, 16) for n in range(4)}
    saved["w2"] = torch.randn(16, 16).T
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    for keys in (["w2"], ["w1", "w3"], list(saved)):
        state = {key: torch.zeros(16, 16) for key in keys}
        dcp.load(state, storage_reader=MigratingReader(tmp_path / "saved"))
        for key in keys:
            assert torch.equal(state[key], saved[key]), key


def test_what_planning_reads_is_looked_at_first(tmp_path: Path) -> None:
    """A rule that decides by values reads them before the chunks are asked for."""
    rules = tmp_path / "kept.yaml"
    rules.write_text(
        """\
id: toy/v2/kept
title: One of two
why: one was a copy
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
keep: ["{k}"]
rules:
  - {name: one, from: "a", to: "b", if_exists: keep}
"""
    )
    values = torch.randn(16, 16)
    saved = {"first": torch.zeros(16, 16), "a": values, "b": values.T.contiguous().T}
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    state = {"b": torch.zeros(16, 16)}
    dcp.load(state, storage_reader=MigratingReader(tmp_path / "saved", rules=rules))
    assert torch.equal(state["b"], values)


def test_what_needs_all_of_a_tensor_is_said_with_its_bytes(tmp_path: Path) -> None:
    rules = tmp_path / "rounds.yaml"
    rules.write_text(
        """\
id: toy/v2/fp8
title: One scale for each tensor
why: to be served
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
rules:
  - name: fp8
    from: "{m}.weight"
    to: {weight: "{m}.weight", scale: "{m}.weight_scale"}
    via: [{quantize: {codec: fp8, granularity: tensor}}]
"""
    )
    save_file({"a.weight": torch.randn(128, 64).bfloat16()}, tmp_path / "a.safetensors")
    migrate.apply(tmp_path / "a.safetensors", tmp_path / "b", rules=rules, allow="lossy")
    state = {"a.weight": torch.zeros(128, 64, dtype=torch.float8_e4m3fn)}

    class Half(DefaultLoadPlanner):  # type: ignore[misc]
        """Asks for the first half of the rows, as one of two ranks would."""

        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            (item,) = plan.items
            return replace(plan, items=[replace(item, lengths=torch.Size((64, 64)))])

    reader = MigratingReader(tmp_path / "a.safetensors", rules=rules, allow="lossy")
    planned = reader.plan
    dcp.load(state, storage_reader=reader, planner=Half())
    expected = load_file(next((tmp_path / "b").glob("*.safetensors")))["a.weight"].view(torch.uint8)
    assert torch.equal(state["a.weight"].view(torch.uint8)[:64], expected[:64])
    assert not state["a.weight"].view(torch.uint8)[64:].any()
    assert reader.report is not None
    said = "`quantize` needs all of a tensor: up to 16,384 bytes are read here for a.weight"
    assert said in reader.report.notes
    said = (
        "`quantize` needs all of a tensor: a rank that loads any part of a.weight reads all 16,384 "
        "bytes of what they are made of"
    )
    assert said in planned.notes
    assert (reader.plan.digest, reader.plan.notes) == (planned.digest, planned.notes)
    assert {row.ops for row in planned.rows} == {("quantize",)}


def test_a_load_proves_no_downgrade_and_the_plan_does(
    rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs = []
    prove = compose.prove_downgrade

    def counted(*args: Any, **kwargs: Any) -> list[str]:
        proofs.append(args)
        return prove(*args, **kwargs)

    monkeypatch.setattr(compose, "prove_downgrade", counted)
    reader = MigratingReader(case.old_layout(), rules=rules)
    state = zeros()
    dcp.load(state, storage_reader=reader)
    case.same(state, NEW)
    assert not proofs
    assert reader.plan.downgrade.exact
    assert len(proofs) == 1


def test_a_reader_in_a_with_statement_says_what_is_written_when_ranks_do_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error of a lost connection is raised by torch after the reader's last call."""

    def lost(*args: Any) -> Any:
        raise ConnectionError("connection closed by peer")

    reader, state = MigratingReader({"w": torch.ones(2)}), {"w": torch.zeros(2)}

    def stumble() -> None:
        with reader:
            dcp.load(state, storage_reader=reader)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        stumble()
    with pytest.raises(CheckpointException), reader:
        dcp.load({"other": torch.zeros(2)}, storage_reader=reader)
    monkeypatch.setattr(_DistWrapper, "all_gather_object", lost)
    with pytest.raises(MigrateError) as caught, reader:
        dcp.load(state, storage_reader=reader)
    (found,) = caught.value.diagnostics
    assert found.code == "M965"
    assert "this one has written 1 tensor, and the model is written in part" in found.message
    assert "ConnectionError: connection closed by peer" in found.notes[0]
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_optimizer_state_follows_its_parameters(tmp_path: Path) -> None:
    rules = tmp_path / "stack.yaml"
    rules.write_text(
        """\
id: toy/v2/stacked
title: A stack
why: the new module has one parameter
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
rules:
  - {name: up, from: "e.{n:int}", to: "up", via: [{stack: {over: n}}]}
"""
    )
    model = {f"e.{n}": torch.randn(4, 3) for n in range(3)}
    moments = {key: torch.randn(4, 3) for key in model}
    state = {key: {"step": torch.tensor(3.0), "exp_avg": moments[key]} for key in model}
    groups = [{"lr": 0.1, "params": list(model)}]
    saved = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    up = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(3, 4, 3)}
    target: dict[str, Any] = {
        "model": {"up": torch.zeros(3, 4, 3)},
        "optimizer": {"state": {"up": up}, "param_groups": [{"lr": 0.0, "params": ["up"]}]},
    }
    dcp.load(target, storage_reader=MigratingReader(tmp_path / "saved", rules=rules))
    assert torch.equal(target["model"]["up"], torch.stack(list(model.values())))
    assert torch.equal(up["exp_avg"], torch.stack(list(moments.values())))
    assert up["step"] == 3
    assert target["optimizer"]["param_groups"] == [{"lr": 0.1, "params": ["up"]}]


def test_optimizer_state_goes_backwards_with_its_parameters(tmp_path: Path) -> None:
    """Stacks of experts come apart; a moment comes out as it would if it were the parameter."""
    model = built.state_of(built.V5)
    moments = {key: torch.randn(one.shape) for key, one in model.items()}
    state = {key: {"step": torch.tensor(3.0), "exp_avg": one} for key, one in moments.items()}
    groups = [{"lr": 0.1, "params": list(model)}]
    saved = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    asked: dict[str, Any] = {"to": "hf-mixtral@v4", "from_": "hf-mixtral@v5"}
    due: dict[str, Any] = {}
    reader = MigratingReader(moments, **asked)
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(due, storage_reader=reader, planner=planner, no_dist=True)
    assert len(due) > len(moments)
    found: dict[str, Any] = {}
    reader = MigratingReader(tmp_path / "saved", **asked)
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    made = found["optimizer"]["state"]
    case.same({key: one["exp_avg"] for key, one in made.items()}, due)
    assert {float(one["step"]) for one in made.values()} == {3.0}
    assert set(found["optimizer"]["param_groups"][0]["params"]) == due.keys()
    case.same(found["model"], built.state_of(built.V4))


def test_the_metadata_names_the_save_and_the_load_as_torch_does(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "saved")
    dcp.save({"a": torch.ones(4)}, storage_writer=writer)
    own, stock = MigratingReader(tmp_path / "saved"), dcp.FileSystemReader(tmp_path / "saved")
    said, torchs = own.read_metadata().storage_meta, stock.read_metadata().storage_meta
    assert str(said.checkpoint_id) == str(torchs.checkpoint_id)
    assert said.save_id == torchs.save_id == writer.save_id
    assert said.load_id == own.load_id
    before = own.load_id
    own.reset()
    assert own.load_id != before
