"""What is asked, as it was asked, and the plan file that holds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from migrate.core.errors import MigrateError
from migrate.planning.request import Request, make_request
from migrate.planning.savedplan import request_of, saved_plan
from migrate.running.output_shapes import shape_of

WHOLE = {
    "format_version": "1.0",
    "kind": "plan",
    "digest": "m1:0",
    "source": {"path": "x"},
    "options": {"max_shard_size": 5, "folder": True},
    "question": {
        "to": ["a@b"],
        "from": [],
        "rules": [],
        "params": {"n": "1"},
        "allow": ["drop"],
        "backwards": False,
    },
}


def write(folder: Path, document: object) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(document))
    return path


def test_a_question_comes_back_from_its_plan(tmp_path: Path) -> None:
    saved = saved_plan(write(tmp_path, WHOLE))
    assert saved is not None
    assert request_of(saved) == Request(("a@b",), (), (), {"n": "1"}, frozenset({"drop"}), False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("to", [1]),
        ("to", "a@b"),
        ("from", [None]),
        ("rules", [["x"]]),
        ("allow", [["drop"]]),
        ("params", [1]),
        ("backwards", "no"),
        ("to", None),
    ],
)
def test_a_question_of_the_wrong_kind_is_no_plan(tmp_path: Path, field: str, value: object) -> None:
    path = write(tmp_path, {**WHOLE, "question": {**WHOLE["question"], field: value}})
    with pytest.raises(MigrateError, match="is not a plan") as caught:
        saved_plan(path)
    assert caught.value.exit_code == 2
    assert str(path) in str(caught.value)


def test_an_allowance_that_there_is_not_is_refused() -> None:
    with pytest.raises(MigrateError, match=r"`drpo`(.|\n)*did you mean `drop`"):
        make_request((), (), (), None, "drpo", backwards=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"to": 5},
        {"to": [b"v5"]},
        {"to": b"v5"},
        {"from_": None},
        {"rules": 1},
        {"rules": [b"r.yaml"]},
        {"params": ["n=1"]},
        {"params": {1: 2}},
        {"allow": 3},
    ],
    ids=str,
)
def test_what_is_no_text_is_refused_by_the_name_of_its_argument(wrong: dict) -> None:
    given = {"to": (), "from_": (), "rules": (), "params": None, "allow": (), **wrong}
    with pytest.raises(MigrateError, match=f"`{next(iter(wrong))}`") as caught:
        make_request(**given, backwards=False)
    assert [d.code for d in caught.value.diagnostics] == ["M115"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("y.gguf", "files end in .safetensors"), ("y.GGUF", "files end in"),
        ("y.h5", "files end in"), ("y.pkl", "files end in"),
        ("model.safetensors.index.json", "files end in"),
        ("new.safetensor", "did you mean `new.safetensors`?"),
        ("new.safetenors", "did you mean `new.safetensors`?"),
        ("new.SafeTensors", "did you mean `new.safetensors`?"),
        ("v1.2.PT", "did you mean `v1.2.pt`?"), ("new.chkpt", "did you mean `new.ckpt`?"),
        ("new.pht", "did you mean `new.pth`?"),
    ],
)  # fmt: skip
def test_a_folder_does_not_get_the_name_of_a_file(name: str, hint: str) -> None:
    with pytest.raises(MigrateError) as caught:
        shape_of(name, "torch", Request())
    (found,) = caught.value.diagnostics
    assert (found.code, found.exit_status, f"`{name}`" in found.message) == ("M115", 2, True)
    assert hint in str(found.help)
    assert shape_of(name, "torch", Request(output_format="safetensors"))[0]


@pytest.mark.parametrize(
    "name",
    [
        "new", "Llama-3.1-8B", "model-v0.1", "v1.0", "step.1000", "run.final", "m.bf16", "m.fp8",
        "deepseek.chat", "llama.tp",
        "x.safetensors.d", ".hidden", "out.v5", "a.text", "v2.it",
    ],
)  # fmt: skip
def test_a_dot_in_the_name_of_a_folder_says_nothing(name: str) -> None:
    assert shape_of(name, "torch", Request()) == (True, Request())
