"""The contract of every command: stdout is the answer, stderr the rest, and each JSON document says
what it is and fits its schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from commandline import (
    DATA,
    ROOT,
    Result,
    content,
    contents,
    done,
    mixtral,
    rules,
    run,
    safetensors,
)

from migrate.rules import schema

HUB = DATA / "mixtral__v4" / "hub"
SCHEMAS = {
    path.name.removesuffix(".schema.json"): json.loads(path.read_text())
    for path in (ROOT / "schemas").glob("*.schema.json")
}
KINDS = schema.document_kinds()


def check(document: Any, kind: str) -> Any:
    """The document, which must begin by saying what it is and fit its schema."""
    assert list(document)[:2] == ["format_version", "kind"]
    assert document["kind"] == kind
    jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(document)
    return document


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_is_valid_and_closed(kind: str) -> None:
    schema = SCHEMAS[kind]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["kind"] == {"const": kind}
    assert schema["additionalProperties"] is False


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and what it was migrated into."""
    folder = tmp_path_factory.mktemp("pair")
    old = safetensors(folder / "old.safetensors", mixtral())
    done("apply", old, "-o", folder / "new.safetensors", "--to", "hf-mixtral@v5")
    return old, folder / "new.safetensors"


def both(*arguments: object, exit: int = 0) -> tuple[Result, Any]:
    """The command as text and as JSON."""
    return done(*arguments, exit=exit), done(*arguments, "--format", "json", exit=exit).json


def test_inspect(pair: tuple[Path, Path]) -> None:
    old, _ = pair
    text, document = both("inspect", old)
    check(document, "inspection")
    assert document["layouts"][0]["layout"] == "v4"
    assert sum(k["count"] for k in document["keys"]) == document["tensors"] == len(mixtral())
    assert text.err == ""
    assert "hf-mixtral@v4" in text.out
    every = done("inspect", old, "--all", "--format=json").json
    assert [k["keys"] for k in check(every, "inspection")["keys"]] == list(mixtral())


def test_plan(pair: tuple[Path, Path], tmp_path: Path) -> None:
    old, _ = pair
    text, document = both("plan", old, "--to", "hf-mixtral@v5")
    check(document, "plan")
    assert text.err == ""
    saved = done("plan", old, "--to", "hf-mixtral@v5", "-o", tmp_path / "plan.json")
    assert saved.out.split("peak memory")[0] == text.out.split("peak memory")[0]
    assert f"migrate apply {tmp_path / 'plan.json'}" in saved.err
    written = check(json.loads((tmp_path / "plan.json").read_text()), "plan")
    assert written["digest"] == document["digest"]
    piped = done("plan", old, "--to", "hf-mixtral@v5", "-o", "-")
    assert check(piped.json, "plan")["digest"] == document["digest"]


