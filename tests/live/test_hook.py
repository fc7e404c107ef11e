"""`migrate.attach`: old state dicts are migrated on the way in, refused whole, or left to torch."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import OrderedDict

import pytest
import torch
from old_layouts import FUSE, Model, holds, old, refused, rule, wanted
from torch import nn

import migrate
from migrate.core.errors import MigrateError
from migrate.live import hook as hooks


@pytest.fixture
def fuse(tmp_path):
    return rule(tmp_path, FUSE)


def test_an_old_dict_is_migrated_on_the_way_in(fuse):
    model, state = Model(), old()
    migrate.attach(model, rules=fuse)
    assert model.load_state_dict(state) == ([], [])
    holds(model, wanted(state))


def test_the_callers_dict_and_its_tensors_stay_as_they_are(fuse):
    model, state = Model(), old()
    state._metadata = OrderedDict({"": {"version": 1}, "layers.0.proj": {"version": 1}})
    before = [(k, id(v), v._version, v.clone()) for k, v in state.items()]
    metadata = copy.deepcopy(state._metadata)
    migrate.attach(model, rules=fuse)
    model.load_state_dict(state)
    assert [(k, id(v), v._version) for k, v in state.items()] == [b[:3] for b in before]
    assert all(torch.equal(state[k], b) for k, _, _, b in before)
    assert state._metadata == metadata


def test_a_dict_that_fits_passes_untouched_and_unmentioned(fuse, caplog):
    model = Model()
    said = []
    migrate.attach(model, rules=fuse, inform=said.append)
    seen = []
    model.layers[0].proj.register_load_state_dict_pre_hook(
        lambda m, state, prefix, *_: seen.append(dict(state))
    )
    state = Model().state_dict()
    with caplog.at_level(logging.DEBUG, "migrate"):
        model.load_state_dict(state)
    assert all(seen[0][k] is state[k] for k in seen[0])
    assert not caplog.records
    assert not said
    holds(model, state)


@pytest.mark.parametrize("part", ["none", "some"])
def test_a_part_of_what_fits_passes_untouched(fuse, part):
    model = Model()
    migrate.attach(model, rules=fuse)
    state = {} if part == "none" else {"layers.0.proj.bias": torch.ones(4)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (len(missing), unexpected) == (8 - len(state), [])
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        model.load_state_dict(state)
    assert "error[" not in str(caught.value)


def test_one_line_is_logged_and_what_there_is_to_say_is_told(fuse, caplog):
    model = Model()
    said = []
    migrate.attach(model, rules=fuse, inform=said.append)
    with caplog.at_level(logging.INFO, "migrate"):
        model.load_state_dict(old())
    assert [r.getMessage() for r in caplog.records] == ["migrated t a -> b: 8 tensors from 10"]
    assert said[0].to_json()["tensors"] == {"read": 10, "made": 8}
    assert said[0].to_json()["steps"] == [
        {"lineage": "t", "from": "a", "to": "b", "backwards": False}
    ]


def test_a_dict_that_nothing_recognises_is_torchs_own_business(fuse):
    model, plain = Model(), Model()
    migrate.attach(model, rules=fuse)
    strange = {"other": torch.zeros(1), "layers.0.proj.scale": torch.zeros(2)}
    messages = []
    for one in (model, plain):
        with pytest.raises(RuntimeError) as caught:
            one.load_state_dict(strange)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_names_left_over_are_refused_before_anything_is_written(fuse):
    model, state = Model(), old()
    migrate.attach(model, rules=fuse)
    del state["layers.1.ln.weight"]
    state["layers.0.ln.weigth"] = state["layers.0.ln.bias"]
    text = refused(model, state, "M960")
    assert "in the module and not in the migrated checkpoint: layers.1.norm.weight" in text
    assert "in the migrated checkpoint and not in the module: layers.0.norm.weigth" in text
    assert "did you mean" in text


def test_names_left_over_are_torchs_answer_without_strict(fuse):
    model, state = Model(), old()
    migrate.attach(model, rules=fuse)
    del state["layers.1.ln.weight"]
    state["layers.0.ln.weigth"] = state["layers.0.ln.bias"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["layers.1.norm.weight"], ["layers.0.norm.weigth"])
    assert torch.equal(
        model.layers[1].proj.weight,
        torch.cat([state["layers.1.proj.half0"], state["layers.1.proj.half1"]]),
    )


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_shapes_are_compared_before_anything_is_written(fuse, strict, assign):
    model = Model(size=6)
    migrate.attach(model, rules=fuse)
    text = refused(model, old(), "M960", strict=strict, assign=assign)
    assert "layers.0.proj.weight: [4, 4], the module's is [6, 6]" in text


def test_a_dtype_that_holds_less_is_a_loss_to_be_allowed(fuse):
    state = {key: value.double() for key, value in old().items()}
    model = Model()
    handle = migrate.attach(model, rules=fuse)
    assert "float64 -> float32" in refused(model, state, "M961")
    handle.remove()
    said = []
    migrate.attach(model, rules=fuse, allow={"lossy"}, inform=said.append)
    model.load_state_dict(state)
    holds(model, {key: value.float() for key, value in wanted(state).items()})
    assert any("cast float64 -> float32" in note for note in said[0].to_json()["notes"])


def test_a_wider_dtype_needs_no_permission(fuse):
    state = {key: value.bfloat16() for key, value in old().items()}
    model = Model()
    migrate.attach(model, rules=fuse)
    model.load_state_dict(state)
    holds(model, {key: value.float() for key, value in wanted(state).items()})


def test_a_part_of_a_group_is_refused_by_name(fuse):
    model, state = Model(), old()
    migrate.attach(model, rules=fuse)
    del state["layers.1.proj.half0"]
    assert "missing {i} = 0" in refused(model, state, "M207")


def test_a_dict_that_mixes_both_layouts_is_refused(fuse):
    model, state = Model(), old()
    migrate.attach(model, rules=fuse)
    refused(model, {**state, **wanted(state)}, "M211")


def test_detection_finds_the_layout_and_its_refusal_is_said():
    model, state = nn.Module(), {}
    for e in range(4):
        for w in ("w1", "w2", "w3"):
            state[f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight"] = torch.randn(2, 2)
    state["model.layers.0.block_sparse_moe.gate.weight"] = torch.randn(4, 2)
    want = dict(migrate.migrate_state_dict(state, to="hf-mixtral@v5"))
    for key, tensor in want.items():
        put(model, key, nn.Parameter(torch.zeros_like(tensor)))
    migrate.attach(model, to="hf-mixtral@v5")
    model.load_state_dict(state)
    at = "model.layers.0.block_sparse_moe.experts"
    ups = torch.stack(
        [torch.cat([state[f"{at}.{e}.w1.weight"], state[f"{at}.{e}.w3.weight"]]) for e in range(4)]
    )
    assert torch.equal(model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"], ups)
    del state[f"{at}.2.w2.weight"]
    assert "missing {e} = 2" in refused(model, state, "M207")


def put(module, key, parameter):
    *path, name = key.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]
    module.register_parameter(name, parameter)


def test_params_come_from_the_models_configuration(tmp_path):
    text = """
