"""The schema and the loader agree on the form of what people write, whatever they write.

Rule files are changed at random. A change that the schema refuses must be refused when the file is read field by field;
a change that is refused there must be refused by the schema, unless the code is one that only the loader can give.
"""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from migrate.core.diagnostics import page
from migrate.core.errors import QuestionError
from migrate.rules import schema
from migrate.rules.fields import Model, found
from migrate.rules.layouts import LayoutsFile
from migrate.rules.model import RuleFile, load_text
from migrate.rules.requires import unmet
from migrate.source import yaml
from migrate.source.yaml import Plain

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = sorted((ROOT / "rules").rglob("layouts.yaml"))
RULES = sorted(p for p in (ROOT / "rules").rglob("*.yaml") if p.name != "layouts.yaml")
CASES = sorted((ROOT / "tests" / "data" / "cases").glob("*.yaml"))
RULE_FILE = jsonschema.Draft202012Validator(schema.rule_file())
LAYOUTS_FILE = jsonschema.Draft202012Validator(schema.layouts())

PLAIN_TEXT = """
5 0 -1 +5 007 2.10 1.0 -0.0 1e3 1e400 .5 5. .inf -.inf .nan 0x10 0o7 0b1 1_000 true True TRUE false no null ~ x e y dtype float32
half float33 iota drop flip tie stack keep skip error list int str bool $x $x+1 $ (1 v5 a.b a/b .a a. latest @1 config.json#a
>=0.1 2024-01-01
"""
PLAIN = PLAIN_TEXT.split()
QUOTED = [
    "", "5", "2.10", "true", "null", " ", " 1", "$x", "$x ", "$x * (2", "x y", "a\n", "a\nb", "\u200b", "é", "{a}", "{", "{a...}.w",
    "0, 1", ">=0.1\n", ">=0.1,<9", "float32", "M101", "int",
]  # fmt: skip
WORDS_TEXT = """
id title why lineage edge requires params keep files names rules tests name from to via map where when optional keep_source
if_exists inverse type items minimum maximum choices config shape default key dim dims shape dtype fill values slices same_as
given expect over into count start sizes only pattern axes size of value stop min max multiple_of remainder ndim weight too
nothing x $x é layouts ordered detect status message note present absent module_version v1 latest +1 0 0,1 error contains allow
side backwards codec
"""
WORDS = WORDS_TEXT.split()


