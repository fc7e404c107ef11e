"""The reference of the language, `docs/reference/rule-files.md`, read off the code.

Patterns come with keys on which a test tries them, fields from the models and their schema, ops and
codecs from their own descriptions and samples, diagnostics from their pages. `migrate explain`
prints parts of it.

    python -m migrate.rules.reference [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .. import codecs, ops
from ..codecs.base import Codec
from ..core import view
from ..core.errors import PAGES, OpError, Page, did_you_mean, fail, page, printable
from ..core.types import FORMAT_VERSION
from ..ops.base import Loss, OneWay, Op, ValueOp
from ..source.registry import BrokenEntryError
from . import arguments, schema

FILE = Path(__file__).resolve().parent.parent.parent / "docs" / "reference" / "rule-files.md"


class Syntax(NamedTuple):
    """One notation of patterns: as it is written, what it means, and a key that `pattern` matches,
    with what it captures.

    With `to` the key is carried on: `result` is the key that comes out.
    """

    written: str
    meaning: str
    pattern: str
    key: str
    captures: Mapping[str, Any]
    to: str = ""
    result: str = ""


PATTERNS = (
    Syntax("{name}", "one or more characters without a dot", "{layer}.weight", "fc1.weight",
    {"layer": "fc1"}),
    Syntax("{name:int}", "a decimal integer, all its digits, no leading zero", "h.{i:int}.w",
    "h.12.w", {"i": 12}),
    Syntax("{name:a|b.c|d}", "one of these, in this order", "{m:attn|mlp.fc}.bias",
    "mlp.fc.bias", {"m": "mlp.fc"}),
    Syntax("{name...}", "zero or more whole segments", "{p...}.norm.{k...}",
    "model.layers.0.norm.weight",
           {"p": "model.layers.0", "k": "weight"}),
    Syntax("{name...}", "when it is empty, the dot beside it is dropped too", "{m...}.weight",
    "weight", {"m": ""}),
    Syntax("{name}…{name}", "a capture that occurs twice has the same value in both places",
    "{a}.{k...}.{a}", "x.y.x", {"a": "x", "k": "y"}),
    Syntax("{name:flat}", "in `to`: another capture's `{name...}` without its dots; written, never read", "{k...}.weight",  # noqa: E501
           "layers.0.fc.weight", {"k": "layers.0.fc"}, "ema.{k:flat}weight", "ema.layers0fcweight"),
    Syntax("{n+1} {2*n} {n-$k}",
    "in `to`: a linear expression of an int capture; it is undone on a downgrade",
    "layers.{n:int}.w",
           "layers.3.w", {"n": 3}, "blocks.{2*n+1}.w", "blocks.7.w"),
    Syntax("{{ }}", "braces", "a{{{n}}}", "a{b}", {"n": "b"}),
    Syntax("@{r:int}", "the rank whose file contains the key", "{k...}.weight@{r:int}",
    "fc.weight@1", {"k": "fc", "r": 1}),
)  # fmt: skip

FAMILIES = (
    ("join", "Many tensors become one", "`over` is a capture that is bound; the op unbinds it."),
    (
        "part",
        "One tensor becomes many",
        "`into` is a capture that is not bound yet; the op binds it.",
    ),
    (
        "each",
        "Each tensor by itself",
        "`only` limits an op to the tensors with these capture values.",
    ),
    ("make", "New tensors", ""),
    ("end", "Tensors are removed", ""),
    (
        "exchange",
        "Parts become other parts",
        "The roles of `from` are those of one number format, the roles of `to` those of another.",
    ),
    (
        "decide",
        "The bytes decide",
        "The bytes of a tensor say what becomes of it; they are read while planning.",
    ),
)
_FORMS = {
    "integer": "integer, `$param` or arithmetic",
    "integers": "list of integers, or `$param`",
    "sizes": "list of integers, integers by capture value, or `$param`",
    "axes": "axis name -> integer",
    "only": "capture -> values",
    "number": "number or `$param`",
    "capture": "name of a capture",
    "dtype": "dtype or `$param`",
    "text": "text",
    "format": "`{codec: …}` with its arguments",
    "flag": "true, false or `$param`",
}
_LOSSES = {
    Loss.LOSSLESS: "lossless",
    Loss.LOSSY: "lossy: values are rounded",
    Loss.DESTRUCTIVE: "destructive: elements are discarded",
}


def render_reference() -> str:
    """The whole page."""
    about = (
        "Made from the code by `python -m migrate.rules.reference`; a test compares the two. The "
        "[rule language](rules.md) explains how rules work, and [your first "
        "rule](../tutorial/first-rule.md) is the place to start. `migrate explain stack` and "
        "`migrate explain M207` print parts of this page."
    )
    parts = [
        "# Fields, ops and codecs",
        about,
        "## Patterns",
        *_patterns(),
        "## Fields",
        *_fields(),
        "## Ops",
        *_ops(),
        "## Codecs",
        *(about_codec(codecs.get(name)) for name in codecs.names()),
        "## Diagnostics",
        (
            "The exit status applies to errors; warnings and advice change it only for "
            "`migrate lint`."
        ),
        _table(
            ("code", "name", "severity", "exit"),
            [(p.code, p.name, p.severity, str(p.exit)) for p in pages()],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def pages() -> list[Page]:
    """The pages of all diagnostics, by code."""
    return [page(path.stem) for path in sorted(PAGES.glob("M*.md"))]


def about_op(op: Op) -> str:
    """What is to be said of an op, as markdown."""
    how = ""
    if isinstance(op, ValueOp):
        how = (
            " Computes values on `--device`, with the same bits everywhere."
            if op.same_bits
            else " Computes values, on the CPU unless `--device cuda:all` is given."
        )
    out = [f"### `{op.name}`", f"{op.summary[:1].upper()}{op.summary[1:]}. Kind `{op.kind}`.{how}"]
    known = arguments.arguments(op.name)
    out += [_arguments(known, lambda a: _form(op.name, a))] if known else []
    if arguments.takes_codec(op.name):
        out.append("It also takes the arguments of its [codec](#codecs).")
    seen: set[str] = set()
    lines = []
    for written, shapes in op.samples():
        line = f"* `{_call(op.name, written)}`{_example(op, written, shapes)}"
        if line not in seen:
            seen.add(line)
            lines.append(line)
    return "\n\n".join([*out, "\n".join(lines)])


def about_codec(codec: Codec) -> str:
    """What is to be said of a codec, as markdown."""
    said = f"{codec.summary[:1].upper()}{codec.summary[1:]}."
    if codec.encodes:
        args, _ = next(iter(codec.samples()))
        said += f" Error: {codec.bound(args)}"
    else:
        said += " It is only decoded: a rule with it is one way."
    out = [f"### `{codec.name}`", said]
    known = arguments.codec_arguments("quantize", codec.name) or ()
    out += [_arguments(known, _form_of, _for_inverse)] if known else []
    rows = [
        (
            naming.producer,
            *(
                f"`{naming.parts[part].split()[0].rstrip('?')}`" if part in naming.parts else ""
                for part in codec.parts
            ),
        )
        for naming in codec.names
    ]
    return "\n\n".join([*out, _table(("producer", *codec.parts), list(dict.fromkeys(rows)))])


def _arguments(
    known: Iterable[arguments.Argument],
    form: Callable[[arguments.Argument], str],
    doc: Callable[[arguments.Argument], str] = lambda a: a.doc,
) -> str:
    rows = []
    for a in known:
        needed = (
            "needed"
            if a.default is MISSING
            else ""
            if a.default in (None, (), {})
            else f"`{_flow(a.default)}`"
        )
        rows.append((f"`{a.word}`", form(a), needed, doc(a)))
    return _table(("argument", "written as", "default", "meaning"), rows)


def _form_of(argument: arguments.Argument) -> str:
    known = argument.words or argument.values
    if known:
        return " \\| ".join(f"`{value}`" for value in known)
    return _FORMS.get(argument.form, argument.form)


def _for_inverse(argument: arguments.Argument) -> str:
    return f"for encoding: {argument.doc}" if argument.encoding else argument.doc


def topics() -> list[dict[str, Any]]:
    """All that has a name, for `migrate explain`: codes, ops and codecs, each with its text."""
    out = [
        {
            "name": p.code,
            "about": "diagnostic",
            "title": p.name,
            "severity": p.severity,
            "exit": p.exit,
            "text": p.body,
        }
        for p in pages()
    ]
    for about, registry, describe in (("op", ops, about_op), ("codec", codecs, about_codec)):
        for name in registry.names():
            try:
                entry = registry.get(name)
            except BrokenEntryError:
                continue
            body = describe(entry).partition("\n\n")[2]
            out.append(
                {
                    "name": name,
                    "about": about,
                    "title": entry.summary,
                    "severity": None,
                    "exit": None,
                    "text": body,
                }
            )
    return out


def explanation(word: str | None = None) -> dict[str, Any]:
    """The document of what a code (`M207` or `incomplete-group`), an op or a codec means, without a
    word of all of them; M115 for an unknown one.
    """
    found = topics() if word is None else [explain(word)]
    return {"format_version": FORMAT_VERSION, "kind": "explanation", "topics": found}


def explain(word: str) -> dict[str, Any]:
    """The topic called `word`: a code or its name, an op or a codec; M115 if there is none."""
    named = {name: topic for topic in topics() for name in _names(topic)}
    if word.lower() not in named:
        near = did_you_mean(
            word, [said for topic in named.values() for said in (topic["name"], *_names(topic))]
        )
        hint = near or "`migrate explain` lists all topics"
        fail("M115", f"no page explains `{printable(word)}`", help=hint)
    return named[word.lower()]


def _names(topic: Mapping[str, Any]) -> list[str]:
    """What a topic can be asked for by, in small letters; a code also by its name."""
    return [topic["name"].lower(), *([topic["title"]] if topic["about"] == "diagnostic" else [])]


def _patterns() -> list[str]:
    rows = []
    for s in PATTERNS:
        shown = ", ".join(f"{name} = {json.dumps(value)}" for name, value in s.captures.items())
        carried = f"; to `{s.to}`: `{s.result}`" if s.to else ""
        rows.append((f"`{s.written}`", s.meaning, f"`{s.pattern}` on `{s.key}`: {shown}{carried}"))
    about = (
        "A pattern matches a whole key. A key has one reading under a pattern, and one rule: "
        "where several match, the narrower pattern takes it."
    )
    return [about, _table(("written", "means", "example"), rows)]


def _fields() -> Iterator[str]:
    rule_file, layouts = schema.rule_file(), schema.layouts()
    headings = (
        (rule_file, None, "A rule file"),
        (rule_file, "Rule", "`rules:`"),
        (rule_file, "Param", "`params:`"),
        (rule_file, "Shape", "`shape:` of a param"),
        (rule_file, "Dtype", "`dtype:` of a param"),
        (rule_file, "RuleTest", "`tests:`"),
        (rule_file, "GivenTensor", "`given:` of a test"),
        (rule_file, "ExpectedTensor", "`expect:` of a test"),
        (layouts, None, "`layouts.yaml`"),
        (layouts, "LayoutFields", "`layouts:`"),
        (layouts, "DetectFields", "`detect:` of a layout"),
        (layouts, "GridFields", "`grid:` of a layout"),
    )
    for whole, name, heading in headings:
        model = whole if name is None else whole["$defs"][name]
        rows = []
        for word, field in model["properties"].items():
            default = (
                "needed"
                if word in model.get("required", ())
                else f"`{_flow(field['default'])}`"
                if "default" in field
                else ""
            )
            example = f"`{_flow(field['examples'][0])}`" if "examples" in field else ""
            rows.append((f"`{word}`", _type(field), default, field.get("description", ""), example))
        yield f"### {heading}"
        yield _table(("field", "written as", "default", "meaning", "example"), rows)
    yield (
        "Where text is expected, the text in the file counts, even if YAML would read a number or "
        "a boolean: `2.10` stays `2.10`. Names (`id`, `lineage`, captures) must be text in YAML "
        'too, so quote them if they look like numbers: `"5"`. Where an integer is expected, `8.0` '
        "and `0x8` are 8."
    )


def _ops() -> Iterator[str]:
    yield (
        "An integer argument may be `$param` or arithmetic over params: `$heads // $groups * "
        "$head_dim`. An argument that is exactly an unset optional `$param` counts as not written. "
        "Each op has examples, which the tests run: the shapes before and after if only bytes "
        "move, what is lost, and the downgrade."
    )
    every = [ops.get(name) for name in ops.registry.builtin()]
    for kind, heading, said in FAMILIES:
        members = [o for o in every if o.kind == kind]
        names = ", ".join(f"[`{o.name}`](#{o.name})" for o in members)
        yield f"**{heading}** (`{kind}`): {names}." + (f" {said}" if said else "")
    yield from map(about_op, every)


def _example(op: Op, written: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> str:
    try:
        args = arguments.resolve(op.name, written, {}, None)
    except OpError:
        return ""
    said = []
    if not isinstance(op, ValueOp) and (made := _made(op, args, shapes)) is not None:
        said.append(f"{_shapes(shapes)} -> {_shapes(made) or 'nothing'}")
    if op.loss(args) is not Loss.LOSSLESS:
        said.append(_LOSSES[op.loss(args)])
    if op.kind != "end":
        back = op.invert(args)
        if isinstance(back, OneWay):
            said.append(f"one way: {back.because}")
        else:
            said.append(f"back: `{_call(back.op, arguments.as_written(back.op, back.args))}`")
    return f": {'; '.join(said)}" if said else ""


def _made(op: Op, args: Any, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]] | None:
    try:
        parts = op.parts(args, shapes[0], None) if op.kind == "part" else 1
        return [
            made.shape
            for made in op.trace(
                args, [view.stored(i, shape) for i, shape in enumerate(shapes)], parts
            )
        ]
    except (OpError, NotImplementedError):
        return None


def _shapes(shapes: Iterable[Sequence[int]]) -> str:
    counted: dict[tuple[int, ...], int] = {}
    for shape in shapes:
        counted[tuple(shape)] = counted.get(tuple(shape), 0) + 1
    return ", ".join(
        f"{n} × {list(shape)}" if n > 1 else str(list(shape)) for shape, n in counted.items()
    )


def _call(op: str, written: Mapping[str, Any]) -> str:
    return f"{op}: {_flow(written)}"


def _flow(value: Any) -> str:
    """A value as YAML writes it on one line."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{_flow(str(name))}: {_flow(item)}" for name, item in value.items())
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        plain = (
            value
            and value[0] not in "{[*&!|>'\"%@`#-?:, "
            and not any(c in value for c in "{}[],#")
            and ": " not in value
        )
        return (
            value
            if plain and not value.replace(".", "").isdigit()
            else json.dumps(value, ensure_ascii=False)
        )
    return json.dumps(value)