def test_apply_and_downgrade(pair: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = pair
    result = done("apply", old, "-o", tmp_path / "new", "--to", "hf-mixtral@v5", "--format", "json")
    document = check(result.json, "published")
    assert document["steps"] == [
        {"lineage": "hf-mixtral", "from": "v4", "to": "v5", "backwards": False}
    ]
    assert set(document["files"]) == {"model.safetensors"}
    check(
        done(
            "apply", new, "-o", tmp_path / "x", "--to", "hf-mixtral@v5", "--format", "json", exit=1
        ).json,
        "published",
    )
    check(done("downgrade", new, "-o", tmp_path / "back", "--format", "json").json, "published")
    text = done("downgrade", new, "-o", tmp_path / "back2")
    assert text.out.startswith(f"published {tmp_path / 'back2'}")
    assert "migrate verify" in text.err
    quiet = done("downgrade", new, "-o", tmp_path / "back3", "-q")
    assert (quiet.out.count("\n"), quiet.err) == (1, "")


def test_a_file_hash_is_that_of_the_whole_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    import xxhash

    files = done(
        "apply",
        pair[0],
        "-o",
        tmp_path / "new",
        "--to",
        "hf-mixtral@v5",
        "--max-shard-size",
        "200B",
        "--format",
        "json",
    ).json["files"]
    assert len(files) > 3
    for name, entry in files.items():
        raw = (tmp_path / "new" / name).read_bytes()
        assert entry == {"size": len(raw), "xxh3_128": xxhash.xxh3_128_hexdigest(raw)}


def test_verify(pair: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = pair
    text, document = both("verify", new, "--source", old)
    assert check(document, "verification")["equal"] is True
    assert text.out.startswith("verified: ")
    raw = bytearray(new.read_bytes())
    raw[-1] ^= 1
    (tmp_path / "bad.safetensors").write_bytes(raw)
    text, document = both("verify", tmp_path / "bad.safetensors", "--source", old, exit=1)
    assert check(document, "verification")["equal"] is False
    changed = list(contents(new))[-1]
    assert [d["key"] for d in document["differences"]] == [changed]
    assert changed in text.out


@pytest.mark.heavy
def test_diff(tmp_path: Path) -> None:
    shared = {"same": ("F32", [4]), "kind": ("F32", [2])}
    changed = content("one", 16)
    one = safetensors(
        tmp_path / "a.safetensors", {**shared, "only.a": ("U8", [1]), "bits": ("F32", [4], changed)}
    )
    other = {
        **shared,
        "kind": ("BF16", [4]),
        "only.b": ("U8", [1]),
        "bits": ("F32", [4], changed[:12] + bytes(4)),
    }
    text, document = both("diff", one, safetensors(tmp_path / "b.safetensors", other), exit=1)
    check(document, "difference")
    assert (document["only_a"], document["only_b"]) == (["only.a"], ["only.b"])
    assert document["specs"] == [{"key": "kind", "a": "float32 [2]", "b": "bfloat16 [4]"}]
    assert [(d["key"], d["index"], d["count"]) for d in document["bytes_differ"]] == [
        ("bits", [3], 1)
    ]
    for said in ("only in A: only.a", "only in B: only.b", "kind", "bits"):
        assert said in text.out
    text, document = both("diff", one, one)
    assert check(document, "difference")["equal"] is True
    assert text.out.startswith("equal: ")


def test_history(pair: tuple[Path, Path]) -> None:
    old, new = pair
    check(done("history", old, "--format", "json").json, "history")
    check(done("history", new, "--format", "json").json, "history")
    check(done("history", "--format", "json").json, "lineages")
    only = check(done("history", "--lineage", "hf-mixtral", "--format", "json").json, "lineages")
    assert [lineage["name"] for lineage in only["lineages"]] == ["hf-mixtral"]
    with new.open("rb") as file:
        n = int.from_bytes(file.read(8), "little")
        stamp = json.loads(file.read(n))["__metadata__"]
    jsonschema.Draft202012Validator(SCHEMAS["history"]).validate(
        json.loads(next(v for v in stamp.values() if '"history"' in v))
    )


def test_a_plan_with_everything_in_it_fits_its_schema(tmp_path: Path) -> None:
    source = safetensors(
        tmp_path / "in.safetensors",
        {"a.0": ("F32", [2, 2]), "a.1": ("F32", [2, 2]), "b": ("F32", [6]), "c": ("U8", [1])},
    )
    rule = rules(
        tmp_path,
        "params: {n: {type: int, default: 2}, names: {type: list, items: str, optional: true}}\n"
        "rules:\n"
        "  - {name: one, from: 'a.{i:int}', to: a, via: [{stack: {over: i, count: $n}}]}\n"
        "  - {name: cut, from: b, to: bb, via: [{slice: {dim: 0, start: 0, stop: 4, of: 6, value: "
        "0}}]}\n"
        "  - {name: gone, from: c, via: [{drop: {why: nobody reads it}}]}\n"
        "  - {name: new, from: b, to: d, keep_source: true, via: [{fill: {value: 1, dtype: "
        "float32, shape: [2]}}]}\n",
    )
    document = done(
        "plan", source, "--rules", rule, "--allow", "drop", "--set", "names=x,y", "--format", "json"
    ).json
    check(document, "plan")
    assert {row["change"] for row in document["rows"]} == {
        "merged",
        "rearranged",
        "dropped",
        "added",
    }
    assert {loss["kind"] for loss in document["losses"]} == {"drop"}
    assert document["params"] == {"n": 2, "names": ["x", "y"]}
    assert document["downgrade"]["exact"] is False
    assert document["downgrade"]["because"]
    text = done("plan", source, "--rules", rule, "--allow", "drop").out
    assert "downgrade: not exact" in text
    assert "nobody reads it" in text
    assert f"{rule}:" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "nowhere"],
        ["plan", "nowhere", "--to", "latest"],
        ["apply", "nowhere", "-o", "out", "--to", "latest"],
        ["downgrade", "nowhere", "-o", "out"],
        ["verify", "nowhere", "--source", "nowhere"],
        ["diff", "nowhere", "nowhere"],
        ["history", "nowhere"],
        ["history", "--lineage", "nothing"],
        ["plan"],
        ["apply", "x", "-o", "y", "--set", "nothing"],
        ["apply", "x", "-o", "y", "--threads", "0"],
        ["unknown"],
    ],
)
def test_a_problem_is_a_document_on_stdout_or_text_on_stderr(
    tmp_path: Path, arguments: list[str]
) -> None:
    result = run(*arguments, "--format", "json", cwd=tmp_path)
    assert result.exit == 2
    assert check(result.json, "problems")["exit"] == 2
    assert result.err == ""
    text = run(*arguments, cwd=tmp_path)
    assert (text.exit, text.out) == (2, "")
    assert "rror" in text.err
    assert list(tmp_path.iterdir()) == []


def test_every_problem_of_all_rule_files_is_in_one_report(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", {"a": ("U8", [1])})
    one = rules(tmp_path, "rules: [{name: r, form: a, to: b}]\n", "one.yaml")
    two = rules(
        tmp_path,
        "rules: [{name: r, from: a, to: '{x}'}, {name: s, from: c, to: d, via: [{stak: {over: "
        "e}}]}]\n",
        "two.yaml",
    )
    result = run("plan", source, "--rules", one, "--rules", two, "--format", "json")
    found = check(result.json, "problems")["diagnostics"]
    assert result.exit == 2
    assert {Path(d["spans"][0]["file"]).name for d in found if d["spans"]} == {
        "one.yaml",
        "two.yaml",
    }
    assert {"M103", "M102"} <= {d["code"] for d in found}
    text = run("plan", source, "--rules", one, "--rules", two).err
    assert f"{len(found)} errors" in text
    assert "did you mean" in text
    assert "^" in text
