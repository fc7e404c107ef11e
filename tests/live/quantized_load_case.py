"""Cases for `ranks`: quantized parameters of which each rank has a part are loaded."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import quantized_classes as classes
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from quantized_ranks import (
    KINDS,
    boxes,
    parameter,
    part_of,
    piece,
    sizes,
    spread,
    tensors,
    whole,
    wrapped,
    write,
)
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

import migrate
from migrate.core.errors import MigrateError


def module_of(rank: int, kinds: list[str], cut: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A module with a parameter of each kind, whose parts hold other bytes, and these parts."""
    module, local = torch.nn.Module(), {}
    for kind in kinds:
        found = part_of(kind, rank, dist.get_world_size(), cut)
        assert found is not None
        local[kind] = found[1]
        for one in found[1].held().values():
            one.copy_(torch.full(one.shape, 99.0).to(one.dtype))
        made = spread(kind, rank, cut, found[1])
        module.register_parameter(kind, parameter(made))
    return module, local


def raw(one: torch.Tensor) -> torch.Tensor:
    return one.contiguous().reshape(-1).view(torch.uint8)


def check(rank: int, kinds: list[str], cut: str, local: dict[str, Any]) -> None:
    """The parts hold what the whole tensor has there, filled up with zeros; one rank takes what one
    rank saved as it is.
    """
    zeros = dist.get_world_size() > 1
    for kind in kinds:
        box = boxes(KINDS[kind], dist.get_world_size(), cut)[rank]
        due = wrapped(kind, sizes(box), piece(kind, box, zeros=zeros)).held()
        held = local[kind].held()
        assert held.keys() == due.keys(), kind
        for name, one in due.items():
            assert held[name].shape == one.shape, (kind, name)
            assert torch.equal(raw(held[name]), raw(one)), (kind, name)


def loads(rank: int, source: str, kinds: str, cut: str) -> None:
    """`migrate.load` fills the parts that are here; the parameters stay the objects they are."""
    names = json.loads(kinds)
    with classes.installed():
        module, local = module_of(rank, names, cut)
        before = {name: getattr(module, name) for name in names}
        places = {k: {n: id(t) for n, t in v.held().items()} for k, v in local.items()}
        migrate.load(module, source, at="model", strict=False)
        assert all(getattr(module, name) is one for name, one in before.items())
        assert places == {k: {n: id(t) for n, t in v.held().items()} for k, v in local.items()}
        check(rank, names, cut, local)


def reads(rank: int, source: str, kinds: str, cut: str) -> None:
    """`dcp.load` through the reader fills them too."""
    names = json.loads(kinds)
    with classes.installed():
        module, local = module_of(rank, names, cut)
        reader = migrate.dcp.MigratingReader(source)
        state = {"model": {name: getattr(module, name) for name in names}, "step": 0}
        dcp.load(state, storage_reader=reader)
        assert reader.report is not None
        assert state["step"] in (1, 3)
        assert reader.report.tensors == len(names)
        check(rank, names, cut, local)


def hollow(module: torch.nn.Module, kinds: list[str]) -> None:
    """Puts the parts that are here on the meta device."""
    for kind in kinds:
        made = getattr(module, kind)
        local = made._local_tensor.like(lambda one: one.to("meta"))
        mesh, placements = made.device_mesh, made.placements
        made = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=made.shape, stride=made.stride()
        )
        module.register_parameter(kind, parameter(made))


def loads_on_meta(rank: int, source: str, kinds: str, cut: str) -> None:
    """Parts on the meta device become objects of the same classes, spread as they were."""
    names = json.loads(kinds)
    with classes.installed():
        module, _ = module_of(rank, names, cut)
        hollow(module, names)
        before = dict(module.named_parameters())
        assert all(one.is_meta for one in before.values())
        report = migrate.load(module, source, at="model", strict=False)
        assert report.left_on_meta == ()
        local = {}
        for name, one in module.named_parameters():
            assert type(one) is DTensor
            assert isinstance(one, torch.nn.Parameter)
            assert one.placements == before[name].placements
            assert (one.shape, one.stride()) == (before[name].shape, before[name].stride())
            local[name] = one._local_tensor
            assert type(local[name]) is type(before[name]._local_tensor)
            assert not one.is_meta
            assert not local[name].is_meta
        check(rank, names, cut, local)


