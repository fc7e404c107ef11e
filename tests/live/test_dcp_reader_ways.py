"""What `dcp.load` is given through the reader that migrates: every argument, folders as they lie
about, values that are no tensors; and what is read and held for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import built
import dcp_reader_case as case
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

import migrate
from migrate.dcp import MigratingReader
from migrate.live import filling

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def loaded(reader: MigratingReader, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of these shapes and dtypes, filled by the reader."""
    state = {key: torch.zeros_like(one) for key, one in like.items()}
    dcp.load(state, storage_reader=reader)
    return state


def test_shards_of_hugging_face_into_an_empty_state_dict(tmp_path: Path) -> None:
    """In either direction, and without one: what comes is what `apply` writes."""
    whole = tmp_path / "whole.pt"
    torch.save(built.state_of(built.V4), whole)
    shards = {"output_format": "safetensors", "max_shard_size": 20_000}
    migrate.apply(whole, tmp_path / "shards", **shards)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    for source, to in ((tmp_path / "shards", "v5"), (built.V5, "v4")):
        expected = built.state_of(built.V5 if to == "v5" else built.V4)
        state: dict[str, Any] = {}
        reader = MigratingReader(source, to=f"hf-mixtral@{to}")
        planner = _EmptyStateDictLoadPlanner()
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
        case.same(state, expected)


def test_a_module_is_read_as_its_state_dict(tmp_path: Path) -> None:
    old, new = built.state_of(built.V4), built.state_of(built.V5)
    model = built.module(old)
    model.load_state_dict(old)
    case.same(loaded(MigratingReader(model, to="hf-mixtral@v5"), new), new)
    assert built.same(model, old)


