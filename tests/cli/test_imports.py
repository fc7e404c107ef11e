"""What each command imports, seen from outside: in a process of its own, at its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commandline import DATA, environment, mixtral, rules, safetensors
from marks import thorough

HUB = DATA / "mixtral__v4" / "hub"
HEAVY = {
    "torch",
    "numpy",
    "jsonschema",
    "pydantic",
    "yaml",
    "rich",
    "click",
    "xxhash",
    "safetensors",
    "einops",
}

CODE = """
import sys
wanted = set(sys.argv.pop(1).split(","))
from migrate.cli.main import run
status = run(sys.argv[1:])
print("LOADED", *sorted(wanted & set(sys.modules)), file=sys.stderr)
sys.exit(status)
"""


def loaded(
    *arguments: object, status: int = 0, cwd: Path | None = None, wanted: set[str] = HEAVY
) -> set[str]:
    """Those of the wanted modules that a command line has loaded when it ends."""
    command = [sys.executable, "-c", CODE, ",".join(wanted), *(str(a) for a in arguments)]
    child = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )
    assert child.returncode == status, child.stderr
    return set(child.stderr.splitlines()[-1].split()[1:])


def test_import_migrate_loads_nothing() -> None:
    code = (
        f"import sys, migrate; print(sorted({HEAVY!r} & set(sys.modules)), [m for m in "
        "sys.modules if m.startswith('migrate.')])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == "[] []"


# what a process on Windows finds: the modules and functions that it lacks are looked for by name
WINDOWS = """
import os, runpy, sys
for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for name in ("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "fork", "geteuid", "pread",
             "preadv", "pwrite", "pwritev", "sched_getaffinity", "statvfs"):
    if hasattr(os, name):
        delattr(os, name)
os.name = "nt"
runpy.run_module("migrate", run_name="__main__")
"""


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "x", "--to", "v5"]])
def test_a_process_on_windows_ends_with_one_line(arguments: list[str]) -> None:
    child = subprocess.run(
        [sys.executable, "-c", WINDOWS, *arguments],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    line = "migrate runs on Linux and macOS, not on Windows; use WSL there\n"
    assert (child.returncode, child.stdout, child.stderr) == (2, "", line)


@pytest.mark.parametrize(
    "command",
    thorough(
        [
            [],
            ["apply"],
            ["inspect"],
            ["plan"],
            ["downgrade"],
            ["verify"],
            ["diff"],
            ["history"],
            ["test"],
            ["lint"],
            ["new"],
        ],
        default=2,
    ),
)
def test_help_loads_click_alone(command: list[str]) -> None:
    assert loaded(*command, "--help") == {"click"}


@pytest.mark.parametrize("command", [[], ["plan"], ["apply"]])
def test_help_loads_neither_formats_nor_ops_nor_rules(command: list[str]) -> None:
    packages = {f"migrate.{name}" for name in ("formats", "ops", "rules", "live", "lints")}
    assert not loaded(*command, "--help", wanted=packages)


@pytest.mark.parametrize(
    "arguments",
    thorough(
        [
            ["plan", HUB, "--to", "hf-mixtral@v5"],
            ["inspect", HUB],
            ["plan", HUB, "--to", "hf-mixtral@v5", "--format", "json"],
            ["history"],
            ["history", HUB],
        ],
        default=2,
    ),
)
def test_what_reads_headers_only_loads_neither_torch_nor_numpy_nor_jsonschema(
    arguments: list[object],
) -> None:
    assert not loaded(*arguments) & {"torch", "numpy", "jsonschema", "rich", "xxhash"}


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["plan", "--to", "gguf-llama@hf", "--allow", "lossy"]]
)
def test_a_gguf_file_is_planned_without_torch_and_numpy(arguments: list[str]) -> None:
    file = DATA.parent / "genuine" / "gguf-llama" / "model.gguf"
    command, *more = arguments
    assert not loaded(command, file, *more, wanted={"torch", "numpy", "gguf"})


def test_a_run_by_rules_that_ship_builds_no_models_of_what_people_write(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "old.safetensors", mixtral())
    new, back = tmp_path / "new.safetensors", tmp_path / "back.safetensors"
    unwanted = {"pydantic", "yaml"}
    for command in (
        ["plan", source, "--to", "hf-mixtral@v5"],
        ["plan", source, "--to", "latest"],
        ["apply", source, "-o", new, "--to", "hf-mixtral@v5"],
        ["verify", new, "--source", source],
        ["downgrade", new, "-o", back],
        ["inspect", new],
        ["history"],
    ):
        assert not loaded(*command) & unwanted, command


def test_new_writes_a_file_without_torch_and_numpy(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "old.safetensors", mixtral())
    found = loaded("new", "toy/v2/one", "--index", source, cwd=tmp_path)
    assert not found & {"torch", "numpy", "safetensors", "xxhash"}


def test_no_command_imports_another_one_nor_what_only_other_formats_need() -> None:
    others = {
        f"migrate.cli.{name}"
        for name in ("diff", "downgrade", "explain", "inspect", "lint", "schema", "test", "verify")
    }
    pickles = {
        f"migrate.source.pickle.{name}"
        for name in ("machine", "policy", "decoding", "quantized_tensors", "emit")
    }
    torch_files = {
        "migrate.formats.torchzip",
        "migrate.formats._torchwrite",
        "migrate.formats._legacy",
        "migrate.formats._signatures",
    }
    wanted = HEAVY | others | pickles | torch_files
    assert loaded("plan", HUB, "--to", "hf-mixtral@v5", wanted=wanted) == {"click"}


KEEPING = """rules:
  - {name: rename, from: 'a.{i:int}.w', to: 'renamed.{i}.w'}
  - {name: stack, from: 'b.{i:int}.w', to: stacked, via: [{stack: {over: i}}]}
  - {name: concat, from: 'c.{i:int}.w', to: joined, via: [{concat: {over: i, dim: 0, count: 2}}]}
  - {name: last, from: 'd.{i:int}.w', to: wide, via: [{concat: {over: i, dim: -1, count: 2}}]}
  - {name: unbind, from: 'e.{i:int}.w', to: 'e.{i}.{j:int}', via: [{unbind: {into: j}}]}
  - {name: flip, from: 'f.{i:int}.w', to: 'flipped.{i}.w', via: [{flip: {dim: 0}}]}