def loads_nothing_on_meta(rank: int, source: str) -> None:
    """A rank whose part has no elements has a real one afterwards, as the others have."""
    KINDS["row"] = dataclasses.replace(KINDS["te-mxfp8-rowwise"], shape=(1, 192))
    with classes.installed():
        box = ((0, 1), (0, 192)) if rank == 0 else ((1, 1), (0, 192))
        local = wrapped("row", sizes(box), piece("row", box, zeros=True))
        module = torch.nn.Module()
        made = spread("row", rank, "rows", local)
        module.register_parameter("row", parameter(made))
        hollow(module, ["row"])
        report = migrate.load(module, source, at="model")
        assert report.left_on_meta == ()
        held = module.row._local_tensor
        assert held.shape == local.shape
        assert {n: one.shape for n, one in held.held().items()} == {
            n: one.shape for n, one in local.held().items()
        }
        assert not any(one.is_meta for one in (held, *held.held().values()))
        check(rank, ["row"], "rows", {"row": held})


class Linear(torch.nn.Module):
    """A module of one quantized weight, as `fully_shard` takes it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


def loads_under_fsdp2(rank: int, source: str, rules: str) -> None:
    """Shards that `fully_shard` itself made of a quantized parameter take their bytes, by each way;
    the parameter is then the one that FSDP2 knows.
    """
    kind = "te-float8"
    box = boxes(KINDS[kind], dist.get_world_size())[rank]
    with classes.installed():
        due = tensors(kind, piece(kind, box))
        for way in ("load", "reader", "meta"):
            other = wrapped(kind, KINDS[kind].shape, whole(kind, seed=1))
            if way == "meta":
                other = other.like(lambda one: one.to("meta"))
            module = Linear(other)
            fully_shard(module)
            before = module.weight
            assert type(before) is DTensor
            assert type(before._local_tensor) is classes.Float8Tensor
            assert before._local_tensor.shape == due["_data"].shape
            if way == "reader":
                state = {kind: get_model_state_dict(module)["weight"]}
                reader = migrate.dcp.MigratingReader(source)
                dcp.load({"model": state}, storage_reader=reader)
            else:
                migrate.load(module, source, at="model", rules=rules)
            assert way == "meta" or module.weight is before
            held = module.weight._local_tensor.held()
            for name, one in due.items():
                assert torch.equal(raw(held[name]), raw(one)), (way, name)


def derives(rank: int, source: str, meta: bool) -> None:
    """Parts of square blocks whose columnwise usage was not saved derive it."""
    kind = "te-block-2d-even"
    with classes.installed():
        module, local = module_of(rank, [kind], "rows")
        if meta:
            hollow(module, [kind])
        report = migrate.load(module, source, at="model")
        assert any("derived" in note for note in report.notes), report.notes
        assert report.left_on_meta == ()
        local[kind] = getattr(module, kind)._local_tensor
        held = local[kind].held()
        box = boxes(KINDS[kind], dist.get_world_size())[rank]
        due = tensors(kind, piece(kind, box, zeros=True))
        for name in ("_rowwise_data", "_rowwise_scale_inv"):
            assert torch.equal(raw(held[name]), raw(due[name])), name
        assert torch.equal(held["_columnwise_data"], due["_rowwise_data"].t())
        rows, columns = (-(-(stop - start) // 128) for start, stop in box)
        turned = due["_rowwise_scale_inv"][:rows, :columns].t()
        assert torch.equal(held["_columnwise_scale_inv"][:columns, :rows], turned)


def quantizes(rank: int, source: str) -> None:
    """Parts take plain numbers by their class's own `copy_`, which needs permission."""
    kinds = ["te-float8", "te-mxfp8-rowwise"]
    with classes.installed():
        module, local = module_of(rank, kinds, "rows")
        copies = {kind: local[kind].like(torch.clone) for kind in kinds}
        codes: set[str] = set()
        try:
            migrate.load(module, source)
        except MigrateError as error:
            codes = {d.code for d in error.diagnostics}
        assert codes == {"M961"}
        for kind in kinds:
            for name, due in copies[kind].held().items():
                assert torch.equal(raw(local[kind].held()[name]), raw(due)), (kind, name)
        parameters = dict(module.named_parameters())
        migrate.load(module, source, allow={"lossy"})
        assert all(parameters[name] is one for name, one in module.named_parameters())
        dense = load_file(source)
        for kind in kinds:
            (top, bottom), _ = boxes(KINDS[kind], dist.get_world_size())[rank]
            one = copies[kind]
            one.quantize_(dense[kind][top:bottom])
            for name, due in one.held().items():
                assert torch.equal(raw(local[kind].held()[name]), raw(due)), (kind, name)