params: {n: {type: int, config: num_halves}}
rules: [{name: fuse, from: "w.half{i:int}", to: "weight", via: [{concat: {over: i, count: $n}}]}]
"""
    file = rule(tmp_path, text)
    model = nn.Linear(2, 4, bias=False)
    migrate.attach(model, rules=file)
    state = {f"w.half{i}": torch.randn(2, 2) for i in range(2)}
    assert "param `n` has no value" in refused(model, state, "M509")
    model.config = {"num_halves": 3}
    refused(model, state, "M207")
    model.config = {"num_halves": 2}
    model.load_state_dict(state)
    assert torch.equal(model.weight, torch.cat([*state.values()]))


def test_a_condition_on_values_is_checked_before_anything_is_written(tmp_path):
    file = rule(
        tmp_path,
        'rules: [{name: one, from: "w{i:int}", to: weight, via: [{same: {over: i}}]}, {name: b, '
        "from: bb, to: bias}]\n",
    )
    model = nn.Linear(2, 2)
    migrate.attach(model, rules=file)
    state = {"bb": torch.ones(2), "w0": torch.ones(2, 2), "w1": torch.ones(2, 2)}
    model.load_state_dict(state)
    assert torch.equal(model.weight, torch.ones(2, 2))
    state["w1"] = torch.zeros(2, 2)
    state["bb"] = torch.zeros(2)
    refused(model, state, "M404")


@pytest.mark.parametrize("call", [
    lambda m: migrate.attach(m, to="hf-mixtrall@v5"),
    lambda m: migrate.attach(m, to="hf-mixtral@v6"),
    lambda m: migrate.attach(m, to="hf-mixtral@+1"),
    lambda m: migrate.attach(m, to="hf-mixtral@v5", allow="everything"),
    lambda m: migrate.attach(m, to="hf-mixtral@v5", from_="te-grouped-bias@multi"),
    lambda m: migrate.attach(m, to="hf-mixtral@v5", params={"num_expertz": 3}),
    lambda m: migrate.attach(m, rules="nowhere.yaml"),
    lambda m: migrate.attach(m, to="hf-mixtral@v5", max_memory=3),
    lambda m: migrate.attach(m, to="hf-mixtral@v5", device="toaster"),
    lambda m: migrate.attach(m),
    lambda m: migrate.attach("model", to="hf-mixtral@v5"),
])  # fmt: skip
def test_a_wrong_question_is_an_error_when_it_is_asked(call):
    model = Model()
    with pytest.raises(MigrateError) as caught:
        call(model)
    assert caught.value.exit_code == 2
    assert not model._load_state_dict_pre_hooks


def test_a_param_that_nothing_will_tell_is_an_error_when_it_is_asked(tmp_path):
    file = rule(
        tmp_path,
        'params: {n: {type: int}}\nrules: [{name: r, from: "w{i:int}", to: weight, via: [{stack: '
        "{over: i, count: $n}}]}]\n",
    )
    model = Model()
    with pytest.raises(MigrateError, match="M509") as caught:
        migrate.attach(model, rules=file)
    assert caught.value.exit_code == 2
    assert not model._load_state_dict_pre_hooks


def test_attaching_twice_is_once_and_another_question_is_refused(fuse, tmp_path):
    model, state = Model(), old()
    said = []
    first = migrate.attach(model, rules=fuse)
    second = migrate.attach(model, rules=fuse, inform=said.append)
    assert len(model._load_state_dict_pre_hooks) == 1
    model.load_state_dict(state)
    assert len(said) == 1
    with pytest.raises(MigrateError) as caught:
        migrate.attach(model, to="hf-mixtral@v5")
    assert [d.code for d in caught.value.diagnostics] == ["M115"]
    assert "in one call" in str(caught.value)
    second.remove()
    assert not model._load_state_dict_pre_hooks
    first.remove()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(state)


def test_loading_twice_is_the_same_and_is_planned_once(fuse, monkeypatch):
    model = Model()
    migrate.attach(model, rules=fuse)
    calls = []
    real = hooks.prepare
    monkeypatch.setattr(hooks, "prepare", lambda *a, **k: calls.append(a) or real(*a, **k))
    for _ in range(3):
        state = old()
        model.load_state_dict(state)
        holds(model, wanted(state))
    assert len(calls) == 1
    strided = {
        key: torch.randn(4, 2, 2)[:, :, 0].T if "half" in key else value
        for key, value in old().items()
    }
    model.load_state_dict(strided)
    holds(model, wanted(strided))
    assert len(calls) == 2


def test_a_model_that_loads_its_own_dict_back_is_left_alone(fuse):
    model = Model()
    migrate.attach(model, rules=fuse)
    model.load_state_dict(old())
    model.load_state_dict(model.state_dict())
    model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)


def test_a_copy_and_a_pickle_of_the_model_have_the_hook_too(fuse):
    model, state = Model(), old()
    handle = migrate.attach(model, rules=fuse)
    model.load_state_dict(state)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        state = old()
        other.load_state_dict(state)
        holds(other, wanted(state))
    twin = copy.deepcopy(model)
    handle.remove()
    twin.load_state_dict(state)
    holds(twin, wanted(state))


# wrappers, prefixes


def test_a_model_that_is_wrapped_later_is_migrated_below_its_prefix(fuse):
    model = Model()
    migrate.attach(model, rules=fuse)
    state = old(lead="module.")
    nn.DataParallel(model).load_state_dict(state)
    holds(model, {key[7:]: value for key, value in wanted(state, lead="module.").items()})


def test_a_wrapper_itself_can_be_the_root(fuse):
    model = nn.DataParallel(Model())
    migrate.attach(model, rules=fuse)
    for lead in ("module.", ""):
        state = old(lead=lead)
        model.load_state_dict(state)
        holds(
            model,
            {
                f"module.{key.removeprefix('module.')}": value
                for key, value in wanted(state, lead=lead).items()
            },
        )


def test_a_dict_of_a_wrapped_model_goes_into_the_plain_one(fuse):
    model, state = Model(), old(lead="module.")
    migrate.attach(model, rules=fuse)
    model.load_state_dict(state)
    holds(model, {key[7:]: value for key, value in wanted(state, lead="module.").items()})


def test_compiled_modules_have_a_segment_of_their_own(fuse):
    state = old()
    model = Model()
    migrate.attach(model, rules=fuse)
    whole = torch.compile(model, backend="eager")
    whole.load_state_dict({f"_orig_mod.{key}": value for key, value in state.items()})
    holds(model, wanted(state))
    state = old()
    outer = torch.compile(Model(), backend="eager")
    migrate.attach(outer, rules=fuse)
    outer.load_state_dict(state)
    holds(outer, {f"_orig_mod.{key}": value for key, value in wanted(state).items()})
    inner = Model()
    inner.layers[0] = torch.compile(inner.layers[0], backend="eager")
    migrate.attach(inner, rules=fuse)
    inner.load_state_dict(state)
    holds(
        inner,
        {
            key.replace("layers.0.", "layers.0._orig_mod."): value
            for key, value in wanted(state).items()
        },
    )


@pytest.mark.parametrize("strict", [True, False])
def test_a_nested_model_is_migrated_below_its_prefix(fuse, strict):
    outer = nn.ModuleDict({"student": Model(), "head": nn.Linear(4, 2)})
    migrate.attach(outer["student"], rules=fuse)
    state = old(lead="student.")
    head = {"head.weight": torch.randn(2, 4), "head.bias": torch.randn(2)}
    assert outer.load_state_dict({**state, **head}, strict=strict) == ([], [])
    holds(outer, {**wanted(state, lead="student."), **head})
    del state["student.layers.0.ln.bias"]
    if strict:
        assert "layers.0.norm.bias" in refused(
            outer["student"], {key[8:]: value for key, value in state.items()}, "M960"
        )
    else:
        assert outer.load_state_dict({**state, **head}, strict=False) == (
            ["student.layers.0.norm.bias"],
            [],
        )


def test_a_hook_on_a_part_and_on_the_root_work_together(fuse, tmp_path):
    outer = nn.ModuleDict({"student": Model()})
    outer_rule = rule(
        tmp_path, 'rules: [{name: r, from: "net.{k...}", to: "student.{k}"}]\n', "outer.yaml"
    )
    migrate.attach(outer["student"], rules=fuse)
    migrate.attach(outer, rules=outer_rule)
    state = old(lead="net.")
    outer.load_state_dict(state)
    holds(outer, {f"student.{key[4:]}": value for key, value in wanted(state, lead="net.").items()})
    both = nn.ModuleDict({"student": Model()})
    migrate.attach(both["student"], rules=fuse)
    migrate.attach(both, rules=fuse)
    state = old(lead="student.")
    both.load_state_dict(state)
    holds(both, wanted(state, lead="student."))


def test_a_submodule_that_is_registered_twice_is_filled_under_both_names(tmp_path):
    file = rule(
        tmp_path,
        'rules: [{name: r, from: "{m:x|y}.w", to: "{m}.weight"}]\nkeep: ["{m:x|y}.bias"]\n',
    )
    linear = nn.Linear(2, 2)
    model = nn.ModuleDict({"x": linear, "y": linear})
    migrate.attach(model, rules=file)
    state = {
        f"{m}.{k}": torch.full((2, 2) if k == "w" else (2,), float(n))
        for n, m in enumerate("xy", 1)
        for k in ("w", "bias")
    }
    model.load_state_dict(state)
    assert torch.equal(linear.weight, torch.full((2, 2), 2.0))
    model.load_state_dict(state, assign=True)
    assert model["x"].weight is model["y"].weight
    assert torch.equal(model["x"].weight, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("lead", ["module.", "_orig_mod.", "module._orig_mod."])
def test_the_names_of_wrappers_go_where_that_is_the_goal(lead):
    model = Model()
    migrate.attach(model, to="torch-wrappers@plain")
    state = {f"{lead}{key}": value + 1 for key, value in Model().state_dict().items()}
    model.load_state_dict(state)
    holds(model, {key.removeprefix(lead): value for key, value in state.items()})


def test_a_dict_without_wrappers_is_torchs_own_business_where_they_are_the_goal():
    model = Model()
    migrate.attach(model, to="torch-wrappers@plain")
    state = {key: value + 1 for key, value in Model().state_dict().items()}
    model.load_state_dict(state)
    holds(model, state)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"other": torch.zeros(1)})
    refused(model, {"module.other": torch.zeros(1), "more": torch.zeros(1)}, "M960")


def test_codes_without_the_scale_beside_them_are_refused_where_names_change(tmp_path):
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(512, 256, bias=False)})
    file = rule(tmp_path, 'rules: [{name: r, from: "old.{k...}", to: "fc.{k}"}]\n')
    migrate.attach(model, rules=[file])
    codes = torch.ones(256, 512).to(torch.float8_e4m3fn)
    state = {"old.weight": codes, "old.weight_scale_inv": torch.full((2, 4), 1e-3)}
    refused(model, state, "M409", strict=False)
