"""Namespaces and members of enums are data: read, written again, and nothing else of their kind."""

from __future__ import annotations

import argparse
import signal
from typing import Any

import pytest
import torch
from torch_streams import decoded, dense, reduce, saved, tree

from migrate.core.errors import CheckpointError
from migrate.source.pickle import policy, settings
from migrate.source.pickle.emit import emit
from migrate.source.pickle.machine import read_pickle
from migrate.source.pickle.nodes import ABSENT, ARCHIVE, Call, Dict, Global
from migrate.source.pickle.tree import OBJECTS, Constant, DictNode, Opaque, to_nodes

ENUMS = "megatron.core.transformer.enums"


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        import os

        return os.mkdir, ("never-made",)


def namespace(state: Any = ABSENT, name: str = "Namespace") -> Call:
    made = Call("newobj", Global(*OBJECTS[name]), ())
    made.state = state
    return made


def found(node: Any) -> policy.Decoded:
    return policy.decode(node, "x.pt")


def refused(node: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(one.name, one.reason, one.paths) for one in found(node).outside]


def again(value: Any) -> bytes:
    return emit(to_nodes(value, lambda record: None), name="x", names=policy.WRITTEN)


def test_a_namespace_is_its_fields_and_is_written_as_it_was() -> None:
    args = argparse.Namespace(
        num_layers=4,
        lr=1e-4,
        params_dtype=torch.float32,
        data_path=["a", ("b", 2)],
        exit_signal=signal.SIGTERM,
        inner=argparse.Namespace(x=None, y=argparse.Namespace()),
    )
    node = tree({"args": args}).get("args")
    assert (type(node), node.kind) == (DictNode, "Namespace")
    assert [key for key, _ in node.pairs] == list(vars(args))
    assert node.get("num_layers") == 4
    assert node.get("inner").get("y").pairs == ()
    assert node.get("exit_signal").text == "Signals.SIGTERM"
    raw, _ = saved(args)
    assert again(tree(args)) == raw


@pytest.mark.parametrize("state", [ABSENT, Dict([])], ids=["without a state", "with an empty one"])
def test_an_empty_namespace_is_written_as_it_was(state: Any) -> None:
    stream = emit(namespace(state), name="x")
    assert again(found(namespace(state)).tree) == stream


@pytest.mark.parametrize(
    ("module", "name", "value", "text"),
    [
        (ENUMS, "AttnBackend", 5, "AttnBackend.auto"),
        ("megatron.core.enums", "ModelType", 1, "ModelType.encoder_or_decoder"),
        ("megatron.core.enums", "Fp8Recipe", "mxfp8", "Fp8Recipe.mxfp8"),
        (ENUMS, "LayerType", 4, "LayerType.decoder"),
        ("signal", "Signals", 15, "Signals.SIGTERM"),
    ],
)
def test_a_member_of_an_enum_is_its_class_and_value(
    module: str, name: str, value: Any, text: str
) -> None:
    node = reduce(module, name, value)
    held = found(node).tree
    assert (type(held), held.kind, held.text) == (Constant, "enum", text)
    assert again(held) == emit(node, name="x")


@pytest.mark.parametrize("number", [1, 2, 3, 10, 12, 15])
def test_signals_are_numbered_as_here(number: int) -> None:
    assert settings.ENUMS["signal", "Signals"][number] == signal.Signals(number).name


def test_a_layout_of_pipeline_stages_is_its_fields() -> None:
    layers = [reduce(ENUMS, "LayerType", 1), reduce(ENUMS, "LayerType", 4)]
    state = Dict(
        [("input_data", "Et"), ("layout", [[layers]]), ("pipeline_model_parallel_size", 1)]
    )
    node = namespace(state, "PipelineParallelLayerLayout")
    held = found(node).tree
    assert held.kind == "PipelineParallelLayerLayout"
    assert held.get("layout").items[0].items[0].items[1].text == "LayerType.decoder"
    assert again(held) == emit(node, name="x")


def changed(node: Call, **more: Any) -> Call:
    for name, value in more.items():
        setattr(node, name, value)
    return node


