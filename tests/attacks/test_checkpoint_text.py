"""What stands in a checkpoint as text (keys, metadata, stamps, configurations, file names) misleads
no terminal and breaks no command.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from archives import safetensors
from commandline import done, mixtral, run
from commandline import safetensors as described
from marks import thorough

RULES = (
    "id: demo/v2/x\ntitle: A change\nlineage: demo\nedge: [v1, v2]\nkeep: "
    '["{k...}"]\nrules:\n  - {name: r, from: x, to: y}\n'
)
KEYS = [
    "\x1b[31mred", "a" * 100_000, "", "a\nerror[M901]: b", "../../x", "{x}", ".".join("a" * 1500),
    "a..b", "\u202e", "x\0y", "\ud7ff", "~",
    "%s%n", ".",
]  # fmt: skip
VALUES = [
    None,
    -1,
    10**30,
    "\x1b[31m",
    "x" * 200_000,
    [],
    {},
    True,
    1.5,
    [None],
    "../../etc/passwd",
]
BROKEN = [
    b"", b"{", b"\xff", b"[]" * 10, b'{"a":' * 5000, b"[" * 200_000, b'{"a":1,"a":2}', b'{"a":NaN}',
    b"null", b"9" * 10_000,
    b'{"format_version":"\\ud800"}', b" " * 1_000_000,
]  # fmt: skip


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


def told(*command: object) -> int:
    """The exit status of a command whose output is fit for a terminal."""
    result = run(*command)
    said = result.out + result.err
    assert result.exit in (0, 1, 2, 3), f"{command}: {said[-2000:]}"
    assert all(c.isprintable() or c == "\n" for c in said), f"{command}: {said[:2000]!a}"
    assert len(said) < 20_000 or "json" in command, f"{command}: {len(said)} characters"
    return result.exit


@pytest.mark.parametrize("key", KEYS, ids=lambda k: ascii(k)[1:20])
def test_any_key_goes_through_every_command(tmp_path: Path, rules: Path, key: str) -> None:
    path, made = tmp_path / "m.safetensors", tmp_path / "made"
    path.write_bytes(safetensors({key: b"abcd", "x": b"abcd"}, {"\x1b]0;x\x07": "\x1b[2J" * 100}))
    for command in (
        ("inspect", path),
        ("inspect", path, "--all"),
        ("inspect", path, "--format", "json"),
        ("plan", path, "--rules", rules),
        ("apply", path, "-o", made, "--rules", rules, "-q"),
        ("verify", made, "--source", path),
        ("diff", path, made),
        ("history", made),
    ):
        told(*command)


def test_names_of_files_are_escaped(tmp_path: Path, rules: Path) -> None:
    path = tmp_path / "evil\x1b[31m\nname"
    path.mkdir()
    (path / "model.safetensors").write_bytes(safetensors({"x": b"abcd"}))
    for name in ("side\x1b[32m\n.json", "stays\x1b[32m\n.bin"):
        (path / name).write_text("{}")
    for command in (
        ("inspect", path),
        ("plan", path, "--rules", rules),
        ("apply", path, "-o", tmp_path / "made", "--rules", rules, "-q"),
    ):
        told(*command)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, below in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from places(below, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    out = at = json.loads(json.dumps(value))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return out


@pytest.mark.parametrize("each", thorough([1, len(VALUES)]))
def test_a_stamp_may_hold_anything(tmp_path: Path, rules: Path, each: int) -> None:
    """So many of the values at each place, by turns."""
    path, made = tmp_path / "src", tmp_path / "made"
    path.mkdir()
    (path / "model.safetensors").write_bytes(safetensors({"x": b"abcd"}))
    done("apply", path, "-o", made, "--rules", rules, "-q")
    stamp = made / "migrate.history.json"
    whole = json.loads(stamp.read_text())
    for raw in (
        *BROKEN,
        *(
            json.dumps(replaced(whole, place, value)).encode()
            for turn, place in enumerate(places(whole))
            for value in (VALUES * 2)[turn % len(VALUES) :][:each]
        ),
    ):
        stamp.write_bytes(raw)
        for command in (("history", made), ("verify", made, "--source", path)):
            told(*command)


def test_a_configuration_may_hold_anything(tmp_path: Path) -> None:
    path, made = tmp_path / "src", tmp_path / "made"
    described(path / "model.safetensors", mixtral())
    good = {
        "model_type": "mixtral",
        "num_local_experts": 2,
        "architectures": ["MixtralForCausalLM"],
    }
    for raw in (
        *BROKEN,
        *(json.dumps({**good, key: value}).encode() for key in good for value in VALUES),
    ):
        (path / "config.json").write_bytes(raw)
        told("inspect", path)
        if told("apply", path, "-o", made, "--to", "hf-mixtral@v5", "-q") == 0:
            shutil.rmtree(made)
        assert not made.exists()
