"""The schema and the loader agree on the form of what people write, whatever they write.

Rule files are changed at random. A change that the schema refuses must be refused when the file is
read field by field; a change that is refused there must be refused by the schema, unless the code
is one that only the loader can give.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import acme_codecs
import jsonschema
import pytest
from marks import thorough
from pydantic import ValidationError
from rule_text import load_text

from migrate.core.errors import MigrateError, QuestionError, Report, page
from migrate.rules import schema
from migrate.rules.compiled import compile_file
from migrate.rules.fields import Model, problems_of, unmet
from migrate.rules.layouts import LayoutsFile
from migrate.rules.model import RuleFile
from migrate.source import yaml
from migrate.source.yaml import PlainScalar

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = sorted((ROOT / "rules").rglob("layouts.yaml"))
RULES = sorted(p for p in (ROOT / "rules").rglob("*.yaml") if p.name != "layouts.yaml")
CASES = sorted((ROOT / "tests" / "data" / "cases").glob("*.yaml"))
RULE_FILE = jsonschema.Draft202012Validator(schema.rule_file())
LAYOUTS_FILE = jsonschema.Draft202012Validator(schema.layouts())

PLAIN_TEXT = """
5 0 -1 +5 007 2.10 1.0 -0.0 1e3 1e400 .5 5. .inf -.inf .nan 0x10 0o7 0b1 1_000 true True TRUE false no null ~ x e y dtype float32
half float33 iota drop flip tie stack keep skip error list int str bool $x $x+1 $ (1 v5 a.b a/b .a a. latest @1 config.json#a
>=0.1 2024-01-01 2024-01-01T00:00:00Z 12:30 00 08 +0 -5 1.5 8.0 -8.0 1e2 1e-400 -1e400 +.inf .Inf .NaN 0.9999999999999999 1e308 1.8e308
9007199254740991 9007199254740992 -9007199254740992 9007199254740993.0 18446744073709551616 1e19 0xfffffffffffffffffff yes No on
"""  # noqa: E501
PLAIN = PLAIN_TEXT.split()
QUOTED = [
    "", "5", "2.10", "true", "null", " ", " 1", "$x", "$x ", "$x * (2", "x y", "a\n", "a\nb",
    "\u200b", "é", "{a}", "{", "{a...}.w",
    "0, 1", ">=0.1\n", ">=0.1,<9", "float32", "M101", "M999", "int", "config.json#a.b",
    "a/b.json#c", "../a.json#b", "/a#b", "a.json#",
    "a.json#.b", "a#b#c", "#a", ".", "..", "a/..", "a//b", "a/", "a\\b", ".git/x", "a.bin",
    "A.SafeTensors", "x.c\u212apt",
    "migrate.items.json", "a/migrate.history.json", ".metadata", "Cache/a.json", "a/b/c/d.json",
    "a/b/c/d/e.json", "é" * 300,
    "x" * 5000, "1 + ", "$x//2", "2*$x", "($x)", "$x $y", "\t1", "$1", "{{", "}}", "{a}}", "{a}{b}",
    "{a:}", "{a:x|}",
    "{2*n+1}", "{1a}", "{a...}{b...}",
    "\x00", "\x7f", "a\x85b",
    "\U0001f600", "\ufeff", "{i=0..3}", "l.{i=3..0}.w",
]  # fmt: skip
WORDS_TEXT = """
id title why lineage edge requires params keep files names rules tests name from to via map where when optional keep_source
if_exists inverse refuse type items minimum maximum choices config shape default key dim dims shape dtype fill values slices same_as
given expect over into count start sizes only pattern axes size of value stop min max multiple_of remainder ndim weight too
nothing x $x é layouts ordered detect status message note present absent module_version v1 latest +1 0 0,1 error contains allow
side backwards codec expect_side params rtol title config.json a/b.json ../x.json /x .git/x x.bin migrate.items.json a/b/c/d/e.json $ $1
$x.y {a} {2*n+1} {a -1 1,1 l.{i=0..3}.w p role lineage detect extra_state
"""  # noqa: E501
WORDS = WORDS_TEXT.split()
# what patterns, paths, references and arithmetic are made of, and what none of them takes
LETTERS = "aeXz019._/\\#$@{}|:-+*%()[]<>=,~ \n\t\x00\x7f\u200b\u212aé\U0001f600"


def editor(node: Any) -> Any:
    """What a YAML 1.2 parser (core schema, section 10.3.2) makes of a document: written anew, apart
    from the loader's own.
    """
    if isinstance(node, dict):
        return {str(key): editor(value) for key, value in node.items()}
    if isinstance(node, list):
        return [editor(item) for item in node]
    if not isinstance(node, PlainScalar):
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
        return {problem.code for _, problem in problems_of(error, model)}
    return set()


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        node = node[step]
    return node


WHOLE = """id: a/b
title: t
why: w
lineage: l
edge: [v1, v2]
requires: ">=0.1"
params:
  n: {type: int, title: n, optional: true, minimum: 1, maximum: 9, config: [a.b, "t.json#b"], shape: {key: "a.{e:int}", count: e},
      choices: [1, 2], default: 1}
  d: {type: str, dtype: {key: ["{p...}.s", t]}}
  m: {type: list, items: str, config: "text/a.json#b.c", shape: {key: [b, c], dim: -1}, default: [x, y]}
  g: {type: list, groups: {key: "{m...}.w{i:int}", of: m, over: i, ndim: 2}}
keep: ["{p...}.k", "{2*n + 1}.w"]
files: {config.json: {a: $n, b: null}, text/a.json: {c: [1, 1.5, true]}}
names: ["config.json#q.modules"]
rules:
  - name: r
    from: "a.{e:int}"
    to: b
    via:
      - {stack: {over: e, dim: "$n - 1"}}
      - flip: {dim: 0, only: {e: [1]}}
      - {slice: {dim: 0, start: 0, stop: 4, of: 4, only: {e: [1]}, value: 0}}
      - {concat: {over: e, sizes: [1, $n], count: 2}}
      - {concat: {over: e, sizes: {q: 1, k: "2 * ($n + 1)"}}}
      - {rearrange: {pattern: "(h d) i -> h d i", axes: {h: 2}}}
      - {cast: {to: bfloat16, from: float32}}
      - {affine: {mul: 2, add: -1.5}}
      - {transpose: {dims: [0, 1]}}
      - {fill: {value: 0, dtype: float32, shape: [2]}}
      - {dequantize: {codec: fp8-block, dtype: bfloat16, block: [128, 128], like: hf, scale: f32, non_finite: refuse}}
      - {extra_state: {stateless: drop}}
    map: {w: {w1: gate, w2: null}}
    where: {e: {min: 1, max: 3, multiple_of: 2, remainder: 0}, w: [w1, w3], $n: 1}
    when: {dtype: [float32, half], ndim: 2, shape: [1, null, {min: 2}]}
    optional: [true, bias]
    keep_source: true
    if_exists: keep
    inverse: skip
  - {name: s, from: {x: "a.{k...}", y: b}, to: [c, "{w:q|k}"], when: {x: {dtype: half, ndim: [1, 2]}}, optional: true, inverse: {refuse: why}}
  - {name: o, from: "o.{w:q|k}.{v:1|x}", to: "p.{w}.{v}", optional: {w: [k], v: x}}
tests:
  - name: t
    params: {n: 1, m: [x]}
    backwards: true
    allow: [lossy]
    given: {"a.{i=0..3}": {shape: [1], dtype: float32, fill: 1}, b: {values: [[1, .nan], [-0.0, 1e3]]}}
    side: {config.json: {a: 1}, notes.txt: t}
    expect: {b: {shape: [1], dtype: half, slices: {"0": 1, "0, -1": [1, 2]}, rtol: 1e-3}, c: {fill: iota}, d: {same_as: b}}
    expect_side: {config.json: {a: 2}}
  - {name: u, given: {a: {shape: [2, 3]}}, error: M207, contains: c}
"""  # noqa: E501
# a rule that loads and has many arguments
STEPS = """id: a/b
title: t
lineage: l
edge: [v1, v2]
params: {n: {type: int, default: 2}}
keep: ["x.{2*n + 1}.w", "y.{m}"]
rules:
  - name: r
    from: "a.{e:int}"
    to: b
    via:
      - {stack: {over: e, dim: 0, start: 1}}
      - {slice: {dim: 0, start: 0, stop: 4, of: $n}}
      - {rearrange: {pattern: "(h d) i -> h d i", axes: {h: 2}}}
      - {transpose: {dims: [0, 1]}}
      - {permute: {dims: [0, 2, 1]}}
      - {reshape: {to: [-1, 4], from: [2, -1, 4]}}
      - {affine: {mul: 2, add: -1.5}}
  - name: s
    from: {weight: c.w, scale: c.s}
    to: d
    via: [{dequantize: {codec: fp8-block, dtype: bfloat16, block: [128, 128], like: hf, scale: f32, scale_fmt: ue8m0, non_finite: refuse}}]
  - {name: t, from: e, keep_source: true, to: f, via: [{fill: {value: 3, dtype: int8, shape: [2]}}]}
"""  # noqa: E501
ALL_LAYOUTS = """lineage: l
title: t
ordered: true
requires: ">=0.1"
layouts:
  v1:
    title: one
    status: deprecated
    message: m
    note: n
    detect:
      present: "{p...}.{e:int}.w"
      absent: [a, "{2*n}.b"]
      dtype: {"{p...}.w": [float32, half]}
      ndim: {"{p...}.w": 2}
      shape: {"{p...}.w": [e, 2, $text_config.hidden_size, null], s: []}
      config: {model_type: [a, b], a.b: 1, c: {not: [d]}}
      configured: true
      module_version: {"{m...}.norm": [1, 2]}
      extra_state: 2.0 to 2.17
  v2: {title: two}
"""


class Changer:
    """Random changes of rule files, the same ones for the same seed."""

    def __init__(self, seed: int, corpus: list[Any]) -> None:
        self.random = random.Random(seed)
        self.corpus = [(data, places(data)) for data in corpus]

    def scalar(self) -> Any:
        pick = self.random.random()
        return PlainScalar(self.random.choice(PLAIN)) if pick < 0.7 else self.random.choice(QUOTED)

    def value(self, depth: int = 2) -> Any:
        pick = self.random.random()
        if pick < 0.55 or not depth:
            return self.scalar()
        if pick < 0.7:
            return [self.value(depth - 1) for _ in range(self.random.choice((0, 1, 1, 2, 3)))]
        if pick < 0.85:
            return {
                self.random.choice(WORDS): self.value(depth - 1)
                for _ in range(self.random.choice((0, 1, 1, 2)))
            }
        data, known = self.random.choice(self.corpus)
        return copy.deepcopy(at(data, self.random.choice(known)))

    def typo(self, word: str) -> str:
        where = self.random.randrange(len(word) + 1)
        letter = self.random.choice(LETTERS) if self.random.random() < 0.8 else "x"
        kinds = (
            word[:where] + letter + word[where:],
            word[:where] + letter + word[where + 1 :],
            word[:where] + word[where + 1 :],
        )
        return self.random.choice((*kinds, *kinds, word + " ", word.upper(), word + word))

    def change(self, data: Any) -> Any:
        """One change, somewhere below the root."""
        path = self.random.choice(places(data)[1:])
        parent, step = at(data, path[:-1]), path[-1]
        kinds = (
            "delete",
            "value",
            "value",
            "value",
            "scalar",
            "scalar",
            "typo",
            "typo",
            "typo",
            "rename",
            "rename",
            "add",
            "repeat",
            "wrap",
        )
        kind = self.random.choice(kinds)
        if kind == "delete":
            del parent[step]
        elif kind == "value":
            parent[step] = self.value()
        elif kind == "scalar":
            old = parent[step]
            quoted = (
                str(old)
                if isinstance(old, PlainScalar)
                else PlainScalar(old)
                if isinstance(old, str)
                else self.scalar()
            )
            parent[step] = quoted if self.random.random() < 0.5 else self.scalar()
        elif kind == "typo" and isinstance(parent[step], str):
            made = self.typo(parent[step])
            parent[step] = (
                PlainScalar(made)
                if isinstance(parent[step], PlainScalar) and self.random.random() < 0.5
                else made
            )
        elif kind == "rename" and isinstance(parent, dict):
            word = self.typo(step) if self.random.random() < 0.5 else self.random.choice(WORDS)
            parent[word] = parent.pop(step)
        elif kind == "add" and isinstance(parent, dict):
            parent[self.random.choice(WORDS)] = self.value()
        elif kind == "repeat" and isinstance(parent, list):
            parent.insert(step, copy.deepcopy(self.random.choice(parent)))
        elif kind == "wrap":
            parent[step] = (
                [parent[step]]
                if self.random.random() < 0.5
                else {self.random.choice(WORDS): parent[step]}
            )


def read(path: Path) -> Any:
    return yaml.parse(path.read_text(), str(path)).data


def short(data: Any) -> Any:
    """A rule file with fewer examples: the first tensors of one test show as much as all of
    them.
    """
    for test in data.get("tests", [])[:1]:
        for side in ("given", "expect"):
            if isinstance(test.get(side), dict):
                test[side] = dict(list(test[side].items())[:3])
    return {**data, **({"tests": data["tests"][:1]} if "tests" in data else {})}


def agreed(model: type[Model], validator: Any, data: Any) -> tuple[bool, bool]:
    """Whether the schema and the loader take a document; fails where only one of them may."""
    codes = refusals(model, data)
    seen = editor(data)
    fits = validator.is_valid(seen)
    assert fits or codes, (
        "the schema refuses what the loader takes: "
        f"{jsonschema.exceptions.best_match(validator.iter_errors(seen))}\n{seen}"
    )
    assert not fits or codes <= schema.BEYOND.keys(), (
        f"the loader refuses what the schema takes: {sorted(codes)}\n{seen}"
    )
    return fits, not codes


def compared(
    seed: int, count: int, model: type[Model], validator: Any, files: list[Path], whole: str
) -> Counter[tuple[bool, bool]]:
    """How often the schema and the loader take what random changes make, as (schema, loader)."""
    changer = Changer(
        seed,
        [
            *(short(read(path)) for path in files),
            *[yaml.parse(whole, "whole.yaml").data] * max(1, len(files) // 2),
        ],
    )
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for _ in range(count):
        data = copy.deepcopy(changer.random.choice(changer.corpus)[0])
        for _ in range(changer.random.choice((1, 1, 1, 2, 3))):
            if isinstance(data, dict) and len(places(data)) > 1:
                changer.change(data)
        verdicts[agreed(model, validator, data)] += 1
    return verdicts


@pytest.mark.parametrize(
    ("seed", "count"), thorough([(0, 200), *((seed, 600) for seed in range(4))])
)
def test_the_schema_and_the_loader_agree_on_changed_rule_files(seed: int, count: int) -> None:
    verdicts = compared(seed, count, RuleFile, RULE_FILE, [*RULES, *CASES], WHOLE)
    assert verdicts[False, False] > count // 6
    assert verdicts[True, True] > count // 6


@pytest.mark.parametrize("seed", thorough(range(2)))
def test_the_schema_and_the_loader_agree_on_changed_layouts(seed: int) -> None:
    verdicts = compared(seed, 400, LayoutsFile, LAYOUTS_FILE, LAYOUTS, ALL_LAYOUTS)
    assert verdicts[False, False] > 50
    assert verdicts[True, True] > 50


@pytest.mark.parametrize("count", thorough([1, 7]))
def test_scalars_mean_the_same_to_both_in_every_field(count: int) -> None:
    values = [*map(PlainScalar, PLAIN), *QUOTED, [], {}, [PlainScalar("")], {"a": PlainScalar("")}]
    chosen = random.Random(0)
    for model, validator, text in (
        (RuleFile, RULE_FILE, WHOLE),
        (LayoutsFile, LAYOUTS_FILE, ALL_LAYOUTS),
    ):
        whole = yaml.parse(text, "whole.yaml").data
        assert not refusals(model, whole)
        for path in places(whole)[1:]:
            parent = at(whole, path[:-1])
            old = parent[path[-1]]
            # all of them take a minute
            for value in chosen.sample(values, count):
                parent[path[-1]] = value
                try:
                    agreed(model, validator, whole)
                except AssertionError as error:
                    raise AssertionError(f"{path}: {value!r}") from error
            parent[path[-1]] = old


def test_every_code_that_only_the_loader_gives_is_one_and_has_a_reason() -> None:
    for code, reason in [*schema.BEYOND.items(), *schema.MEANING.items()]:
        assert page(code)
        assert reason
    given = {
        code
        for name in ("loading", "layouts", "examples", "compiled")
        for code in codes(f"rules/{name}.py")
    }
    # M106 is given by readers of fields as well, M508 is about two files; M303 and M308 come from
    # the ops
    assert given - {"M106", "M508"} | {"M303", "M308"} == {*schema.MEANING}
    assert codes("source/yaml.py") | codes("source/yaml.py") | codes("core/keys.py") | codes(
        "core/notation.py"
    ) | codes("core/notation.py") == schema.BEYOND.keys() - {"M107"}


def test_what_a_dtype_cannot_hold_is_a_matter_of_meaning() -> None:
    text = STEP % "{fill: {value: 300, dtype: int8, shape: [2]}}"
    assert RULE_FILE.is_valid(editor(yaml.parse(text, "x").data))
    assert "M303" in loaded(text)


def loaded(text: str) -> set[str]:
    """The codes with which a rule file is refused, from its text to its compiled rules."""
    report = Report()
    try:
        compile_file(load_text(text, "x.yaml"), report)
    except MigrateError as error:
        report.diagnostics += error.diagnostics
    return {d.code for d in report.diagnostics if d.severity == "error"}


@pytest.mark.parametrize("seed", thorough(range(2)))
def test_whatever_the_whole_loader_refuses_beyond_the_schema_is_a_matter_of_meaning(
    seed: int,
) -> None:
    changer = Changer(
        seed,
        [short(read(path)) for path in [*RULES, *CASES]]
        + [yaml.parse(STEPS, "steps.yaml").data] * len(RULES),
    )
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for _ in range(250):
        data = copy.deepcopy(changer.random.choice(changer.corpus)[0])
        changer.change(data)
        # what is refused here is compared above
        if refusals(RuleFile, data) or not RULE_FILE.is_valid(seen := editor(data)):
            continue
        try:
            text = json.dumps(seen, allow_nan=False)
        except ValueError:
            # JSON cannot write it
            continue
        codes = loaded(text)
        assert codes <= {*schema.BEYOND, *schema.MEANING}, seen
        verdicts[True, not codes] += 1
    assert verdicts[True, True] > 20
    assert verdicts[True, False] > 20


STEP = (
    'id: a/b\ntitle: t\nlineage: l\nedge: [x, y]\nrules:\n  - {name: r, from: "a.{e:int}", to: '
    "b, via: [{stack: {over: e}}, %s]}\n"
)
VALUES = (
    (
        "id: a/b\ntitle: t\nlineage: l\nedge: [x, y]\nparams: {n: {type: int}}\nrules:\n  - {name: r, "  # noqa: E501
        "%s, via: [%s]}\n"
    ),
    "from: {weight: a.w, scale: a.s}, to: b",
    "from: b, to: {weight: a.w, scale: a.s}",
)


@pytest.mark.parametrize(
    "step",
    [
        "{transpose: {dims: [0, 0]}}", "{permute: {dims: [1, 0, 1]}}", "{reshape: {to: [-1, -1]}}",
        "{reshape: {to: [4], from: [-1, -1]}}",
        "{rearrange: {pattern: ''}}", "{rearrange: {pattern: a b}}",
        "{rearrange: {pattern: a -> b -> a}}", "{stack: {over: e, start: -1}}",
        "{rearrange: {pattern: a b -> b a, axes: {a: 0}}}", "{split: {into: e, dim: 0, count: 0}}",
    ],
)  # fmt: skip
def test_arguments_that_no_tensor_could_satisfy_are_refused_by_both(step: str) -> None:
    text = STEP % step
    assert not RULE_FILE.is_valid(editor(yaml.parse(text, "x").data))
    assert "M308" in loaded(text)


@pytest.mark.parametrize(
    ("args", "fits"),
    [
        ("like: hf, scale: f32, scale_fmt: ue8m0, non_finite: keep, block: [128, 128]", True),
        ("like: $n, scale: $n, scale_fmt: $n, non_finite: $n, block: $n", True),
        ("block: [$n, 2 * $n]", True),
        *[
            (said, False)
            for said in (
                "like: foo",
                "scale: xyz",
                "scale_fmt: zzz",
                "non_finite: maybe",
                "block: [128]",
                "block: [-1, 2]",
            )
        ],
        ("like: foo, block: [$n, $n]", False),
    ],
)
def test_what_a_built_in_codec_may_be_told_is_the_same_to_both(args: str, fits: bool) -> None:
    form, decoding, encoding = VALUES
    for text in (
        form % (decoding, f"{{dequantize: {{codec: fp8-block, dtype: bfloat16, {args}}}}}"),
        form % (encoding, f"{{quantize: {{codec: fp8-block, from: bfloat16, {args}}}}}"),
    ):
        assert RULE_FILE.is_valid(editor(yaml.parse(text, "x").data)) is fits
        assert loaded(text) == (set() if fits else {"M308"})


@pytest.mark.parametrize(
    "args",
    ["codec: fp8-block, dtype: int8", "codec: '', dtype: bfloat16", "codec: other, dtype: x"],
)
def test_a_codec_has_a_name_and_dtypes_to_both(args: str) -> None:
    text = VALUES[0] % (VALUES[1], f"{{dequantize: {{{args}}}}}")
    assert not RULE_FILE.is_valid(editor(yaml.parse(text, "x").data))
    assert "M308" in loaded(text)


def test_what_is_only_decoded_is_encoded_neither_by_the_schema_nor_by_the_loader() -> None:
    form, decoding, encoding = VALUES

    class Table(acme_codecs.Table):
        name = "acme-scaled-table"
        parts = ("weight", "scale")

    with acme_codecs.installed(Table()):
        rule_file = jsonschema.Draft202012Validator(schema.rule_file())
        for text, fits in (
            (form % (decoding, "{dequantize: {codec: acme-scaled-table, dtype: float32}}"), True),
            (form % (encoding, "{quantize: {codec: acme-scaled-table, from: float32}}"), False),
        ):
            assert rule_file.is_valid(editor(yaml.parse(text, "x").data)) is fits
            assert loaded(text) == (set() if fits else {"M308"})


def test_words_for_a_codec_that_a_package_may_add_are_open_to_the_schema() -> None:
    text = VALUES[0] % (
        VALUES[1],
        "{dequantize: {codec: other, dtype: bfloat16, like: me, block: [3]}}",
    )
    assert RULE_FILE.is_valid(editor(yaml.parse(text, "x").data))


@pytest.mark.parametrize(
    ("written", "fits"),
    [
        *[
            (f"x.{{{body}}}", True)
            for body in (
                "2*e+1",
                " e + 1",
                "(e+1)",
                "-(1-e)",
                "e + $n",
                "$n+e",
                "e+e",
                "2*(e - $n % 2)",
            )
        ],
        *[
            (f"x.{{{body}}}", False)
            for body in (
                "2*",
                "+",
                "e f",
                " ",
                "()",
                "*2",
                "2**e",
                "1e",
                "e-",
                "2+3",
                "$n+1",
                "$n",
                "(e)",
                " e",
            )
        ],
    ],
)
def test_an_index_has_one_form_for_both(written: str, fits: bool) -> None:
    text = (
        "id: a/b\ntitle: t\nlineage: l\nedge: [x, y]\nparams: {n: {type: int}}\nkeep: "
        f"['{written}']\n"
    )
    assert RULE_FILE.is_valid(editor(yaml.parse(text, "x").data)) is fits
    assert bool(loaded(text)) is not fits


def codes(module: str) -> set[str]:
    return set(re.findall(r'"(M[0-9]{3})"', (ROOT / "migrate" / module).read_text()))


@pytest.mark.parametrize("code", ["M104", "M105", "M107", "M108", "M110", "M111", "M116"])
def test_only_the_loader_refuses(code: str) -> None:
    texts = {
        "M104": "title: a\ntitle: b\n",
        "M105": "title: &a b\n",
        "M107": 'title: t\nrequires: ">99"\n',
        "M108": "title: 'a\n",
        "M110": "title: t\nkeep: [{p...}.w]\n",
        "M111": 'title: t\nrules: [{name: r, from: a, to: b, via: [{flip: {dim: "(1"}}]}]\n',
        "M116": "title: t # \u202e\n",
    }
    with pytest.raises(QuestionError) as caught:
        load_text("id: i\nlineage: l\nedge: [a, b]\n" + texts[code], "x.yaml")
    assert code in {d.code for d in caught.value.diagnostics}
    assert code in schema.BEYOND
