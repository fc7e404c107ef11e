"""The README and the pages of `docs/` as programs: files that they write, commands, Python.

A page is run from top to bottom in an empty folder:

    <!-- setup: NAME -->      makes what the page takes for granted (`SETUPS`)
    `file.yaml`:              the next block is written to this file, with ` +` behind it appended
    ```console                each line that begins with `$ ` is run; the lines below it are what
                              it prints, `…` standing for anything; without such lines it must
                              exit with 0
    ```python                 run, all blocks of a page in one namespace
    ```yaml, json, toml       must be well-formed; YAML without a file name must compile as a part
                              of a rule file
    ```text                   is not run
    <!-- not run: WHY -->     the next block is not run
    <!-- needs: PACKAGE -->   the next block is not run where the package is not installed
    <!-- made: FILE -->       the next block stands so in a file that the page has made
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from commandline import DATA, ROOT, Result, environment, run
from fresh_environment import Environment

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = {page.relative_to(ROOT).as_posix(): page for page in (README, *sorted(DOCS.rglob("*.md")))}
KINDS = {"console", "python", "yaml", "json", "toml", "text"}
# what a page says that installs a package of its own
INSTALLS = "\n$ pip install .\n"
# pages whose blocks other tests run, against what they are about
ELSEWHERE = {"docs/how-to/frameworks.md": "tests/live/test_frameworks.py"}

_MARK = re.compile(r"<!-- (setup|not run|needs|made): (.+) -->")
_NAME = re.compile(r"`([^`]+)`(:| \+)")
_FENCE = re.compile(r"( *)```(\S*)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its line, its kind, the file it is written to, why it is not run, and the
    file that it was made in.
    """

    line: int
    kind: str
    body: str
    name: str = ""
    appended: bool = False
    not_run: str = ""
    made: str = ""


@dataclass(frozen=True)
class Setup:
    """A mark that asks for what the page takes for granted."""

    line: int
    name: str


def steps(text: str) -> Iterator[Block | Setup]:
    """The blocks and marks of a page, in their order."""
    lines = text.splitlines()
    name = not_run = made = ""
    appended = False
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if mark := _MARK.fullmatch(line.strip()):
            if mark[1] == "setup":
                yield Setup(at, mark[2])
            elif mark[1] == "made":
                made = mark[2]
            elif mark[1] == "not run":
                not_run = mark[2]
            elif find_spec(mark[2]) is None:
                not_run = f"{mark[2]} is not installed"
        elif found := _NAME.fullmatch(line.strip()):
            name, appended = found[1], found[2] == " +"
        elif fence := _FENCE.fullmatch(line):
            start, indent, body = at, len(fence[1]), []
            while lines[at].strip() != "```":
                body.append(lines[at][indent:])
                at += 1
            at += 1
            text = "\n".join(body) + "\n"
            yield Block(start, fence[2], text, name, appended, not_run, made)
            name = not_run = made = ""
            appended = False
        elif line.strip():
            name = not_run = made = ""


def blocks(text: str, kind: str) -> list[Block]:
    return [s for s in steps(text) if isinstance(s, Block) and s.kind == kind]


