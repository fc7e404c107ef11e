"""The hook with modules like Transformer Engine's GroupedLinear: each remark in the review of the
change that brought it is a test.
"""

from __future__ import annotations

import io
from collections import OrderedDict

import pytest
import torch
from grouped_linear import Float8, GroupedLinear, GroupedTensor, Remapping, plain
from marks import thorough
from old_layouts import photo, same
from torch import nn

import migrate

N, OUT, IN = 3, 4, 2
BOTH = ["te-grouped-weight", "te-grouped-bias"]


def attached(module, modules=("",), weight="multi", bias="multi", **more):
    """The module with a hook that leads to how it keeps its weights and biases."""
    to = [f"te-grouped-weight@{weight}", f"te-grouped-bias@{bias}"]
    migrate.attach(module, to=to, params={"modules": list(modules)}, **more)
    return module


def layout(single):
    return "single" if single else "multi"


def values(n=N):
    return torch.randn(n, OUT, IN), torch.randn(n, OUT)


def dict_of(weights, biases, *, single_weight=False, single_bias=False, prefix=""):
    made = OrderedDict()
    if single_weight:
        made[f"{prefix}weight"] = weights
    for i in range(len(weights)):
        if not single_weight:
            made[f"{prefix}weight{i}"] = weights[i].clone()
        if biases is not None and not single_bias:
            made[f"{prefix}bias{i}"] = biases[i].clone()
    if biases is not None and single_bias:
        made[f"{prefix}bias"] = biases
    made[f"{prefix}_extra_state"] = torch.empty(0, dtype=torch.uint8)
    return made


def holds(module, weights, biases):
    got = module.values()
    assert torch.equal(got[0], weights)
    assert (biases is None and got[1] is None) or torch.equal(got[1], biases)


def refused(module, state, code, root=None, **how):
    before = photo(module)
    with pytest.raises(RuntimeError) as caught:
        (root or module).load_state_dict(state, **how)
    assert same(
        [(*b[:-1], plain(b[-1])) for b in before], [(*b[:-1], plain(b[-1])) for b in photo(module)]
    )
    text = str(caught.value)
    assert f"error[{code}]" in text
    return text