def _form(op: str, argument: arguments.Argument) -> str:
    if argument.form in _FORMS:
        return _FORMS[argument.form]
    return _type(_steps()[op]["properties"][argument.word])


@cache
def _steps() -> Mapping[str, Any]:
    """The schema of each op."""
    steps: dict[str, Any] = schema.rule_file()["$defs"]["Step"]["properties"]
    return steps


def _type(field: Mapping[str, Any]) -> str:
    """In words what a JSON schema asks for."""
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return (
            " \\| ".join(f"`{choice}`" for choice in field["enum"])
            if len(field["enum"]) < 8
            else "a code"
            if field["enum"][0].startswith("M")
            else "a dtype"
        )
    if "if" in field and "type" in field:
        words = _type(field["else"]) + " \\| " if "enum" in field.get("else", ()) else ""
        return f"{words}mapping"
    if "if" in field:
        return f"{_type(field['else'])}, or a list of them"
    if "$ref" in field:
        return "mapping"
    kinds = field.get("type", "anything")
    kinds = [kinds] if isinstance(kinds, str) else [k for k in kinds if k != "null"]
    names = {"object": "mapping", "array": "list", "boolean": "true or false"}
    if set(schema.FREE_TEXT) <= set(kinds):
        kinds = ["text", *(k for k in kinds if k not in schema.FREE_TEXT)]
    return ", ".join(names.get(k, "text" if k == "string" else k) for k in kinds)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("\\|", "|").replace("|", "\\|").replace("\n", " ")


def main(words: Sequence[str]) -> int:
    """Writes the page; with `--check` only compares, and answers 1 where it differs."""
    if "--check" not in words:
        FILE.write_text(render_reference(), encoding="utf-8")
        return 0
    if FILE.read_text(encoding="utf-8") == render_reference():
        return 0
    sys.stderr.write(f"{FILE} is not what the code says: python -m migrate.rules.reference\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