def commands(body: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block, comments cut off, and what it is shown to print."""
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        first, *shown = part.splitlines()
        while first.endswith("\\"):
            first = first[:-1] + shown.pop(0).strip()
        yield first.split("  #")[0].strip(), shown


def run_page(text: str, folder: Path, execute: Callable[[str, Path], Result]) -> list[str]:
    """Runs a page in `folder`, which is the working directory, its commands by `execute`. The
    commands that were run.
    """
    ran: list[str] = []
    names: dict[str, Any] = {"__name__": "page"}
    for step in steps(text):
        if isinstance(step, Setup):
            SETUPS[step.name](folder)
        elif step.not_run or step.kind == "text":
            continue
        elif step.made:
            text = (folder / step.made).read_text(encoding="utf-8")
            assert step.body in text, f"line {step.line}: {step.made} is\n{text}"
        elif step.name:
            path = folder / step.name
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_text(encoding="utf-8") if step.appended else ""
            path.write_text(before + step.body, encoding="utf-8")
        elif step.kind == "console":
            for command, shown in commands(step.body):
                ran.append(command)
                result = execute(command, folder)
                where = f"line {step.line}: $ {command}\n{result.out}{result.err}"
                if shown:
                    missing = unprinted(result, shown)
                    assert not missing, f"{missing!r} is not printed so\n{where}"
                else:
                    assert result.exit == 0, f"exit {result.exit}, {where}"
        elif step.kind == "python":
            exec(
                compile("\n" * (step.line - 1) + step.body, "page", "exec", dont_inherit=True),
                names,
            )
    return ran


def execute(command: str, folder: Path) -> Result:
    """A command line that a page shows, by the migrate that is tested. What is installed from an
    index is there.
    """
    words = shlex.split(command)
    if words[:2] == ["pip", "install"]:
        assert words[-1] != ".", f"{command} needs an environment"
        return Result(0, "", "")
    if words[0] == "migrate":
        return run(*words[1:], cwd=folder)
    program = {"pytest": ["-m", "pytest", "-q"], "python": []}
    child = subprocess.run(
        [sys.executable, *program[words[0]], *words[1:]],
        cwd=folder,
        env={**environment(), "PYTHONPATH": f"{ROOT}:{folder}"},
        capture_output=True,
        text=True,
    )
    return Result(child.returncode, child.stdout, child.stderr)


def execute_in(installed: Environment, command: str, folder: Path) -> Result:
    """The same in an environment of its own, into which pip really installs."""
    words = shlex.split(command)
    if words[:2] == ["pip", "install"]:
        return installed.install(*words[2:], cwd=folder)
    if words[0] == "pytest":
        words = ["python", "-m", "pytest", "-q", *words[1:]]
    return installed.run(words[0], *words[1:], cwd=folder)


def unprinted(result: Result, shown: list[str]) -> str:
    """The first line that a page shows and the command did not print, in this order, or one that it
    printed and the page leaves out; `…` stands for anything.
    """
    lines, at, skipping = (result.out + result.err).splitlines(), 0, False
    for line in shown:
        if line == "…":
            skipping = True
            continue
        wanted = re.compile(".*".join(map(re.escape, line.split("…"))))
        places = range(at, len(lines) if skipping else min(at + 1, len(lines)))
        found = next((n for n in places if wanted.fullmatch(lines[n])), None)
        if found is None:
            return line
        at, skipping = found + 1, False
    return "" if skipping or at == len(lines) else lines[at]


def _copied(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copytree(DATA / name / "hub", folder / "OLD") and None


def _genuine(name: str) -> Callable[[Path], None]:
    source = ROOT / "tests" / "data" / "genuine" / name
    return lambda folder: shutil.copytree(source, folder / "OLD") and None


def _fp8(folder: Path) -> None:
    """A model in FP8, and one that was trained in bfloat16, which has no stamp."""
    import migrate

    genuine = ROOT / "tests" / "data" / "genuine"
    shutil.copytree(genuine / "hf-fp8-block", folder / "OLD")
    shutil.copytree(genuine / "modelopt-fp8", folder / "MODELOPT")
    migrate.apply(folder / "OLD", folder / "TRAINED", to="fp8@bf16", allow=["lossy"])
    (folder / "TRAINED" / "migrate.history.json").unlink()


def _kimi(folder: Path) -> None:
    """Kimi K2 with its experts in int4, and one that was trained in bfloat16."""
    import migrate

    shutil.copytree(ROOT / "tests" / "data" / "genuine" / "kimi-k2", folder / "OLD")
    migrate.apply(folder / "OLD", folder / "TRAINED", to="kimi-k2@bf16", allow=["lossy"])
    (folder / "TRAINED" / "migrate.history.json").unlink()


def _mixed(folder: Path) -> None:
    """A model whose modules compressed-tensors stored in several formats, instead of another."""
    for name in ("OLD", "BF16"):
        shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(ROOT / "tests" / "data" / "genuine" / "ct-mixed", folder / "OLD")


def _nvfp4(folder: Path) -> None:
    """A model in NVFP4, as ModelOpt writes it."""
    shutil.copytree(ROOT / "tests" / "data" / "genuine" / "modelopt-nvfp4", folder / "OLD")


def _gptq(folder: Path) -> None:
    """A model in GPTQ, as GPTQModel packs it."""
    shutil.copytree(ROOT / "tests" / "data" / "genuine" / "gptq-sym", folder / "OLD")


def _gguf(folder: Path) -> None:
    """A Llama in a GGUF file, as gguf-py writes it."""
    made = ROOT / "tests" / "data" / "genuine" / "gguf-llama" / "model.gguf"
    shutil.copy(made, folder / "MODEL.gguf")


def _bnb(folder: Path) -> None:
    """A model in NF4, as transformers stores it with bitsandbytes, and one trained in bfloat16."""
    import migrate

    shutil.copytree(ROOT / "tests" / "data" / "genuine" / "bnb-nf4", folder / "OLD")
    migrate.apply(folder / "OLD", folder / "TRAINED", to="bnb@bf16", allow=["lossy"])
    (folder / "TRAINED" / "migrate.history.json").unlink()


def _training(folder: Path) -> None:
    import torch

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, folder / "OLD.pt")


def _distributed(folder: Path) -> None:
    """Mixtral in two files of chunks, as torch saves it, with what a trainer saves beside it."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    hub = DATA / "mixtral__v4" / "hub"
    model = load_file(hub / "model.safetensors")
    state = {"model": model, "lr_scheduler": {"last_epoch": 3, "base_lrs": [0.1]}, "step": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(folder / "TRAINED", thread_count=2, sync_files=False)
        dcp.save(state, storage_writer=writer, no_dist=True)
    shutil.copy(hub / "config.json", folder / "TRAINED")


def _megatron(folder: Path) -> None:
    """A run of megatron-core on four ranks."""
    from megatron_runs import run_folder

    shutil.copytree(run_folder("llama", "legacy", "tp2-pp2"), folder / "run")


def _more_of_megatron(folder: Path) -> None:
    """A run with virtual stages, the model that went into it, and files of a reference folder."""
    from megatron_runs import family, run_folder

    shutil.copytree(run_folder("llama", "legacy", "pp2-vpp2"), folder / "virtual")
    for name, files in (("plain", ("model.safetensors", "config.json")), ("reference", ())):
        (folder / name).mkdir()
        for file in files:
            shutil.copy(family("llama") / "hf" / file, folder / name)
    (folder / "reference" / "tokenizer.json").write_text("{}")


def _te(folder: Path) -> None:
    made = "v1.13_linear_DelayedScaling_cuda0.ckpt.pt"
    shutil.copy(ROOT / "tests" / "data" / "te" / made, folder / "model.pt")


SETUPS: dict[str, Callable[[Path], None]] = {
    "mixtral": _copied("mixtral__v4"),
    "qwen2-moe": _copied("qwen2_moe__v4"),
    "deepseek": _copied("fp8_dequant_deepseek_v3"),
    "deepseek-v4": _genuine("deepseek-v4"),
    "fp8": _fp8,
    "gpt-oss": _copied("mxfp4_dequant_gpt_oss"),
    "kimi-k2": _kimi,
    "ct-mixed": _mixed,
    "nvfp4": _nvfp4,
    "gptq": _gptq,
    "gguf": _gguf,
    "bnb": _bnb,
    "torchao": _genuine("torchao-int8"),
    "training-checkpoint": _training,
    "dcp": _distributed,
    "te-1.13": _te,
    "megatron": _megatron,
    "megatron-more": _more_of_megatron,
}


def well_formed(block: Block) -> None:
    """Raises unless a JSON block (or each of its lines) or a TOML block can be read."""
    if block.kind == "json":
        try:
            json.loads(block.body)
        except ValueError:
            for line in block.body.splitlines():
                json.loads(line)
    elif block.kind == "toml" and sys.version_info >= (3, 11):
        import tomllib

        tomllib.loads(block.body)
