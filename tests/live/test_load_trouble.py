"""What can be wrong with a load: it is said before anything changes, or it is said exactly what was
written.
"""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from built import V4, V5, Refusing, module, rules, same, state_of, untouched
from grouped_linear import GroupedTensor
from safetensors.torch import save_file

import migrate
from migrate.core.errors import MigrateError
from migrate.live import filling


@pytest.fixture(scope="module")
def old():
    return state_of(V4)


@pytest.fixture(scope="module")
def new():
    return state_of(V5)


def refused(model, *arguments, **named):
    """The diagnostics by code; nothing was written."""
    with pytest.raises(MigrateError) as caught:
        migrate.load(model, *arguments, **named)
    assert untouched(model)
    return {d.code: d for d in caught.value.diagnostics}


def test_names_without_a_partner_are_told_both_ways_with_the_nearest(new):
    renamed = {
        ("model.embed_token.weight" if key == "model.embed_tokens.weight" else key): one
        for key, one in new.items()
    }
    model = module(renamed)
    found = refused(model, V4, "hf-mixtral@v5")["M960"]
    text = found.render()
    assert "in the module and not in the migrated checkpoint: model.embed_token.weight" in text
    assert "in the migrated checkpoint and not in the module: model.embed_tokens.weight" in text
    assert "did you mean" in text
    answer = migrate.load(model, V4, "hf-mixtral@v5", strict=False)
    assert (answer.to_json()["missing"], answer.to_json()["unexpected"]) == (
        ["model.embed_token.weight"],
        ["model.embed_tokens.weight"],
    )
    assert not same(model, renamed)
    assert bool((model.model.embed_token.weight == 7).all())


def test_shapes_that_differ_are_named_all_at_once_and_even_without_strict(new):
    other = {key: torch.zeros(3) if "norm" in key else one for key, one in new.items()}
    found = refused(module(other), V4, "hf-mixtral@v5", strict=False)["M960"]
    assert "the module's is [3]" in found.render()


def test_shape_dtype_and_names_are_told_in_one_go():
    state = {"a": torch.ones(2), "b": torch.ones(2) + 2**-20, "c": torch.ones(2)}
    model = module(
        {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float16), "d": torch.ones(2)}
    )
    assert refused(model, state).keys() == {"M960", "M961"}


def test_a_dict_that_mixes_both_layouts_is_refused(old, new):
    mixed = {**old, **{key: one for key, one in new.items() if "layers.0.mlp" in key}}
    assert refused(module(new), mixed, "hf-mixtral@v5", params={"num_experts": 4})


def test_a_partial_group_is_refused(old, new):
    gone = {
        key: one for key, one in old.items() if "layers.1.block_sparse_moe.experts.2.w1" not in key
    }
    found = refused(module(new), gone, "hf-mixtral@v5", params={"num_experts": 4})
    assert any(
        "experts" in d.message or any("experts" in note for note in d.notes) for d in found.values()
    )


PARAM = (
    "params: {n: {type: int, config: n_parts}}\nrules:\n  - {name: r, from: w, to: p, via: "
    "[{reshape: {from: [6], to: [$n, -1]}}]}\n"
)


def test_a_param_that_nobody_gave_is_taken_from_the_configuration_of_the_model(tmp_path):
    rule = rules(tmp_path, PARAM)
    state, wanted = {"w": torch.arange(6.0)}, {"p": torch.arange(6.0).reshape(2, 3)}
    assert refused(module(wanted), state, rules=rule)
    model = module(wanted)
    model.config = {"n_parts": 2}
    assert migrate.load(model, state, rules=rule).to_json()["params"] == {"n": 2}
    assert same(model, wanted)
    save_file(state, tmp_path / "one.safetensors")
    model = module(wanted)
    model.config = type("Config", (), {"to_dict": lambda self: {"n_parts": 2}})()
    migrate.load(model, tmp_path / "one.safetensors", rules=rule)
    assert same(model, wanted)


