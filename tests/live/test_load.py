"""A checkpoint streamed into a live module: every source, every kind of target, and what the answer
says.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict

import pytest
import torch
from built import V4, V5, Counting, module, rules, same, state_of, untouched
from checkpoints import fits
from safetensors.torch import save_file

import migrate
from migrate.core.errors import MigrateError
from migrate.live import filling
from migrate.running import gather


@pytest.fixture(scope="module")
def old():
    return state_of(V4)


@pytest.fixture(scope="module")
def new():
    return state_of(V5)


def single(folder, state):
    save_file(state, folder / "one.safetensors")
    return folder / "one.safetensors"


def shards(folder, state):
    keys, weight_map = list(state), {}
    for number in range(3):
        name = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file({key: state[key] for key in keys[number::3]}, folder / name)
        weight_map |= dict.fromkeys(keys[number::3], name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text((V4 / "config.json").read_text())
    return folder


def training(folder, state):
    torch.save(
        {"epoch": 3, "model": state, "optimizer": {"state": {0: {"m": torch.ones(3)}}}},
        folder / "train.pt",
    )
    return folder / "train.pt"


def plain(folder, state):
    torch.save(state, folder / "plain.pt")
    return folder / "plain.pt"


def in_memory(folder, state):
    return state


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "source", [lambda folder, state: V4, single, shards, training, plain, in_memory]
)
def test_a_checkpoint_of_any_kind_is_loaded_migrated(tmp_path, old, new, source, device):
    model = module(new, device)
    answer = migrate.load(model, source(tmp_path, old), "hf-mixtral@v5", params={"num_experts": 4})
    assert same(model, new)
    fits(answer.to_json(), "loaded")
    assert [
        (step["from"], step["to"], step["backwards"]) for step in answer.to_json()["steps"]
    ] == [("v4", "v5", False)]
    assert answer.tensors == len(new)
    assert answer.bytes_written == sum(one.nbytes for one in new.values())
    assert (
        answer.to_json()["missing"],
        answer.to_json()["unexpected"],
        answer.to_json()["left_on_meta"],
    ) == ([], [], [])


def test_an_older_layout_is_reached_backwards(old):
    model = module(old)
    answer = migrate.load(model, V5, "hf-mixtral@v4")
    assert same(model, old)
    assert answer.to_json()["steps"][0]["backwards"] is True


def test_without_a_goal_the_checkpoint_is_loaded_as_it_is(old):
    model, other = module(old), module(old)
    answer = migrate.load(model, V4)
    other.load_state_dict(old)
    assert answer.to_json()["steps"] == []
    assert same(model, other.state_dict())


def test_files_of_ranks_become_one_module(tmp_path):
    state = {"fc.weight": torch.arange(24.0).reshape(6, 4), "norm.weight": torch.ones(4)}
    for rank, part in enumerate(state["fc.weight"].chunk(2)):
        torch.save(
            {"fc.weight": part.clone(), "norm.weight": state["norm.weight"]},
            tmp_path / f"consolidated.{rank:02d}.pth",
        )
    rule = rules(
        tmp_path,
        "rules:\n  - {name: fc, from: 'fc.weight@{r:int}', to: fc.weight, via: [{concat: {over: "
        "r, dim: 0}}]}\n"
        "  - {name: norm, from: 'norm.weight@{r:int}', to: norm.weight, via: [{same: {over: "
        "r}}]}\n",
    )
    model = module(state)
    migrate.load(model, tmp_path, rules=rule)
    assert same(model, state)


def test_a_stamp_says_where_the_checkpoint_is(tmp_path, new):
    migrate.apply(V4, tmp_path / "new", to="hf-mixtral@v5", fsync=False)
    model = module(new)
    assert migrate.load(model, tmp_path / "new", "hf-mixtral@v5").to_json()["steps"] == []
    assert same(model, new)


def test_tensors_are_read_in_the_order_in_which_they_lie(tmp_path, monkeypatch):
    state = {
        f"{name}.weight": torch.full((3,), float(number)) for number, name in enumerate("edcba")
    }
    torch.save(state, tmp_path / "in.pt")
    order = []
    model = module(dict(sorted(state.items())))
    opened = filling.Targets.open
    monkeypatch.setattr(
        filling.Targets,
        "open",
        lambda self, slot: (order.append(slot.plain), opened(self, slot))[1],
    )
    migrate.load(model, tmp_path / "in.pt", threads=1)
    assert order == [f"{name}.weight" for name in "edcba"]
    assert same(model, dict(sorted(state.items())))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_and_ranges_gives_the_same_bits(monkeypatch, new, threads):
    monkeypatch.setattr(filling, "RANGE", 100)
    model = module(new)
    seen = []
    migrate.load(
        model,
        V4,
        "hf-mixtral@v5",
        threads=threads,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert same(model, new)
    assert seen[-1][0] == seen[-1][1] == sum(one.nbytes for one in new.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_path_through_buffers_gives_the_same_bits(monkeypatch, new):
    monkeypatch.setattr(filling, "RANGE", 1000)
    monkeypatch.setattr(filling, "direct", lambda tensor, target: False)
    turns = []
    turn = filling.Upload._turn
    monkeypatch.setattr(
        filling.Upload, "_turn", lambda self, *given: turns.append(self._next) or turn(self, *given)
    )
    model = module(new)
    migrate.load(model, V4, "hf-mixtral@v5", threads=1)
    assert same(model, new)
    assert turns[:4] == [0, 1, 0, 1]


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_module_on_a_device_holds_the_same_bits(new, dtype, device):
    wanted = new if dtype is None else {key: one.to(dtype) for key, one in new.items()}
    for model in (module(wanted).to(device), module(wanted, "meta")):
        migrate.load(model, V4, "hf-mixtral@v5", device=device)
        assert {one.device.type for one in model.parameters()} == {device}
        assert same(model.cpu(), wanted)


def overlap(ones, others):
    """How long intervals of the one kind run at the same time as intervals of the other."""
    return sum(max(0, min(b, d) - max(a, c)) for a, b in ones for c, d in others)


def test_intervals_overlap_by_what_they_share():
    assert overlap([(0, 10)], [(10, 20), (30, 40)]) == 0
    assert overlap([(0, 10), (20, 30)], [(5, 25)]) == 10


def test_reading_goes_on_while_the_bytes_read_before_travel(tmp_path, monkeypatch, device):
    """On CUDA one buffer is read while the other one travels, as a trace of the profiler shows."""
    from torch.profiler import ProfilerActivity, profile, record_function

    side = 4096 if device == "cuda" else 64
    state = {f"w{i}": torch.randn(side, side) for i in range(4)}
    source = single(tmp_path, state)
    model = torch.nn.ParameterDict(
        {k: torch.empty_like(one, device=device) for k, one in state.items()}
    )
    migrate.load(model, source)
    fill = gather.Gather.fill

    def recorded(self, *given):
        with record_function("gather"):
            fill(self, *given)

    monkeypatch.setattr(gather.Gather, "fill", recorded)
    on_gpu = [ProfilerActivity.CUDA] if device == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as trace:
        migrate.load(model, source, threads=1)
        if on_gpu:
            torch.cuda.synchronize()
    assert all(torch.equal(model[key].cpu(), one) for key, one in state.items())
    spans = {"gather": [], "HtoD": []}
    for event in trace.events():
        for kind, times in spans.items():
            if kind in event.name:
                times.append((event.time_range.start, event.time_range.end))
    if on_gpu:
        assert len(spans["HtoD"]) > 4
        assert "Pinned" in next(e.name for e in trace.events() if "HtoD" in e.name)
        assert overlap(spans["gather"], spans["HtoD"]) > 0
    else:
        assert not spans["HtoD"]


COMPUTED = """rules:
  - {name: c, from: 'c.{i:int}', to: c, via: [{cast: {to: bfloat16}}, {stack: {over: i}}]}
  - {name: t, from: t, to: t, via: [{transpose: {dims: [0, 1]}}]}
