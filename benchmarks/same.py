"""Whether two commits do the same, and what differs.

    git worktree add --detach ../before 5c24549
    python benchmarks/same.py ../before [--only mixtral] [--texts]

Compared are the bytes of all outputs, plan digests, stamps, JSON answers, exit statuses and codes.
Both trees run the same command lines and calls, each in a process of its own and on the rules that
it ships: the pairs of `tests/data/hf`, each example in the tests of the shipped rules, each case of
`tests/planning/test_*case*.py`, files of torch and of ranks, live modules, and questions that are
refused. Every difference is printed, and the exit status is 1 if there is one. Texts for people
(messages, helps, notes) may differ; `--texts` prints those too. The interpreter needs what the
tests need.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAIRS = {
    "mixtral__v4": "hf-mixtral@v5",
    "qwen2_moe__v4": "hf-qwen2-moe@v5",
    "fp8_dequant_deepseek_v3": "hf-deepseek-v3@v5",
}
# keys of JSON answers whose values are written for people
TEXTS = {
    "against",
    "message",
    "help",
    "notes",
    "note",
    "label",
    "text",
    "why",
    "title",
    "description",
    "evidence",
    "warnings",
    "problems",
    "reason",
}
# dtypes as safetensors spells them
NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
# what the machine decides and not the commit
MACHINE = {"free", "seconds"}
# commands that cannot answer, or answer no
WRONG = """\
plan hub --to hf-mixtral@v9
plan hub --to nothing@v1
plan hub
plan nowhere --to latest
plan hub --to latest
plan hub --to hf-mixtral@v5 --from hf-mixtral@v5
plan hub --to hf-mixtral@v5 --set num_experts=3
plan hub --to hf-mixtral@v5 --set nothing=3
plan hub --to hf-mixtral@v5 --allow nothing
plan hub --to hf-mixtral@v5 --check
plan hub --rules broken.yaml
plan stray --to hf-mixtral@v5 --from hf-mixtral@v4
apply hub --to hf-mixtral@v5
apply hub -o hub --to hf-mixtral@v5
apply hub -o made.gguf --to hf-mixtral@v5
apply hub -o made --to hf-mixtral@v5 --threads 0
apply hub -o made --to hf-mixtral@v5 --device tpu
apply hub -o made --to hf-mixtral@v5 --max-memory 1
apply v5 -o made --to hf-mixtral@v5
apply v5 -o made --to hf-mixtral@v5 --if-needed
downgrade hub -o made
verify hub --source hub
inspect broken.safetensors
inspect empty.pt
diff hub v5
lint nowhere.yaml
lint broken.yaml
test broken.yaml
explain M999
schema nothing
nothing
""".splitlines()


# -- what both run on ----------------------------------------------------------------------------


def prepare(work: Path) -> list[dict[str, Any]]:
    """Makes the inputs below `work`, with this tree's tests; the runs: name, source, arguments."""
    runs = []
    for name, goal in PAIRS.items():
        shutil.copytree(ROOT / "tests" / "data" / "hf" / name, work / name)
        allow = ["--allow", "lossy"] if name.startswith("fp8") else []
        runs.append({"name": name, "source": f"{name}/hub", "arguments": ["--to", goal, *allow]})
        if name.startswith("fp8"):
            runs.append(
                {
                    "name": f"{name} bf16",
                    "source": f"{name}/hub",
                    "arguments": ["--to", "deepseek-v3@bf16", *allow],
                }
            )
    for folder in ("torchao", "te", "quant"):
        shutil.copytree(ROOT / "tests" / "data" / folder, work / folder)
    shutil.copytree(work / "mixtral__v4" / "hub", work / "hub")
    shutil.copytree(work / "mixtral__v4" / "v5", work / "v5")
    (work / "broken.safetensors").write_bytes(b"\xff" * 64)
    (work / "empty.pt").write_bytes(b"")
    (work / "broken.yaml").write_text("id: x\nrules: [{from: 'a.{', to: b, via: [{stak: {}}]}]\n")
    (work / "stray").mkdir()
    shutil.copy(
        work / "quant" / "hf_fp8_block" / "block_inf_128x128_bf16.safetensors",
        work / "stray" / "model.safetensors",
    )
    return [*runs, *examples_of_rules(work), *examples_of_cases(work)]


