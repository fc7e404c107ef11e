"""`migrate_state_dict`: views of the caller's tensors, values made when asked for, and nothing of
the caller's changed.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch

import migrate
from migrate.core.errors import MigrateError
from migrate.live.standins import LazyTensor

HEAD = "id: t/live\ntitle: t\nlineage: t\nedge: [a, b]\n"


def rule(tmp_path, text):
    file = tmp_path / "rule.yaml"
    file.write_text(HEAD + text)
    return file


def mixtral(layers=2, experts=4):
    made = OrderedDict()
    for i in range(layers):
        for e in range(experts):
            for w, shape in (("w1", (6, 4)), ("w2", (4, 6)), ("w3", (6, 4))):
                made[f"model.layers.{i}.block_sparse_moe.experts.{e}.{w}.weight"] = torch.randn(
                    shape
                )
        made[f"model.layers.{i}.block_sparse_moe.gate.weight"] = torch.randn(experts, 4)
    return made


def test_what_is_only_renamed_is_the_callers_own_object():
    old = mixtral()
    new = migrate.migrate_state_dict(old, to="hf-mixtral@v5")
    assert (
        new["model.layers.1.mlp.gate.weight"] is old["model.layers.1.block_sparse_moe.gate.weight"]
    )


def test_stacked_experts_are_what_torch_makes_of_them_and_come_apart_as_views():
    old = mixtral()
    new = migrate.migrate_state_dict(old, to="hf-mixtral@v5")
    for i in range(2):
        at = f"model.layers.{i}.block_sparse_moe.experts"
        ups = [
            torch.cat([old[f"{at}.{e}.w1.weight"], old[f"{at}.{e}.w3.weight"]]) for e in range(4)
        ]
        assert torch.equal(new[f"model.layers.{i}.mlp.experts.gate_up_proj"], torch.stack(ups))
        assert torch.equal(
            new[f"model.layers.{i}.mlp.experts.down_proj"],
            torch.stack([old[f"{at}.{e}.w2.weight"] for e in range(4)]),
        )
    held = dict(new)
    back = migrate.migrate_state_dict(held, to="hf-mixtral@v4")
    assert set(back) == set(old)
    for key, tensor in old.items():
        assert torch.equal(back[key], tensor)
    part = back["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    assert (
        part.untyped_storage().data_ptr()
        == held["model.layers.0.mlp.experts.gate_up_proj"].untyped_storage().data_ptr()
    )


VIEWS = {
    "transposed": ("via: [{transpose: {dims: [0, 1]}}]", lambda x: x.T),
    "rows": ("via: [{slice: {dim: 0, start: 1, stop: 3, of: 4, value: 0}}]", None),
    "reshaped": ("via: [{reshape: {to: [3, 8], from: [4, 6]}}]", lambda x: x.reshape(3, 8)),
}


@pytest.mark.parametrize("name", ["transposed", "reshaped"])
def test_a_layout_that_is_a_view_shares_the_callers_memory(tmp_path, name):
    text, expected = VIEWS[name]
    weight = torch.randn(4, 6)
    file = rule(tmp_path, f"rules: [{{name: r, from: w, to: v, {text}}}]\n")
    made = migrate.migrate_state_dict({"w": weight}, rules=file)["v"]
    assert torch.equal(made, expected(weight))
    weight.zero_()
    assert not made.any()


@pytest.mark.parametrize(
    "strided", [lambda x: x.t(), lambda x: x[::2, 1:], lambda x: x[2:3].expand(5, 6)]
)
def test_a_view_of_a_strided_tensor_is_right(tmp_path, strided):
    weight = strided(torch.randn(6, 6))
    file = rule(
        tmp_path, "rules: [{name: r, from: w, to: v, via: [{transpose: {dims: [0, 1]}}]}]\n"
    )
    assert torch.equal(migrate.migrate_state_dict({"w": weight}, rules=file)["v"], weight.T)


def test_a_flip_which_torch_has_no_view_for_is_a_new_tensor(tmp_path):
    weight = torch.randn(4, 6)
    file = rule(tmp_path, "rules: [{name: r, from: w, to: v, via: [{flip: {dim: 1}}]}]\n")
    made = migrate.migrate_state_dict({"w": weight}, rules=file)["v"]
    assert torch.equal(made, weight.flip(1))
    assert made.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()


def test_a_value_is_made_on_access_and_kept_by_nobody_but_whoever_asked():
    new = migrate.migrate_state_dict(mixtral(), to="hf-mixtral@v5")
    key = "model.layers.0.mlp.experts.down_proj"
    made = new[key]
    assert new[key] is made
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert torch.equal(new[key], new[key])


def test_tied_outputs_that_are_made_are_one_tensor_while_both_live(tmp_path):
    file = rule(
        tmp_path,
        "rules: [{name: r, from: 'w{i:int}', to: '{n:x|y}', via: [{stack: {over: i}}, {tie: "
        "{into: n}}]}]\n",
    )
    new = migrate.migrate_state_dict({"w0": torch.zeros(2), "w1": torch.ones(2)}, rules=file)
    one, other = new["x"], new["y"]
    assert one is other


def test_computed_values_are_bit_equal_to_those_of_a_run_into_files(tmp_path):
    file = rule(
        tmp_path,
        "rules: [{name: r, from: w, to: v, via: [{cast: {to: bfloat16, from: float32}}]}]\n",
    )
    weight = torch.randn(64, 64)
    with pytest.raises(MigrateError) as caught:
        migrate.migrate_state_dict({"w": weight}, rules=file)
    assert caught.value.diagnostics[0].code == "M401"
    made = migrate.migrate_state_dict({"w": weight}, rules=file, allow={"lossy"})["v"]
    assert torch.equal(made.view(torch.int16), weight.bfloat16().view(torch.int16))


def test_the_callers_dict_its_tensors_and_metadata_stay_what_they_are(tmp_path):
    old = mixtral()
    old._metadata = OrderedDict(
        {"": {"version": 1}, "model.layers.0.block_sparse_moe": {"version": 3}}
    )
    copies = {key: tensor.clone() for key, tensor in old.items()}
    metadata = {name: dict(entry) for name, entry in old._metadata.items()}
    new = migrate.migrate_state_dict(old, to="hf-mixtral@v5")
    assert new._metadata == {"": {"version": 1}, "model.layers.0.mlp": {"version": 3}}
    new._metadata[""]["version"] = 7
    for key in new:
        new[key]
    assert list(old) == list(copies)
    assert all(torch.equal(old[key], copies[key]) for key in old)
    assert dict(old._metadata) == metadata


def test_modules_of_different_versions_that_become_one_have_none(tmp_path):
    file = rule(
        tmp_path,
        "rules: [{name: r, from: '{m:a|b}.w', to: c.w, via: [{concat: {over: m, dim: 0}}]}]\n",
    )
    for versions, expected in (((1, 2), {"": {}}), ((2, 2), {"": {}, "c": {"version": 2}})):
        state = OrderedDict({"a.w": torch.ones(2), "b.w": torch.ones(2)})
        state._metadata = {"": {}, "a": {"version": versions[0]}, "b": {"version": versions[1]}}
        assert migrate.migrate_state_dict(state, rules=file)._metadata == expected


def test_values_that_are_no_tensors_follow_their_module_and_arrays_are_taken(tmp_path):
    file = rule(tmp_path, "rules: [{name: r, from: '{m}.w', to: 'new.{m}.w'}]\n")
    state = {"a.w": np.arange(4.0), "a._extra_state": {"scale": 2}}
    new = migrate.migrate_state_dict(state, rules=file)
    assert list(new) == ["new.a.w", "new.a._extra_state"]
    assert len(new) == 2
    assert "new.a._extra_state" in new
    assert new["new.a._extra_state"] is state["a._extra_state"]
    assert np.array_equal(new["new.a.w"], np.arange(4.0))
    with pytest.raises(KeyError):
        new["a.w"]


def test_a_condition_on_values_is_checked_before_anything_is_made(tmp_path):
    file = rule(tmp_path, "rules: [{name: r, from: '{n:a|b}', to: c, via: [{same: {over: n}}]}]\n")
    assert torch.equal(
        migrate.migrate_state_dict({"a": torch.ones(2), "b": torch.ones(2)}, rules=file)["c"],
        torch.ones(2),
    )
    with pytest.raises(MigrateError, match="differ first at"):
        migrate.migrate_state_dict({"a": torch.ones(2), "b": torch.zeros(2)}, rules=file)


def test_the_lazy_form_streams_into_a_module():
    old = mixtral(layers=1)
    new = migrate.migrate_state_dict(old, to="hf-mixtral@v5")
    stand_ins = new.lazy()
    key = "model.layers.0.mlp.experts.gate_up_proj"
    assert isinstance(stand_ins[key], LazyTensor)
    assert stand_ins[key].shape == (4, 12, 4)
    target = torch.nn.ParameterDict({"gate_up_proj": torch.empty(4, 12, 4, dtype=torch.float64)})
    target.load_state_dict({"gate_up_proj": stand_ins[key]})
    assert torch.equal(target["gate_up_proj"], new[key].double())
    # any other use sees a tensor
    assert torch.equal(torch.stack([stand_ins[key], stand_ins[key]])[1], new[key])
    assert torch.equal(stand_ins[key][1], new[key][1])
    assert stand_ins[key].sum() == new[key].sum()


def test_a_device_that_there_is_not_is_refused():
    with pytest.raises(MigrateError, match="no device"):
        migrate.migrate_state_dict(mixtral(1), to="hf-mixtral@v5", device="gpu")


def test_a_gpu_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MigrateError) as caught:
        migrate.migrate_state_dict(mixtral(1), to="hf-mixtral@v5", device="cuda")
    assert caught.value.diagnostics[0].code == "M407"


def test_values_on_a_device_are_bit_equal_to_those_of_the_cpu(device):
    old = mixtral()
    new = migrate.migrate_state_dict(old, to="hf-mixtral@v5")
    asked = migrate.migrate_state_dict(old, to="hf-mixtral@v5", device=device)
    moved = {key: one.to(device) for key, one in old.items()}
    moved = migrate.migrate_state_dict(moved, to="hf-mixtral@v5")
    for key in new:
        assert asked[key].device.type == device
        assert torch.equal(asked[key].cpu(), new[key])
        assert torch.equal(moved[key].cpu(), new[key])


def test_only_a_meta_device_without_bytes_is_stood_in_for(tmp_path):
    """The control flow of another device: everything is made there, from tensors that are here."""
    new = migrate.migrate_state_dict(mixtral(1), to="hf-mixtral@v5", device="meta")
    assert {tensor.device.type for tensor in new.values()} == {"meta"}