def quantizes_objects(rank: int, source: str, dense: str) -> None:
    """Parts take objects in another encoding by their class's own `copy_`; `dense` has what these
    stand for.
    """
    kind = "te-float8"
    numbers = load_file(dense)[kind]
    for way in ("load", "reader"):
        with classes.installed():
            module, local = module_of(rank, [kind], "rows")
            due = local[kind].like(torch.clone)
            reader = migrate.dcp.MigratingReader(source, allow={"lossy"})
            if way == "load":
                migrate.load(module, source, allow={"lossy"})
            else:
                dcp.load(dict(module.named_parameters()), storage_reader=reader)
            (top, bottom), _ = boxes(KINDS[kind], dist.get_world_size())[rank]
            due.quantize_(numbers[top:bottom])
            for name, one in due.held().items():
                assert torch.equal(raw(local[kind].held()[name]), raw(one)), (way, name)


def refuses(rank: int, source: str) -> None:
    """Parts that end inside of a block are refused by name, and nothing is written."""
    # torch keeps the boxes of a shape for all placements along an axis
    KINDS["odd"] = dataclasses.replace(KINDS["te-block-2d"], shape=(1000, 300))
    with classes.installed():
        module, local = module_of(rank, ["odd"], "inside")
        held = local["odd"].held()
        before = {name: raw(one).clone() for name, one in held.items()}
        try:
            migrate.load(module, source, at="model")
        except MigrateError as error:
            found = {d.code: d.render() for d in error.diagnostics}
            assert "odd: its part in this process is not cut on a border" in found["M946"]
        else:
            raise AssertionError("it was loaded")
        assert all(torch.equal(raw(one), before[name]) for name, one in held.items())


def refuses_sums(rank: int, source: str) -> None:
    """Parts that are to be summed are no parts of a checkpoint's."""
    kind, world = KINDS["te-float8"], dist.get_world_size()
    with classes.installed():
        local = wrapped("te-float8", kind.shape, whole("te-float8"))
        mesh = init_device_mesh("cpu", (world,))
        made = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        module = torch.nn.Module()
        module.register_parameter("te-float8", torch.nn.Parameter(made, requires_grad=False))
        for one in local.held().values():
            one.fill_(99)
        found: dict[str, str] = {}
        try:
            migrate.load(module, source, at="model")
        except MigrateError as error:
            found = {d.code: d.render() for d in error.diagnostics}
        assert "te-float8: its part in this process is to be summed" in found["M946"]
        assert all(bool((one == 99).all()) for one in local.held().values())


