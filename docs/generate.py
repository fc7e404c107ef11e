"""The pages of the site that are made from the code, and links to files outside of `docs/`.

`make docs` runs this module as a hook of mkdocs. The command line comes from click's help, the
Python API from signatures and docstrings, diagnostics from `migrate/explain/`, schemas from
`migrate/documents/`. `generated()` needs no mkdocs, so that the tests can look at these pages too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# a link from a page to a file of the repository that is no page
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)((?!\.\./)[^)#]+)\)")
_EXPLAIN = re.compile(r"migrate/explain/(M\d+)\.md")
_CELL = re.compile(r"<td>.*?</td>", re.DOTALL)
_SECTION = re.compile(r"(Args|Returns|Raises|Examples?|Attributes|Note):\s*")


API = """\
`import migrate` costs nothing: names are loaded on first use. A function that has a command of the
same name takes the same arguments. Problems are raised as `migrate.MigrateError`, which carries the
[diagnostics](diagnostics.md).

In signatures, `PathLike` is a `str` or an `os.PathLike`, `Live` is a state dict or a
`torch.nn.Module`, and `Progress` is a callable that takes two integers: the bytes done so far and
the bytes in total."""
DIAGNOSTICS = """\
`migrate explain CODE` prints the same. Codes and exit statuses are stable, wording is not. M1xx
concern rule files, M2xx matching, M3xx shapes, M4xx losses, M5xx layouts and parameters, M6xx are
findings of `migrate lint`, M7xx failed tests of rule files, M9xx concern checkpoints and runs."""
SCHEMAS = """\
With `--format json` every command prints one document. Each begins with `format_version` and
`kind`, and has a schema (draft 2020-12); `migrate schema` lists them and `migrate schema -o DIR`
writes them. `rulefile` and `layouts` describe what people write; editors use them for
completion."""

RESULTS = """\
What the functions above return: read-only objects with named fields. `to_json()` gives the document
that the command prints ([schemas](schemas.md))."""


def generated() -> dict[str, str]:
    """The Markdown of each page that is made from the code, by its path in the site."""
    return {
        "reference/cli.md": command_line(),
        "reference/api.md": api(),
        "reference/diagnostics.md": diagnostics(),
        "reference/schemas.md": schemas(),
    }


def command_line() -> str:
    """The help of every command, as click prints it."""
    import click

    from migrate.cli.main import cli

    top = click.Context(cli, info_name="migrate", max_content_width=88, **cli.context_settings)
    parts = [
        "# Command line",
        "The program is called `migrate` and `ckpt-migrate`; `python -m migrate` works too.",
        _fenced(cli.get_help(top)),
    ]
    for name in cli.list_commands(top):
        command = cli.get_command(top, name)
        if command is not None and not command.hidden:
            context = click.Context(command, info_name=name, parent=top, max_content_width=88)
            parts += [f"## migrate {name}", _fenced(command.get_help(context))]
    return _page(parts)


def api() -> str:
    """Every public name: its signature and its docstring."""
    import migrate

    functions, classes = [], []
    for name in migrate.__all__:
        found = getattr(migrate, name)
        (classes if inspect.isclass(found) else functions).append((name, found))
    parts = [
        "# Python API",
        API,
        "## Functions",
    ]
    for name, function in functions:
        parts += [f"### {name}", _fenced(_signature(f"migrate.{name}", function), "python")]
        parts.append(_docstring(function))
    parts.append("## Classes")
    for name, one in classes:
        parts += [f"### {name}", _docstring(one), *_members(one)]
    from migrate import dcp

    for name in dcp.__all__:
        found = getattr(dcp, name)
        parts += [f"### dcp.{name}", _docstring(found)]
    parts += ["## Results", RESULTS]
    shown = [one for one in _results(f for _, f in functions) if one not in dict(classes).values()]
    meanings = _meanings(shown)
    for one in shown:
        parts += [f"### {one.__name__}", _docstring(one), *_members(one, meanings.get(one, {}))]
    return _page(parts)


def diagnostics() -> str:
    """The page of every code, as `migrate explain` prints it."""
    from migrate.core.errors import codes, page

    parts = [
        "# Diagnostics",
        DIAGNOSTICS,
        "| code | name | severity | exit status |\n|---|---|---|---|\n"
        + "\n".join(
            f"| [{code}](#{code.lower()}) | {found.name} | {found.severity} | {found.exit} |"
            for code, found in ((code, page(code)) for code in codes())
        ),
    ]
    for code in codes():
        found = page(code)
        parts += [f"## {code}: {found.name} {{#{code.lower()}}}", _fences(found.body)]
    return _page(parts)


def schemas() -> str:
    """The fields of every JSON document."""
    parts = [
        "# JSON schemas",
        SCHEMAS,
    ]
    for path in sorted((ROOT / "schemas").glob("*.schema.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        name = path.name.removesuffix(".schema.json")
        parts += [f"## {name}", schema.get("title", ""), schema.get("description", "")]
        needed = schema.get("required", [])
        rows = [
            f"| `{field}` | {_kind(one)} | {'yes' if field in needed else ''} "
            f"| {_cell(one.get('description', ''))} |"
            for field, one in schema.get("properties", {}).items()
        ]
        parts.append("| field | type | always | |\n|---|---|---|---|\n" + "\n".join(rows))
    return _page(parts)


def _page(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _fences(text: str) -> str:
    """Text whose indented blocks became fenced ones."""
    return re.sub(
        r"(?:^    .*\n?|^\n(?=    ))+",
        lambda found: (
            "\n" + _fenced(inspect.cleandoc("\n" + found[0].strip("\n"))) + "\n"
            if found[0].strip()
            else found[0]
        ),
        text,
        flags=re.MULTILINE,
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _kind(schema: dict[str, Any]) -> str:
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    kind = schema.get("type", "")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _signature(name: str, function: Any) -> str:
    """The signature, a parameter a line where it is long. Overloads are for type checkers: they
    share one docstring and one list of parameters, which is what is shown.
    """
    signature = inspect.signature(inspect.unwrap(function))
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        parameters.append(_parameter(parameter))
    returned = signature.return_annotation
    arrow = "" if returned is signature.empty else f" -> {_annotation(returned)}"
    line = f"{name}({', '.join(parameters)}){arrow}"
    if len(line) > 88:
        line = f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){arrow}"
    return line


def _parameter(parameter: inspect.Parameter) -> str:
    name = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
    if parameter.annotation is not parameter.empty:
        name += f": {_annotation(parameter.annotation)}"
    return name if parameter.default is parameter.empty else f"{name} = {parameter.default!r}"


def _annotation(written: Any) -> str:
    return str(written).replace("'", "") if isinstance(written, str) else str(written)


def _docstring(found: Any) -> str:
    """A docstring as Markdown: sections become bold words, their entries lists."""
    lines, out, listing, indented = (inspect.getdoc(found) or "").splitlines(), [], False, False
    for line in lines:
        if section := _SECTION.fullmatch(line):
            listing = section[1] in ("Args", "Raises", "Attributes")
            indented = section[1] in ("Returns", "Note")
            out += ["", f"**{section[1]}**", ""]
        elif listing and (entry := re.match(r"^    (\*{0,2}[\w.]+(?: \([^)]*\))?): (.*)", line)):
            out.append(f"* `{entry[1]}`: {entry[2]}")
        elif listing and line.startswith("     "):
            out.append("  " + line.strip())
        else:
            listing = listing and not line.strip()
            out.append(line.removeprefix("    ") if indented else line)
    text = "\n".join(out)
    text = re.sub(
        r"(?:^ *>>> .*\n?(?:^ *(?:>>>|\.\.\.|\S).*\n?)*)+",
        lambda m: _fenced(inspect.cleandoc("\n" + m[0]), "pycon") + "\n",
        text,
        flags=re.MULTILINE,
    )
    return _fences(text)


def _meanings(reports: Iterable[type]) -> dict[type, dict[str, str]]:
    """Of the fields of reports and of their parts: what the schemas say that they mean."""
    from migrate import results
    from migrate.core.document import DocumentPart, fields_of

    out: dict[type, dict[str, str]] = {}

    def visit(one: type, schema: dict[str, Any], definitions: dict[str, Any]) -> None:
        schema = schema.get("items", schema)
        if "$ref" in schema:
            schema = definitions[schema["$ref"].rpartition("/")[2]]
        for name, kind in fields_of(one).items():
            written = getattr(one, "RENAMED", {}).get(name, name.rstrip("_"))
            said = schema.get("properties", {}).get(written, {})
            out.setdefault(one, {}).setdefault(name, said.get("description", ""))
            for word in re.findall(r"\w+", _annotation(kind)):
                part = getattr(results, word, None)
                if inspect.isclass(part) and issubclass(part, DocumentPart):
                    visit(part, said, definitions)

    for one in reports:
        path = ROOT / "schemas" / f"{getattr(one, 'KIND', '')}.schema.json"
        if path.is_file():
            schema = json.loads(path.read_text(encoding="utf-8"))
            visit(one, schema, schema.get("$defs", {}))
    return out


def _members(one: type, meanings: Mapping[str, str] = {}) -> Iterator[str]:
    """The fields and the public methods of a class."""
    from migrate.core.document import DocumentPart, fields_of

    fields: Mapping[str, Any]
    if issubclass(one, DocumentPart):
        fields = fields_of(one)
    elif dataclasses.is_dataclass(one):
        fields = {field.name: field.type for field in dataclasses.fields(one)}
    else:
        fields = vars(one).get("__annotations__", {})
    said = any(meanings.values())
    rows = [
        f"| `{name}` | `{_cell(_annotation(kind))}` |"
        + f" {_cell(meanings.get(name, ''))} |" * said
        for name, kind in fields.items()
        if not name.startswith("_") and name.islower()
    ]
    if rows:
        heads = "| field | type | |\n|---|---|---|\n" if said else "| field | type |\n|---|---|\n"
        yield heads + "\n".join(rows)
    for name, member in vars(one).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property | functools.cached_property):
            code = member.fget if isinstance(member, property) else member.func
            yield f"**{name}** (property): {inspect.getdoc(code) or ''}"
        elif inspect.isfunction(member) or isinstance(member, classmethod | staticmethod):
            code = member if inspect.isfunction(member) else member.__func__
            yield f"**{name}{inspect.signature(code)}**: {inspect.getdoc(code) or ''}".replace(
                "'", ""
            )


def _results(functions: Any) -> list[type]:
    """The classes that functions are annotated to return, where their names can be resolved, and
    those that these are made of.
    """
    from migrate import results

    found: list[type] = []
    for function in functions:
        code = inspect.unwrap(function)
        name = _annotation(inspect.signature(code).return_annotation)
        one = getattr(inspect.getmodule(code), name, None)
        if inspect.isclass(one) and one.__module__.startswith("migrate") and one not in found:
            found.append(one)
    parts = [one for name, one in vars(results).items() if name[0] != "_" and inspect.isclass(one)]
    return found + [
        one for one in parts if one.__module__.startswith(results.__name__) and one not in found
    ]


def on_files(files: Any, *, config: Any) -> Any:
    """mkdocs: adds the generated pages, and the colours of code."""
    from mkdocs.structure.files import File
    from pygments.formatters import HtmlFormatter

    colours = HtmlFormatter(style="default").get_style_defs(".highlight")
    for path, text in {**generated(), "css/pygments.css": colours}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """mkdocs: a link to an explain page leads to the page of diagnostics; other files are named."""
    depth = page.file.src_uri.count("/")

    def inside(found: re.Match[str]) -> str:
        text, up, path = found[1], found[2].count("../"), found[3]
        if up <= depth:
            return found[0]
        if code := _EXPLAIN.fullmatch(path):
            return f"[{text}]({'../' * depth}reference/diagnostics.md#{code[1].lower()})"
        return text

    return _OUTSIDE.sub(inside, markdown)


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """mkdocs: a bar in code in a table is shown without the escape that Markdown wants."""
    return _CELL.sub(lambda found: found[0].replace("\\|", "|"), html)