def examples_of_rules(work: Path) -> Iterator[dict[str, Any]]:
    """Each example of a shipped rule file, as a checkpoint of its own."""
    from migrate.rules.loading import load_files
    from migrate.ruletests.binding import given_source

    for path in sorted((ROOT / "rules").glob("*/*/*.yaml")):
        (file,) = load_files([path])
        for number, test in enumerate(file.model.tests):
            source = given_source(test.given, test.side)
            place = (
                work
                / "examples"
                / f"{path.parent.parent.name}-{path.parent.name}-{path.stem}-{number}"
            )
            tensors = {
                key: (NAMES[stored.spec.dtype], stored.spec.shape, source.read_tensor(key))
                for key, stored in source.index.tensors.items()
            }
            checkpoint(place, tensors)
            for name, content in source.sides.items():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_bytes(content)
            yield {
                "name": place.name,
                "source": f"examples/{place.name}",
                "arguments": [
                    "--rules",
                    f"RULES/{path.relative_to(ROOT / 'rules')}",
                    *sets(test.params),
                    *permitted(test.allow),
                ],
                "backwards": test.backwards,
            }


def sets(params: Any) -> list[str]:
    return [
        word
        for name, value in params.items()
        for word in ("--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    ]


def permitted(allow: Any) -> list[str]:
    return [
        word for one in (("lossy", "drop") if allow is None else allow) for word in ("--allow", one)
    ]


def examples_of_cases(work: Path) -> Iterator[dict[str, Any]]:
    """Each case that the tests compare with upstream's code: its rule file and its arrays."""
    sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("planning", "cli", "ops", "")]
    for file in sorted((ROOT / "tests" / "planning").glob("test_*case*.py")):
        module = importlib.import_module(file.stem)
        for name, example in cases_in(module):
            place = work / "cases" / f"{file.stem}-{name}"
            arrays = {key: example.source[key] for key in example.source}
            kinds = {
                "float32": "F32",
                "int64": "I64",
                "uint8": "U8",
                "float16": "F16",
                "uint16": "BF16",
            }
            made = {key: (kinds[str(a.dtype)], a.shape, a.tobytes()) for key, a in arrays.items()}
            checkpoint(place, made)
            (place.parent / f"{place.name}.yaml").write_text(example.text())
            rules = [
                "--rules",
                f"cases/{place.name}.yaml",
                *sets(example.params),
                "--allow",
                "lossy",
                "--allow",
                "drop",
            ]
            yield {
                "name": place.name,
                "source": f"cases/{place.name}",
                "arguments": rules,
                "rules": f"cases/{place.name}.yaml",
            }


def cases_in(module: Any) -> Iterator[tuple[str, Any]]:
    """The examples that `directions` was given in a test module: name and example."""
    makers = {}
    for value in vars(module).values():
        mark = getattr(value, "mark", None)
        if mark is not None and mark.name == "parametrize" and mark.args[0] == "example":
            makers |= {make.__name__: make for make in mark.args[1]}
    for name, make in makers.items():
        yield name, make()


def checkpoint(place: Path, tensors: dict[str, tuple[str, Any, bytes]]) -> None:
    """Writes `model.safetensors`, or where keys name ranks (`w@1`) a file for each rank."""
    place.mkdir(parents=True)
    ranks = sorted({int(key.rpartition("@")[2]) for key in tensors if "@" in key})
    for rank in ranks or [None]:
        mine = {
            key.rpartition("@")[0] or key: one
            for key, one in tensors.items()
            if rank is None or int(key.rpartition("@")[2] if "@" in key else 0) == rank
        }
        name = "model" if rank is None else f"consolidated.{rank:02}"
        header, offset = {}, 0
        for key, (dtype, shape, data) in mine.items():
            offsets = [offset, offset + len(data)]
            header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
            offset += len(data)
        text = json.dumps(header).encode()
        body = b"".join(data for *_, data in mine.values())
        (place / f"{name}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)


# -- what one tree does --------------------------------------------------------------------------


def record(tree: Path, work: Path, only: str) -> dict[str, Any]:
    """name -> what came out, by the tree that this process imports; `work` has the inputs."""
    found: dict[str, Any] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        if only in name:
            found[name] = call()

    def command(*words: str) -> Callable[[], Any]:
        return lambda: ran(tree, [*words])

    for run in json.loads((work / "runs.json").read_text()):
        for name, words in way(run):
            note(f"{run['name']}: {name}", command(*words))
        note(f"{run['name']}: files", lambda run=run: files(work / "out" / run["name"], ""))
    for words in WRONG:
        note(f"wrong: {words}", command(*words.split(), "--format", "json"))
    for path in sorted([*(work / "torchao").glob("*.pt"), *(work / "te").glob("*.pt")]):
        name = path.relative_to(work).as_posix()
        note(f"{name}: inspect", command("inspect", name, "--all", "--format", "json"))
        note(
            f"{name}: convert",
            command(
                "apply",
                name,
                "-o",
                f"{name}.safetensors",
                "--output-format",
                "safetensors",
                "--format",
                "json",
            ),
        )
        note(
            f"{name}: back",
            command(
                "apply",
                f"{name}.safetensors",
                "-o",
                f"{name}.back.pt",
                "--output-format",
                "torch",
                "--format",
                "json",
            ),
        )
        note(f"{name}: files", lambda path=path: files(path.parent, path.name))
    note(
        "pt: made",
        command(
            "apply",
            "hub",
            "-o",
            "hub.pt",
            "--to",
            "hf-mixtral@v5",
            "--output-format",
            "torch",
            "--format",
            "json",
        ),
    )
    note("pt: back", command("downgrade", "hub.pt", "-o", "hub-back.pt", "--format", "json"))
    note("pt: verify", command("verify", "hub.pt", "--source", "hub", "--format", "json"))
    note("pt: files", lambda: files(work, "hub"))
    note(
        "saved: plan",
        command("plan", "hub", "--to", "hf-mixtral@v5", "-o", "saved.json", "--format", "json"),
    )
    note("saved: apply", command("apply", "saved.json", "-o", "saved", "--format", "json"))
    note("saved: files", lambda: files(work, "saved"))
    for words in (
        ["lint"],
        ["test", "--specs"],
        ["test"],
        ["packs"],
        ["history"],
        ["schema"],
        ["lint", "cases"],
        ["explain", "M301"],
    ):
        if words != ["test"] or not only:
            note(f"rules: {' '.join(words)}", command(*words, "--format", "json"))
    for kind in sorted(path.name.split(".")[0] for path in (tree / "schemas").glob("*.json")):
        note(f"schema {kind}", command("schema", kind))
    for name, call in live(work).items():
        note(f"live: {name}", call)
    return found


def way(run: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The command lines of one run: there, looked at, and back."""
    name, source, question = run["name"], run["source"], run["arguments"]
    there, back, json_ = f"out/{name}/there", f"out/{name}/back", ["--format", "json"]
    verb, how = ("downgrade", ["--downgrade"]) if run.get("backwards") else ("apply", [])
    # a case is of no lineage that is known, so its file has to be named each time
    rules = ["--rules", run["rules"]] if "rules" in run else []
    params = [word for word in question[2:] if word not in ("--allow", "lossy", "drop")]
    yield "inspect", ["inspect", source, "--all", *json_]
    yield "plan", ["plan", source, *question, *how, *json_]
    yield (
        verb,
        [verb, source, "-o", there, *question, "--report", f"out/{name}/report.json", *json_],
    )
    yield "verify", ["verify", there, "--source", source, *(rules and [*rules, *params]), *json_]
    yield "history", ["history", there, *json_]
    undo = ["downgrade", there, "-o", back, "--allow", "lossy", "--allow", "drop", *json_]
    yield "back", [*undo, *(rules and [*rules, *params])]
    yield "diff", ["diff", source, back, *json_]
    to_torch = [verb, source, "-o", f"{there}.pt", *question, "--output-format", "torch"]
    yield "to torch", [*to_torch, *json_]
    if rules:
        yield "lint", ["lint", run["rules"], *json_]


def ran(tree: Path, words: list[str]) -> dict[str, Any]:
    """Exit status, codes and JSON of one command line in this process."""
    from migrate.cli.main import run

    read = words[1:2] + (words[2:3] if words[0] == "diff" else [])
    if any(word.startswith("out/") and not Path(word).exists() for word in read):
        return {"exit": "nothing to read"}
    for word in words:
        if word.startswith("out/"):
            Path(word).parent.mkdir(parents=True, exist_ok=True)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run([word.replace("RULES/", f"{tree}/rules/") for word in words])
    said = out.getvalue().replace(str(tree), "TREE")
    with contextlib.suppress(ValueError):
        return {"exit": status, "json": json.loads(said)}
    return {
        "exit": status,
        "codes": sorted(set(re.findall(r"\bM[1-9]\d\d\b", said + err.getvalue()))),
        "text": said,
    }


def files(folder: Path, start: str) -> dict[str, Any]:
    """The sha256 of each file below the folder whose path begins so; of JSON what it says."""
    places = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    return {
        place: json.loads(path.read_bytes())
        if place.endswith(".json")
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for place, path in places.items()
        if place.startswith(start)
    }


def live(work: Path) -> dict[str, Callable[[], Any]]:
    """Calls on tensors in memory: what comes out, as hashes of the bytes."""
    import torch
    from safetensors.torch import load_file

    import migrate

    def hashed(one: Any) -> str:
        raw = one.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{one.dtype} {tuple(one.shape)} {hashlib.sha256(raw).hexdigest()}"

    def hashes(state: Any) -> dict[str, str]:
        return {key: hashed(state[key]) for key in state}

    old, new = (load_file(work / name / "model.safetensors") for name in ("hub", "v5"))

    def module() -> torch.nn.Module:
        made = torch.nn.Module()
        for key, one in new.items():
            *path, leaf = key.split(".")
            at = made
            for part in path:
                if not hasattr(at, part):
                    at.add_module(part, torch.nn.Module())
                at = getattr(at, part)
            at.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(one)))
        return made

    def attached() -> Any:
        model = module()
        migrate.attach(model, "hf-mixtral@v5")
        loaded = model.load_state_dict(dict(old))
        return [list(map(list, loaded)), hashes(model.state_dict())]

    def loaded() -> Any:
        model = module()
        answer = migrate.load(model, work / "hub", "hf-mixtral@v5")
        return [document(answer), hashes(model.state_dict())]

    def saved() -> Any:
        model = module()
        model.load_state_dict(new)
        answer = migrate.save(
            model, work / "live-saved.safetensors", to="hf-mixtral@v4", from_="hf-mixtral@v5"
        )
        return [document(answer), files(work, "live-saved")]

    def caught(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            try:
                return call()
            except Exception as error:  # noqa: BLE001 - what is raised is compared
                return [
                    type(error).__name__,
                    [d.code for d in getattr(error, "diagnostics", ())],
                    getattr(error, "exit_code", None),
                ]

        return run

    to, back = {"to": "hf-mixtral@v5"}, {"to": "hf-mixtral@v4"}
    calls = {
        "plan": lambda: [
            migrate.plan(work / "hub", **to).digest,
            document(migrate.plan(old, **to)),
        ],
        "inspect": lambda: document(migrate.inspect(old)),
        "apply": lambda: hashes(migrate.apply(dict(old), **to)),
        "downgrade": lambda: hashes(migrate.downgrade(dict(new), **back)),
        "to files": lambda: [
            document(migrate.apply(dict(old), work / "live-made", **to)),
            files(work, "live-made"),
        ],
        "migrate_state_dict": lambda: hashes(migrate.migrate_state_dict(dict(old), **to)),
        "attach": attached,
        "load": loaded,
        "save": saved,
        "wrong layout": lambda: migrate.migrate_state_dict(dict(old), "hf-mixtral@v9"),
        "stray key": lambda: migrate.apply({**old, "stray": torch.zeros(1)}, **to),
    }
    return {name: caught(call) for name, call in calls.items()}


def document(answer: Any) -> Any:
    """What an answer gives as JSON; early commits answer with the document itself."""
    if hasattr(answer, "to_json"):
        answer = answer.to_json()
    return (
        json.loads(answer)
        if isinstance(answer, str)
        else json.loads(json.dumps(answer, default=str))
    )


# -- the comparison ------------------------------------------------------------------------------


def differences(
    old: Any, new: Any, place: str = "", text: bool = False
) -> Iterator[tuple[str, bool]]:
    """Each place where two answers differ, and whether a text for people stands there."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted((old.keys() | new.keys()) - MACHINE):
            if key not in old or key not in new:
                yield f"{place}.{key}: only in the {'new' if key in new else 'old'}", False
            else:
                yield from differences(old[key], new[key], f"{place}.{key}", text or key in TEXTS)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{place}[{number}]", text)
    elif old != new:
        yield (
            f"{place}: {shown(old)} became {shown(new)}",
            text and isinstance(old, str) and isinstance(new, str),
        )


def shown(value: Any) -> str:
    said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= 300 else f"{said[:300]}…"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="the tree of the earlier commit")
    parser.add_argument(
        "new", type=Path, nargs="?", default=ROOT, help="the tree of the later one (this)"
    )
    parser.add_argument("--only", default="", help="a part of the names of what is run")
    parser.add_argument("--texts", action="store_true", help="print texts that differ too")
    parser.add_argument("--keep", type=Path, help="keep the answers of both in this folder")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        os.chdir(given.new)
        answers = record(given.old, Path.cwd(), given.only)
        Path("answers.json").write_text(json.dumps(answers))
        return
    if given.new.resolve() != ROOT:
        sys.exit(
            f"the inputs are made by the tests of the new tree: call {given.new}/benchmarks/same.py"
        )
    with tempfile.TemporaryDirectory() as folder:
        # equal names of both working folders: no path in an answer differs
        inputs = Path(folder) / "inputs"
        inputs.mkdir()
        (inputs / "runs.json").write_text(json.dumps(prepare(inputs)))
        answers = []
        for tree in (given.old.resolve(), given.new.resolve()):
            work = Path(folder) / "work"
            shutil.copytree(inputs, work, copy_function=shutil.copy2)
            environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
            more = ["--only", given.only] if given.only else []
            subprocess.run(
                [sys.executable, __file__, str(tree), str(work), "--child", *more],
                env=environment,
                check=True,
            )
            answers.append(json.loads((work / "answers.json").read_text()))
            shutil.rmtree(work)
        if given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            for name, one in zip(("old", "new"), answers, strict=True):
                (given.keep / f"{name}.json").write_text(
                    json.dumps(one, indent=1, sort_keys=True) + "\n"
                )
    found = list(differences(*answers))
    hard = [text for text, soft in found if not soft]
    for text, soft in found:
        if not soft or given.texts:
            print(f"{'text ' if soft else ''}{text.lstrip('.')}")
    ended = {
        status: sum(
            one.get("exit") == status for one in answers[1].values() if isinstance(one, dict)
        )
        for status in range(5)
    }
    print(
        f"{len(answers[1])} answers compared (exit statuses {ended}): "
        f"{len(hard)} differences, {len(found) - len(hard)} texts that differ"
    )
    sys.exit(1 if hard else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT)) if "--child" not in sys.argv else None
    main()
