"""The hook in torch's own ways of loading: assigned, swapped, lazy, on the meta device, in threads,
and broken off in the middle.
"""

from __future__ import annotations

import io
import logging
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from old_layouts import FUSE, Model, holds, old, photo, refused, rule, same, wanted
from torch import nn

import migrate
from migrate.live import hook as hooks


@pytest.fixture
def fuse(tmp_path):
    return rule(tmp_path, FUSE)


def test_tied_parameters_stay_tied_when_they_are_assigned(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(3, 2)
            self.head = nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight

    file = rule(
        tmp_path,
        "rules: [{name: e, from: wte, to: embed.weight}, {name: h, from: wout, to: head.weight, "
        "optional: true}]\n",
    )
    for strict in (True, False):
        model = Tied()
        migrate.attach(model, rules=file)
        state = {"wte": torch.randn(3, 2), "wout": torch.randn(3, 2)}
        if not strict:
            del state["wout"]
        model.load_state_dict(state, assign=True, strict=strict)
        assert model.embed.weight is model.head.weight
        assert torch.equal(model.head.weight, state["wout" if strict else "wte"])


def test_assigning_takes_the_dtype_of_the_dict_and_keeps_requires_grad(fuse, caplog):
    model, state = Model(), {key: value.double() for key, value in old().items()}
    model.layers[0].proj.weight.requires_grad_(False)
    migrate.attach(model, rules=fuse)
    with caplog.at_level(logging.INFO, "migrate"):
        model.load_state_dict(state, assign=True)
    assert "assign=True" in caplog.text
    holds(model, wanted(state))
    assert model.layers[0].proj.weight.dtype == torch.float64
    assert [p.requires_grad for p in model.layers[0].proj.parameters()] == [False, True]
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert model.layers[0].norm.weight.data_ptr() == state["layers.0.ln.weight"].data_ptr()


def test_a_meta_module_is_filled_by_assign(fuse):
    with torch.device("meta"):
        model = Model()
    migrate.attach(model, rules=fuse)
    state = old()
    model.load_state_dict(state, assign=True)
    holds(model, wanted(state))


def test_what_is_copied_out_twice_is_not_tied_by_assign(tmp_path):
    file = rule(
        tmp_path, 'rules: [{name: c, from: w, to: "{n:x|y}.weight", via: [{copy: {into: n}}]}]\n'
    )
    model = nn.ModuleDict({n: nn.Linear(2, 2, bias=False) for n in "xy"})
    migrate.attach(model, rules=file)
    model.load_state_dict({"w": torch.ones(2, 2)}, assign=True)
    with torch.no_grad():
        model["x"].weight.zero_()
    assert torch.equal(model["y"].weight, torch.ones(2, 2))


class Scaled(torch.Tensor):
    """A parameter of a class of its own."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, True)


class Tagged(nn.Parameter):
    pass


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("kind", [Scaled, Tagged])
def test_a_parameter_of_a_subclass_keeps_its_class(tmp_path, kind, assign):
    file = rule(
        tmp_path, 'rules: [{name: c, from: "w{i:int}", to: weight, via: [{stack: {over: i}}]}]\n'
    )
    model = nn.Module()
    model.weight = (
        nn.Parameter(Scaled(torch.zeros(2, 3))) if kind is Scaled else Tagged(torch.zeros(2, 3))
    )
    model.weight.tag = "here"
    migrate.attach(model, rules=file)
    state = {f"w{i}": torch.randn(3) for i in range(2)}
    model.load_state_dict(state, assign=assign)
    assert type(model.weight) is kind
    assert isinstance(model.weight, nn.Parameter)
    assert torch.equal(model.weight.data.as_subclass(torch.Tensor), torch.stack([*state.values()]))
    if kind is Tagged:
        assert model.weight.tag == "here"


@pytest.mark.parametrize("assign", [True, False])
def test_parameters_may_be_swapped_instead_of_copied(fuse, assign):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model, state = Model(), old()
        ids = [id(p) for p in model.parameters()]
        migrate.attach(model, rules=fuse)
        model.load_state_dict(state, assign=assign)
        holds(model, wanted(state))
        assert [id(p) for p in model.parameters()] == ids
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        del state["layers.0.ln.bias"]
        before = photo(model)
        with pytest.raises(RuntimeError, match="M960"):
            model.load_state_dict(state, assign=assign)
        assert same(photo(model), before)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_buffers_are_filled_and_a_counter_is_made_up_as_torch_does(tmp_path):
    file = rule(tmp_path, 'rules: [{name: r, from: "norm.{k}", to: "bn.{k}"}]\n')
    model = nn.ModuleDict({"bn": nn.BatchNorm1d(3)})
    migrate.attach(model, rules=file)
    other = nn.BatchNorm1d(3)
    other(torch.randn(4, 3))
    state = {f"norm.{key}": value for key, value in other.state_dict().items()}
    model.load_state_dict(state)
    holds(model, {key.replace("norm.", "bn."): value for key, value in state.items()})
    del state["norm.num_batches_tracked"]
    model.load_state_dict(state)
    # the dict knows of counters, and has none
    versions = OrderedDict(state)
    versions._metadata = {"bn": {"version": 2}}
    assert "bn.num_batches_tracked" in refused(model, versions, "M960")


def test_a_lazy_module_takes_its_shape_from_what_is_migrated(tmp_path):
    file = rule(
        tmp_path,
        'rules: [{name: r, from: "w{i:int}", to: weight, via: [{stack: {over: i}}]}]\nkeep: '
        "[bias]\n",
    )
    for assign in (False, True):
        model = nn.LazyLinear(2)
        migrate.attach(model, rules=file)
        state = {"w0": torch.ones(3), "w1": torch.zeros(3), "bias": torch.ones(2)}
        model.load_state_dict(state, assign=assign)
        assert torch.equal(model.weight, torch.stack([state["w0"], state["w1"]]))
        unfilled = nn.LazyLinear(2)
        migrate.attach(unfilled, rules=file)
        with pytest.raises(RuntimeError, match="M207"):
            unfilled.load_state_dict({"w1": torch.ones(3), "bias": torch.ones(2)}, assign=assign)
        assert isinstance(unfilled.weight, nn.UninitializedParameter)


class Stateful(nn.Linear):
    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def test_values_that_are_no_tensors_follow_their_modules(tmp_path):
    file = rule(tmp_path, 'rules: [{name: r, from: "old.{k}", to: "new.{k}"}]\n')
    model = nn.ModuleDict({"new": Stateful(2, 2)})
    migrate.attach(model, rules=file)
    kept = io.BytesIO(b"state")
    state = {"old.weight": torch.ones(2, 2), "old.bias": torch.ones(2), "old._extra_state": kept}
    model.load_state_dict(state)
    assert model["new"].state is kept
    model.load_state_dict({**state, "old._extra_state": torch.ones(3, dtype=torch.uint8)})
    assert torch.equal(model["new"].state, torch.ones(3, dtype=torch.uint8))
    kept = io.BytesIO(b"other")
    model.load_state_dict({**state, "old._extra_state": kept})
    assert model["new"].state is kept


def test_a_module_that_loads_itself_is_left_to_judge(tmp_path):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def _load_from_state_dict(self, state, prefix, *rest):
            self.seen = state.pop(f"{prefix}packed")
            state[f"{prefix}weight"] = torch.cat([self.seen, self.seen])
            super()._load_from_state_dict(state, prefix, *rest)

    file = rule(tmp_path, 'rules: [{name: r, from: "old.{k}", to: "new.{k}"}]\n')
    model = nn.ModuleDict({"new": Packed()})
    migrate.attach(model, rules=file)
    packed = torch.ones(2)
    model.load_state_dict({"old.packed": packed}, strict=False)
    assert torch.equal(model["new"].weight, torch.ones(4))


# breaking off


@pytest.mark.parametrize("at", [0, 1])
def test_a_load_that_breaks_off_says_what_was_written(fuse, at):
    model, state = Model(), old()
    migrate.attach(model, rules=fuse)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    good = wanted({key: value.clone() for key, value in state.items()})
    ours = model.layers[at].proj.register_load_state_dict_pre_hook(
        lambda *_: state[f"layers.{at}.proj.half1"].untyped_storage().resize_(0)
    )
    # a hook in torch's own name is none that renames
    model.layers[at].proj._load_state_dict_pre_hooks[ours.id].hook.__module__ = "torch.test"
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    text = str(caught.value)
    assert f"error[M962]: loading stopped at layers.{at}.proj.weight" in text
    assert text.count("error[") == 1
    first = f"layers.{at}.proj.weight"
    keys = [*good]
    done = keys[: keys.index(first)]
    assert ("nothing was written before" in text) == (not done)
    for key, value in model.state_dict().items():
        if key in done:
            assert torch.equal(value, good[key])
        elif key != first:
            assert torch.equal(value, before[key])
    if at == 1:
        assert "written before: layers.0.{proj,norm}.{weight,bias}\n" in text
        assert "as before: layers.1.proj.bias, layers.1.norm.{weight,bias}\n" in text


def test_peak_is_one_tensor_above_the_dict(fuse, monkeypatch):
    model, state = Model(layers=8, size=8), old(layers=8, size=8)
    migrate.attach(model, rules=fuse)
    made = []
    real = hooks.Outputs.compute
    monkeypatch.setattr(hooks.Outputs, "compute", lambda self, *a: made.append(a) or real(self, *a))
    model.load_state_dict(state)
    assert not made
    holds(model, wanted(state, 8))


def test_threads_load_side_by_side(fuse):
    models = [Model() for _ in range(4)]
    states = [old() for _ in models]
    for model in models:
        migrate.attach(model, rules=fuse)
    failed = []

    def load(model, state):
        try:
            for _ in range(5):
                model.load_state_dict(state)
        except Exception as error:  # noqa: BLE001 - told to the main thread
            failed.append(error)

    threads = [
        threading.Thread(target=load, args=pair) for pair in zip(models, states, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for model, state in zip(models, states, strict=True):
        holds(model, wanted(state))


def test_tensors_on_the_meta_device_are_named_where_their_elements_are_needed(fuse):
    model, state = Model(), old()
    migrate.attach(model, rules=fuse)
    state["layers.1.proj.half1"] = state["layers.1.proj.half1"].to("meta")
    assert "layers.1.proj.half1" in refused(model, state, "M916")


@pytest.mark.parametrize("strict", [True, False])
def test_a_tensor_on_the_meta_device_is_refused_before_a_parameter_changes(tmp_path, strict):
    file = rule(
        tmp_path, 'rules: [{name: r, from: "old.{k}", to: "new.{k}"}]\nkeep: ["kept.{k}"]\n'
    )
    for absent in ("old.weight", "old.bias", "kept.weight"):
        model = nn.ModuleDict({"new": nn.Linear(2, 2), "kept": nn.Linear(2, 2, bias=False)})
        before = {key: value.clone() for key, value in model.state_dict().items()}
        migrate.attach(model, rules=file)
        state = {
            "old.weight": torch.ones(2, 2),
            "old.bias": torch.ones(2),
            "kept.weight": torch.ones(2, 2),
        }
        state[absent] = state[absent].to("meta")
        with pytest.raises(RuntimeError, match="M916") as caught:
            model.load_state_dict(state, strict=strict)
        assert absent.replace("old", "new") in str(caught.value)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        with pytest.raises(migrate.MigrateError, match="M916"):
            migrate.apply(state, rules=file)
    # a place on the meta device takes nothing, and assigning gives the place itself
    with torch.device("meta"):
        model = nn.ModuleDict({"new": nn.Linear(2, 2), "kept": nn.Linear(2, 2, bias=False)})
    migrate.attach(model, rules=file)
    model.load_state_dict(state, assign=True, strict=strict)
    assert model["kept"].weight.is_meta
    assert torch.equal(model["new"].bias, torch.ones(2))


def test_tensors_that_rules_cannot_take_go_with_their_modules(tmp_path):
    file = rule(
        tmp_path, 'rules: [{name: r, from: "old.{k}", to: "new.{k}"}]\nkeep: ["other.{k}"]\n'
    )
    model = nn.ModuleDict({"new": nn.Linear(2, 2, bias=False)})
    migrate.attach(model, rules=file)
    sparse = torch.eye(3).to_sparse()
    missing, unexpected = model.load_state_dict(
        {"old.weight": torch.ones(2, 2), "other.x": sparse}, strict=False
    )
    assert (missing, unexpected) == ([], ["other.x"])
    assert torch.equal(model["new"].weight, torch.ones(2, 2))


UNFIT = [None, "text", [1.0, 2.0], torch.ones(2).to_sparse(), torch.ones(3).to_sparse()]


@pytest.mark.parametrize("bias", UNFIT)
def test_what_no_parameter_can_be_filled_from_is_refused_before_anything_is_written(tmp_path, bias):
    file = rule(tmp_path, 'rules: [{name: r, from: "old.{k}", to: "new.{k}"}]\n')
    model = nn.ModuleDict({"new": nn.Linear(2, 2)})
    migrate.attach(model, rules=file)
    assert "new.bias" in refused(model, {"old.weight": torch.ones(2, 2), "old.bias": bias}, "M960")


TE = Path(__file__).parent.parent / "data" / "te"
STATES = {
    "2.0, a tensor of bytes": lambda: torch.frombuffer(
        bytearray((TE / "v2.0_linear_DelayedScaling.pkl").read_bytes()), dtype=torch.uint8
    ),
    "1.13, an archive": lambda: io.BytesIO(
        (TE / "v1.13_linear_DelayedScaling.bytesio.pt").read_bytes()
    ),
}


@pytest.mark.parametrize("age", STATES)
def test_the_policies_of_extra_states_hold_in_the_hook_although_all_names_fit(age):
    def module():
        made = nn.Sequential(Stateful(2, 2))
        made[0].state = None
        return made

    def state():
        return {
            "0.weight": torch.ones(2, 2),
            "0.bias": torch.ones(2),
            "0._extra_state": STATES[age](),
        }

    strict = module()
    migrate.attach(strict, to="te-extra-state@2.18")
    before = photo(strict)
    with pytest.raises(RuntimeError, match="M951"):
        strict.load_state_dict(state())
    assert same(photo(strict), before)
    assert strict[0].state is None
    loose = module()
    migrate.attach(loose, to="te-extra-state@2.18", allow={"delayed-scaling"})
    wanted = dict(
        migrate.migrate_state_dict(state(), to="te-extra-state@2.18", allow={"delayed-scaling"})
    )["0._extra_state"]
    for _ in range(2):
        loose.load_state_dict(state())
        assert loose[0].state.dtype is torch.uint8
        assert torch.equal(loose[0].state, wanted)
    dropped = module()
    migrate.attach(
        dropped, to="te-extra-state@2.18", allow={"drop"}, params={"delayed_scaling": "drop"}
    )
    with pytest.raises(RuntimeError, match=r"M960.*\n.*0\._extra_state"):
        dropped.load_state_dict(state())
    assert dropped.load_state_dict(state(), strict=False) == (["0._extra_state"], [])
    assert dropped[0].state is None
    assert torch.equal(dropped[0].weight, torch.ones(2, 2))
    new = module()
    migrate.attach(new, to="te-extra-state@2.18")
    empty = torch.empty(0, dtype=torch.uint8)
    new.load_state_dict({**state(), "0._extra_state": empty})
    assert new[0].state is empty


def test_a_sharded_module_takes_its_part_of_each_tensor(fuse):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, state = Model(), old()
        mesh = dist.init_device_mesh("cpu", (1,))
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        migrate.attach(model, rules=fuse)
        model.load_state_dict(state)
        got = {key: value.full_tensor() for key, value in model.state_dict().items()}
        assert all(torch.equal(got[key], value) for key, value in wanted(state).items())
        assert all(isinstance(p, DTensor) for p in model.parameters())
        halves = {
            k: distribute_tensor(v, mesh, [Replicate()]) if "half" in k else v
            for k, v in old().items()
        }
        with pytest.raises(RuntimeError, match="M916") as caught:
            model.load_state_dict(halves)
        assert "layers.{0,1}.proj.half{0,1}" in str(caught.value)
    finally:
        dist.destroy_process_group()


def test_what_calls_the_modules_own_method_gets_a_migration_too(tmp_path):
    """Some packages load module by module, without `load_state_dict`: then what hooks are told
    counts.
    """
    file = rule(
        tmp_path, 'rules: [{name: r, from: "w{i:int}", to: weight, via: [{stack: {over: i}}]}]\n'
    )
    model = nn.Linear(3, 2)
    migrate.attach(model, rules=file)
    for assign in (False, True):
        state, messages = {f"fc.w{i}": torch.randn(3) for i in range(2)}, []
        made = torch.stack([*state.values()])
        # strict, as torch tells all hooks
        model._load_from_state_dict(
            dict(state), "fc.", {"assign_to_params_buffers": assign}, True, [], [], messages
        )
        assert len(messages) == 1
        assert "bias" in messages[0]
        model._load_from_state_dict(
            dict(state), "fc.", {"assign_to_params_buffers": assign}, False, [], [], messages[:0]
        )
        assert torch.equal(model.weight, made)
