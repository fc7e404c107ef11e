"""Little memory, and no threads: refused as M922 with exit status 4 wherever it shows, never a bug,
a hang, or another answer.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commandline import contents, environment, fingerprint, run, safetensors

import migrate
from migrate import formats
from migrate.cli import main, terminal
from migrate.core.errors import RunError
from migrate.core.out_of_memory import lacking
from migrate.ops.cast import OP as CAST
from migrate.running import resources

RULES = """
  - {name: moved, from: "l.{i:int}.w", to: "l.{i}.v", via: [{transpose: {dims: [0, 1]}}]}
  - {name: cast, from: "l.{i:int}.c", to: "l.{i}.c", via: [{cast: {to: float32}}]}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 12 MB in two files' worth of layers, and rules that move and compute."""
    folder = tmp_path_factory.mktemp("memory")
    safetensors(
        folder / "in.safetensors",
        {f"l.{i}.{x}": ("BF16", [1024, 1024]) for i in range(3) for x in "wc"},
    )
    (folder / "rules.yaml").write_text(
        f"id: t/x\ntitle: t\nlineage: t\nedge: [a, b]\nrules:{RULES}"
    )
    return folder


def question(made: Path) -> list[object]:
    return ["--rules", made / "rules.yaml"]


@pytest.fixture(scope="module")
def wanted(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    out = tmp_path_factory.mktemp("wanted") / "out.safetensors"
    assert run("apply", made / "in.safetensors", "-o", out, *question(made), "--no-fsync").exit == 0
    return contents(out)


def apply(made: Path, out: Path, *more: object) -> object:
    return run(
        "apply",
        made / "in.safetensors",
        "-o",
        out,
        *question(made),
        "--threads",
        3,
        "--no-fsync",
        *more,
    )


def no_thread(*_: object) -> int:
    raise RuntimeError("can't start new thread")


def stillborn(*_: object) -> int:
    """A thread that ends before its first step, as one does that finds no memory for it."""
    return 1


@pytest.mark.parametrize("start", [no_thread, stillborn])
def test_what_no_other_thread_can_do_the_first_one_does(made, wanted, tmp_path, monkeypatch, start):
    monkeypatch.setattr(resources._thread, "start_new_thread", start)
    assert apply(made, tmp_path / "out.safetensors").exit == 0
    assert contents(tmp_path / "out.safetensors") == wanted


def test_a_thread_that_comes_when_all_is_done_finds_nothing_to_do(monkeypatch):
    late: list[object] = []
    monkeypatch.setattr(
        resources._thread, "start_new_thread", lambda work, given: late.append((work, given))
    )
    did: list[int] = []
    resources.run_together(did.append, 4, lambda: None)
    for work, given in late:
        work(*given)
    assert (did, len(late)) == ([0], 3)


def test_a_thread_that_has_done_its_work_refers_to_nothing_of_it(monkeypatch):
    """It may still be there when the interpreter ends, and must free nothing then."""
    held: list[object] = []
    start = resources._thread.start_new_thread

    def keep(work: Any, given: Any) -> int:
        held.append((work, given))
        return start(work, given)

    monkeypatch.setattr(resources._thread, "start_new_thread", keep)

    class Work:
        did: ClassVar[list[int]] = []

        def __call__(self, number: int) -> None:
            self.did.append(number)
            while len(self.did) < 3:
                pass

    work = Work()
    there = weakref.ref(work)
    resources.run_together(work, 3, lambda: None)
    assert (sorted(work.did), len(held)) == ([0, 1, 2], 2)
    del work
    assert there() is None


def test_an_interrupt_ends_the_others_first():
    began, ended = [], []

    def work(number: int) -> None:
        began.append(number)
        if not number:
            while len(began) < 3:
                pass
            raise KeyboardInterrupt
        while not stopped:
            pass
        ended.append(number)

    stopped: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        resources.run_together(work, 3, lambda: stopped.append(True))
    assert sorted(ended) == [1, 2]


def test_a_module_is_loaded_without_other_threads(made, monkeypatch):
    import torch

    monkeypatch.setattr(resources._thread, "start_new_thread", no_thread)
    model = torch.nn.Module()
    state = formats_state(made)
    model.l = torch.nn.ModuleList([torch.nn.Module() for _ in range(3)])
    for key, value in state.items():
        model.l[int(key.split(".")[1])].register_parameter(
            key[-1], torch.nn.Parameter(torch.zeros_like(value))
        )
    migrate.load(model, made / "in.safetensors", threads=4)
    assert all(
        torch.equal(value.view(torch.int16), state[key].view(torch.int16))
        for key, value in model.state_dict().items()
    )


def formats_state(made: Path) -> dict[str, object]:
    from safetensors.torch import load_file

    return load_file(made / "in.safetensors")


def test_no_memory_for_a_box_names_rule_op_key_and_bytes(made, tmp_path, monkeypatch):
    chunk = type(CAST).chunk

    def short(self, args, raw, spec, out, meter):
        left.append(1)
        if len(left) > 3:
            raise MemoryError("Unable to allocate 4.00 MiB for an array")
        return chunk(self, args, raw, spec, out, meter)

    left: list[int] = []
    monkeypatch.setattr(type(CAST), "chunk", short)
    out = tmp_path / "out.safetensors"
    answer = apply(made, out, "--format", "json")
    monkeypatch.undo()
    assert answer.exit == 4
    (found,) = answer.json["diagnostics"]
    assert found["code"] == "M922"
    assert "rule cast (" in found["message"]
    assert "`cast` of l." in found["message"]
    said = re.search(
        r", (\d+) bytes at once: Unable to allocate 4.00 MiB for an array$", found["message"]
    )
    # a box of whole rows, with its input and what the op lays out
    assert said is not None
    assert 0 < int(said[1]) <= 2 * (2 + 4) << 20
    assert int(said[1]) % (2 * (2 + 4) * 1024) == 0
    assert found["notes"] == [f"what was written so far is kept in {out}.migrate-partial"]
    assert "--resume" in found["help"]
    assert not out.exists()


def test_what_was_written_before_memory_ran_out_is_kept_and_resumed(
    made, wanted, tmp_path, monkeypatch
):
    from migrate.running.publish import Partial
    from migrate.running.tiles import FileWriter

    commit, claim = FileWriter.commit, Partial.claim

    def claimed(self, *arguments):
        claim(self, *arguments)
        written.append(arguments)

    def short(self, *arguments):
        if written:
            raise MemoryError
        return commit(self, *arguments)

    written: list[object] = []
    monkeypatch.setattr(Partial, "claim", claimed)
    monkeypatch.setattr(FileWriter, "commit", short)
    out = tmp_path / "out.safetensors"
    answer = apply(made, out)
    monkeypatch.undo()
    assert answer.exit == 4
    assert "error[M922]: not enough memory to write" in answer.err
    assert "what was written so far is kept in" in answer.err
    assert "--resume" in answer.err
    assert apply(made, out, "--resume").exit == 0
    assert contents(out) == wanted


def refused(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("verb", ["plan", "inspect", "apply", "verify", "diff", "downgrade"])
def test_in_python_too_it_is_an_error_of_the_run(made, tmp_path, monkeypatch, verb):
    monkeypatch.setattr(formats, "open", refused)
    given = {
        "apply": {"out": tmp_path / "o"},
        "downgrade": {"out": tmp_path / "o"},
        "verify": {"source": "x"},
        "diff": {"b": "x"},
    }
    with pytest.raises(RunError, match="M922") as caught:
        getattr(migrate, verb)(made / "in.safetensors", **given.get(verb, {}))
    assert caught.value.exit_code == 4


def test_an_import_that_fails_for_want_of_memory_is_no_bug(made, monkeypatch):
    def imports(*_: object, **__: object) -> None:
        try:
            raise ImportError("libtorch_cpu.so: failed to map segment from shared object")
        except ImportError as error:
            raise ImportError("Read this for advice!\n\nOriginal error was: see above") from error

    monkeypatch.setattr(formats, "open", imports)
    answer = run("plan", made / "in.safetensors", *question(made), "--format", "json")
    assert (answer.exit, answer.codes) == (4, ["M922"])
    assert "failed to map segment" in answer.json["diagnostics"][0]["message"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("can't start new thread"), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate "
                "memory: you tried"
            ),
            True,
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (SystemError("error return without exception set"), False),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("no such thing"), False),
        (ImportError("No module named torch"), False),
        (KeyError("out of memory"), False),
    ],
)
def test_only_what_says_so_is_a_lack_of_memory(error, said):
    assert lacking(error) is said


