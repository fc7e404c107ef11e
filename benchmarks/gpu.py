"""What only a GPU can show, in one command of at most 8 minutes: `make gpu PYTHON=python3`.

Runs the tests marked `gpu`, then the rows below, and writes `benchmarks/results/gpu.json`. The
interpreter is used as it is, with its own CUDA build of torch; nothing is downloaded and no
environment is made. Packages that it lacks are taken from the wheels in `wheels/`, if there are
any: `make wheels` fills the folder on a machine with a network. Without a GPU the tests and rows
are listed, and the exit status is 0.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULT = HERE / "results" / "gpu.json"
# seconds for all of it; the tests get what the rows are not expected to need
LIMIT, FOR_ROWS = 480, 180
ROUNDS = 5


def gpu() -> str:
    """The name of the GPU that torch finds, "" without one or without torch."""
    try:
        import torch
    except ImportError:
        return ""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def unpacked(wheels: Path, into: Path) -> list[str]:
    """Unpacks the wheels of what this interpreter lacks; what it has stays its own."""
    taken = []
    own = ("-none-any.whl", "-abi3-", f"-cp{sys.version_info.major}{sys.version_info.minor}-")
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        if not any(tag in wheel.name for tag in own):
            print(f"{wheel.name} is for another Python")
            continue
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
            taken.append(wheel.name)
    return taken


def tests(environment: dict[str, str], seconds: float, *, listed: bool) -> dict[str, Any]:
    """Runs or lists the tests marked `gpu`: exit status, and how many ended how."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-rs"]
    command += ["--collect-only"] if listed else []
    # collecting all files takes longer than running these
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    command += [str(f) for f in files if re.search(r"[(,]\s*device\b", f.read_text("utf-8"))]
    try:
        child = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        print(said.decode() if isinstance(said, bytes) else said)
        return {"exit": None, "stopped_after": round(seconds)}
    print(child.stdout, end="")
    counts = dict(re.findall(r"(\d+) (passed|failed|skipped|errors?)", child.stdout))
    return {"exit": child.returncode, **{what: int(n) for n, what in counts.items()}}


# -- rows ----------------------------------------------------------------------------------------


def codec(folder: Path, run: Callable[..., Any]) -> Any:
    """fp8-block on one matrix of 4096 x 4096 in memory: milliseconds, beside clone and peers."""
    figures = folder / "codec.json"
    words = ["--device", "cuda", "--only", "fp8-block", "--rounds", ROUNDS, "--json", figures]
    run(HERE / "format_speed.py", *words)
    return json.loads(figures.read_text())


def formats(folder: Path, run: Callable[..., Any]) -> Any:
    """Every number format decoded in memory, 4096 x 4096: milliseconds, beside clone."""
    figures = folder / "formats.json"
    run(HERE / "format_speed.py", "--device", "cuda", "--rounds", 2, "--json", figures)
    return json.loads(figures.read_text())


def values(folder: Path, run: Callable[..., Any]) -> Any:
    """FP8 blocks -> bf16 of a checkpoint, on the GPU and on the CPU: seconds, and equal bytes."""
    import data_fp8

    old = folder / "fp8"
    data_fp8.make(old, data_fp8.shape("demo"))
    out: dict[str, Any] = {}
    for _ in range(ROUNDS):
        for device in ("cpu", "cuda"):
            new = folder / device
            shutil.rmtree(new, ignore_errors=True)
            words = ["apply", old, "-o", new, "--to", "deepseek-v3@bf16", "--allow", "lossy"]
            begun = time.perf_counter()
            run("-m", "migrate", *words, "--device", device, "--no-fsync")
            out.setdefault(device, []).append(round(time.perf_counter() - begun, 3))
    out["equal"] = all(
        (folder / "cuda" / file.name).read_bytes() == file.read_bytes()
        for file in (folder / "cpu").glob("*.safetensors")
    )
    out["bytes"] = sum(file.stat().st_size for file in (folder / "cpu").glob("*.safetensors"))
    return out


def load(folder: Path, run: Callable[..., Any]) -> Any:
    """`migrate.load` into a module on the GPU, and load_state_dict(load_file()): seconds each."""
    import data

    data.make(folder / "v4", data.PRESETS["demo"])
    words = [folder / "v4", "-o", folder / "v5", "--to", "hf-mixtral@v5", "--no-fsync"]
    run("-m", "migrate", "apply", *words)
    code = (
        "import json, sys, time, torch\n"
        "from pathlib import Path\n"
        "from safetensors.torch import load_file\n"
        "from live_load import headers, module_of\n"
        "import migrate\n"
        "old, new = map(Path, sys.argv[1:])\n"
        "model = module_of(headers(new)).to('cuda')\n"
        "def torchs():\n"
        "    state = {}\n"
        "    for path in sorted(new.glob('*.safetensors')):\n"
        "        state |= load_file(path, device='cuda')\n"
        "    model.load_state_dict(state)\n"
        "def ours():\n"
        "    migrate.load(model, old, 'hf-mixtral@v5', device='cuda')\n"
        "taken = {'migrate': [], 'torch': []}\n"
        f"for _ in range({ROUNDS}):\n"
        "    for name, call in (('migrate', ours), ('torch', torchs)):\n"
        "        torch.cuda.synchronize()\n"
        "        begun = time.perf_counter()\n"
        "        call()\n"
        "        torch.cuda.synchronize()\n"
        "        taken[name].append(round(time.perf_counter() - begun, 4))\n"
        "print(json.dumps(taken))\n"
    )
    return json.loads(run("-c", code, folder / "v4", folder / "v5").splitlines()[-1])