def refuses_other_boxes(rank: int, source: str) -> None:
    """A part that is not the box that its placement says is filled by nothing."""
    kind = "te-mxfp8-rowwise"
    rows, columns = KINDS[kind].shape
    with classes.installed():
        # the first ⌈rows / ranks⌉ rows would be its own
        box = ((0, 5), (0, columns)) if rank == 0 else ((5, rows), (0, columns))
        local = wrapped(kind, sizes(box), piece(kind, box, zeros=True))
        made = DTensor.from_local(
            local,
            init_device_mesh("cpu", (2,)),
            [Shard(0)],
            run_check=False,
            shape=torch.Size((rows, columns)),
            stride=(columns, 1),
        )
        module = torch.nn.Module()
        module.register_parameter(kind, torch.nn.Parameter(made, requires_grad=False))
        for one in local.held().values():
            one.fill_(99)
        found: dict[str, str] = {}
        try:
            migrate.load(module, source, at="model")
        except MigrateError as error:
            found = {d.code: d.render() for d in error.diagnostics}
        assert f"{kind}: its part in this process is not one box" in found["M946"]
        assert all(bool((one == 99).all()) for one in local.held().values())


def stock(rank: int, source: str) -> None:
    """torch's own reader fills the parts of a folder that we cut for these ranks."""
    with classes.installed():
        state = {}
        for name in ("te-mxfp8", "te-float8"):
            kind, world = KINDS[name], dist.get_world_size()
            each = -(-kind.shape[0] // world)
            first, last = rank * each, min(rank * each + each, kind.shape[0])
            box = ((first, last), (0, kind.shape[1]))
            due = tensors(name, piece(name, box, zeros=True))
            local = wrapped(name, (last - first, kind.shape[1]), piece(name, box))
            for one in local.held().values():
                one.fill_(0)
            made = DTensor.from_local(
                local,
                init_device_mesh("cpu", (world,)),
                [Shard(0)],
                run_check=False,
                shape=torch.Size(kind.shape),
                stride=(kind.shape[1], 1),
            )
            state[name] = (made, local, due)
        dcp.load(
            {"model": {name: made for name, (made, _, _) in state.items()}}, checkpoint_id=source
        )
        for name, (_, local, due) in state.items():
            for part, one in due.items():
                assert torch.equal(raw(local.held()[part]), raw(one)), (name, part)


def _numbers(held: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """What the rowwise copy of 2-D blocks stands for."""
    values = held["_rowwise_data"].view(torch.float8_e4m3fn).double()
    scales = held["_rowwise_scale_inv"].double()
    for axis in (0, 1):
        scales = scales.repeat_interleave(128, axis).narrow(axis, 0, shape[axis])
    return values * scales


def requantizes(rank: int, source: str) -> None:
    """Parts that end inside of a block are encoded anew where that is asked for and allowed, by
    both ways of loading alike.
    """
    shape = (1000, 300)
    KINDS["odd"] = dataclasses.replace(KINDS["te-block-2d"], shape=shape)
    how: dict[str, Any] = {"params": {"requantize": "odd"}}
    with classes.installed():
        given = torch.load(source, weights_only=True)["model"]["odd"].held()
        module, local = module_of(rank, ["odd"], "inside")
        held = local["odd"].held()
        before = {name: raw(one).clone() for name, one in held.items()}
        codes = []
        try:
            migrate.load(module, source, at="model", **how)
        except MigrateError as error:
            codes = [d.code for d in error.diagnostics]
        assert codes == ["M401"]
        assert all(torch.equal(raw(one), before[name]) for name, one in held.items())
        report = migrate.load(module, source, at="model", **how, allow={"lossy"})
        assert any("encoded anew" in note for note in report.notes)
        (first, last), _ = boxes(KINDS["odd"], dist.get_world_size(), "inside")[rank]
        due = _numbers(given, shape)[first:last]
        got = _numbers(held, (last - first, shape[1]))
        assert (due - got).abs().max() <= due.abs().max() / 16
        loaded = {name: raw(one).clone() for name, one in held.items()}
        for one in held.values():
            one.zero_()
        reader = migrate.dcp.MigratingReader(source, **how, allow={"lossy"})
        dcp.load({"model": {"odd": module.odd}, "step": 0}, storage_reader=reader)
        assert all(torch.equal(raw(one), loaded[name]) for name, one in held.items())


def _fill(way: str, module: torch.nn.Module, names: list[str], source: str, **how: Any) -> None:
    """Loads these parameters by the reader, or by `migrate.load`."""
    if way == "load":
        migrate.load(module, source, at="model", strict=False, **how)
        return
    state = {"model": {name: getattr(module, name) for name in names}}
    dcp.load(state, storage_reader=migrate.dcp.MigratingReader(source, **how))


def opens_its_chunks(rank: int, source: str, kinds: str, way: str, anew: str = "") -> None:
    """Of each tensor a rank reads its own chunk and, to plan, the first one: nothing of the others.
    An `.metadata` says where chunks lie. Of the tensor that may be encoded `anew` it reads all.
    """
    names, pread, preadv = json.loads(kinds), os.pread, os.preadv
    how = {"params": {"requantize": anew}, "allow": {"lossy"}} if anew else {}
    read: list[tuple[str, int, int]] = []

    def note(descriptor: int, offset: int, size: int) -> None:
        read.append((Path(f"/proc/self/fd/{descriptor}").resolve().name, offset, offset + size))

    def one(descriptor: int, size: int, offset: int) -> bytes:
        note(descriptor, offset, size)
        return pread(descriptor, size, offset)

    def many(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        note(descriptor, offset, sum(memoryview(buffer).nbytes for buffer in buffers))
        return preadv(descriptor, buffers, offset, *flags)

    with classes.installed():
        said = dcp.FileSystemReader(source).read_metadata()
        module, local = module_of(rank, names, "rows")
        os.pread, os.preadv = one, many
        try:
            _fill(way, module, names, source, **how)
        finally:
            os.pread, os.preadv = pread, preadv
        check(rank, names, "rows", local)
    assert said.storage_data is not None
    for name in names:
        begun = [box[0][0] for box in boxes(KINDS[name], dist.get_world_size())]
        found = set()
        for at, place in said.storage_data.items():
            first, last = place.offset, place.offset + place.length
            if at.fqn == f"model.{name}" and any(
                file == place.relative_path and start < last and first < stop
                for file, start, stop in read
            ):
                found.add(at.offset[0])
        assert found == (set(begun) if name == anew else {0, begun[rank]}), (name, found)


def refuses_what_differs(
    rank: int, source: str, kinds: str, seen_by: str, way: str = "reader"
) -> None:
    """The last rank's chunks differ from the first in what all share, and no rank that opens such a
    chunk writes anything. The ranks `seen_by` say it, each of all tensors. By the reader no rank
    writes anything.
    """
    names = json.loads(kinds)
    with classes.installed():
        module, local = module_of(rank, names, "rows")
        before = {
            name: {part: raw(one).clone() for part, one in local[name].held().items()}
            for name in names
        }
        failures = {}
        try:
            _fill(way, module, names, source)
        except CheckpointException as error:
            failures = {number: str(cause) for number, (cause, _) in error.failures.items()}
        except MigrateError as error:
            failures = {rank: str(error)}
        last = dist.get_world_size() - 1
        seen = json.loads(seen_by)
        assert sorted(failures) == (seen if way == "reader" else [rank] * (rank in seen))
        for said in failures.values():
            assert said.count("M946") == len(names), said
            for name in names:
                assert f"model.{name}: its {last + 1} chunks are quantized" in said, said
            assert f"rank {last} at" in said, said
        for name in names if failures else ():
            held = local[name].held()
            assert all(torch.equal(raw(held[part]), one) for part, one in before[name].items())


def leaves_what_differs(rank: int, source: str, kind: str) -> None:
    """What differs in a tensor that no rank loads is not seen."""
    with classes.installed():
        state = {"model": {"norm": torch.zeros(5)}}
        reader = migrate.dcp.MigratingReader(source)
        dcp.load(state, storage_reader=reader)
    assert torch.equal(state["model"]["norm"], torch.arange(5.0))
    assert reader.report is not None
    assert list(reader.report.unexpected) == [f"model.{kind}"]


def saves_turned(rank: int, folder: str, kinds: str) -> None:
    """The last rank's first component lies column by column in memory, and so in its archive, which
    is as long as the others'.
    """
    world, model = dist.get_world_size(), {}
    with classes.installed():
        for kind in json.loads(kinds):
            found = part_of(kind, rank, world)
            assert found is not None
            local = found[1]
            if rank == world - 1:
                name, one = next(iter(local.held().items()))
                setattr(local, name, one.t().contiguous().t())
            model[kind] = spread(kind, rank, "rows", local)
        write({"model": model, "step": 3}, folder, "save")


def _moments(kind: str, rank: int) -> dict[str, Any]:
    """State of a parameter as it is spread over the ranks, and a counter of steps."""
    shape = KINDS[kind].shape
    torch.manual_seed(len(kind))
    box = boxes(KINDS[kind], dist.get_world_size())[rank]
    own = tuple(slice(start, stop) for start, stop in box)
    held = {name: torch.randn(shape)[own].clone() for name in ("exp_avg", "master_param")}
    spreads = {name: spread(kind, rank, "rows", one) for name, one in held.items()}
    return {"step": torch.tensor(3.0), **spreads}


def saves_with_state(rank: int, folder: str, kinds: str, flat: bool) -> None:
    """Quantized parameters under old names, and an optimizer that knows them by these."""
    names, world = json.loads(kinds), dist.get_world_size()
    with classes.installed():
        model, state = {}, {}
        for kind in names:
            found = part_of(kind, rank, world)
            assert found is not None
            model[f"old.{kind}"] = spread(kind, rank, "rows", found[1])
            state[f"old.{kind}"] = _moments(kind, rank)
        optimizer: dict[str, Any] = {
            "state": state,
            "param_groups": [{"lr": 0.5, "params": list(state)}],
        }
        if flat:
            optimizer = {
                f"state.{name}.{moment}": one
                for name, held in state.items()
                for moment, one in held.items()
            } | {f"param_groups.{name}.lr": 0.5 for name in state}
        write({"model": model, "optimizer": optimizer}, folder, "save")


def reads_with_state(rank: int, source: str, rules: str, kinds: str, flat: bool) -> None:
    """The state comes under the new names of its parameters, each rank its part."""
    names = json.loads(kinds)
    with classes.installed():
        module, local = module_of(rank, names, "rows")
        due = {kind: _moments(kind, rank) for kind in names}
        blank = {
            kind: {moment: torch.zeros_like(one) for moment, one in held.items()}
            for kind, held in due.items()
        }
        optimizer: dict[str, Any] = {
            "state": blank,
            "param_groups": [{"lr": 0.0, "params": []}],
        }
        if flat:
            optimizer = {
                f"state.{name}.{moment}": one
                for name, held in blank.items()
                for moment, one in held.items()
            } | {f"param_groups.{name}.lr": 0.0 for name in names}
        target = {"model": {kind: getattr(module, kind) for kind in names}, "optimizer": optimizer}
        dcp.load(target, storage_reader=migrate.dcp.MigratingReader(source, rules=rules))
        check(rank, names, "rows", local)
        for kind, held in due.items():
            assert blank[kind]["step"] == held["step"]
            for moment in ("exp_avg", "master_param"):
                found, wanted = blank[kind][moment], held[moment]
                assert torch.equal(found.to_local(), wanted.to_local()), (kind, moment)
        if flat:
            assert all(optimizer[f"param_groups.{kind}.lr"] == 0.5 for kind in names)
        else:
            assert optimizer["param_groups"] == [{"lr": 0.5, "params": names}]
