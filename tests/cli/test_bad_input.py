"""Bad input end to end: the documented exit status, a diagnostic that names the culprit, the source
untouched, nothing left.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import Result, fingerprint, length, mixtral, rules, run, safetensors, shards
from disks import mounted

TWO = {"a": ("F32", [2]), "b": ("F32", [2])}
KEEP = "keep: ['{k...}']\nrules: [{name: r, from: a, to: c, optional: true}]\n"


def everything(folder: Path) -> dict[str, str]:
    """All that lies in a folder, links by where they point."""
    found = {
        str(p): str(os.readlink(p)) if p.is_symlink() else "dir"
        for p in folder.rglob("*")
        if p.is_symlink() or p.is_dir()
    }
    return {**fingerprint(folder), **found}


def refused(
    source: Path, *question: object, status: int, code: str, said: str | list[str], out: str = "out"
) -> Result:
    """`apply` refuses with this status, code and words; nothing in the folder has changed."""
    folder = source.parent
    before = everything(folder)
    result = run("apply", source, "-o", folder / out, *question, "--format", "json")
    assert result.exit == status, result.out + result.err
    assert code in result.codes
    text = json.dumps(result.json, ensure_ascii=False)
    for word in [said] if isinstance(said, str) else said:
        assert word in text, (word, text)
    assert everything(folder) == before
    return result


def raw(path: Path, header: bytes, data: bytes = b"", n: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if n is None else n) + header + data)
    return path


def entry(start: int, stop: int, shape: list[int] | None = None) -> str:
    return json.dumps(
        {
            "dtype": "U8",
            "shape": [stop - start] if shape is None else shape,
            "data_offsets": [start, stop],
        }
    )


# ---- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        pytest.param(f'{{"a":{entry(0, 4)},"b":{entry(2, 6)}}}', 6, "b", id="overlapping tensors"),
        pytest.param(f'{{"a":{entry(0, 4)},"a":{entry(4, 8)}}}', 8, "a", id="duplicate keys"),
        pytest.param(
            '{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
            4,
            "dtype",
            id="duplicate fields",
        ),
        pytest.param(f'{{"a":{entry(0, 400)}}}', 4, "a", id="offsets past the end"),
        pytest.param(f'{{"a":{entry(0, 4, [9])}}}', 4, "a", id="shape and offsets disagree"),
        pytest.param(f'{{"a":{entry(0, 4)}', 4, "in.safetensors", id="JSON cut short"),
        pytest.param("[]", 0, "in.safetensors", id="no object"),
        pytest.param(
            '{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}', 4, "F33", id="unknown dtype"
        ),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, header: str, data: int, said: str) -> None:
    source = raw(tmp_path / "in.safetensors", header.encode(), bytes(data))
    refused(
        source,
        "--rules",
        rules(tmp_path, KEEP),
        status=3,
        code="M906",
        said=[said, "in.safetensors"],
    )


@pytest.mark.parametrize("kept", [0, 4, 8, 40])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    source = safetensors(tmp_path / "in.safetensors", TWO)
    source.write_bytes(source.read_bytes()[:kept])
    refused(source, "--rules", rules(tmp_path, KEEP), status=3, code="M906", said="in.safetensors")


def test_a_file_without_its_last_byte_is_refused(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", TWO)
    source.write_bytes(source.read_bytes()[:-1])
    refused(source, "--rules", rules(tmp_path, KEEP), status=3, code="M906", said="in.safetensors")


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    source = raw(tmp_path / "in.safetensors", b"{}", n=1 << 60)
    refused(source, "--rules", rules(tmp_path, KEEP), status=3, code="M914", said="in.safetensors")


# ---- folders -------------------------------------------------------------------------------------


def edit_index(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/hostname", "sub/../../outside.safetensors"]
)
def test_an_index_that_names_files_outside_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = shards(tmp_path / "ckpt", [{"a": ("F32", [2])}, {"b": ("F32", [2])}])
    safetensors(tmp_path / "outside.safetensors", {"b": ("F32", [2])})
    edit_index(folder, lambda d: d["weight_map"].update(b=name))
    refused(
        folder, "--rules", rules(tmp_path, KEEP), status=3, code="M907", said=os.path.basename(name)
    )


def test_a_link_out_of_the_folder_is_refused_unless_allowed(tmp_path: Path) -> None:
    folder = shards(tmp_path / "ckpt", [{"a": ("F32", [2])}, {"b": ("F32", [2])}])
    second = folder / "model-00002-of-00002.safetensors"
    shutil.move(second, tmp_path / "elsewhere.safetensors")
    second.symlink_to(tmp_path / "elsewhere.safetensors")
    rule = rules(tmp_path, KEEP)
    refused(
        folder,
        "--rules",
        rule,
        status=3,
        code="M907",
        said=["model-00002-of-00002.safetensors", "--allow links"],
    )
    assert (
        run("apply", folder, "-o", tmp_path / "new", "--rules", rule, "--allow", "links").exit == 0
    )


def test_all_missing_shards_are_named_at_once(tmp_path: Path) -> None:
    folder = shards(tmp_path / "ckpt", [{f"k{i}": ("U8", [1])} for i in range(4)])
    (folder / "model-00002-of-00004.safetensors").unlink()
    (folder / "model-00004-of-00004.safetensors").unlink()
    rule = rules(tmp_path, KEEP)
    refused(
        folder,
        "--rules",
        rule,
        status=3,
        code="M908",
        said=["model-00002-of-00004.safetensors", "model-00004-of-00004.safetensors"],
    )


def test_an_index_with_duplicate_keys_is_refused(tmp_path: Path) -> None:
    folder = shards(tmp_path / "ckpt", [{"a": ("F32", [2])}])
    name = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors.index.json").write_text(
        f'{{"weight_map": {{"a": "{name}", "a": "{name}"}}}}'
    )
    result = refused(
        folder, "--rules", rules(tmp_path, KEEP), status=3, code="M906", said="index.json"
    )
    assert result.json["diagnostics"][0]["message"].endswith(": a")


def test_an_index_that_says_another_file_than_the_key_stands_in_is_refused(tmp_path: Path) -> None:
    folder = shards(tmp_path / "ckpt", [{"a": ("F32", [2])}, {"b": ("F32", [2])}])
    edit_index(folder, lambda d: d["weight_map"].update(b="model-00001-of-00002.safetensors"))
    refused(folder, "--rules", rules(tmp_path, KEEP), status=3, code="M915", said="b")


# ---- rule files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        pytest.param("keep: &k ['{k...}']\nrules: []\n", "M105", id="anchor"),
        pytest.param("rules: *r\n", "M110", id="alias, or an unquoted pattern"),
        pytest.param("keep: !!python/object/apply:os.system ['id']\nrules: []\n", "M105", id="tag"),
        pytest.param("<<: {title: x}\nrules: []\n", "M105", id="merge key"),
        pytest.param("keep: ['{k...}']\nkeep: ['{k...}']\nrules: []\n", "M104", id="duplicate key"),
        pytest.param("rules: " + "[" * 5000 + "]" * 5000 + "\n", "M109", id="depth"),
        pytest.param("rules: [{name: r, from: {a}, to: b}]\n", "M106", id="unquoted capture"),
        pytest.param("rules: [{name: r, from: a, to: 'b\n", "M108", id="syntax"),
        pytest.param("rules: [{name: r, from: '{x}', to: b}]\n", "M204", id="leftover capture"),
        pytest.param("rules: [{name: r, from: a, to: '{x}'}]\n", "M203", id="undefined capture"),
    ],
)
def test_a_bad_rule_file_is_refused_with_line_and_caret(
    tmp_path: Path, text: str, code: str
) -> None:
    source = safetensors(tmp_path / "in.safetensors", TWO)
    rule = rules(tmp_path, text)
    result = refused(source, "--rules", rule, status=2, code=code, said="rules.yaml")
    found = next(d for d in result.json["diagnostics"] if d["code"] == code)
    assert found["spans"][0]["line"] >= 5
    rendered = run("plan", source, "--rules", rule).err
    assert f"--> {rule}:{found['spans'][0]['line']}:" in rendered
    assert "^" in rendered


# ---- rules and checkpoint ------------------------------------------------------------------------

STACK = "rules: [{name: fuse, from: 'e.{i:int}.w', to: w, via: [{stack: {over: i}}]}]\n"


@pytest.mark.parametrize(
    ("tensors", "text", "code", "said"),
    [
        pytest.param(
            {f"e.{i}.w": ("F32", [2]) for i in (0, 1, 3)},
            STACK,
            "M207",
            ["{i} = 2", "fuse"],
            id="gap",
        ),
        pytest.param(
            {f"e.{i}.w": ("F32", [2]) for i in (1, 2)},
            STACK,
            "M207",
            ["{i} = 0"],
            id="does not start at 0",
        ),
        pytest.param(
            {f"e.{i}.w": ("F32", [3 if i in (2, 5) else 2]) for i in range(6)},
            STACK,
            "M301",
            ["e.2.w", "e.5.w"],
            id="unequal shapes",
        ),
        pytest.param(
            {f"e.{i}.w": ("F16" if i == 1 else "F32", [2]) for i in range(3)},
            STACK,
            "M303",
            ["e.1.w"],
            id="dtype mismatch",
        ),
        pytest.param(
            {"x.one": ("F32", [2])},
            "rules: [{name: p, from: 'x.{a}', to: 'y.{a}'}, {name: q, from: '{b}.one', to: "
            "'{b}.two'}]\n",
            "M208",
            ["x.one", "p", "q"],
            id="two rules for one key",
        ),
        pytest.param(
            {"x.x.w": ("F32", [2])},
            "rules: [{name: r, from: '{a...}.x.{b...}.w', to: '{a}.y.{b}.w'}]\n",
            "M202",
            ["x.x.w"],
            id="two readings",
        ),
        pytest.param(
            {"m.attn.q.weight": ("F32", [2]), "m.atn.k.weight": ("F32", [2])},
            "rules: [{name: r, from: 'm.attn.{w}.weight', to: 'n.{w}'}]\n",
            "M211",
            ["m.atn.k.weight", "m.attn.{w}.weight", "atn"],
            id="unmatched key",
        ),
        pytest.param(
            {"a": ("F32", [2]), "b": ("F32", [2])},
            "rules: [{name: p, from: a, to: c}, {name: q, from: b, to: c}]\n",
            "M212",
            ["c", "p", "q"],
            id="two writers",
        ),
        pytest.param(
            TWO,
            "keep: ['{k...}']\nrules: [{name: lost, from: z, to: y}]\n",
            "M206",
            ["lost"],
            id="rule matches nothing",
        ),
        pytest.param(
            TWO,
            "keep: [b]\nrules: [{name: gone, from: a, via: [{drop: {why: unused}}]}]\n",
            "M402",
            ["gone", "unused"],
            id="drop",
        ),
    ],
)
def test_what_rules_and_checkpoint_do_not_agree_on_is_named(
    tmp_path: Path, tensors: dict, text: str, code: str, said: list[str]
) -> None:
    source = safetensors(tmp_path / "in.safetensors", tensors)
    refused(source, "--rules", rules(tmp_path, text), status=3, code=code, said=said)


def test_all_problems_of_a_checkpoint_come_at_once(tmp_path: Path) -> None:
    tensors = (
        {f"e.{i}.w": ("F32", [2]) for i in (0, 2)}
        | {f"g.{i}.w": ("F32", [i + 1]) for i in range(2)}
        | {"stray": ("U8", [1])}
    )
    text = (
        "rules:\n"
        "  - {name: e, from: 'e.{i:int}.w', to: e, via: [{stack: {over: i}}]}\n"
        "  - {name: g, from: 'g.{i:int}.w', to: g, via: [{stack: {over: i}}]}\n"
    )
    source = safetensors(tmp_path / "in.safetensors", tensors)
    result = refused(
        source, "--rules", rules(tmp_path, text), status=3, code="M211", said=["stray"]
    )
    assert {"M207", "M301", "M211"} <= set(result.codes)


def test_control_characters_of_a_key_do_not_reach_the_terminal(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", {"a\x1b[31m\u202e": ("U8", [1])})
    for arguments in (
        ["inspect", source],
        ["plan", source, "--rules", rules(tmp_path, KEEP.replace("{k...}", "b"))],
    ):
        result = run(*arguments)
        assert "\x1b" not in result.out + result.err
        assert "\u202e" not in result.out + result.err


# ---- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "full folder", "empty folder", "dangling link"])
def test_an_existing_output_is_never_replaced(tmp_path: Path, kind: str) -> None:
    source, rule = safetensors(tmp_path / "in.safetensors", TWO), rules(tmp_path, KEEP)
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "dangling link":
        out.symlink_to("nowhere")
    else:
        out.mkdir()
        if kind == "full folder":
            (out / "mine").write_text("mine")
    refused(source, "--rules", rule, status=2, code="M904", said=str(out))


def test_an_output_inside_the_source_is_refused(tmp_path: Path) -> None:
    folder = shards(tmp_path / "ckpt", [TWO])
    rule = rules(tmp_path, KEEP)
    for out in ("ckpt/new", "ckpt", "ckpt/../ckpt/new.safetensors"):
        refused(folder, "--rules", rule, status=2, code="M904", said="ckpt", out=out)
    (tmp_path / "link").symlink_to("ckpt")
    refused(folder, "--rules", rule, status=2, code="M904", said="ckpt", out="link/new")


def test_an_output_in_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    source, rule = safetensors(tmp_path / "in.safetensors", TWO), rules(tmp_path, KEEP)
    result = run(
        "apply", source, "-o", tmp_path / "no" / "out", "--rules", rule, "--format", "json"
    )
    assert result.exit in (2, 4)
    assert str(tmp_path / "no") in result.out


@pytest.mark.parametrize("size", ["x", "-1", "0", "5QB", "1e3"])
def test_a_size_that_is_none_is_refused(tmp_path: Path, size: str) -> None:
    source, rule = safetensors(tmp_path / "in.safetensors", TWO), rules(tmp_path, KEEP)
    refused(source, "--rules", rule, "--max-shard-size", size, status=2, code="M115", said=size)


def after(monkeypatch: pytest.MonkeyPatch, step: str, action: Callable[[], object]) -> None:
    """Lets something happen right after a step of publishing: `allocate` is before the first byte,
    `check` after the last.
    """
    from migrate.running.publish import Partial

    original = getattr(Partial, step)

    def stepped(*arguments: object, **keywords: object) -> None:
        original(*arguments, **keywords)
        action()

    monkeypatch.setattr(Partial, step, stepped)


# ---- while it runs -------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 1 MB."""
    with mounted(tmp_path / "disk", "1m", lazily=True) as disk:
        yield disk