@pytest.mark.parametrize("kind", [GroupedLinear, Remapping])
@pytest.mark.parametrize("assign", thorough([False, True]))
@pytest.mark.parametrize("there", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("here", [(False, False), (True, False), (False, True), (True, True)])
def test_each_layout_is_read_by_each_module(kind, here, there, assign):
    module = kind(N, IN, OUT, single_weight=here[0], single_bias=here[1])
    root = attached(
        nn.ModuleDict({"fc": module}), ["fc"], weight=layout(here[0]), bias=layout(here[1])
    )
    weights, biases = values()
    state = dict_of(weights, biases, single_weight=there[0], single_bias=there[1], prefix="fc.")
    kept = [(key, id(value), value._version, value.clone()) for key, value in state.items()]
    classes = {name: type(p) for name, p in module.named_parameters()}
    assert root.load_state_dict(state, assign=assign) == ([], [])
    holds(module, weights, biases)
    # the caller's dict is as it was, and a second load does the same
    assert [(key, id(value), value._version) for key, value in state.items()] == [
        k[:3] for k in kept
    ]
    assert all(torch.equal(state[key], value) for key, _, _, value in kept)
    root.load_state_dict(state, assign=assign)
    holds(module, weights, biases)
    if here != there:
        assert {name: type(p) for name, p in module.named_parameters()} == classes
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("single", [False, True])
def test_nothing_is_remapped_twice(single):
    module = Remapping(N, IN, OUT, single_weight=single, single_bias=single)
    attached(module, weight=layout(single), bias=layout(single))
    outer = attached(
        nn.ModuleDict({"fc": module}), ["fc"], weight=layout(single), bias=layout(single)
    )
    weights, biases = values()
    for there in (single, not single):
        state = dict_of(weights, biases, single_weight=there, single_bias=there, prefix="fc.")
        outer.load_state_dict(state)
        holds(module, weights, biases)
        outer.load_state_dict(outer.state_dict())
        holds(module, weights, biases)


def test_without_biases_only_the_weights_are_migrated():
    module = attached(
        GroupedLinear(N, IN, OUT, single_weight=True, bias=False), weight="single", bias="single"
    )
    weights, _ = values()
    module.load_state_dict(dict_of(weights, None))
    holds(module, weights, None)


@pytest.mark.parametrize("single", [False, True])
def test_modules_in_modules_are_found_by_their_names(single):
    names = ["layers.0.mlp.fc1", "layers.0.mlp.fc2"]

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = (
                GroupedLinear(N, IN, OUT, single_weight=single, single_bias=single)
                for _ in range(2)
            )
            self.conv = nn.Conv1d(IN, OUT, 3)

    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": Mlp()})])})
    attached(model, names, weight=layout(single), bias=layout(single))
    state, wanted = OrderedDict(), {}
    for name in names:
        wanted[name] = values()
        state.update(
            dict_of(
                *wanted[name], single_weight=not single, single_bias=not single, prefix=f"{name}."
            )
        )
    state["layers.0.mlp.conv.weight"] = torch.randn(OUT, IN, 3)
    state["layers.0.mlp.conv.bias"] = torch.randn(OUT)
    assert model.load_state_dict(state) == ([], [])
    for name in names:
        holds(model.get_submodule(name), *wanted[name])
    assert torch.equal(
        model.get_submodule("layers.0.mlp.conv").weight, state["layers.0.mlp.conv.weight"]
    )


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_another_number_of_gemms_is_named_before_anything_is_loaded(single, strict):
    module = GroupedLinear(N, IN, OUT, single_weight=single, single_bias=single)
    attached(module, weight=layout(single), bias=layout(single))
    state = dict_of(*values(N + 1), single_weight=not single, single_bias=not single)
    if single:
        text = refused(module, state, "M960", strict=strict)
        assert "weight: [4, 4, 2], the module's is [3, 4, 2]" in text
    elif strict:
        text = refused(module, state, "M960")
        assert "and not in the module: {bias3,weight3}" in text


@pytest.mark.parametrize("single", [False, True])
def test_the_number_of_gemms_can_be_said(single):
    module = GroupedLinear(N, IN, OUT, single_weight=single, single_bias=single)
    to = [f"{lineage}@{layout(single)}" for lineage in BOTH]
    migrate.attach(module, to=to, params={"modules": [""], "gemms": N})
    refused(
        module,
        dict_of(*values(N + 1), single_weight=not single, single_bias=not single),
        "M207" if single else "M305",
    )
    weights, biases = values()
    module.load_state_dict(
        dict_of(weights, biases, single_weight=not single, single_bias=not single)
    )
    holds(module, weights, biases)


def test_a_gemm_that_is_missing_is_named():
    module = attached(
        GroupedLinear(N, IN, OUT, single_weight=True, single_bias=True),
        weight="single",
        bias="single",
    )
    state = dict_of(*values())
    del state["weight1"]
    assert "missing {i} = 1" in refused(module, state, "M207")


def test_dtypes_are_not_promoted():
    module = attached(
        GroupedLinear(N, IN, OUT, single_weight=True, single_bias=True),
        weight="single",
        bias="single",
    )
    state = dict_of(*values())
    state["weight1"] = state["weight1"].bfloat16()
    with pytest.raises(RuntimeError, match=r"error\[M206\]"):
        module.load_state_dict(state)


@pytest.mark.parametrize("single", [False, True])
def test_redundant_keys_of_the_other_layout_go_if_they_are_equal(single):
    module = GroupedLinear(N, IN, OUT, single_weight=single, bias=False)
    goal, start = f"te-grouped-weight@{layout(single)}", f"te-grouped-weight@{layout(not single)}"
    migrate.attach(module, to=goal, from_=start, params={"modules": [""]})
    weights, _ = values()
    state = {**dict_of(weights, None), **dict_of(weights, None, single_weight=True)}
    module.load_state_dict(state)
    holds(module, weights, None)
    state["weight1"] = state["weight1"] + 1
    assert "weight" in refused(module, state, "M404")


def test_a_bias_of_three_axes_is_read():
    module = attached(GroupedLinear(N, IN, OUT))
    weights, biases = values()
    state = dict_of(weights, biases, single_bias=True)
    state["bias"] = state["bias"][:, None]
    module.load_state_dict(state)
    holds(module, weights, biases)


# tensor subclasses


def exact(shape):
    """Numbers that survive eight bits with a scale of a quarter."""
    return torch.randint(-8, 8, shape) / 4.0


@pytest.mark.parametrize("assign", [False, True])
def test_a_grouped_tensor_comes_apart_into_plain_weights(assign):
    module = attached(GroupedLinear(N, IN, OUT))
    weights, biases = values()
    state = dict_of(
        GroupedTensor.of(weights), GroupedTensor.of(biases), single_weight=True, single_bias=True
    )
    module.load_state_dict(state, assign=assign)
    holds(module, weights, biases)
    assert all(type(p) is nn.Parameter for p in module.parameters())


@pytest.mark.parametrize("kind", [GroupedLinear, Remapping])
@pytest.mark.parametrize("assign", [False, True])
def test_quantized_members_become_one_only_if_that_is_allowed(kind, assign):
    one = kind(N, IN, OUT, single_weight=True, bias=False, scale=0.25)
    root = nn.ModuleDict({"fc": one})
    weights = exact((N, OUT, IN))
    state = {f"fc.weight{i}": Float8.of(weights[i]) for i in range(N)} | {
        "fc._extra_state": torch.empty(0, dtype=torch.uint8)
    }
    strict = migrate.attach(root, to="te-grouped-weight@single", params={"modules": ["fc"]})
    assert "weight0" in refused(one, state, "M401", root, assign=assign)
    strict.remove()
    migrate.attach(root, to="te-grouped-weight@single", params={"modules": ["fc"]}, allow={"lossy"})
    root.load_state_dict(state, assign=assign)
    assert type(one.weight) is GroupedTensor
    assert one.weight.rowwise_data.dtype is torch.uint8
    holds(one, weights, None)


@pytest.mark.parametrize("assign", [False, True])
def test_a_quantized_group_comes_apart_only_if_that_is_allowed(assign):
    weights = exact((N, OUT, IN))
    module = GroupedLinear(N, IN, OUT, bias=False, scale=0.25)
    state = {
        "weight": GroupedTensor.of(weights, 0.25),
        "_extra_state": torch.empty(0, dtype=torch.uint8),
    }
    handle = migrate.attach(module, to="te-grouped-weight@multi", params={"modules": [""]})
    refused(module, state, "M401", assign=assign)
    handle.remove()
    migrate.attach(module, to="te-grouped-weight@multi", params={"modules": [""]}, allow={"lossy"})
    module.load_state_dict(state, assign=assign)
    assert all(type(p) is Float8 for p in module.parameters())
    holds(module, weights, None)


def test_quantized_tensors_that_are_only_renamed_go_on_as_they_are(tmp_path):
    file = tmp_path / "rename.yaml"
    file.write_text(
        'id: t/r\ntitle: t\nlineage: t\nedge: [a, b]\nrules: [{name: r, from: "old.{k...}", to: '
        '"fc.{k}"}]\n'
    )
    module = GroupedLinear(N, IN, OUT, bias=False, scale=0.25)
    outer = nn.ModuleDict({"fc": module})
    migrate.attach(outer, rules=file)
    seen = {}
    module.register_load_state_dict_pre_hook(lambda m, state, *_: seen.update(state))
    weights = exact((N, OUT, IN))
    state = {f"old.weight{i}": Float8.of(weights[i]) for i in range(N)} | {
        "old._extra_state": torch.empty(0, dtype=torch.uint8)
    }
    outer.load_state_dict(state)
    assert all(seen[f"fc.weight{i}"] is state[f"old.weight{i}"] for i in range(N))
    holds(module, weights, None)
    outer.load_state_dict(state, assign=True)
    assert all(type(p) is Float8 for p in module.parameters())
    holds(module, weights, None)


def test_a_class_that_cannot_be_made_anew_is_refused_and_not_replaced():
    class Stubborn(GroupedTensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.empty_like.default:
                return torch.empty(args[0].shape)
            return super().__torch_dispatch__(func, types, args, kwargs)

    module = GroupedLinear(N, IN, OUT, single_weight=True, bias=False)
    module.weight = nn.Parameter(Stubborn.of(torch.zeros(N, OUT, IN)))
    migrate.attach(module, to="te-grouped-weight@single", params={"modules": [""]})
    weights, _ = values()
    state = dict_of(weights, None)
    before = photo(module)
    with pytest.raises(RuntimeError, match=r"error\[M964\]"):
        module.load_state_dict(state, assign=True)
    assert type(module.weight) is Stubborn
    assert [b[1] for b in photo(module)] == [b[1] for b in before]
    module.load_state_dict(state)
    holds(module, weights, None)


def test_a_class_that_gives_no_elements_is_named_before_anything_is_written():
    class Opaque(Float8):
        def dequantize(self):
            raise RuntimeError("no way out of this class")

    module = GroupedLinear(N, IN, OUT, single_weight=True, bias=False)
    migrate.attach(module, to="te-grouped-weight@single", params={"modules": [""]}, allow={"lossy"})
    state = dict_of(torch.zeros(N, OUT, IN), None)
    state["weight2"] = Opaque.of(torch.zeros(OUT, IN))
    text = refused(module, state, "M916")
    assert "weight2" in text
    assert "no way out of this class" in text


@pytest.mark.parametrize("single", [False, True])
def test_both_sides_are_saved_and_read_with_weights_only(single):
    old = GroupedLinear(N, IN, OUT, single_weight=not single, single_bias=not single)
    weights, biases = values()
    attached(old, weight=layout(not single), bias=layout(not single))
    old.load_state_dict(dict_of(weights, biases))
    file = io.BytesIO()
    torch.save(old.state_dict(), file)
    file.seek(0)
    with torch.serialization.safe_globals([GroupedTensor]):
        state = torch.load(file, weights_only=True)
    new = GroupedLinear(N, IN, OUT, single_weight=single, single_bias=single)
    attached(new, weight=layout(single), bias=layout(single))
    new.load_state_dict(state)
    holds(new, weights, biases)