def test_the_configuration_of_the_checkpoint_comes_before_that_of_the_model(tmp_path):
    rule = rules(tmp_path, PARAM)
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"w": torch.arange(6.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"n_parts": 3}))
    wanted = {"p": torch.arange(6.0).reshape(3, 2)}
    model = module(wanted)
    model.config = {"n_parts": 2}
    assert migrate.load(model, folder, rules=rule).to_json()["params"] == {"n": 3}
    assert same(model, wanted)


def test_a_condition_on_values_is_checked_first(tmp_path):
    rule = rules(
        tmp_path,
        "rules:\n  - {name: r, from: '{k:a|b}', to: one, via: [{same: {over: k}}]}\nkeep: [z]\n",
    )
    model = module({"one": torch.ones(2), "z": torch.ones(2)})
    assert "M404" in refused(
        model, {"z": torch.ones(2), "a": torch.ones(2), "b": torch.zeros(2)}, rules=rule
    )


def test_a_damaged_file_is_noticed_first(tmp_path):
    state = {"a": torch.ones(100), "b": torch.ones(100) * 2}
    torch.save(state, tmp_path / "in.pt")
    data = bytearray((tmp_path / "in.pt").read_bytes())
    at = data.index(state["b"].numpy().tobytes())
    data[at + 5] ^= 1
    (tmp_path / "in.pt").write_bytes(data)
    assert "M942" in refused(module(state), tmp_path / "in.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_damage_is_noticed_first_in_a_chunk_that_was_taken_to_be_like_another(tmp_path):
    state = {name: torch.full((100,), float(n)) for n, name in enumerate("abc", 1)}
    dcp.save(state, checkpoint_id=tmp_path / "in")
    (data,) = (tmp_path / "in").glob("*.distcp")
    raw = bytearray(data.read_bytes())
    raw[raw.index(state["b"].numpy().tobytes()) + 5] ^= 1
    data.write_bytes(raw)
    assert "M942" in refused(module(state), tmp_path / "in")
    # what is not read is not looked at
    model = module({"c": state["c"]})
    migrate.load(model, tmp_path / "in", strict=False)
    assert torch.equal(model.c, state["c"])


def test_a_module_is_not_loaded_from_its_own_memory(tmp_path):
    rule = rules(
        tmp_path,
        "rules:\n  - {name: r, from: '{k:a|b}', to: '{k}', via: [{reshape: {from: [4], to: [2, "
        "2]}}, {transpose: {dims: [0, 1]}}]}\n",
    )
    model = module({"a": torch.ones(2, 2), "b": torch.ones(2, 2)})
    flat = {"a": model.a.detach().view(-1), "b": torch.ones(4)}
    assert "M115" in refused(model, flat, rules=rule)
    assert migrate.load(model, model.state_dict()).tensors == 2
    assert untouched(model)


def test_too_little_memory_is_known_first(new):
    found = refused(module(new), V4, "hf-mixtral@v5", max_memory=100)
    assert "M115" in found
    assert "M115" in refused(module(new), V4, "hf-mixtral@v5", threads=0)


# -- in the middle ---------------------------------------------------------------------------------


@pytest.fixture
def breaking(monkeypatch):
    """A load that fails at the fourth tensor, with what it is given."""

    def arrange(error):
        write, count = filling.Upload.write, []

        def broken(self, tensor, target, start, stop):
            count.append(1)
            if len(count) == 4:
                raise error
            write(self, tensor, target, start, stop)

        monkeypatch.setattr(filling.Upload, "write", broken)

    return arrange


@pytest.mark.parametrize(
    "error", [OSError("the disk is on fire"), torch.OutOfMemoryError("no memory"), MemoryError()]
)
def test_a_load_that_breaks_says_what_is_written(breaking, new, error):
    breaking(error)
    model = module(new)
    with pytest.raises(MigrateError) as caught:
        migrate.load(model, V5, threads=1)
    (found,) = caught.value.diagnostics
    assert caught.value.exit_code == 4
    assert caught.value.__cause__ is error
    assert found.code == "M965"
    assert type(error).__name__ in found.notes[0]
    said = {note.split(": ")[0]: note.split(": ")[1].split(", ") for note in found.notes[1:]}
    held = model.state_dict()
    written = [key for key, one in new.items() if torch.equal(held[key], one)]
    assert sorted(said["written"]) == sorted(written)
    assert len(written) == 3
    assert len(said["written in part"]) == 1
    assert all(
        bool((held[key] == 7).all())
        for key in new
        if key not in (*written, *said["written in part"])
    )


def test_the_diagnostics_of_the_cause_come_with_it(breaking, new):
    from migrate.core.errors import CheckpointError, Diagnostic

    breaking(CheckpointError([Diagnostic("M905", "the file was cut short")]))
    with pytest.raises(CheckpointError) as caught:
        migrate.load(module(new), V5, threads=2)
    assert [d.code for d in caught.value.diagnostics] == ["M905", "M965"]


def test_a_module_on_the_meta_device_is_as_it_was(breaking, new):
    breaking(OSError("gone"))
    model = module(new, "meta")
    before = dict(model.named_parameters())
    with pytest.raises(MigrateError, match="nothing in the module was changed"):
        migrate.load(model, V5)
    assert all(one is before[name] and one.is_meta for name, one in model.named_parameters())


def test_an_interrupt_stays_one_and_says_what_is_written(breaking, new):
    breaking(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match=r"M965.*3 tensors of the module are written"):
        migrate.load(module(new), V5, threads=1)


def test_a_checkpoint_that_changes_meanwhile_is_noticed(tmp_path, new, monkeypatch):
    save_file(new, tmp_path / "in.safetensors")
    end = filling.Filling._end

    def touched(self, *given):
        (tmp_path / "in.safetensors").touch()
        end(self, *given)

    monkeypatch.setattr(filling.Filling, "_end", touched)
    with pytest.raises(MigrateError) as caught:
        migrate.load(module(new, "meta"), tmp_path / "in.safetensors")
    assert [d.code for d in caught.value.diagnostics] == ["M905", "M965"]


def test_a_progress_that_raises_stops_the_load(new):
    def progress(done, total):
        raise RuntimeError("enough")

    with pytest.raises(MigrateError, match="enough"):
        migrate.load(module(new), V5, progress=progress)


def test_a_value_that_nobody_here_makes_is_named_first(tmp_path):
    torch.save(
        {"w": torch.ones(2), "_extra_state": {"made": torch.nn.Linear(1, 1)}}, tmp_path / "in.pt"
    )
    assert "M935" in refused(Refusing(), tmp_path / "in.pt")


def test_a_wrapper_that_is_real_outside_and_meta_inside_is_refused():
    """Its `copy_` would take the numbers and keep none of them."""
    inside = GroupedTensor.of(torch.zeros(2, 2, 2))
    inside.rowwise_data = inside.rowwise_data.to("meta")
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(inside)
    with pytest.raises(MigrateError, match="weight say that they are on a real device") as caught:
        migrate.load(model, {"weight": torch.ones(2, 2, 2)})
    assert [d.code for d in caught.value.diagnostics] == ["M963"]


@pytest.mark.parametrize("way", ["refused", "failed", "interrupted"])
def test_what_did_not_load_is_kept_by_no_cycle(way):
    """Memory of a module that is dropped after an error is needed for the next one at once."""

    def attempt():
        module, state = torch.nn.Linear(4, 4), {"weight": torch.zeros(4, 4)}
        state["bias"] = torch.zeros(5 if way == "refused" else 4)

        def progress(*_):
            raise KeyboardInterrupt if way == "interrupted" else ValueError("no")

        kept = [weakref.ref(one) for one in (module, *state.values())]
        with pytest.raises((migrate.MigrateError, KeyboardInterrupt)):
            migrate.load(module, state, progress=progress)
        return kept

    gc.collect()
    gc.disable()
    try:
        assert [one() for one in attempt()] == [None] * 3
    finally:
        gc.enable()


def test_a_param_that_no_rule_has_is_refused_without_rules_too():
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    params, said = {"requantise": "weight"}, r"M115.*no rules are applied.* requantise"
    with pytest.raises(MigrateError, match=said):
        migrate.load(other, one.state_dict(), params=params)
    with pytest.raises(MigrateError, match=said):
        migrate.convert_module(one, other, params=params)