def test_a_full_disk_is_seen_before_the_first_byte(tmp_path: Path, small_disk: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", {"a": ("U8", [3 << 20])}, holes=True)
    before = fingerprint(source)
    result = run(
        "apply",
        source,
        "-o",
        small_disk / "out.safetensors",
        "--rules",
        rules(tmp_path, KEEP),
        "--format",
        "json",
    )
    assert (result.exit, result.codes) == (4, ["M909"])
    assert list(small_disk.iterdir()) == []
    assert fingerprint(source) == before
    fits = safetensors(tmp_path / "fits.safetensors", {"a": ("U8", [1 << 19])})
    assert (
        run(
            "apply", fits, "-o", small_disk / "out.safetensors", "--rules", tmp_path / "rules.yaml"
        ).exit
        == 0
    )


def test_a_disk_that_fills_up_after_the_look_is_seen_when_files_are_allocated(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rule = (
        safetensors(tmp_path / "in.safetensors", {"a": ("U8", [1 << 19])}),
        rules(tmp_path, KEEP),
    )
    filler = small_disk / "filler"
    with monkeypatch.context() as patched:
        after(patched, "require", lambda: filler.write_bytes(bytes(3 << 18)))
        result = run(
            "apply",
            source,
            "-o",
            small_disk / "out.safetensors",
            "--rules",
            rule,
            "--format",
            "json",
        )
    assert (result.exit, result.codes) == (4, ["M909"])
    assert list(small_disk.iterdir()) == [filler]
    filler.unlink()
    assert run("apply", source, "-o", small_disk / "out.safetensors", "--rules", rule).exit == 0


def test_a_source_cut_short_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"a.{i}": ("U8", [1 << 20]) for i in range(8)}
    source = safetensors(tmp_path / "in.safetensors", tensors, holes=True)
    rule = rules(tmp_path, "rules: [{name: r, from: 'a.{i:int}', to: 'b.{i}'}]\n")
    after(monkeypatch, "allocate", lambda: os.truncate(source, source.stat().st_size - (3 << 20)))
    result = run(
        "apply", source, "-o", tmp_path / "out.safetensors", "--rules", rule, "--format", "json"
    )
    assert (result.exit, result.codes) == (3, ["M905"])
    assert "in.safetensors" in result.out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.safetensors", "rules.yaml"]


def test_a_source_written_to_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = safetensors(tmp_path / "in.safetensors", mixtral())

    def write() -> None:
        with source.open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"xx")
        os.utime(source, ns=(1, 1))

    after(monkeypatch, "allocate", write)
    result = run(
        "apply", source, "-o", tmp_path / "new", "--to", "hf-mixtral@v5", "--format", "json"
    )
    assert (result.exit, result.codes) == (3, ["M905"])
    assert "in.safetensors" in result.out
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