"""


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_computed_or_turned_is_what_apply_makes_of_it(
    tmp_path, monkeypatch, staged, on_disk
):
    if staged:
        monkeypatch.setattr(filling, "direct", lambda tensor, target: False)
    generator = torch.Generator().manual_seed(1)
    state = {
        **{f"c.{i}": torch.randn(300, 70, generator=generator) for i in range(3)},
        "t": torch.randn(700, 900, generator=generator),
    }
    rule = rules(tmp_path, COMPUTED)
    wanted = migrate.apply(state, rules=rule, allow="lossy")
    model = module(wanted)
    answer = migrate.load(
        model,
        single(tmp_path, state) if on_disk else state,
        rules=rule,
        allow="lossy",
        max_memory="4MiB",
    )
    assert same(model, wanted)
    fits(answer.to_json(), "loaded")
    assert answer.to_json()["report"]["rules"][0]["op"] == "cast"
    assert [loss["kind"] for loss in answer.to_json()["losses"]] == ["lossy"]


# -- targets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cast_that_loses_nothing_is_done_and_told(new, threads):
    wide = {key: one.to(torch.float64) for key, one in new.items()}
    model = module(wide)
    answer = migrate.load(model, V4, "hf-mixtral@v5", threads=threads)
    assert same(model, wide)
    (note,) = answer.to_json()["notes"]
    assert note.startswith("cast float32 -> float64: ")


def test_a_cast_that_rounds_needs_permission(tmp_path):
    state = {"w": torch.tensor([1.0, 1.0 + 2**-20])}
    narrow = {"w": state["w"].to(torch.bfloat16)}
    model = module(narrow)
    with pytest.raises(MigrateError, match="M961"):
        migrate.load(model, single(tmp_path, state))
    assert bool((model.w == 7).all())
    answer = migrate.load(model, single(tmp_path, state), allow="lossy")
    assert same(model, narrow)
    assert any("float32 -> bfloat16: w" in note for note in answer.to_json()["notes"])


def test_strided_targets_and_parameters_of_other_classes_keep_what_they_are(tmp_path):
    class Marked(torch.nn.Parameter):
        pass

    state = {"t": torch.arange(12.0).reshape(3, 4), "m": torch.arange(4.0), "b": torch.arange(3.0)}
    model = torch.nn.Module()
    model.t = torch.nn.Parameter(torch.zeros(4, 3).T)
    model.m = Marked(torch.zeros(4))
    model.register_buffer("b", torch.zeros(6)[::2])
    before = {name: getattr(model, name) for name in state}
    migrate.load(model, single(tmp_path, state))
    assert all(getattr(model, name) is one for name, one in before.items())
    assert model.t.stride() == (1, 3)
    assert all(torch.equal(getattr(model, name), state[name]) for name in state)


def test_lazy_parameters_get_their_shape(tmp_path):
    model = torch.nn.Sequential(torch.nn.LazyLinear(3))
    state = {"0.weight": torch.randn(3, 5), "0.bias": torch.randn(3)}
    migrate.load(model, single(tmp_path, state))
    assert same(model, state)
    assert torch.equal(
        model(torch.ones(2, 5)),
        torch.nn.functional.linear(torch.ones(2, 5), state["0.weight"], state["0.bias"]),
    )
    narrow = torch.nn.Sequential(torch.nn.LazyLinear(3, dtype=torch.float16))
    with pytest.raises(MigrateError, match="M961"):
        migrate.load(narrow, single(tmp_path, state))
    assert torch.nn.parameter.is_lazy(narrow[0].weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_around_the_model_are_looked_through(new):
    for wrap in (
        torch.compile,
        torch.nn.DataParallel,
        lambda model: torch.nn.DataParallel(torch.compile(model)),
    ):
        model = module(new)
        migrate.load(wrap(model), V4, "hf-mixtral@v5")
        assert same(model, new)


def test_a_state_dict_saved_from_a_wrapped_model_is_known(old, new):
    model = module(new)
    migrate.load(
        model, {f"module._orig_mod.{key}": one for key, one in old.items()}, "hf-mixtral@v5"
    )
    assert same(model, new)


def test_one_tensor_under_two_names_needs_one_of_the_checkpoint(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    weight = torch.randn(4, 3)
    model = Tied()
    answer = migrate.load(model, single(tmp_path, {"embed.weight": weight}))
    assert answer.to_json()["missing"] == []
    assert any("one tensor under several names" in note for note in answer.to_json()["notes"])
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, weight)
    migrate.load(model, {"embed.weight": weight + 1, "head.weight": weight + 1})
    assert torch.equal(model.head.weight, weight + 1)
    with pytest.raises(
        MigrateError, match=r"M960.*\n?.*different tensors for embed.weight, head.weight"
    ):
        migrate.load(model, {"embed.weight": weight, "head.weight": weight + 2})
    assert torch.equal(model.head.weight, weight + 1)
    migrate.load(model, {"embed.weight": weight, "head.weight": weight + 2}, strict=False)
    assert torch.equal(model.head.weight, weight + 2)
    with torch.device("meta"):
        model = Tied()
    migrate.load(model, {"embed.weight": weight})
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, weight)


def test_a_submodule_that_is_registered_twice_is_loaded_once(tmp_path):
    shared = torch.nn.Linear(2, 2)
    model = torch.nn.ModuleDict({"a": shared, "b": shared})
    state = {"a.weight": torch.randn(2, 2), "a.bias": torch.randn(2)}
    assert migrate.load(model, single(tmp_path, state)).to_json()["missing"] == []
    assert torch.equal(model["b"].weight, state["a.weight"])


# -- the meta device -------------------------------------------------------------------------------


class Rotary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2, dtype=torch.float64)
        self.register_buffer("steps", torch.zeros(2))
        self.register_buffer("freq", torch.ones(2), persistent=False)
        self.fc.bias.requires_grad_(False)
        self.fc.weight.shard = 3


def test_tensors_on_the_meta_device_get_memory_and_keep_class_dtype_and_flags(tmp_path):
    state = {"fc.weight": torch.randn(2, 2), "fc.bias": torch.randn(2), "steps": torch.ones(2)}
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(MigrateError, match="M963") as caught:
        migrate.load(model, single(tmp_path, state))
    assert "freq" in str(caught.value)
    assert all(one.is_meta for one in model.parameters())
    answer = migrate.load(model, single(tmp_path, state), strict=False)
    assert answer.to_json()["left_on_meta"] == ["freq"]
    assert type(model.fc.weight) is torch.nn.Parameter
    assert (model.fc.weight.dtype, model.fc.weight.requires_grad, model.fc.bias.requires_grad) == (
        torch.float64,
        True,
        False,
    )
    assert model.fc.weight.shard == 3
    assert torch.equal(model.fc.weight, state["fc.weight"].double())
    assert torch.equal(model.steps, state["steps"])
    assert "steps" in model._buffers


def test_tensors_on_the_meta_device_go_where_the_others_are_or_where_one_says(tmp_path):
    state = {"0.weight": torch.randn(2, 2), "1.weight": torch.randn(2, 2)}
    file = single(tmp_path, state)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(2, 2, bias=False, device=d) for d in ("meta", "cpu"))
    )
    kept = model[1].weight
    migrate.load(model, file)
    assert model[1].weight is kept
    assert same(model, state)
    migrate.load(model, file, device="cpu")
    with pytest.raises(MigrateError, match="M115"):
        migrate.load(model, file, device="meta")
    with pytest.raises(MigrateError, match="M115"):
        migrate.load(model, file, device="nowhere")


# -- values that are no tensors --------------------------------------------------------------------


STATES = [
    {"calls": 3, "names": ["a", ("b", 1.5)], "best": None, "by": OrderedDict(x=1)},
    io.BytesIO(b"state"),
    torch.tensor([1, 2, 3], dtype=torch.uint8),
    [torch.ones(2), {"scale": torch.zeros(1)}],
    torch.float16,
    defaultdict(int, {"a": 1}),
    defaultdict(OrderedDict),
]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("on_disk", [True, False])
def test_an_extra_state_is_set_when_the_tensors_are_there(tmp_path, state, on_disk):
    held = {"inner.w": torch.ones(2), "inner._extra_state": state}
    source = held
    if on_disk:
        source = tmp_path / "in.pt"
        torch.save(held, source)
    model = torch.nn.ModuleDict({"inner": Counting()})
    migrate.load(model, source)
    ((got, seen),) = model["inner"].got
    assert seen == [1.0, 1.0]
    assert type(got) is type(state)
    assert told(got) == told(state)


def told(value):
    """What a value holds, so that two can be compared."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, io.BytesIO):
        return value.getvalue(), value.tell()
    if isinstance(value, dict):
        return (
            type(value),
            getattr(value, "default_factory", None),
            [(key, told(one)) for key, one in value.items()],
        )
    return (
        (type(value), [told(one) for one in value]) if isinstance(value, (list, tuple)) else value
    )