def reader(folder: Path, run: Callable[..., Any]) -> Any:
    """`dcp.load` into tensors on the GPU by MigratingReader, and by torch's of a migrated copy."""
    import data

    data.make(folder / "v4", data.PRESETS["demo"])
    words = [folder / "v4", "-o", folder / "v5", "--to", "hf-mixtral@v5", "--no-fsync"]
    run("-m", "migrate", "apply", *words, "--output-format", "dcp")
    code = (
        "import json, sys, time, torch, warnings\n"
        "import torch.distributed.checkpoint as dcp\n"
        "import migrate\n"
        "warnings.simplefilter('ignore')\n"
        "old, new = sys.argv[1:]\n"
        "told = dcp.FileSystemReader(new).read_metadata().state_dict_metadata\n"
        "def empty():\n"
        "    return {k: torch.zeros(e.size, dtype=e.properties.dtype, device='cuda')\n"
        "            for k, e in told.items() if hasattr(e, 'size')}\n"
        "def ours(state):\n"
        "    made = migrate.dcp.MigratingReader(old, to='hf-mixtral@v5')\n"
        "    dcp.load(state, storage_reader=made)\n"
        "def torchs(state):\n"
        "    dcp.load(state, checkpoint_id=new)\n"
        "taken, held = {}, {}\n"
        f"for _ in range({ROUNDS}):\n"
        "    for name, call in (('migrate', ours), ('torch', torchs)):\n"
        "        held[name] = empty()\n"
        "        torch.cuda.synchronize()\n"
        "        begun = time.perf_counter()\n"
        "        call(held[name])\n"
        "        torch.cuda.synchronize()\n"
        "        taken.setdefault(name, []).append(round(time.perf_counter() - begun, 4))\n"
        "one, other = held.values()\n"
        "taken['equal'] = all(torch.equal(one[key], other[key]) for key in one)\n"
        "print(json.dumps(taken))\n"
    )
    return json.loads(run("-c", code, folder / "v4", folder / "v5").splitlines()[-1])


ROWS: dict[str, Callable[[Path, Callable[..., Any]], Any]] = {
    "codec": codec,
    "values": values,
    "load": load,
    "reader": reader,
    "formats": formats,
}


def rows(environment: dict[str, str], deadline: float) -> Iterator[tuple[str, Any]]:
    """Each row and its figures, or why it has none."""

    def run(*words: object) -> str:
        child = subprocess.run(
            [sys.executable, *map(str, words)], env=environment, cwd=ROOT, capture_output=True,
            text=True, check=False, timeout=max(1.0, deadline - time.monotonic()),
        )  # fmt: skip
        if child.returncode:
            raise subprocess.SubprocessError(f"exit {child.returncode}: {child.stderr[-2000:]}")
        return child.stdout

    for name, row in ROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield name, row(Path(folder), run)
            except subprocess.SubprocessError as error:
                yield name, {"failed": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="a folder of wheels")
    given = parser.parse_args()
    deadline = time.monotonic() + LIMIT
    with tempfile.TemporaryDirectory() as site:
        taken = unpacked(given.wheels, Path(site))
        places = [str(ROOT), str(HERE), site, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        name = gpu()
        if not name:
            print(f"{sys.executable} finds no GPU; with one, these tests would run:")
            status = tests(environment, LIMIT, listed=True)["exit"]
            if status:
                print("(they cannot be listed: this interpreter has no pytest, or lacks a package)")
            print("and these rows would be measured:")
            print("".join(f"  {row:<8} {call.__doc__}\n" for row, call in ROWS.items()), end="")
            return
        print(f"{name}; from wheels: {', '.join(taken) or 'nothing'}", flush=True)
        result: dict[str, Any] = {"format_version": 1, "kind": "gpu", "machine": machine(name)}
        result["tests"] = tests(environment, deadline - time.monotonic() - FOR_ROWS, listed=False)
        result["rows"] = {}
        for row, figures in rows(environment, deadline):
            print(f"{row}: {json.dumps(figures)}", flush=True)
            result["rows"][row] = figures
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {RESULT.relative_to(ROOT)}")
    failed = [row for row, figures in result["rows"].items() if "failed" in figures]
    sys.exit(1 if failed or result["tests"]["exit"] != 0 else 0)


def machine(name: str) -> dict[str, Any]:
    """What the figures were taken on; no host name, no path."""
    import torch

    return {
        "date": datetime.date.today().isoformat(),
        "gpu": name,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
