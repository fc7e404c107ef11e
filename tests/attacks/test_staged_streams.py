"""The one unpickler of the package, which builds staged structures, runs nothing, and no byte of a
checkpoint gets there.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import DATA, environment
from hostile_streams import STREAMS

import migrate.staging.walk as walk
from migrate.staging.tensors import NotCopiedError

PACKAGE = Path(walk.__file__).parents[1]
LIVE = [stream for stream in STREAMS if stream.live]


@pytest.mark.parametrize("name", [stream.name for stream in LIVE])
def test_a_hostile_stream_finds_nothing(name: str, tmp_path: Path) -> None:
    """`test_live` shows that each of these runs where an ordinary unpickler reads it."""
    stream = next(one for one in LIVE if one.name == name)
    canary = tmp_path / "canary"
    build = walk.Build(stream.pickle(str(canary)), [], [], lambda number: pytest.fail(str(number)))
    with pytest.raises(Exception) as raised:
        build.run()
    assert not isinstance(raised.value, NotCopiedError)
    assert not canary.exists()


def test_the_names_that_a_stream_may_call_are_these() -> None:
    build = walk.Build(b".", [], [], lambda number: pytest.fail(str(number)))
    for module, name in (
        ("builtins", "eval"),
        ("posix", "system"),
        (walk.__name__, "Walk"),
        (walk.__name__, "pickle.loads"),
        (walk.__name__, "tensor.__globals__"),
        (walk.__name__, "run"),
    ):
        with pytest.raises(walk.pickle.UnpicklingError, match="no part of a staged structure"):
            build.find_class(module, name)
    assert all(callable(build.find_class(walk.__name__, name)) for name in walk._CALLED)


def test_streams_are_built_where_they_were_made_and_nowhere_else() -> None:
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.ImportFrom) and "Build" in [a.name for a in node.names]
            if named or (isinstance(node, ast.Attribute) and node.attr == "Build"):
                found.add(file.relative_to(PACKAGE).as_posix())
    assert found == {"staging/snapshot.py"}


def test_reading_a_checkpoint_does_not_load_the_walker(tmp_path: Path) -> None:
    """By commands and functions, with torch and without."""
    source = str(DATA / "mixtral__v4" / "hub")
    program = f"""
import sys, migrate, torch
torch.save({{"w": torch.ones(2)}}, "in.pt")
migrate.inspect("in.pt")
migrate.apply("in.pt", "out.safetensors")
migrate.apply({source!r}, "new", to="hf-mixtral@v5")
migrate.verify("new", source={source!r})
model = torch.nn.Module()
model.w = torch.nn.Parameter(torch.zeros(2))
migrate.load(model, "in.pt")
assert model.w.tolist() == [1, 1]
print([name for name in sys.modules if name.startswith("migrate.staging")])
"""
    child = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (child.returncode, child.stdout) == (0, "[]\n"), child.stderr
