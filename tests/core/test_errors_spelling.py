"""Arguments as each front end spells them."""

from __future__ import annotations

from pathlib import Path

import pytest

import migrate
from migrate.core.errors import MigrateError, command, on_command_line, option, together

SPELLED = [
    (("to",), "--to", "`to`"),
    (("to", "x@v5"), "--to x@v5", 'to="x@v5"'),
    (("from_", "v4"), "--from v4", 'from_="v4"'),
    (("allow", "lossy", "drop"), "--allow lossy --allow drop", 'allow={"lossy", "drop"}'),
    (("params", "heads=8"), "--set heads=8", 'params={"heads": "8"}'),
    (("params", "heads=…"), "--set heads=…", 'params={"heads": …}'),
    (("max_memory", 4096), "--max-memory 4096", "max_memory=4096"),
    (("resume", True), "--resume", "resume=True"),
    (("single_file", False), "--folder", "single_file=False"),
    (("at", 'a"b'), '--at a"b', 'at="a\\"b"'),
]


@pytest.mark.parametrize(("words", "flags", "keywords"), SPELLED)
def test_an_argument_is_spelled_for_its_front_end(
    words: tuple[str, ...], flags: str, keywords: str
) -> None:
    name, *values = words
    assert option(name, *values) == keywords
    with on_command_line():
        assert option(name, *values) == flags
    assert option(name, *values) == keywords


def test_arguments_of_one_call_are_joined_as_a_call_joins_them() -> None:
    assert together("to=1", "at=2") == "to=1, at=2"
    with on_command_line():
        assert together("--to 1", "--at 2") == "--to 1 --at 2"


def test_commands_are_functions_in_python() -> None:
    assert command("history") == "migrate.history"
    with on_command_line():
        assert command("history") == "migrate history"


def test_a_caller_in_python_reads_no_flag(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    import numpy as np

    safetensors.save_file(
        {"a": np.zeros(2, "f4"), "b": np.zeros(2, "f4")}, tmp_path / "in.safetensors"
    )
    (tmp_path / "gone.yaml").write_text(
        "id: demo/v2/x\ntitle: x\nlineage: demo\nedge: [v1, v2]\nkeep: [b]\n"
        "rules:\n  - {name: gone, from: a, via: [{drop: {why: unused}}]}\n"
    )
    source = tmp_path / "in.safetensors"
    asked = {
        'to="LINEAGE@LAYOUT"': {},
        'from_="hf-mixtral@v4"': {"to": "hf-mixtral@v5"},
        'allow={"drop"}': {"rules": tmp_path / "gone.yaml"},
        "`params` nn: there is no such param": {
            "rules": tmp_path / "gone.yaml",
            "params": {"nn": 1},
        },
        "`to` names a layout and `rules` a rule file": {
            "rules": tmp_path / "gone.yaml",
            "to": "v5",
        },
    }
    for words, question in asked.items():
        with pytest.raises(MigrateError) as caught:
            migrate.plan(source, **question)  # type: ignore[arg-type]
        assert words in str(caught.value)
        assert "--" not in str(caught.value).replace("-->", "")
