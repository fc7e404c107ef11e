"""One live module's state in another of the new layout."""

from __future__ import annotations

import pytest
import torch
from built import V4, V5, Counting, module, rules, same, state_of
from checkpoints import fits

import migrate
from migrate.core.errors import MigrateError


@pytest.fixture(scope="module")
def old():
    return state_of(V4)


@pytest.fixture(scope="module")
def new():
    return state_of(V5)


def test_the_state_of_a_module_moves_into_another_layout(old, new):
    source, made = module(old), module(new)
    source.load_state_dict(old)
    answer = migrate.convert_module(source, made, "hf-mixtral@v5")
    fits(answer.to_json(), "loaded")
    assert same(made, new)
    assert same(source, old)
    assert not {one.data_ptr() for one in source.parameters()} & {
        one.data_ptr() for one in made.parameters()
    }
    back = module(old, "meta")
    migrate.convert_module(made, back, "hf-mixtral@v4")
    assert same(back, old)


def test_a_module_that_holds_nothing_is_not_converted(new):
    with pytest.raises(MigrateError, match="M916"):
        migrate.convert_module(module(new, "meta"), module(new))
    with pytest.raises(MigrateError, match="M115"):
        migrate.convert_module(new, module(new))
    with pytest.raises(MigrateError, match="M115"):
        migrate.load(new, V5)


def test_extra_states_and_configuration_go_from_module_to_module(tmp_path):
    rule = rules(
        tmp_path,
        "params: {n: {type: int, config: n_parts}}\n"
        "rules:\n  - {name: r, from: 'inner.{k...}', to: 'core.{k}', via: [{reshape: {from: [$n], "
        "to: [$n, 1]}}]}\n",
    )
    source = torch.nn.ModuleDict({"inner": Counting()})
    source.config = {"n_parts": 2}
    made = torch.nn.ModuleDict({"core": Counting()})
    made["core"].w = torch.nn.Parameter(torch.zeros(2, 1))
    answer = migrate.convert_module(source, made, rules=rule)
    assert answer.to_json()["params"] == {"n": 2}
    assert made["core"].got == [({"calls": 0}, [[0.0], [0.0]])]
