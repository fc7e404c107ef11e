"""Every form is decoded to one record, and the numbers in it are those of an independent
reading.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from te_streams import (
    TE,
    VECTORS,
    archive,
    dumps,
    made,
    mapping,
    recipe,
    scaling,
    stream,
    text,
    transformer_engine,
    vector,
)

from migrate.core.errors import CheckpointError
from migrate.extra_state.decode import decode, decode_nodes
from migrate.extra_state.record import RECIPES, Known, StateForm, StateRecord, StateTensor
from migrate.extra_state.verdict import judge
from migrate.source.pickle.nodes import Call, Dict, Global, Persistent

EXPECTED: dict[str, dict[str, dict[str, Any]]] = json.loads((VECTORS / "expected.json").read_text())


def refused(payload: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        decode(payload, "layer._extra_state")
    return caught.value


def code(payload: bytes) -> str:
    return refused(payload).diagnostics[0].code


def described(record: StateRecord) -> dict[str, Any]:
    out = {}
    for mode, state in record.states.items():
        assert state is not None
        tensors = {
            n: {"shape": list(t.shape), "sha256": hashlib.sha256(t.data).hexdigest()}
            for n, t in state.tensors.items()
        }
        pair = state.format
        name = None if state.recipe is None else state.recipe.name
        out[mode] = {
            "recipe": name,
            "format": pair and pair.name,
            "history": state.history,
            "tensors": tensors,
        }
    return out


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_vector_holds_what_an_independent_reading_of_it_found(name: str) -> None:
    expected = EXPECTED[name]
    sorts = {mode["sort"] for mode in expected.values()}
    if sorts <= {"unknown", "broken"}:
        assert code(vector(name)) == ("M950" if sorts == {"unknown"} else "M930")
        return
    record = decode(vector(name), name)
    assert {judge(record).sort} == sorts
    found = described(record)
    if not found:
        assert [mode["tensors"] for mode in expected.values()] == [{}]
    else:
        assert found == {
            mode: {k: v for k, v in held.items() if k != "sort"} for mode, held in expected.items()
        }


def test_the_independent_reading_is_the_one_that_is_checked_in() -> None:
    before = (VECTORS / "expected.json").read_text()
    program = (
        "import runpy, pathlib\nm = "
        f"runpy.run_path({str(VECTORS / 'worked_out.py')!r})\nimport json\n"
    )
    program += "files = sorted([*m['HERE'].glob('*.pkl'), *m['HERE'].glob('*.bytesio.pt')])\n"
    program += "print(json.dumps({p.name: m['read'](p) for p in files}, indent=1))\n"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == before
    )


# Where Transformer Engine's own verdict differs, why ours is right
DIFFERENT = {
    "crafted_memo_stateless_then_delayed.pkl": "it spells the module of DelayedScaling by the "
    "memo, which TE's scanner does not follow",
    "crafted_evil_with_mxfp8_recipe.pkl": "TE ignores what it takes for stateless; a call of "
    "posix.system is nothing to drop silently",
}


def test_verdicts_differ_from_those_of_transformer_engine_only_where_it_is_fooled() -> None:
    theirs = json.loads((VECTORS / "te_verdicts.json").read_text())
    differing = set()
    for name, verdict in theirs.items():
        try:
            ours = "IGNORE" if judge(decode(vector(name), name)).sort == "stateless" else "REFUSE"
        except CheckpointError:
            ours = "REFUSE"
        if ours != verdict:
            differing.add(name)
    assert differing == set(DIFFERENT)


@pytest.mark.parametrize(
    ("name", "form", "releases"),
    [
        ("v0.8_linear_DelayedScaling.pkl", "pickle", "0.8 to 0.11"),
        ("v1.13_linear_DelayedScaling.bytesio.pt", "archive", "1.6 to 1.13"),
        ("v1.13_linear_DelayedScaling_nofp8.bytesio.pt", "archive", "0.12 to 1.13"),
        ("v1.13_ops_basic_linear_DelayedScaling.pkl", "pickle", "1.13"),
        ("v2.0_linear_DelayedScaling.pkl", "pickle", "2.0 to 2.1"),
        ("v2.17_linear_DelayedScaling.pkl", "pickle", "2.16 and later"),
        ("v2.17_linear_NVFP4BlockScaling.pkl", "pickle", "2.17"),
        ("v2.0_linear_MXFP8BlockScaling.pkl", "pickle", "2.0 to 2.17"),
        ("HEAD_linear_DelayedScaling_nofp8.pkl", "empty", "2.4 and later"),
        ("crafted_none.pkl", "none", "0.6 to 0.11 and 2.0 to 2.3"),
    ],
)
def test_a_record_says_which_releases_write_it(name: str, form: str, releases: str) -> None:
    record = decode(vector(name), name)
    assert (record.form, record.releases) == (form, releases)


def test_tensors_on_a_gpu_are_read_like_others() -> None:
    one = decode(vector("v1.13_linear_DelayedScaling.bytesio.pt"), "x").states[""]
    other = decode(vector("v1.13_linear_DelayedScaling_cuda0.bytesio.pt"), "x").states[""]
    assert one is not None
    assert other is not None
    assert one.tensors == other.tensors


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_a_state_is_read_in_every_protocol_and_container() -> None:
    tensors = scaling()
    held = {
        **tensors,
        "extra_fp8_variables": {"num_gemms": 1, "fp8_max_fwd": 448, "fp8_max_bwd": 448},
    }
    for payload in (*(dumps(held, p) for p in (2, 3, 4, 5)), archive(held)):
        state = decode(payload, "x").states[""]
        assert state is not None
        assert state.tensors == {
            name: StateTensor("float32", tuple(t.shape), raw(t)) for name, t in tensors.items()
        }
        assert state.format == StateForm(448, 448)


def nodes(tensors: dict[str, torch.Tensor], storages: dict[str, bytes]) -> dict[str, Any]:
    """Tensors as the outer file of a .pt checkpoint holds them: on storages of its own."""
    out = {}
    for name, tensor in tensors.items():
        key = str(len(storages))
        storages[key] = raw(tensor)
        storage = Persistent(
            ("storage", Global("torch", "FloatStorage"), key, "cuda:0", tensor.numel())
        )
        hooks = Call("reduce", Global("collections", "OrderedDict"), ())
        arguments = (storage, 0, tuple(tensor.shape), tensor.stride(), False, hooks)
        out[name] = Call("reduce", Global("torch._utils", "_rebuild_tensor_v2"), arguments)
    return out


def test_the_list_of_the_first_releases_and_the_dict_of_the_next_are_read_from_the_checkpoint_around_them() -> (  # noqa: E501
    None
):
    storages: dict[str, bytes] = {}
    tensors = scaling(forward=2, backward=1)
    held = nodes(tensors, storages)
    listed = [*held.values(), Dict([("FWD_AMAX_1", [held["scale_fwd"]])]), True, 0, 0, 3, 3]
    record = decode_nodes(listed, "x", storages.__getitem__)
    assert (record.form, record.releases) == ("list", "0.1 to 0.2")
    state = record.states[""]
    assert state is not None
    assert {n: t.data for n, t in state.tensors.items()} == {n: raw(t) for n, t in tensors.items()}
    assert state.extras["autocast_id_bwd"] == 3
    record = decode_nodes(
        Dict([*held.items(), ("extra_fp8_variables", Dict([("num_gemms", 1)]))]),
        "x",
        storages.__getitem__,
    )
    assert (record.form, record.releases) == ("dict", "0.3 to 0.5")
    assert decode_nodes(None, "x").states == {}
    with pytest.raises(CheckpointError, match="a list of 9 items"):
        decode_nodes(listed[:9], "x", storages.__getitem__)


def test_operations_of_2_0_have_modes_and_no_recipe() -> None:
    forward = {k: v for k, v in scaling().items() if k.endswith("fwd")}
    record = decode(dumps({"forward": {**forward, "extra_fp8_variables": {}}, "backward": {}}), "x")
    assert (record.api, record.releases) == ("ops", "2.0 to 2.2")
    assert record.states["backward"] is None


def test_megatrons_storages_and_recipe_are_read_like_transformer_engines() -> None:
    payload = vector("v2.17_linear_DelayedScaling.pkl").replace(
        b"\x8c\rtorch.storage\x94\x8c\x10_load_from_bytes",
        b"\x8c\x1amegatron.core.safe_globals\x94\x8c\x14safe_load_from_bytes",
    )
    # without its frame, whose length is another now
    payload = payload[:2] + payload[11:]
    state = decode(payload, "x").states[""]
    plain = decode(vector("v2.17_linear_DelayedScaling.pkl"), "x").states[""]
    assert state is not None
    assert plain is not None
    assert state.tensors == plain.tensors
    for module in (
        "megatron.core.extensions.transformer_engine",
        "megatron.core.transformer.custom_layers.transformer_engine",
    ):
        own = stream(mapping({"recipe": made("TEDelayedScaling", {"margin": b"K\x00"}, module)}))
        assert judge(decode(own, "x")).sort == "delayed"


def test_an_unknown_recipe_is_refused_with_a_line_that_says_how_to_add_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with transformer_engine() as te:
        payload = dumps({"recipe": recipe(te, "NewRecipe"), "extra_fp8_variables": {}})
    error = refused(payload).diagnostics[0]
    assert error.code == "M950"
    assert f"{TE}.NewRecipe" in error.message
    assert "RECIPES in migrate/extra_state/record.py" in str(error.help)
    monkeypatch.setitem(RECIPES, (TE, "NewRecipe"), Known("stateless", (2, 20)))
    assert judge(decode(payload, "x")).sort == "stateless"


@pytest.mark.parametrize(
    ("held", "what"),
    [
        ({"scale_fwd": torch.ones(3), "amax_history_fwd": torch.ones(4, 2)}, "do not fit together"),
        ({"scale_fwd": torch.ones(3, dtype=torch.float64)}, "float64"),
        ({"scale_fwd": torch.ones(3, 3)}, "with 1 axes"),
        ({"scale_fwd": [1.0, 2.0]}, "not a tensor"),
        ({"scale_fwd": torch.ones(0)}, "float32"),
        ({"amax_history_fwd": torch.ones(3, 4).T}, "row by row"),
        ({"scale_up": torch.ones(3)}, "the key scale_up"),
        ({"recipe": 3}, "a recipe that is an int"),
        ([torch.ones(3)], "a list"),
        (3, "an extra state that is an int"),
        ({1: 2}, "not text"),
        ({"forward": {}, "scale_fwd": torch.ones(3)}, "the key forward"),
    ],
)
def test_what_no_release_writes_is_refused_and_named(held: Any, what: str) -> None:
    error = refused(dumps(held)).diagnostics[0]
    assert error.code == "M950"
    assert what in error.message


def test_bytes_of_a_storage_that_do_not_add_up_are_refused() -> None:
    payload = dumps({"scale_fwd": torch.ones(3)})
    numbers = raw(torch.ones(3))
    at = payload.index(numbers)
    assert "elements with" in str(
        refused(payload[: at - 8] + (4).to_bytes(8, "little") + payload[at:])
    )
    assert "reaches to element" in str(refused(payload.replace(b"K\x03\x85", b"K\x04\x85")))
    # a storage that is listed under another key than its own
    key = payload[payload.index(b"storageq\x00") :].split(b"X", 2)[1][4:18]
    first = payload.index(key)
    other = bytes([key[0] ^ 1]) + key[1:]
    assert "another key" in str(refused(payload[:first] + other + payload[first + len(key) :]))


def test_a_storage_of_an_archive_that_no_tensor_has_is_refused() -> None:
    payload = dumps({"extra_fp8_variables": {}}, 2)
    for names, expected in (
        ((), None),
        (("data/0",), "storage 0 of the archive belongs to no tensor"),
    ):
        buffer = io.BytesIO()
        writer = torch._C.PyTorchFileWriter(buffer)
        for record, held in (
            ("data.pkl", payload),
            ("byteorder", b"little"),
            *((name, b"hide") for name in names),
        ):
            writer.write_record(record, held, len(held))
        writer.write_end_of_file()
        if expected is None:
            assert decode(buffer.getvalue(), "x").form == "archive"
        else:
            assert expected in str(refused(buffer.getvalue()))


def test_an_unread_field_of_a_recipe_hides_nothing() -> None:
    hidden = {
        "tensor": torch.ones(3), "a list": [1.0, 2.0], "a tuple": (1.0,), "a dict": {"scale": 1.0},
        "bytes": b"state",
    }  # fmt: skip
    with transformer_engine() as te:
        for what, value in hidden.items():
            payload = dumps(
                {"recipe": recipe(te, "MXFP8BlockScaling", x=value), "extra_fp8_variables": {}}
            )
            assert code(payload) == "M950", what
        nested = dumps({"recipe": recipe(te, "MXFP8BlockScaling", x=recipe(te, "DelayedScaling"))})
    assert code(nested) == "M950"
    named = {"amax_compute_algo": b"cmath\nsin\n", "margin": b"cmath\nsin\n"}
    assert (
        judge(
            decode(
                stream(
                    mapping(
                        {
                            "recipe": made(
                                "DelayedScaling", {"amax_compute_algo": named["amax_compute_algo"]}
                            )
                        }
                    )
                ),
                "x",
            )
        ).sort
        == "delayed"
    )
    assert (
        code(stream(mapping({"recipe": made("DelayedScaling", {"margin": named["margin"]})})))
        == "M950"
    )


def test_a_mistyped_text_is_no_recipe() -> None:
    assert code(stream(mapping({"recipe": text("DelayedScaling")}))) == "M950"
