"""The integer of a dtype that Transformer Engine renumbered: asked for where it decides something,
from the command line to the decoder.

7 is E5M2 until 2.3 and E4M3 since 2.4; a Float8Tensor of five arguments, and a
Float8BlockwiseQTensor of nine, were written by both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from commandline import Result, done, run
from inert_unpickler import load_stand_ins
from quantized_streams import Made, stand_ins

import migrate
from migrate.core.errors import CheckpointError

MEANINGS = {"0.8": "float8_e5m2", "2.4": "float8_e4m3fn"}
HEAD = "id: demo/2/x\ntitle: x\nlineage: demo\nedge: ['1', '2']\n"
RENAME = HEAD + 'rules:\n  - {name: r, from: "a.{k...}", to: "b.{k}"}\n'
APART = (
    HEAD + 'rules:\n  - {name: r, from: "a.w._data", to: "a.data"}\n  - {name: s, from: '
    '"a.w._scale_inv", to: "a.scale"}\n'
)
GROUP = (
    HEAD
    + 'rules:\n  - {name: g, from: "a.w{e:int}.{k}", to: "a.w.{k}", via: [{stack: {over: e}}]}\n'
)


@pytest.fixture
def te() -> Iterator[dict[str, ModuleType]]:
    with stand_ins() as modules:
        yield modules


def float8(te: dict[str, ModuleType], code: int) -> Made:
    number = te["transformer_engine_torch"].DType(code)
    data = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    method = te["float8_tensor"].Float8Tensor._make_in_reduce_ex
    return Made(method, (data, number, torch.ones(1), torch.bfloat16, torch.Size((2, 3))))


def blockwise(te: dict[str, ModuleType], seed: int) -> Made:
    torch.manual_seed(seed)
    number = te["transformer_engine_torch"].DType(7)
    quantizer = te["float8_blockwise_tensor"].Float8BlockQuantizer(
        dtype=number, block_scaling_dim=2
    )
    data, scale = torch.randint(0, 256, (128, 128), dtype=torch.uint8), torch.rand(1, 4)
    arguments = (
        torch.Size((128, 128)),
        data,
        scale,
        None,
        None,
        number,
        torch.bfloat16,
        quantizer,
        True,
    )
    return Made(te["float8_blockwise_tensor"].Float8BlockwiseQTensor._make_in_reduce_ex, arguments)


def saved(path: Path, **tensors: Any) -> Path:
    torch.save({f"a.{name}": value for name, value in tensors.items()}, path / "in.pt")
    return path / "in.pt"


def asked(source: Path, text: str, *words: object) -> Result:
    file = source.with_name("rules.yaml")
    file.write_text(text)
    return run("plan", source, "--rules", file, *words, "--format", "json")


def test_inspect_shows_both_readings_and_takes_the_answer(te: Any, tmp_path: Path) -> None:
    source = saved(tmp_path, w=float8(te, 7))
    (told,) = done("inspect", source, "--format", "json").json["objects"]
    assert (told["number"], told["readings"]) == (None, MEANINGS)
    text = done("inspect", source).out
    assert "float8_e5m2 (0.8) or float8_e4m3fn (2.4)" in text
    assert "--set te_dtype_numbering=0.8 or =2.4" in text
    for said, number in MEANINGS.items():
        (told,) = done(
            "inspect", source, "--set", f"te_dtype_numbering={said}", "--format", "json"
        ).json["objects"]
        assert (told["number"], told["readings"]) == (number, {})
        assert migrate.inspect(source, params={"te_dtype_numbering": float(said)}).to_json()[
            "objects"
        ] == [told]


def test_an_object_that_stays_what_it_is_needs_no_answer(te: Any, tmp_path: Path) -> None:
    assert asked(saved(tmp_path, w=float8(te, 7)), RENAME).exit == 0


def test_an_object_that_comes_apart_is_asked_about_and_both_answers_are_taken(
    te: Any, tmp_path: Path
) -> None:
    source = saved(tmp_path, w=float8(te, 7))
    found = asked(source, APART)
    assert (found.exit, found.codes) == (3, ["M955"])
    assert (
        "float8_e5m2 in 0.8 and later, float8_e4m3fn in 2.4 and later"
        in found.json["diagnostics"][0]["message"]
    )
    assert "--set te_dtype_numbering=0.8" in found.json["diagnostics"][0]["help"]
    for said, number in MEANINGS.items():
        words = ("--rules", tmp_path / "rules.yaml", "--set", f"te_dtype_numbering={said}")
        plan = asked(source, APART, *words[2:]).json
        assert plan["params"] == {"te_dtype_numbering": said}
        assert any(
            note.startswith("plain tensors") and note.endswith(f"of their data are {number}")
            for note in plan["notes"]
        )
        out = tmp_path / f"out{said}.pt"
        done("apply", source, "-o", out, *words, "-q")
        # the stamp remembers the answer
        done("verify", out, "--source", source, *words[:2], "-q")
        done("downgrade", out, "-o", tmp_path / f"back{said}.pt", *words[:2], "-q")


def test_members_are_a_group_only_where_the_answer_says_that_the_group_means_the_same(
    te: Any, tmp_path: Path
) -> None:
    source = saved(tmp_path, w0=blockwise(te, 0), w1=blockwise(te, 1))
    assert asked(source, GROUP).codes == ["M955"]
    for said in MEANINGS:
        out = tmp_path / f"out{said}.pt"
        migrate.apply(
            source, out, rules=[tmp_path / "rules.yaml"], params={"te_dtype_numbering": said}
        )
        made = load_stand_ins(out)
        if said == "2.4":
            assert list(made) == ["a.w"]
            assert made["a.w"].quantizer.dtype.value == 7
            run_of = torch.cat([blockwise(te, seed).arguments[1].reshape(-1) for seed in (0, 1)])
            assert torch.equal(made["a.w"].rowwise_data, run_of)
        else:
            # a group has the newer numbering, in which the same integer is another dtype
            assert sorted(made) == ["a.w._rowwise_data", "a.w._rowwise_scale_inv"]


def test_another_object_of_the_file_answers_and_is_not_outvoted(te: Any, tmp_path: Path) -> None:
    source = saved(tmp_path, w=float8(te, 7), v=float8(te, 6))
    text = APART + '  - {name: k, from: "a.v.{k}", to: "a.v.{k}"}\n'
    notes = asked(source, text).json["notes"]
    assert any("float8_e5m2" in note for note in notes)
    assert asked(source, text, "--set", "te_dtype_numbering=0.8").exit == 0
    assert asked(source, text, "--set", "te_dtype_numbering=2.4").codes == ["M955"]


def test_an_answer_that_is_none_and_a_question_that_nobody_asks(te: Any, tmp_path: Path) -> None:
    source = saved(tmp_path, w=float8(te, 7))
    assert asked(source, RENAME, "--set", "te_dtype_numbering=2.3").codes == ["M955"]
    assert asked(source, RENAME, "--set", "te_dtype_number=2.4").codes == ["M112"]
    assert run("inspect", source, "--set", "heads=2", "--format", "json").codes == ["M112"]
    with pytest.raises(CheckpointError, match="M955"):
        migrate.plan(source, rules=[tmp_path / "rules.yaml"], params={"te_dtype_numbering": "new"})
