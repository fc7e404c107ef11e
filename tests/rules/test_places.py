"""Which side files, and which places in them, a rule file may name; what is refused is refused
where it stands.
"""

from __future__ import annotations

import re

import pytest
from rule_text import load_text

from migrate.core.errors import QuestionError
from migrate.rules import fields
from migrate.rules.fields import fits
from migrate.source.paths import (
    CACHES,
    HISTORY,
    ITEMS,
    MAX_DEPTH,
    METADATA,
    PARTIAL,
    WEIGHT_SUFFIXES,
    stays_behind,
)

HEAD = "id: a/b\ntitle: t\nlineage: l\nedge: [v1, v2]\n"
FINE = [
    "config.json",
    "a/b/c/config.json",
    ".gitattributes",
    "é.json",
    "x" * 255,
    "a b.json",
    "bin",
    "ckpt.json",
    "...",
]
BELOW = [
    "migrate.items.json",
    "text/migrate.history.json",
    ".metadata",
    "model.bin",
    "M.SafeTensors",
    "a.index.json",
    "x.c\u212apt",
    ".git/x",
    "__pycache__/x.json",
    "Cache/x.json",
    "out.migrate-partial",
    "out.migrate-partial/x",
    "a/b/c/d/x.json",
    "a#b.json",
    "a/.b/c",
]
NO_PATH = [
    "",
    ".",
    "..",
    "/x",
    "//x",
    "../x",
    "a/../x",
    "./x",
    "a/.",
    "a//b",
    "a/",
    "a\\b",
    "a\nb",
    "a\u200bb",
    "x" * 256,
]


def refused(body: str) -> tuple[str, str, str]:
    """Code, message, and the text under the caret."""
    with pytest.raises(QuestionError) as caught:
        load_text(HEAD + body, "r.yaml")
    (found,) = caught.value.diagnostics
    span = found.spans[0]
    return found.code, found.message, span.text[span.column - 1 : span.column - 1 + span.length]


def quoted(text: str) -> str:
    return (
        '"'
        + "".join(c if 32 <= ord(c) < 127 and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
        + '"'
    )


@pytest.mark.parametrize("path", FINE)
def test_a_path_below_the_checkpoint_may_be_patched_read_and_renamed_in(path: str) -> None:
    name = quoted(path)[1:-1]
    loaded = load_text(
        HEAD + f'files: {{"{name}": {{a: 1}}}}\nnames: ["{name}#a.b"]\nparams: {{n: {{type: int, '
        f'config: "{name}#a"}}}}\n',
        "r",
    )
    assert list(loaded.model.files) == [path]
    assert loaded.model.names == (f"{path}#a.b",)


@pytest.mark.parametrize(
    ("path", "words"),
    [(p, "") for p in NO_PATH] + [(p, "not a side file") for p in BELOW if "#" not in p],
)
def test_what_is_no_side_file_is_refused_at_its_key(path: str, words: str) -> None:
    code, message, text = refused(f"files: {{{quoted(path)}: {{a: 1}}}}\n")
    assert (code, text) == ("M114", quoted(path))
    assert (words or "is not a path below the checkpoint") in message


@pytest.mark.parametrize("path", [*NO_PATH, *BELOW])
def test_a_reference_into_what_is_no_side_file_is_refused_where_it_stands(path: str) -> None:
    reference = quoted(f"{path}#a.b")
    assert refused(f"names: [{reference}]\n")[::2] == ("M114", reference)
    assert refused(f"params: {{n: {{type: int, config: {reference}}}}}\n")[::2] == (
        "M114",
        reference,
    )


@pytest.mark.parametrize("keys", ["", ".a", "a.", "a..b", "a\x07"])
def test_a_place_is_made_of_names_with_single_dots_between(keys: str) -> None:
    assert refused(f"names: [{quoted('c.json#' + keys)}]\n")[0] == "M114"
    assert refused(f"params: {{n: {{type: int, config: {quoted(keys)}}}}}\n")[0] == "M114"


def test_a_list_of_names_stands_in_a_file_that_is_named() -> None:
    assert refused("names: [a.b]\n")[0] == "M114"
    load_text(HEAD + "params: {n: {type: int, config: a.b}}\n", "r")


@pytest.mark.parametrize("path", ["migrate.items.json", "../x.json", "model.safetensors"])
def test_the_side_files_of_a_test_are_such_as_a_run_can_meet(path: str) -> None:
    text = (
        "rules: [{{name: r, from: a, to: b}}]\ntests: [{{name: t, given: {{a: {{shape: "
        "[1]}}}}, {}, expect: {{b: {{}}}}}}]\n"
    )
    for field in ("side", "expect_side"):
        assert refused(text.format(f"{field}: {{{path}: {{a: 1}}}}"))[::2] == ("M114", path)


def test_the_pattern_leaves_out_what_a_migration_leaves_behind() -> None:
    names = [*(f"x{suffix}" for suffix in WEIGHT_SUFFIXES), METADATA, HISTORY, ITEMS]
    for name in [*names, *(n.upper() for n in names if n not in (METADATA, HISTORY, ITEMS))]:
        assert not fits(fields.PATH, name), name
        assert not fits(fields.PATH, f"a/{name}"), name
        assert name in (HISTORY, ITEMS) or stays_behind(name)
    for folder in (*CACHES, ".x", f"x{PARTIAL}"):
        assert not fits(fields.PATH, f"{folder.upper()}/x"), folder
        assert stays_behind(folder.upper(), folder=True)
    assert fits(fields.PATH, "a/" * MAX_DEPTH + "x")
    assert not fits(fields.PATH, "a/" * (MAX_DEPTH + 1) + "x")


def test_the_patterns_are_read_alike_by_other_engines() -> None:
    for schema in (fields.PATH, fields.PLACE, fields.LIST):
        assert not re.search(r"\\[-AZpP]|\(\?[^:!=]", schema["pattern"])
