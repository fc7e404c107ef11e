"""What the house promises about its own source: sizes, names, pages of diagnostics, nothing that
executes a file's contents.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from light import HEAVY
from marks import CAMPAIGN, GPU, MARKS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "migrate"
EXPLAIN = PACKAGE / "explain"

SOURCES = sorted(PACKAGE.rglob("*.py"))
ALL_PYTHON = sorted(
    f
    for folder in ("migrate", "tests", "benchmarks", "docs")
    for f in (ROOT / folder).rglob("*.py")
)
CODE = re.compile(r"M[1-9]\d\d")
SEVERITIES = {"error", "warning", "advice", "note"}
STATUSES = {0, 1, 2, 3, 4, 70, 130}

# calls that run, or can be talked into running, what they read: dotted name, or a name alone
FORBIDDEN_CALLS = {
    "eval", "exec", "__import__", "torch.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
    "yaml.full_load",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads",
    "shelve.open", "dill.load", "dill.loads",
    "joblib.load", "os.system", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter",
}  # fmt: skip

# a flag in a text; what a rule of ASCII art or a long dash would be is none
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
# commands of their own and of others, and descriptions of fields that schemas and the reference
# print
OF_THE_COMMAND_LINE = {
    "rules/packaged.py",
    "rules/reference.py",
    "rules/examples.py",
    "testing/plugin.py",
}
# functions that spell the flags of other programs
OF_OTHER_PROGRAMS = {
    "source/urls.py": {"how_to_fetch"},
    "running/hub_run.py": {"_kept"},
    "lints/since.py": {"changed_since", "_top"},
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@functools.cache
def text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@functools.cache
def tree(file: Path) -> ast.Module:
    """A source of the package, parsed once for all tests, which change nothing in it."""
    return ast.parse(text(file))


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(tree(file)))


def dotted(node: ast.AST) -> str:
    """`a.b.c` as it is written; `?` stands for what is neither a name nor an attribute of one.

    `ast.unparse` says the same and takes many times as long.
    """
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def short(file: Path) -> str:
    return str(file.relative_to(ROOT))


@functools.cache
def codes_used() -> dict[str, str]:
    """Diagnostic code -> a place that uses it: every string literal of the package that is exactly
    a code.
    """
    found: dict[str, str] = {}
    for file in SOURCES:
        for node in nodes(file):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and CODE.fullmatch(node.value)
            ):
                found.setdefault(node.value, f"{short(file)}:{node.lineno}")
    return found


@functools.cache
def pages() -> dict[str, Path]:
    return {file.stem: file for file in EXPLAIN.glob("*.md")}


def test_no_file_has_more_than_800_lines() -> None:
    counted = {short(f): len(text(f).splitlines()) for f in ALL_PYTHON}
    assert not {name: n for name, n in counted.items() if n > 800}


def test_a_codec_is_a_short_file_and_one_that_only_decodes_is_shorter() -> None:
    folder = PACKAGE / "codecs"
    files = {f.stem: text(f) for f in folder.glob("*.py")}
    codecs = {name: code for name, code in files.items() if "\nCODEC = " in code}
    assert len(codecs) >= 13
    most = {name: 80 if "(LayoutCodec):" in code else 150 for name, code in codecs.items()}
    counted = {name: len(code.splitlines()) for name, code in codecs.items()}
    assert not {name: n for name, n in counted.items() if n > most[name]}


def test_the_codec_that_the_docs_show_has_at_most_60_lines() -> None:
    page = text(ROOT / "docs" / "codecs.md")
    shown = [
        code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "CODEC" in code
    ]
    assert len(shown) == 2
    assert all(len(code.splitlines()) <= 60 for code in shown)


def test_every_code_that_is_used_has_a_page() -> None:
    missing = {code: where for code, where in codes_used().items() if code not in pages()}
    assert not missing


def test_every_page_is_of_a_code_that_is_used() -> None:
    assert not sorted(pages().keys() - codes_used().keys())


@pytest.mark.parametrize("code", sorted(pages()))
def test_a_page_says_name_severity_and_exit_status_and_explains(code: str) -> None:
    page = text(pages()[code])
    assert CODE.fullmatch(code)
    assert page.startswith("---\n")
    _, front, body = page.split("---\n", 2)
    head = dict(line.split(": ", 1) for line in front.strip().splitlines())
    assert head.keys() == {"name", "severity", "exit"}
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", head["name"])
    assert head["severity"] in SEVERITIES
    assert int(head["exit"]) in STATUSES
    assert len(body.split()) >= 15


def test_no_two_pages_have_the_same_name() -> None:
    names = [re.search(r"^name: (.*)$", text(f), re.MULTILINE) for f in pages().values()]
    said = [m[1] for m in names if m]
    assert sorted(said) == sorted(set(said))


def test_no_module_has_the_name_of_a_public_verb() -> None:
    """`migrate.plan` is a function; a module beside it would replace it as soon as someone imports
    the module.
    """
    import migrate

    modules = {f.stem for f in PACKAGE.glob("*.py")} | {
        f.name for f in PACKAGE.iterdir() if f.is_dir() and any(f.glob("*.py"))
    }
    assert migrate.__all__
    assert not modules & set(migrate.__all__)
    verbs = {
        "inspect",
        "plan",
        "apply",
        "downgrade",
        "verify",
        "diff",
        "history",
        "new",
        "test",
        "lint",
        "schema",
        "packs",
        "stamp",
        "load",
        "attach",
    }
    assert not modules & verbs


def test_no_flag_is_spelled_outside_of_the_command_line() -> None:
    """What reaches a Python caller says `to=…`: messages ask `core.errors`, and when they are
    raised, not when they are imported.
    """
    spelled, early = [], []
    for file in SOURCES:
        place = file.relative_to(PACKAGE).as_posix()
        if place.startswith("cli/") or place in OF_THE_COMMAND_LINE:
            continue
        firsts = [n.body[0] for n in nodes(file) if isinstance(n, DOCUMENTED) and n.body]
        descriptions = {id(first.value) for first in firsts if isinstance(first, ast.Expr)}
        descriptions |= {
            id(n)
            for f in nodes(file)
            if isinstance(f, ast.FunctionDef) and f.name in OF_OTHER_PROGRAMS.get(place, ())
            for n in ast.walk(f)
        }
        for node in nodes(file):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in descriptions
            ):
                spelled += [f"{place}:{node.lineno}: {m[0]}" for m in FLAG.finditer(node.value)]
        within = {id(n) for f in nodes(file) if isinstance(f, FUNCTIONS) for n in ast.walk(f)}
        calls = [
            n
            for n in nodes(file)
            if isinstance(n, ast.Call) and dotted(n.func) in ("option", "command")
        ]
        early += [f"{place}:{n.lineno}" for n in calls if id(n) not in within]
    assert not spelled
    assert not early


# walks states in memory by C pickle; `tests/staging` shows that no other stream does anything there
WALKER = PACKAGE / "staging" / "walk.py"
# writes a state by C pickle, for the decoder of files; it has nothing that reads
WRITER = PACKAGE / "staging" / "torchstream.py"


def test_nothing_in_the_package_runs_what_it_reads() -> None:
    found = []
    for file in SOURCES:
        for node in nodes(file):
            if isinstance(node, ast.Call):
                name = dotted(node.func)
                if name in FORBIDDEN_CALLS:
                    found.append(f"{short(file)}:{node.lineno}: {name}")
                found += [
                    f"{short(file)}:{node.lineno}: weights_only"
                    for k in node.keywords
                    if k.arg == "weights_only"
                ]
                found += [
                    f"{short(file)}:{node.lineno}: shell" for k in node.keywords if k.arg == "shell"
                ]
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if node.level == 0
                    else []
                )
                found += [
                    f"{short(file)}:{node.lineno}: {n}"
                    for n in names
                    if n.split(".")[0] in {"pickle", "marshal", "shelve", "dill", "joblib"}
                    and (file, n) != (WALKER, "pickle")
                    and (file, [a.name for a in node.names]) != (WRITER, ["Pickler"])
                ]
    assert not found, "\n".join(found)


def test_the_readers_of_pickle_streams_can_reach_nothing_by_name() -> None:
    """No way from a text in a stream to a module, an attribute or code."""
    modules = {
        "pickle",
        "_pickle",
        "pickletools",
        "copyreg",
        "importlib",
        "imp",
        "pkgutil",
        "runpy",
        "builtins",
        "sys",
        "os",
        "subprocess",
    }
    calls = {
        "getattr",
        "setattr",
        "delattr",
        "eval",
        "exec",
        "compile",
        "__import__",
        "globals",
        "locals",
        "vars",
        "open",
    }
    files = sorted((PACKAGE / "source" / "pickle").glob("*.py"))
    found = []
    for file in files:
        for node in nodes(file):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names if a.name.split(".")[0] in modules]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""] if (node.module or "").split(".")[0] in modules else []
            elif isinstance(node, ast.Name) and node.id in calls:
                names = [node.id]
            elif isinstance(node, ast.Attribute) and node.attr in {
                "__globals__",
                "__subclasses__",
                "__builtins__",
                "__dict__",
                "modules",
            }:
                names = [node.attr]
            found += [f"{short(file)}:{node.lineno}: {name}" for name in names]
    assert any(file.name == "machine.py" for file in files)
    assert not found, "\n".join(found)


def test_no_loader_of_pickles_is_named_in_the_package() -> None:
    loaders = re.compile(
        r"\b(pickle|torch|joblib|dill)\.(loads?|Unpickler)\(|weights_only\s*=\s*False|from "
        r"torch(\.serialization)? import .*\bload\b"
    )
    found = [
        f"{short(f)}:{n}"
        for f in SOURCES
        for n, line in enumerate(text(f).splitlines(), 1)
        if loaders.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_note_of_unfinished_work_is_left() -> None:
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
    files = [
        *ALL_PYTHON,
        *ROOT.glob("*.md"),
        *(ROOT / "rules").rglob("*.yaml"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    found = [
        f"{short(f)}:{n}"
        for f in files
        for n, line in enumerate(text(f).splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


def test_nothing_in_the_package_asserts_or_sets_the_threads_of_the_user() -> None:
    found = []
    for file in SOURCES:
        below = file.relative_to(PACKAGE).parts[0]
        for node in nodes(file):
            if isinstance(node, ast.Assert) and below != "testing":
                found.append(f"{short(file)}:{node.lineno}: assert")
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "set_num_threads"
                and below != "cli"
            ):
                found.append(f"{short(file)}:{node.lineno}: set_num_threads")
    assert not found, "\n".join(found)


def test_every_module_says_why_it_exists() -> None:
    silent = [
        short(f) for f in SOURCES if f.name != "__init__.py" and not ast.get_docstring(tree(f))
    ]
    assert not silent


def test_test_files_have_names_of_their_own() -> None:
    names = [f.name for f in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_every_mark_is_declared_explained_and_run_by_ci() -> None:
    """A mark that nothing runs would hide its tests."""
    declared = re.findall(
        r'^  "(\w+): ',
        (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("\nmarkers = [")[1],
        re.MULTILINE,
    )
    assert declared == [*MARKS, HEAVY, GPU, CAMPAIGN]
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [mark for mark in declared if f"| `{mark}` |" not in contributing] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\nMARKS ?= {' or '.join(MARKS)} or hypothesis\n" in makefile
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    gpu = "make gpu PYTHON=.venv-test/bin/python"
    assert {"make lint", "make test", "make marks", gpu} <= set(ci)


def test_the_oldest_libraries_are_those_that_pyproject_admits() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    admitted = dict(
        re.findall(
            r'^  "([\w-]+)>=([\d.]+)",$',
            project.split("\ndependencies = [")[1].split("\n]")[0],
            re.MULTILINE,
        )
    )
    oldest = dict(
        re.findall(
            r"^([\w-]+)==([\d.]+)$",
            (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    assert len(admitted) == 9
    assert {
        name: (*map(int, release.split(".")), 0, 0)[:3] for name, release in admitted.items()
    } == {name: (*map(int, release.split(".")), 0, 0)[:3] for name, release in oldest.items()}
    least = re.search(r'requires-python = ">=([\d.]+)"', project)
    assert least is not None
    assert f"OLDEST ?= python{least[1]}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


# these read a clock to choose the moment of a kill or of a cut, and assert nothing about it
CHOOSE_MOMENTS = {"tests/cli/test_kills.py", "tests/cli/test_power_cuts.py"}


def clocks(source: str) -> list[tuple[int, str]]:
    """Where a test reads a clock, or waits for some seconds rather than for what hangs: line and
    what.
    """
    clock = r"(perf_counter|process_time|monotonic|thread_time|time)(_ns)?"
    found: list[tuple[int, str]] = []
    # without one of these words there is nothing to be found, and most tests have none
    if not re.search(r"\btimes?\b|timeit|timeout|_[us]time\b", source):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if re.fullmatch(rf"time\.{clock}|os\.times|timeit\..*|.*\.ru_[us]time", dotted(node)):
                found.append((node.lineno, dotted(node)))
        elif isinstance(node, ast.ImportFrom):
            read = [
                a.name
                for a in node.names
                if node.module == "timeit"
                or (node.module == "time" and re.fullmatch(clock, a.name))
            ]
            found += [(node.lineno, f"from {node.module} import {name}") for name in read]
        elif isinstance(node, ast.Call):
            if dotted(node.func) == "pytest.mark.timeout":
                found.append((node.lineno, "pytest.mark.timeout"))
            given = [k.value for k in node.keywords if k.arg == "timeout"]
            found += [
                (node.lineno, f"timeout={value.value}")
                for value in given
                if isinstance(value, ast.Constant) and (value.value or 300) < 300
            ]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "import" in node.value
        ):
            # a program for a child process; one that puts a clock of its own there reads none
            read = re.finditer(rf"\btime\.{clock}\b(?! *=[^=])", node.value)
            found += [(node.lineno, m[0]) for m in read]
    return found


def test_no_test_asserts_seconds() -> None:
    """Work is counted, or compared with a yardstick: `tests/work.py`, which says as well how long a
    child may hang (`HANG`).
    """
    files = [
        f
        for f in ALL_PYTHON
        if short(f).startswith("tests/") and short(f) not in {"tests/work.py", *CHOOSE_MOMENTS}
    ]
    found = [f"{short(f)}:{line}: {what}" for f in files for line, what in clocks(text(f))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "assert time.perf_counter() - start < 2", "from time import monotonic",
        "seconds = os.times()", "time.time_ns()",
        "resource.getrusage(0).ru_utime", "@pytest.mark.timeout(5)\ndef test(): ...",
        "child.wait(timeout=5)",
        "CODE = 'import time; print(" + "time.process_time())'",
    ],
)  # fmt: skip
def test_a_clock_in_a_test_is_found(line: str) -> None:
    assert clocks(line)
    assert not clocks("time.sleep(0.1)\nchild.wait(timeout=HANG)\nresource.getrusage(0).ru_maxrss")
    assert not clocks("CODE = 'import time; " + "time.monotonic = lambda: 1'")


def test_a_failure_is_no_book(request: pytest.FixtureRequest) -> None:
    """Whatever a test compares: the beginning says which test it is, the end what failed."""
    (suite,) = (
        p
        for name, p in request.config.pluginmanager.list_name_plugin()
        if name == str(ROOT / "tests" / "conftest.py")
    )
    report = pytest.TestReport(
        "x",
        ("x", 0, "x"),
        {},
        "failed",
        "begin" + "x" * 100_000 + "end",
        "call",
        [("stdout", "y" * 50_000)],
    )
    made = suite.pytest_runtest_makereport()
    next(made)
    with pytest.raises(StopIteration) as cut:
        made.send(report)
    shown = cut.value.value
    assert str(shown.longrepr).startswith("begin")
    assert str(shown.longrepr).endswith("end")
    assert len(str(shown.longrepr)) + sum(len(text) for _, text in shown.sections) < 20_000