def test_layouts_params_and_the_dict_are_named(tmp_path: Path) -> None:
    """`from_`, `params` and `at` as in `apply`, wrong ones too."""
    old, new = built.state_of(built.V4), built.state_of(built.V5)
    save_file(old, tmp_path / "bare.safetensors")
    asked: dict[str, Any] = {"to": "hf-mixtral@v5", "from_": "hf-mixtral@v4"}
    bare = tmp_path / "bare.safetensors"
    case.same(loaded(MigratingReader(bare, params={"num_experts": 4}, **asked), new), new)
    with pytest.raises(CheckpointException) as raised:
        loaded(MigratingReader(bare, params={"num_experts": 5}, **asked), new)
    ((said, _),) = raised.value.failures.values()
    assert "num_experts" in str(said)
    dcp.save({"gen": old, "disc": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "gan")
    state = {"gen": {key: torch.zeros_like(one) for key, one in new.items()}}
    dcp.load(state, storage_reader=MigratingReader(tmp_path / "gan", at="gen", **asked))
    case.same(state["gen"], new)


def test_hugging_face_into_a_model_of_torchtitan(tmp_path: Path) -> None:
    """Its Llama has the names and the order of rows of Meta's, and DCP's nesting at the root."""
    torch.manual_seed(0)
    titan = {"tok_embeddings.weight": (32, 16), "norm.weight": (16,), "output.weight": (32, 16)}
    for n in range(2):
        p = f"layers.{n}."
        titan |= {f"{p}attention.w{w}.weight": (16 if w in "qo" else 8, 16) for w in "qkvo"}
        titan |= {f"{p}feed_forward.w{w}.weight": (24, 16) for w in (1, 3)}
        titan[f"{p}feed_forward.w2.weight"] = (16, 24)
        titan |= {f"{p}{w}_norm.weight": (16,) for w in ("attention", "ffn")}
    held = {key: torch.randn(shape).bfloat16() for key, shape in titan.items()}
    meta, hub = tmp_path / "meta", tmp_path / "hub"
    meta.mkdir()
    torch.save(held, meta / "consolidated.00.pth")
    (meta / "params.json").write_text(json.dumps({"dim": 16, "n_heads": 4, "n_kv_heads": 2}))
    migrate.apply(meta, hub, to="meta-llama@hf", output_format="safetensors")
    (hub / "migrate.history.json").unlink(missing_ok=True)
    config = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    (hub / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    saved = load_file(next(hub.glob("*.safetensors")))
    assert not torch.equal(
        saved["model.layers.0.self_attn.q_proj.weight"], held["layers.0.attention.wq.weight"]
    )
    case.same(loaded(MigratingReader(hub, to="meta-llama@meta"), held), held)


VALUES = """\
id: toy/v2/values
title: Names that change, extra states with them
why: the new module is called otherwise
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
rules:
  - {name: moved, from: "old.{k...}", to: "new.{k}"}
"""


def test_values_follow_their_rules(tmp_path: Path) -> None:
    """An extra state goes where the parameters of its module go; others stay."""
    (tmp_path / "values.yaml").write_text(VALUES)
    saved = {"old.w": torch.ones(2), "old._extra_state": {"calls": [5, None]}, "step": 3}
    dcp.save(saved, checkpoint_id=tmp_path / "saved", planner=dcp.DefaultSavePlanner(False))
    state: dict[str, Any] = {}
    reader = MigratingReader(tmp_path / "saved", rules=str(tmp_path / "values.yaml"))
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    assert state.pop("new._extra_state") == {"calls": [5, None]}
    assert state.pop("step") == 3
    case.same(state, {"new.w": torch.ones(2)})


def test_layouts_are_read_into_the_targets_own_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No buffer is made for what is contiguous and has the dtype; for another one there is."""
    (tmp_path / "rules.yaml").write_text(case.RULES)
    save_file(case.old_layout(), tmp_path / "old.safetensors")
    made: list[int] = []
    room = filling._Stage.room

    def counted(self: Any, nbytes: int, device: torch.device) -> Any:
        made.append(nbytes)
        return room(self, nbytes, device)

    monkeypatch.setattr(filling._Stage, "room", counted)
    new = case.new_layout(case.old_layout())
    for wanted, staged in ((torch.float32, False), (torch.float64, True)):
        reader = MigratingReader(tmp_path / "old.safetensors", rules=str(tmp_path / "rules.yaml"))
        like = {key: one.to(wanted) for key, one in new.items()}
        case.same(loaded(reader, like), like)
        assert bool(made) == staged


BLOCKS = """\
id: toy/v2/dense
title: Plain weights
why: the trainer has no FP8
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
rules:
  - name: plain
    from: {weight: "{m}.weight", scale: "{m}.weight_scale_inv"}
    to: "{m}.weight"
    via: [{dequantize: {codec: fp8-block, dtype: bfloat16, block: [128, 128]}}]
"""


def cut(box: Callable[[torch.Size], tuple[slice, ...]]) -> DefaultLoadPlanner:
    """A planner that asks for a part, as a rank whose shard that is would."""

    class Part(DefaultLoadPlanner):  # type: ignore[misc]
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            items = []
            for item in plan.items:
                part = [s.indices(n) for s, n in zip(box(item.lengths), item.lengths, strict=True)]
                first = torch.Size([one[0] for one in part])
                size = torch.Size([one[1] - one[0] for one in part])
                items.append(replace(item, dest_offsets=first, storage_offsets=first, lengths=size))
            return replace(plan, items=items)

    return Part()


BOXES: dict[str, tuple[slice, slice]] = {
    "a row of blocks": (slice(0, 128), slice(None)),
    "halves of two rows": (slice(64, 192), slice(None)),
    "two columns of blocks": (slice(None), slice(256, 512)),
}


@pytest.mark.parametrize("part", BOXES.values(), ids=BOXES.keys())
def test_of_blocks_that_are_computed_what_is_needed_is_read_once(
    part: tuple[slice, slice], tmp_path: Path
) -> None:
    (tmp_path / "dense.yaml").write_text(BLOCKS)
    torch.manual_seed(0)
    codes = torch.randn(2048, 1024).to(torch.float8_e4m3fn)
    scales = torch.rand(16, 8) + 0.5
    source = tmp_path / "old.safetensors"
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, source)
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = (codes.float() * whole).bfloat16()
    state = {"a.weight": torch.zeros(2048, 1024, dtype=torch.bfloat16)}
    asked = MigratingReader(source, rules=str(tmp_path / "dense.yaml"), allow="lossy")
    with case.counted() as read:
        dcp.load(state, storage_reader=asked, planner=cut(lambda shape: part))
    assert torch.equal(state["a.weight"][part], expected[part])
    needed = codes[part].numel()
    # runs of 1 KiB and of 256 bytes; the scales and the header come on top
    assert needed <= read.data <= 1.1 * needed + scales.nbytes + 1000