def test_a_bug_stays_a_bug(made, monkeypatch):
    def wrong(*_: object, **__: object) -> None:
        raise SystemError("error return without exception set")

    monkeypatch.setattr(formats, "open", wrong)
    assert run("plan", made / "in.safetensors", *question(made)).exit == 70


def test_where_there_is_no_memory_to_tell_it_the_status_tells_it(made, monkeypatch, capfd):
    monkeypatch.setattr(formats, "open", refused)
    monkeypatch.setattr(main, "_report", refused)
    assert (
        main.run(["plan", str(made / "in.safetensors"), "--rules", str(made / "rules.yaml")]) == 4
    )
    assert "error[M922]" in capfd.readouterr().err


def test_the_progress_bar_goes_without_its_thread(monkeypatch):
    import rich.progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(rich.progress.Progress, "start", no_thread)
    with terminal.Progress("writing", False) as bar:
        bar.update(1, 2)
        bar.update(2, 2)


def limited(
    megabytes: int | None, *command: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if megabytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    # a hang is what the limit on time is for
    return subprocess.run(
        [sys.executable, *command],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )


@pytest.mark.parametrize(
    ("megabytes", "end", "status"),
    [(1000, "exit", 4), (1000, "abort", 4), (None, "exit", 1)],
    ids=["exit", "abort", "unlimited"],
)
def test_a_library_that_ends_the_process_does_not_choose_the_status(megabytes, end, status):
    program = f"""
        import sys
        from migrate.cli.main import watch_memory
        watch_memory()
        print("ctypes" in sys.modules, flush=True)
        import ctypes
        ctypes.CDLL(None).{end}(1)
    """
    found = limited(megabytes, "-c", textwrap.dedent(program))
    assert (found.returncode, found.stdout) == (status, f"{megabytes is not None}\n")
    assert ("error[M922]" in found.stderr) is (megabytes is not None)


COMMANDS = ("plan", "inspect", "apply", "verify")


def under(made: Path, wanted: Path, folder: Path, command: str, megabytes: int) -> None:
    """One command under a limit: done, or refused as M922 or M919 and nothing at its place."""
    out = folder / f"{command}-{megabytes}.safetensors"
    given = {
        "plan": [made / "in.safetensors", *question(made)],
        "inspect": [made / "in.safetensors"],
        "apply": [made / "in.safetensors", "-o", out, "--no-fsync", *question(made)],
        "verify": [wanted, "--source", made / "in.safetensors", *question(made)],
    }[command]
    source = fingerprint(made)
    found = limited(megabytes, "-m", "migrate", command, *map(str, given))
    what = (
        f"{command} in {megabytes} MB: "
        f"{found.returncode}\n{found.stdout[-500:]}{found.stderr[-2000:]}"
    )
    if (
        found.returncode == 127
        and "cannot allocate memory for thread-local data: ABORT" in found.stderr
    ):
        # the loader of the system ends the process by itself; nothing of ours is asked
        assert not out.exists(), what
        return
    assert found.returncode in (0, 4), what
    if found.returncode:
        assert "error[M922]" in found.stderr or "error[M919]" in found.stderr, what
        assert not out.exists(), what
        partial = Path(f"{out}.migrate-partial")
        assert (
            not partial.exists()
            or partial.name in found.stderr
            or "OUT.migrate-partial" in found.stderr
        ), what
    elif command == "apply":
        assert contents(out) == contents(wanted), what
        os.unlink(out)
    assert fingerprint(made) == source


@pytest.fixture(scope="module")
def verified(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("verified") / "out.safetensors"
    assert run("apply", made / "in.safetensors", "-o", out, *question(made), "--no-fsync").exit == 0
    return out


@pytest.mark.parametrize(("command", "megabytes"), [("apply", 60), ("verify", 150)])
def test_little_memory_is_told(made, verified, tmp_path, command, megabytes):
    under(made, verified, tmp_path, command, megabytes)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "megabytes",
    [*range(40, 120, 4), *range(120, 300, 10), *range(300, 760, 20), *range(800, 2001, 200)],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_any_limit_on_memory_is_told(made, verified, tmp_path, command, megabytes):
    under(made, verified, tmp_path, command, megabytes)
