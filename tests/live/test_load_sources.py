"""Checkpoints as they lie about: nested, linked, quantized, incomplete, hostile; and every dtype
that parameters have.
"""

from __future__ import annotations

import json
import os
import sys

import fsdp_case
import pytest
import torch
import torch.distributed.checkpoint as dcp
from built import Refusing, module, rules, same, untouched
from commandline import DATA
from dcp_reader_case import counted
from safetensors.torch import load_file, save_file

import migrate
from migrate.core.errors import MigrateError

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.uint16, torch.uint32,
    torch.float16, torch.bfloat16, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex64, torch.complex128,
]  # fmt: skip


def bits(dtype):
    made = torch.arange(1, 1 + 6 * dtype.itemsize, dtype=torch.uint8)
    return (made % 2 if dtype is torch.bool else made).view(dtype).reshape(2, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_dtype_is_loaded_bit_for_bit_without_dimensions_and_empty_too(
    tmp_path, dtype, device
):
    state = {
        "w": bits(dtype),
        "scalar": bits(dtype)[1, 2].clone(),
        "empty": bits(dtype)[:0].clone(),
    }
    torch.save(state, tmp_path / "in.pt")
    for source in (state, tmp_path / "in.pt"):
        model = torch.nn.Module()
        for name, one in state.items():
            model.register_buffer(
                name, torch.zeros(one.shape, dtype=torch.uint8).to(dtype).to(device)
            )
        migrate.load(model, source)
        assert same(model, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_of_a_distributed_checkpoint_the_heads_are_read_of_what_is_read(tmp_path):
    state = {f"w{n}": torch.randn(32, 32) for n in range(200)}
    # it is as long as the others, and its numbers lie in another order
    state["w150"] = torch.randn(32, 32).T
    dcp.save(state, checkpoint_id=tmp_path / "in")
    size = (tmp_path / "in" / ".metadata").stat().st_size
    for keys, most in ((("w7", "w149"), 40), (("w7", "w150"), None)):
        model = module({key: state[key] for key in keys})
        with counted() as read:
            migrate.load(model, tmp_path / "in", strict=False)
        assert same(model, {key: state[key] for key in keys})
        # one that differs has all of them looked at
        assert (read.calls < most) if most else (read.calls > 200)
        # checksums are compared: what is read is read twice
        assert most is None or read.data < size + 4 * 4096 + 3 * 8192


def test_of_a_nested_checkpoint_one_says_which_dict(tmp_path):
    state = {"w": torch.ones(2)}
    torch.save({"gen": {"w": torch.zeros(2)}, "disc": state, "step": 4}, tmp_path / "gan.pt")
    model = module(state)
    with pytest.raises(MigrateError, match="M945"):
        migrate.load(model, tmp_path / "gan.pt")
    assert untouched(model)
    migrate.load(model, tmp_path / "gan.pt", at="disc")
    assert same(model, state)


def test_a_snapshot_of_the_hub_s_cache_is_a_folder_of_links(tmp_path):
    state = {"w": torch.arange(3.0)}
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    save_file(state, tmp_path / "blobs" / "beef")
    (tmp_path / "snapshots" / "abc" / "model.safetensors").symlink_to("../../blobs/beef")
    model = module(state)
    migrate.load(model, tmp_path / "snapshots" / "abc")
    assert same(model, state)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fp8_blocks_are_dequantized_into_the_module_as_apply_does_it(tmp_path, threads, device):
    old = DATA / "fp8_dequant_deepseek_v3" / "hub"
    migrate.apply(
        old, tmp_path / "new.safetensors", to="deepseek-v3@bf16", allow={"lossy"}, fsync=False
    )
    wanted = load_file(tmp_path / "new.safetensors")
    model = module(wanted, device)
    if device == "cpu":
        with pytest.raises(MigrateError, match="lossy"):
            migrate.load(model, old, "deepseek-v3@bf16")
        assert untouched(model)
    answer = migrate.load(
        model, old, "deepseek-v3@bf16", allow={"lossy"}, threads=threads, max_memory="1MiB"
    )
    assert same(model, wanted)
    assert answer.to_json()["report"]["rules"]


def missing(folder, state):
    save_file({"a": state["a"]}, folder / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def cut(folder, state):
    save_file(state, folder / "in.safetensors")
    os.truncate(folder / "in.safetensors", os.path.getsize(folder / "in.safetensors") - 4)
    return folder / "in.safetensors"


def cut_zip(folder, state):
    torch.save(state, folder / "in.pt")
    os.truncate(folder / "in.pt", os.path.getsize(folder / "in.pt") - 500)
    return folder / "in.pt"


@pytest.mark.parametrize(("broken", "code"), [(missing, "M908"), (cut, "M906"), (cut_zip, "M940")])
def test_an_incomplete_checkpoint_changes_nothing(tmp_path, broken, code):
    state = {"a": torch.ones(100), "b": torch.ones(100)}
    model = module(state)
    with pytest.raises(MigrateError, match=code):
        migrate.load(model, broken(tmp_path, state))
    assert untouched(model)


class Hostile:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("key", ["_extra_state", "x"])
def test_nothing_of_a_hostile_file_is_executed(tmp_path, key, zipped, strict):
    torch.save(
        {"w": torch.ones(2), key: Hostile()},
        tmp_path / "in.pt",
        _use_new_zipfile_serialization=zipped,
    )
    seen = []
    listening = True
    sys.addaudithook(
        lambda event, _: (
            seen.append(event)
            if listening and event in ("os.system", "pickle.find_class")
            else None
        )
    )
    model = Refusing()
    with pytest.raises(MigrateError, match="M935"):
        migrate.load(model, tmp_path / "in.pt", strict=strict)
    listening = False
    assert seen == []
    assert untouched(model)


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_load_between_forward_and_backward_is_noticed_by_autograd(tmp_path, on_disk):
    source = {"w": torch.ones(2)}
    if on_disk:
        save_file(source, tmp_path / "in.safetensors")
        source = tmp_path / "in.safetensors"
    model = module({"w": torch.ones(2)})
    model.w.requires_grad_(True)
    out = (model.w * model.w).sum()
    migrate.load(model, source)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.ranks
def test_with_fsdp_each_of_two_processes_gets_its_part(tmp_path, ranks):
    rule = "keep: ['head.{k...}']\nrules:\n  - {name: r, from: 'blocks.{k...}', to: 'b.{k}'}\n"
    rules(tmp_path, rule).rename(tmp_path / "rule.yaml")
    fsdp_case.written(tmp_path)
    ranks(2).run("fsdp_case", "loads_its_part", str(tmp_path))


@pytest.mark.ranks
def test_a_rank_that_fails_is_named_and_the_others_are_not_waited_for(tmp_path, ranks):
    with pytest.raises(AssertionError, match=r"rank [01]: [^$]*old.safetensors"):
        ranks(2).run("fsdp_case", "loads_its_part", str(tmp_path / "nowhere"))
    ranks(2).run("gc", "collect")


def test_storages_can_be_resized_afterwards_on_both_sides(tmp_path):
    rule = rules(tmp_path, "rules:\n  - {name: r, from: w, to: w, via: [{cast: {to: float64}}]}\n")
    old, new = module({"w": torch.ones(4)}), module({"w": torch.ones(4, dtype=torch.float64)})
    migrate.convert_module(old, new, rules=rule)
    assert new.w.tolist() == [7.0] * 4
    for one in (old.w, new.w):
        one.untyped_storage().resize_(0)