def test_a_source_replaced_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path / "ckpt", [{"a": ("F32", [2])}, {"b": ("F32", [2])}])
    file = folder / "model-00002-of-00002.safetensors"

    def replace() -> None:
        os.replace(safetensors(folder / "x", {"b": ("F32", [2], bytes(length("F32", [2])))}), file)

    after(monkeypatch, "allocate", replace)
    result = run(
        "apply",
        folder,
        "-o",
        tmp_path / "out",
        "--rules",
        rules(tmp_path, KEEP),
        "--format",
        "json",
    )
    assert (result.exit, result.codes) == (3, ["M905"])
    assert file.name in result.out
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.migrate-partial").exists()


def test_a_target_that_appears_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rule = safetensors(tmp_path / "in.safetensors", TWO), rules(tmp_path, KEEP)
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        after(patched, "check", out.mkdir)
        result = run("apply", source, "-o", out, "--rules", rule, "--format", "json")
    assert (result.exit, result.codes) == (2, ["M904"])
    assert list(out.iterdir()) == []
    out.rmdir()
    assert run("apply", source, "-o", out, "--rules", rule, "--resume").exit == 0


def test_a_partial_of_another_plan_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rule = safetensors(tmp_path / "in.safetensors", TWO), rules(tmp_path, KEEP)

    def stop() -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        after(patched, "check", stop)
        assert run("apply", source, "-o", tmp_path / "out", "--rules", rule).exit == 4
    other = rules(tmp_path, KEEP.replace("to: c", "to: d"), "other.yaml")
    result = run(
        "apply", source, "-o", tmp_path / "out", "--rules", other, "--resume", "--format", "json"
    )
    assert (result.exit, result.codes) == (2, ["M918"])
    assert run("apply", source, "-o", tmp_path / "out", "--rules", rule, "--resume").exit == 0