def editor(node: Any) -> Any:
    """What a YAML 1.2 parser (core schema, section 10.3.2) makes of a document: written anew, apart from the loader's own."""
    if isinstance(node, dict):
        return {str(key): editor(value) for key, value in node.items()}
    if isinstance(node, list):
        return [editor(item) for item in node]
    if not isinstance(node, Plain):
        return node
    for pattern, read in (
        (r"null|Null|NULL|~|", lambda _: None),
        (r"true|True|TRUE", lambda _: True),
        (r"false|False|FALSE", lambda _: False),
        (r"[-+]?[0-9]+", lambda t: int(t, 10)),
        (r"0o[0-7]+", lambda t: int(t, 0)),
        (r"0x[0-9a-fA-F]+", lambda t: int(t, 0)),
        (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", float),
        (r"[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN", lambda t: float(t.replace(".", ""))),
    ):
        if re.fullmatch(pattern, node):
            return read(str(node))
    return str(node)


def refusals(model: type[Model], data: Any) -> set[str]:
    """The codes with which a document is refused while it is read field by field."""
    if not isinstance(data, dict):
        return {"M106"}
    if problem := unmet(data.get("requires")):
        return {problem.code}
    try:
        model.model_validate(data)
    except ValidationError as error:
        return {problem.code for _, problem in found(error, model)}
    return set()


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        node = node[step]
    return node


class Changer:
    """Random changes of rule files, the same ones for the same seed."""

    def __init__(self, seed: int, corpus: list[Any]) -> None:
        self.random = random.Random(seed)
        self.corpus = [(data, places(data)) for data in corpus]

    def scalar(self) -> Any:
        pick = self.random.random()
        return Plain(self.random.choice(PLAIN)) if pick < 0.7 else self.random.choice(QUOTED)

    def value(self, depth: int = 2) -> Any:
        pick = self.random.random()
        if pick < 0.55 or not depth:
            return self.scalar()
        if pick < 0.7:
            return [self.value(depth - 1) for _ in range(self.random.choice((0, 1, 1, 2, 3)))]
        if pick < 0.85:
            return {self.random.choice(WORDS): self.value(depth - 1) for _ in range(self.random.choice((0, 1, 1, 2)))}
        data, known = self.random.choice(self.corpus)
        return copy.deepcopy(at(data, self.random.choice(known)))

    def typo(self, word: str) -> str:
        where = self.random.randrange(len(word) + 1)
        return self.random.choice((word[:where] + "x" + word[where:], word[:where] + word[where + 1 :], word + " ", word.upper()))

    def change(self, data: Any) -> Any:
        """One change, somewhere below the root."""
        path = self.random.choice(places(data)[1:])
        parent, step = at(data, path[:-1]), path[-1]
        kind = self.random.choice(("delete", "value", "value", "value", "scalar", "scalar", "rename", "rename", "add", "repeat", "wrap"))
        if kind == "delete":
            del parent[step]
        elif kind == "value":
            parent[step] = self.value()
        elif kind == "scalar":
            old = parent[step]
            quoted = str(old) if isinstance(old, Plain) else Plain(old) if isinstance(old, str) else self.scalar()
            parent[step] = quoted if self.random.random() < 0.5 else self.scalar()
        elif kind == "rename" and isinstance(parent, dict):
            word = self.typo(step) if self.random.random() < 0.5 else self.random.choice(WORDS)
            parent[word] = parent.pop(step)
        elif kind == "add" and isinstance(parent, dict):
            parent[self.random.choice(WORDS)] = self.value()
        elif kind == "repeat" and isinstance(parent, list):
            parent.insert(step, copy.deepcopy(self.random.choice(parent)))
        elif kind == "wrap":
            parent[step] = [parent[step]] if self.random.random() < 0.5 else {self.random.choice(WORDS): parent[step]}


def read(path: Path) -> Any:
    return yaml.parse(path.read_text(), str(path)).data


def short(data: Any) -> Any:
    """A rule file with fewer examples: the first tensors of one test show as much as all of them."""
    for test in data.get("tests", [])[:1]:
        for side in ("given", "expect"):
            if isinstance(test.get(side), dict):
                test[side] = dict(list(test[side].items())[:3])
    return {**data, **({"tests": data["tests"][:1]} if "tests" in data else {})}


def disagreement(model: type[Model], validator: Any, data: Any) -> str:
    codes = refusals(model, data)
    fits = validator.is_valid(editor(data))
    if not fits and not codes:
        return f"the schema refuses what the loader takes: {jsonschema.exceptions.best_match(validator.iter_errors(editor(data)))}"
    if fits and codes - schema.BEYOND.keys():
        return f"the loader refuses what the schema takes: {sorted(codes)}"
    return ""


@pytest.mark.parametrize("seed", range(4))
def test_the_schema_and_the_loader_agree_on_changed_rule_files(seed: int) -> None:
    corpus = [short(read(path)) for path in [*RULES, *CASES]]
    changer = Changer(seed, corpus)
    refused = taken = 0
    for _ in range(600):
        data = copy.deepcopy(changer.random.choice(corpus))
        for _ in range(changer.random.choice((1, 1, 1, 2, 3))):
            if isinstance(data, dict) and len(places(data)) > 1:
                changer.change(data)
        problem = disagreement(RuleFile, RULE_FILE, data)
        assert not problem, f"{problem}\n{editor(data)}"
        if refusals(RuleFile, data):
            refused += 1
        else:
            taken += 1
    assert refused > 100
    assert taken > 100


@pytest.mark.parametrize("seed", range(2))
def test_the_schema_and_the_loader_agree_on_changed_layouts(seed: int) -> None:
    corpus = [read(path) for path in LAYOUTS]
    changer = Changer(seed, corpus)
    verdicts = set()
    for _ in range(400):
        data = copy.deepcopy(changer.random.choice(corpus))
        for _ in range(changer.random.choice((1, 1, 2))):
            changer.change(data)
        problem = disagreement(LayoutsFile, LAYOUTS_FILE, data)
        assert not problem, f"{problem}\n{editor(data)}"
        verdicts.add(bool(refusals(LayoutsFile, data)))
    assert verdicts == {True, False}


FIELDS = {
    "rule": ("rules", 0), "op": ("rules", 0, "via", 0, "stack"), "flip": ("rules", 0, "via", 1, "flip"), "when": ("rules", 0, "when"),
    "where": ("rules", 0, "where"), "param": ("params", "n"), "given": ("tests", 0, "given", "a"), "expect": ("tests", 0, "expect", "b"),
    "file": (),
}  # fmt: skip
WHOLE = """id: a/b
title: t
lineage: l
edge: [v1, v2]
params: {n: {type: int, optional: true, shape: {key: a}, choices: [1]}}
rules:
  - name: r
    from: "a.{e:int}"
    to: b
    via: [{stack: {over: e}}, {flip: {dim: 0}}, {slice: {dim: 0, only: {e: [1]}, value: 0}}, {concat: {over: e, sizes: [1]}}]
    where: {e: {min: 1, multiple_of: 2, remainder: 0}, $n: 1}
    when: {dtype: float32, ndim: 2}
tests:
  - {name: t, given: {a: {shape: [1], dtype: float32, fill: 1}}, expect: {b: {shape: [1], slices: {"0": 1}}}}
"""


def test_every_scalar_means_the_same_to_both_in_every_field() -> None:
    whole = yaml.parse(WHOLE, "whole.yaml").data
    assert not refusals(RuleFile, whole)
    values = [*map(Plain, PLAIN[:38]), *QUOTED[:12], [], {}, [Plain("")], {"a": Plain("")}]
    for path in places(whole):
        for value in values if path else ():
            data = copy.deepcopy(whole)
            at(data, path[:-1])[path[-1]] = copy.deepcopy(value)
            problem = disagreement(RuleFile, RULE_FILE, data)
            assert not problem, f"{path}: {value!r}: {problem}"


def test_every_code_that_only_the_loader_gives_is_one_and_has_a_reason() -> None:
    for code, reason in [*schema.BEYOND.items(), *schema.MEANING.items()]:
        assert page(code)
        assert reason
    given = {code for name in ("checks", "examples", "captures", "compiled") for code in codes(f"rules/{name}.py")}
    # M106 is in `examples`, whose readers of fields give it; M308 comes from the ops
    assert given - {"M106"} | {"M308"} == {*schema.MEANING}
    assert codes("source/yaml.py") | codes("core/keys.py") | codes("core/notation.py") | codes("core/expr.py") == schema.BEYOND.keys() - {
        "M107"
    }


def codes(module: str) -> set[str]:
    return set(re.findall(r'"(M[0-9]{3})"', (ROOT / "migrate" / module).read_text()))


@pytest.mark.parametrize("code", ["M104", "M105", "M107", "M108", "M110", "M111"])
def test_only_the_loader_refuses(code: str) -> None:
    texts = {
        "M104": "title: a\ntitle: b\n",
        "M105": "title: &a b\n",
        "M107": 'title: t\nrequires: ">99"\n',
        "M108": "title: 'a\n",
        "M110": "title: t\nkeep: [{p...}.w]\n",
        "M111": 'title: t\nrules: [{name: r, from: a, to: b, via: [{flip: {dim: "(1"}}]}]\n',
    }
    with pytest.raises(QuestionError) as caught:
        load_text("id: i\nlineage: l\nedge: [a, b]\n" + texts[code], "x.yaml")
    assert code in {d.code for d in caught.value.diagnostics}
    assert code in schema.BEYOND