def test_an_extra_state_follows_its_module(tmp_path):
    rule = rules(tmp_path, "rules:\n  - {name: r, from: 'old.{k...}', to: 'new.{k}'}\n")
    model = torch.nn.ModuleDict({"new": Counting()})
    migrate.load(model, {"old.w": torch.ones(2), "old._extra_state": {"calls": 5}}, rules=rule)
    assert model["new"].got == [({"calls": 5}, [1.0, 1.0])]


# -- memory, processes -----------------------------------------------------------------------------

MEMORY = """
import os, sys, threading
import torch
import migrate
def private():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon:"))
model = torch.nn.Module()
for n in range(3):
    model.register_parameter(f"w{n}", torch.nn.Parameter(torch.zeros(20_000_000).fill_(1)))
model.register_parameter("s", torch.nn.Parameter(torch.zeros(5_000, 4_000).fill_(1).T))
migrate.load(torch.nn.Linear(1, 1), {"weight": torch.ones(1, 1), "bias": torch.ones(1)})
before = peak = private()
def look(done, total):
    global peak
    peak = max(peak, private())
migrate.load(model, sys.argv[1], progress=look)
assert all(float(getattr(model, f"w{n}")[-1]) == n + 2 for n in range(3))
print(peak - before)
"""  # noqa: E501