"""


def test_moving_bytes_that_keep_the_last_axis_loads_no_torch(tmp_path: Path) -> None:
    tensors = {f"{letter}.{i}.w": ("BF16", [8, 4096]) for letter in "abcdef" for i in range(2)}
    source, question = (
        safetensors(tmp_path / "in.safetensors", tensors),
        ["--rules", rules(tmp_path, KEEPING)],
    )
    out, back = tmp_path / "out.safetensors", tmp_path / "back.safetensors"
    assert not loaded("apply", source, "-o", out, *question) & {
        "torch",
        "numpy",
        "jsonschema",
        "rich",
    }
    assert not loaded("downgrade", out, "-o", back, *question) & {
        "torch",
        "numpy",
        "jsonschema",
        "rich",
    }
    assert not loaded("diff", source, back) & {"torch", "numpy", "jsonschema", "rich"}
    assert not loaded("verify", out, "--source", source, *question) & {
        "torch",
        "jsonschema",
        "rich",
    }


HALVES = """rules:
  - {name: halves, from: w, to: 'w.{h:int}', via: [{split: {into: h, dim: 1, count: 2}}]}
"""


@pytest.mark.parametrize(("columns", "wanted"), [(512, set()), (256, {"numpy"})])
def test_halves_of_rows_are_read_into_their_places_if_they_have_1_kib(
    columns: int, wanted: set[str], tmp_path: Path
) -> None:
    source = safetensors(tmp_path / "in.safetensors", {"w": ("BF16", [32, 2 * columns])})
    out = tmp_path / "out.safetensors"
    found = loaded("apply", source, "-o", out, "--rules", rules(tmp_path, HALVES))
    assert found & {"torch", "numpy"} == wanted
    rows = [
        source.read_bytes()[-128 * columns :][i * 4 * columns :][: 4 * columns] for i in range(32)
    ]
    halves = [b"".join(row[h * 2 * columns :][: 2 * columns] for row in rows) for h in range(2)]
    assert out.read_bytes().endswith(b"".join(halves))


def test_the_first_migration_of_the_readme_loads_no_torch(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "old.safetensors", mixtral())
    new, back = tmp_path / "new.safetensors", tmp_path / "back.safetensors"
    assert not loaded("apply", source, "-o", new, "--to", "hf-mixtral@v5") & {"torch", "jsonschema"}
    assert not loaded("downgrade", new, "-o", back) & {"torch", "jsonschema"}
    assert not loaded("verify", new, "--source", source) & {"torch", "jsonschema"}


def test_a_wrong_question_is_refused_without_anything_heavy(tmp_path: Path) -> None:
    assert not loaded("plan", "nowhere", "--to", "latest", status=2, cwd=tmp_path) & {
        "torch",
        "numpy",
        "jsonschema",
        "rich",
    }
    assert loaded("unknown", status=2) == {"click"}


def test_numbers_that_differ_are_measured_with_torch(tmp_path: Path) -> None:
    one = safetensors(tmp_path / "a.safetensors", {"w": ("F32", [4], bytes(16))})
    other = safetensors(tmp_path / "b.safetensors", {"w": ("F32", [4])})
    assert "torch" in loaded("diff", one, other, status=1)


def test_distributed_checkpoints_are_read_written_and_cut_anew_without_torch(
    tmp_path: Path,
) -> None:
    tensors = {f"{letter}.{i}.w": ("BF16", [8, 4096]) for letter in "abcdef" for i in range(2)}
    source = safetensors(tmp_path / "in.safetensors", tensors)
    question = ["--rules", rules(tmp_path, KEEPING)]
    out, back = tmp_path / "out", tmp_path / "back"
    unwanted = {"torch", "numpy", "jsonschema", "rich"}
    for command in (
        ["plan", source, "--output-format", "dcp", "--chunks", "4", *question],
        ["apply", source, "-o", out, "--output-format", "dcp", "--chunks", "4", *question],
        ["apply", out, "-o", tmp_path / "again", "--chunks", "3"],
        ["downgrade", tmp_path / "again", "-o", back, "--output-format", "safetensors", *question],
        ["diff", source, back],
        ["inspect", out],
    ):
        assert not loaded(*command) & unwanted, command
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == [
        ".metadata",
        *(f"__{rank}_0.distcp" for rank in range(3)),
        "migrate.history.json",
    ]
