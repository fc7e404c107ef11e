"""How long the way of an ordinary call is: the functions and modules that the second call enters.

    python benchmarks/walk.py [CASE ...] [--names | --json]

Counts, not times: they are the same on a busy machine. A function is what `def` or `lambda` wrote
(comprehensions are none, for newer Pythons inline them); a module counts when a function of it is
entered. All threads are watched. What happens once in a process (imports, caches that the first
call fills) does not count; so that no case profits from another, each has a process of its own.
`tests/house/test_walk.py` holds the counts to bars.
"""

from __future__ import annotations

import _thread
import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HUB = ROOT / "tests" / "data" / "hf" / "mixtral__v4" / "hub"
GOAL = "hf-mixtral@v5"

# one call; the number tells the first from the second
Call = Callable[[int], object]


def apply(folder: Path) -> Call:
    """`migrate.apply` of the tiny Mixtral, to files."""
    import migrate

    return lambda number: migrate.apply(HUB, folder / f"out{number}", to=GOAL)


def plan(folder: Path) -> Call:
    """`migrate.plan` of the tiny Mixtral."""
    import migrate

    return lambda number: migrate.plan(HUB, to=GOAL)


def rules(folder: Path) -> Call:
    """One rule file, loaded and compiled."""
    from migrate.core.errors import Report
    from migrate.rules.compiled import compile_file
    from migrate.rules.loading import load_files

    path = ROOT / "tests" / "data" / "cases" / "c02-densenet.yaml"

    def call(number: int) -> None:
        (loaded,) = load_files([path])
        compile_file(loaded, Report())

    return call


def blocks(folder: Path) -> Call:
    """`migrate.apply` of one tensor in blocks of FP8, to bfloat16."""
    import migrate

    tensors = {
        "w": ("F8_E4M3", [4, 4], bytes(range(16))),
        "w_scale_inv": ("F32", [2, 2], struct.pack("<4f", 1, 2, 3, 4)),
    }
    source = safetensors(folder / "old.safetensors", tensors)
    way = "via: [{dequantize: {codec: fp8-block, dtype: bfloat16, block: [2, 2], like: deepseek}}]"
    rule = rule_file(
        folder, f"  - {{name: r, from: {{weight: w, scale: w_scale_inv}}, to: w, {way}}}\n"
    )
    return lambda number: migrate.apply(
        source, folder / f"new{number}.safetensors", rules=rule, allow="lossy"
    )


def attach(folder: Path) -> Call:
    """`migrate.attach` and one `load_state_dict` of two tensors that are renamed."""
    import torch

    import migrate

    rule = rule_file(folder, '  - {name: r, from: "old.{i:int}", to: "new.{i}"}\n')
    modules = [torch.nn.Module(), torch.nn.Module()]
    for module in modules:
        module.new = torch.nn.ParameterList([torch.zeros(2), torch.zeros(2)])
    state = {f"old.{i}": torch.full((2,), float(i)) for i in range(2)}

    def call(number: int) -> None:
        migrate.attach(modules[number], rules=rule)
        modules[number].load_state_dict(dict(state))

    return call


def torch_file(folder: Path) -> Call:
    """A `.pt` of one tensor, opened and closed."""
    from migrate import formats

    path = folder / "one.pt"
    # what torch.save writes of {"w": torch.zeros(2)}, protocol 2
    pickled = (
        b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00storageq\x03ctorch\nFloatStorage\n"
        b"q\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K\x02tq\x07QK\x00K\x02\x85q\x08K\x01\x85q\t\x89ccollections\nOrderedDict\n"
        b"q\n)Rq\x0btq\x0cRq\rs."
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (
            ("data.pkl", pickled),
            ("byteorder", b"little"),
            ("data/0", bytes(8)),
            ("version", b"3\n"),
        ):
            archive.writestr(f"one/{name}", content)
    return lambda number: formats.open(path).close()


CASES: dict[str, Callable[[Path], Call]] = {
    "apply": apply,
    "plan": plan,
    "rules": rules,
    "fp8": blocks,
    "attach": attach,
    "pt": torch_file,
}


def rule_file(folder: Path, text: str) -> Path:
    path = folder / "rules.yaml"
    path.write_text(
        "id: walk/new\ntitle: One step\nlineage: walk\nedge: [old, new]\n"
        f'requires: ">=0.1"\nrules:\n{text}'
    )
    return path


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    header, body = {}, b""
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def entered(call: Call, package: str) -> list[str]:
    """`module:function:line` of all of the folder `package` that the second call enters."""
    seen: set[CodeType] = set()
    counting = False

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and counting:
            seen.add(frame.f_code)

    def start(function: Callable[..., object], *given: Any) -> int:
        def watched(*arguments: Any, **named: Any) -> None:
            sys.setprofile(note)
            function(*arguments, **named)

        return started(watched, *given)

    # before the first call, so that threads which live on are watched in the second; `threading`
    # knows nothing of those that are started without it
    started, _thread.start_new_thread = _thread.start_new_thread, start
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call(0)
        counting = True
        call(1)
    finally:
        counting = False
        _thread.start_new_thread = started
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return sorted({name for code in seen if (name := named(code, package))})


def named(code: CodeType, package: str) -> str:
    """`module:function:line` of a function of the package, "" for any other code."""
    own = code.co_filename.startswith(package + os.sep)
    if not own or (code.co_name.startswith("<") and code.co_name != "<lambda>"):
        return ""
    module = code.co_filename[len(package) + 1 :].removesuffix(".py").replace(os.sep, ".")
    return f"{module}:{getattr(code, 'co_qualname', code.co_name)}:{code.co_firstlineno}"


def measured(case: str) -> list[str]:
    """What the second call of a case enters, found in this process."""
    import migrate

    package = str(Path(migrate.__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        return entered(CASES[case](Path(folder)), package)


def walk(cases: Iterable[str] = tuple(CASES)) -> dict[str, list[str]]:
    """Case -> what its second call enters, each case in a new process."""
    found = {}
    for case in cases:
        child = subprocess.run(
            [sys.executable, __file__, "--child", case], stdout=subprocess.PIPE, check=True
        )
        found[case] = json.loads(child.stdout)
    return found


def modules(names: Iterable[str]) -> list[str]:
    return sorted({name.split(":")[0] for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--names", action="store_true", help="list the functions")
    parser.add_argument("--json", action="store_true", help="case -> functions")
    parser.add_argument("--child", metavar="CASE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measured(given.child)))
        return
    found = walk(given.case)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for case, names in found.items():
        counted = f"{len(modules(names)):>4} modules {len(names):>5} functions"
        print(f"{case:<8}{counted}   {CASES[case].__doc__}")
        if given.names:
            print("".join(f"    {name}\n" for name in names), end="")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