@pytest.mark.thorough
def test_never_more_than_a_tensor_is_held_beside_the_module(tmp_path):
    state = {f"w{n}": torch.full((20_000_000,), float(n + 2)) for n in range(3)}
    save_file({**state, "s": torch.zeros(4_000, 5_000)}, tmp_path / "in.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / "in.safetensors"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # the largest that cannot be written in place has 80 MB
    assert int(done.stdout) < 180_000_000


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, Replicate, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
import migrate
full = {"a": torch.arange(35.0).reshape(7, 5), "b": torch.arange(6.0), "c": torch.arange(3.0)}
places = {"a": [Shard(0), Shard(1)], "b": [Replicate(), Shard(0)], "c": [Shard(0), Shard(0)]}
rank = 3
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
mesh = init_device_mesh("cpu", (2, 2))
model = torch.nn.Module()
row, column = divmod(rank, 2)
half = full["c"].chunk(2)[row].chunk(2)
wanted = {
    "a": full["a"].chunk(2, 0)[row].chunk(2, 1)[column],
    "b": full["b"].chunk(2)[column],
    "c": half[column] if column < len(half) else full["c"][:0],
}
for device in ("cpu", "meta"):
    for name, one in full.items():
        made = torch.distributed.tensor.zeros(*one.shape, device_mesh=mesh, placements=places[name])
        made = torch.empty_like(made, device="meta") if device == "meta" else made
        model.register_parameter(name, torch.nn.Parameter(made))
    migrate.load(model, sys.argv[1] if device == "cpu" else full)
    for name, one in wanted.items():
        held = getattr(model, name)
        assert type(held.data).__name__ == "DTensor" and held.placements == tuple(places[name]), name
        assert torch.equal(held.to_local(), one), (name, held.to_local(), one)
"""  # noqa: E501


@pytest.mark.ranks
def test_of_a_distributed_tensor_the_part_that_lies_here_is_read(tmp_path):
    full = {"a": torch.arange(35.0).reshape(7, 5), "b": torch.arange(6.0), "c": torch.arange(3.0)}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, single(tmp_path, full)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_two_threads_load_two_models(old, new):
    models, failures = (module(new), module(old)), []

    def go(model, source, to):
        try:
            for _ in range(5):
                migrate.load(model, source, to)
        except Exception as error:  # noqa: BLE001 - a thread cannot raise
            failures.append(error)

    threads = [
        threading.Thread(target=go, args=a)
        for a in ((models[0], V4, "hf-mixtral@v5"), (models[1], V5, "hf-mixtral@v4"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert same(models[0], new)
    assert same(models[1], old)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_checkpoint_that_fits_in_another_layout_says_which(old, new, in_memory):
    target = module(new)
    with pytest.raises(MigrateError, match="M960") as caught:
        migrate.load(target, old if in_memory else V4)
    assert untouched(target)
    (found,) = (d for d in caught.value.diagnostics if d.code == "M960")
    assert found.help == 'as another layout it fits the module: to="hf-mixtral@v5"'
    migrate.load(target, V4, to="hf-mixtral@v5")
    assert same(target, new)
    with pytest.raises(MigrateError, match='to="hf-mixtral@v4"'):
        migrate.load(module(old), new if in_memory else V5)


def test_a_checkpoint_that_fits_in_no_layout_is_told_as_before(new):
    model = module({**new, "more.weight": torch.zeros(1)})
    with pytest.raises(MigrateError, match="M960") as caught:
        migrate.load(model, V4)
    assert "strict=False" in caught.value.diagnostics[0].help
    assert untouched(model)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scales", "factors"])
def test_codes_are_not_cast_into_a_module_without_the_scale_beside_them(tmp_path, name, strict):
    codes = torch.ones(256, 512).to(torch.float8_e4m3fn)
    state = {"fc.weight": codes, f"fc.{name}": torch.full((2, 4), 1e-3)}
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(512, 256, bias=False)})
    before = model["fc"].weight.clone()
    with pytest.raises(MigrateError) as caught:
        migrate.load(model, single(tmp_path, state), strict=strict)
    (found,) = [d for d in caught.value.diagnostics if d.code == "M409"]
    assert found.notes == (f"fc.weight (float8_e4m3fn [256, 512]): fc.{name} (float32 [2, 4])",)
    assert "unscaled: true" in found.help
    assert torch.equal(model["fc"].weight, before)


def test_codes_are_cast_where_the_module_has_a_place_for_the_scale_or_there_is_none(tmp_path):
    codes = torch.ones(256, 512).to(torch.float8_e4m3fn)
    state = {"fc.weight": codes, "fc.weight_scale": torch.ones(2, 4)}
    fc = torch.nn.Linear(512, 256, bias=False)
    model = torch.nn.ModuleDict({"fc": fc})
    fc.weight_scale = torch.nn.Parameter(torch.zeros(2, 4))
    migrate.load(model, single(tmp_path, state))
    assert torch.equal(fc.weight, torch.ones(256, 512))
    assert torch.equal(fc.weight_scale, torch.ones(2, 4))
    alone = torch.nn.ModuleDict({"fc": torch.nn.Linear(512, 256, bias=False)})
    migrate.load(alone, {"fc.weight": codes, "fc.input_scale": torch.ones(())}, strict=False)
    assert torch.equal(alone["fc"].weight, torch.ones(256, 512))


def test_a_rule_that_casts_codes_as_they_are_loads_them(tmp_path):
    codes = torch.ones(256, 512).to(torch.float8_e4m3fn)
    file = rules(
        tmp_path,
        'keep: ["{k...}"]\nrules: [{name: r, from: fc.weight, to: fc.weight, '
        "via: [{cast: {to: bfloat16, unscaled: true}}]}]\n",
    )
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(512, 256, bias=False)})
    state = {"fc.weight": codes, "fc.factors": torch.ones(2, 4)}
    migrate.load(model, state, rules=[file], strict=False)
    assert torch.equal(model["fc"].weight, torch.ones(256, 512))