NO_DATA: dict[str, Any] = {
    "a member that is not known": reduce(ENUMS, "AttnBackend", 77),
    "a member by its name": reduce(ENUMS, "AttnBackend", "auto"),
    "True for 1": reduce(ENUMS, "AttnBackend", True),
    "1.0 for 1": reduce(ENUMS, "AttnBackend", 1.0),
    "an enum that is not known": reduce(ENUMS, "Other", 1),
    "a known name of another module": reduce("os", "AttnBackend", 1),
    "a member of two values": reduce(ENUMS, "AttnBackend", 1, 2),
    "a member with a state": changed(reduce(ENUMS, "AttnBackend", 1), state=Dict([("x", 1)])),
    "a member with items": changed(reduce(ENUMS, "AttnBackend", 1), items=[1]),
    "a call of Namespace": reduce("argparse", "Namespace"),
    "a Namespace with arguments": Call("newobj", Global("argparse", "Namespace"), (1,)),
    "the class": Global("argparse", "Namespace"),
    "slots": namespace((None, Dict([("a", 1)]))),
    "a list for a state": namespace([1]),
    "a number for a name": namespace(Dict([(1, 2)])),
    "items": changed(namespace(Dict([("a", 1)])), items=[1]),
    "pairs": changed(namespace(Dict([("a", 1)])), pairs=[("a", 1)]),
    "another class": Call("newobj", Global("argparse", "ArgumentParser"), ()),
    "SimpleNamespace": reduce("types", "SimpleNamespace"),
}


@pytest.mark.parametrize("case", NO_DATA)
def test_what_is_no_data_is_refused_by_name(case: str) -> None:
    node = NO_DATA[case]
    ((name, _, paths),) = refused(Dict([("args", Dict([("x", node)]))]))
    assert name == str(node.function if type(node) is Call else node)
    assert paths == ("args.x",)


def test_code_in_a_namespace_is_refused_where_it_stands_and_the_fields_around_it_are_read() -> None:
    args = argparse.Namespace(a=1, evil=Evil(), inner=argparse.Namespace(b=[Evil()]))
    held = decoded({"args": args})
    ((name, paths),) = [(one.name, one.paths) for one in held.outside]
    assert (name, paths) == ("posix.mkdir", ("args.evil", "args.inner.b.0"))
    node = held.tree.get("args")
    assert (node.get("a"), type(node.get("evil"))) == (1, Opaque)


def test_a_namespace_with_tensors_is_no_data() -> None:
    held = decoded({"args": argparse.Namespace(a=[torch.ones(2)]), "w": torch.ones(3)})
    ((name, reason),) = [(one.name, one.reason) for one in held.outside]
    assert (name, reason) == (
        "argparse.Namespace",
        "a call of argparse.Namespace with tensors in it",
    )
    # its storage is in the file, and belongs to it
    assert len(held.hidden) == 1
    inner = namespace(Dict([("t", dense())]))
    ((_, _, paths),) = refused(namespace(Dict([("deep", inner)])))
    assert paths == ("deep",)


def test_a_namespace_with_two_fields_of_one_name_is_refused() -> None:
    two = Dict([("a", 1), (reduce("_codecs", "encode", "a", "latin1"), 2)])
    assert refused(namespace(two))[0][1].endswith("a field whose name is no text")
    stream = emit(namespace(Dict([("a", 1), ("a", 2)])), name="x")
    with pytest.raises(CheckpointError, match="twice"):
        read_pickle(stream, ARCHIVE, name="x")


def test_a_namespace_that_holds_itself_is_refused_by_the_machine() -> None:
    args = argparse.Namespace(a=1)
    args.me = args
    raw, _ = saved(args)
    with pytest.raises(CheckpointError) as caught:
        read_pickle(raw, ARCHIVE, name="x", persistent=True)
    assert caught.value.diagnostics[0].code in ("M931", "M932")


def test_namespaces_inside_of_each_other_end_at_the_limit_of_depth() -> None:
    node: Any = 1
    for _ in range(40):
        node = namespace(Dict([("x", node)]))
    with pytest.raises(CheckpointError) as caught:
        emit(node, name="x")
    assert caught.value.diagnostics[0].code == "M933"
    shallow = argparse.Namespace(x=argparse.Namespace(x=argparse.Namespace(x=1)))
    raw, _ = saved(shallow)
    assert again(tree(shallow)) == raw


def test_a_namespace_costs_steps_in_proportion_to_its_fields() -> None:
    from work import steps

    def work(count: int) -> int:
        fields = Dict([(f"f{number}", number) for number in range(count)])
        nest = namespace(Dict([("inner", namespace(fields))]))
        return steps(lambda: found(nest))

    assert work(8000) < 10 * work(1000)
