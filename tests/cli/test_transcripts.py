"""Golden transcripts: what a user types and reads, whole. UPDATE_GOLDEN=1 writes them again; then
read the difference.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import ROOT, content, mixtral, rules, run, safetensors, shards

GOLDEN = Path(__file__).parent / "golden"
# what depends on the machine or the moment, and what stands for it
CHANGING = [
    (re.compile(re.escape(str(ROOT))), "<root>"),
    (
        re.compile(r"peak memory about [\d.]+ [kMGT]?B, [\d.]+ [kMGT]?B free"),
        "peak memory about <size>, <size> free",
    ),
    (re.compile(r"\b(writing|verifying|comparing) .* private memory .*\n"), ""),
    (re.compile(r"m1:[0-9a-f]+…"), "m1:<hash>…"),
    (re.compile(r"migrate \d+\.\d+\.\d+"), "migrate <version>"),
]


def stable(text: str, folder: Path) -> str:
    """The text without what changes from run to run."""
    text = text.replace(str(folder), "<here>")
    for pattern, instead in CHANGING:
        text = pattern.sub(instead, text)
    return text


def section(name: str, text: str) -> str:
    return f"--- {name}\n{text}" if text else ""


def played(lines: list[str], folder: Path) -> str:
    """The transcript of these command lines, run one after the other in the folder."""
    out = []
    for line in lines:
        result = run(*shlex.split(line), cwd=folder)
        said = section("stdout", stable(result.out, folder)) + section(
            "stderr", stable(result.err, folder)
        )
        out.append(f"$ migrate {line}\n{said}--- exit {result.exit}\n")
    return "\n".join(out)


def first_migration(folder: Path) -> list[str]:
    half = list(mixtral(layers=3, experts=2).items())
    shards(folder / "old", [dict(half[::2]), dict(half[1::2])])
    (folder / "old" / "config.json").write_text('{"model_type": "mixtral"}')
    (folder / "old" / "tokenizer.json").write_text("{}")
    (folder / "old" / "pytorch_model.bin").write_text("not carried")
    return [
        "inspect old",
        "plan old --to hf-mixtral@v5 -o plan.json",
        "apply plan.json -o new",
        "verify new --source old",
        "history new",
        "plan new --to latest --check",
        "apply new -o again --to latest",
        "plan new --downgrade",
        "downgrade new -o back",
        "diff back old",
        "diff new old",
        "history back",
        "downgrade back -o further",
    ]


def wrong_questions(folder: Path) -> list[str]:
    safetensors(folder / "old.safetensors", mixtral())
    safetensors(folder / "odd.safetensors", {"w": ("F32", [2])})
    (folder / "taken").mkdir()
    return [
        "plan old.safetensors",
        "plan old.safetensors --to hf-mixtrl@v5",
        "plan old.safetensors --to hf-mixtral@v6",
        "plan old.safetensors --to v6",
        "plan old.safetensors --to -1",
        "plan odd.safetensors --to hf-mixtral@v5",
        "plan odd.safetensors --to latest",
        "plan nowhere --to latest",
        "plan old.safetensors --to te-grouped-weight@single",
        "apply old.safetensors --to v5",
        "apply old.safetensors -o taken --to v5",
        "apply old.safetensors -o old.safetensors --to v5",
        "apply old.safetensors -o new --to v5 --set experts",
        "apply old.safetensors -o new --to v5 --set num_expert=2",
        "apply old.safetensors -o new --to v5 --set num_experts=x",
        "apply old.safetensors -o new --to v5 --max-shard-size 5parsecs",
        "apply old.safetensors -o new --to v5 --allow everything",
        "downgrade old.safetensors -o new",
        "downgrade old.safetensors -o new --to v5",
        "verify old.safetensors --source odd.safetensors",
        "history --lineage hf-mixtrall",
        "aply old.safetensors",
        "inspect nowhere --format json",
    ]


def wrong_rules(folder: Path) -> list[str]:
    safetensors(folder / "in.safetensors", {"a.0.w": ("F32", [2]), "a.1.w": ("F32", [2])})
    rules(
        folder,
        "rules:\n  - name: r\n    from: 'a.{i:int}.w'\n    to: 'b.{j}'\n    via: [{stak: {over: "
        "i}}]\n",
        "typo.yaml",
    )
    rules(
        folder,
        "rules:\n  - {name: r, form: a, to: b}\n  - {name: r, from: 'a.{i', to: b}\n",
        "several.yaml",
    )
    rules(folder, "keep: &x ['{k...}']\nrules: []\nrules: []\n", "strict.yaml")
    rules(folder, "rules:\n  - {name: r, from: {p...}.w, to: b}\n", "unquoted.yaml")
    return [
        "plan in.safetensors --rules typo.yaml",
        "plan in.safetensors --rules several.yaml --rules strict.yaml",
        "plan in.safetensors --rules unquoted.yaml",
        "plan in.safetensors --rules missing.yaml",
    ]


def wrong_checkpoints(folder: Path) -> list[str]:
    stacked = (
        "rules:\n  - name: fuse\n    from: 'e.{i:int}.w'\n    to: w\n    via: [{stack: "
        "{over: i}}]\n"
    )
    rules(folder, stacked, "stack.yaml")
    rules(folder, "rules:\n  - {name: q, from: 'm.attn.{w}.weight', to: 'n.{w}'}\n", "near.yaml")
    rules(
        folder,
        "rules:\n  - {name: p, from: 'm.{w}.b', to: 'n.{w}'}\n  - {name: q, from: '{m}.q.b', to: "
        "'o.{m}'}\n",
        "two.yaml",
    )
    rules(
        folder,
        "rules:\n  - {name: gone, from: 'e.{i:int}.w', via: [{drop: {why: nobody reads it}}]}\n",
        "drop.yaml",
    )
    safetensors(folder / "gap.safetensors", {f"e.{i}.w": ("F32", [2]) for i in (0, 1, 3)})
    safetensors(
        folder / "shapes.safetensors", {f"e.{i}.w": ("F32", [3 if i == 4 else 2]) for i in range(6)}
    )
    safetensors(
        folder / "dtypes.safetensors",
        {f"e.{i}.w": ("F16" if i == 1 else "F32", [2]) for i in range(3)},
    )
    safetensors(
        folder / "stray.safetensors",
        {"m.attn.q.weight": ("F32", [2]), "m.atn.k.weight": ("F32", [2])},
    )
    safetensors(folder / "both.safetensors", {"m.q.b": ("F32", [2])})
    shards(folder / "missing", [{f"k{i}": ("U8", [1])} for i in range(3)])
    (folder / "missing" / "model-00001-of-00003.safetensors").unlink()
    (folder / "missing" / "model-00003-of-00003.safetensors").unlink()
    (folder / "short.safetensors").write_bytes((folder / "gap.safetensors").read_bytes()[:-3])
    return [
        "plan gap.safetensors --rules stack.yaml",
        "plan shapes.safetensors --rules stack.yaml",
        "plan dtypes.safetensors --rules stack.yaml",
        "plan stray.safetensors --rules near.yaml",
        "plan both.safetensors --rules two.yaml",
        "plan gap.safetensors --rules drop.yaml",
        "inspect missing",
        "inspect short.safetensors",
    ]


def losses_and_ways_back(folder: Path) -> list[str]:
    text = (
        "params: {rows: {type: int, default: 4}}\n"
        "keep: [norm.weight]\n"
        "rules:\n"
        "  - {name: one, from: 'e.{i:int}.w', to: w, via: [{same: {over: i}}]}\n"
        "  - {name: cut, from: padded, to: cut, via: [{slice: {dim: 0, start: 0, stop: $rows, of: "
        "6, value: 0}}]}\n"
        "  - {name: gone, from: 'cache.{k...}', via: [{drop: {why: made again when the model is "
        "built}}]}\n"
        "  - {name: qkv, from: qkv, to: '{w:q|k|v}', via: [{split: {into: w, dim: 0}}]}\n"
    )
    rules(folder, text, "change.yaml")
    tensors = {f"e.{i}.w": ("F32", [2], content("e", 8)) for i in range(3)}
    more = {
        "padded": ("F32", [6], bytes(24)),
        "cache.a.b": ("U8", [3]),
        "cache.c": ("U8", [3]),
        "qkv": ("F32", [6, 2]),
        "norm.weight": ("F32", [2]),
    }
    safetensors(folder / "in.safetensors", {**tensors, **more})
    safetensors(
        folder / "unequal.safetensors", {**tensors, "e.1.w": ("F32", [2], bytes(8)), **more}
    )
    return [
        "plan in.safetensors --rules change.yaml",
        "plan in.safetensors --rules change.yaml --allow drop",
        "apply in.safetensors -o out.safetensors --rules change.yaml --allow drop",
        "verify out.safetensors --source in.safetensors --rules change.yaml",
        "apply unequal.safetensors -o bad.safetensors --rules change.yaml --allow drop",
        "downgrade out.safetensors -o back.safetensors --rules change.yaml",
    ]


def grouped_linear(folder: Path) -> list[str]:
    tensors = {f"fc.weight{i}": ("BF16", [4, 2]) for i in range(3)} | {
        f"fc.bias{i}": ("BF16", [4]) for i in range(3)
    }
    safetensors(folder / "multi.safetensors", {**tensors, "norm.weight": ("BF16", [4])})
    question = "--to te-grouped-weight@single --to te-grouped-bias@single"
    return [
        "inspect multi.safetensors",
        f"plan multi.safetensors {question}",
        f"plan multi.safetensors {question} --set modules=fc --set gemms=4",
        f"plan multi.safetensors {question} --set modules=fc",
        f"apply multi.safetensors -o single.safetensors {question} --set modules=fc",
        "inspect single.safetensors",
    ]


def help_texts(folder: Path) -> list[str]:
    commands = (
        "inspect",
        "plan",
        "apply",
        "downgrade",
        "verify",
        "diff",
        "history",
        "test",
        "lint",
        "schema",
        "explain",
        "packs",
    )
    return ["--help", *(f"{c} --help" for c in commands), "history"]


SCENES: list[Callable[[Path], list[str]]] = [
    first_migration,
    wrong_questions,
    wrong_rules,
    wrong_checkpoints,
    losses_and_ways_back,
    grouped_linear,
    help_texts,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__.replace("_", "-"))
def test_a_user_reads_what_the_transcript_says(
    scene: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = played(scene(tmp_path), tmp_path)
    golden = GOLDEN / f"{scene.__name__.replace('_', '-')}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_no_transcript_is_left_over() -> None:
    assert {p.stem for p in GOLDEN.glob("*.txt")} == {
        scene.__name__.replace("_", "-") for scene in SCENES
    }
