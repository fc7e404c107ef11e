"""What the README and the site show is run as it stands, and their links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from commandline import ROOT, done
from fresh_environment import Environment
from pages import (
    DOCS,
    ELSEWHERE,
    INSTALLS,
    KINDS,
    PAGES,
    Block,
    blocks,
    commands,
    execute,
    execute_in,
    run_page,
    steps,
    well_formed,
)

from migrate.cli import main
from migrate.core.errors import Report
from migrate.rules.compiled import compile_file
from migrate.rules.layouts import load_layouts
from migrate.rules.loading import load_files
from migrate.rules.model import RuleFile

sys.path.append(str(DOCS))

every_page = pytest.mark.parametrize("page", PAGES)


def read(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


# torch says so wherever one process loads alone
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.libraries) if INSTALLS in read(page) else page
        for page in sorted(PAGES.keys() - ELSEWHERE.keys())
    ],
)
def test_a_page_happens_as_it_is_shown(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """One that installs a package in an environment of its own, in which pip does so."""
    monkeypatch.chdir(tmp_path)
    way = execute
    if INSTALLS in read(page):
        way = partial(execute_in, Environment(tmp_path_factory.mktemp("fresh")))
    run_page(read(page), tmp_path, way)


@every_page
def test_a_block_is_fenced_and_of_a_kind_that_is_tested(page: str) -> None:
    text = read(page)
    for step in steps(text):
        if isinstance(step, Block):
            assert step.kind in KINDS, step
            well_formed(step)
    outside = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "@@" not in outside
    # lists may be indented; four spaces after an empty line are a block that nothing runs
    assert not re.search(r"^\n {4}(?![ *0-9-])", outside, re.MULTILINE)


def test_a_page_that_other_tests_run_is_named_there() -> None:
    for page, test in ELSEWHERE.items():
        assert PAGES[page].name in (ROOT / test).read_text(encoding="utf-8")


@every_page
def test_a_command_in_running_text_has_arguments_that_exist(page: str) -> None:
    text = re.sub(r"^( *)```.*?^\1```$", "", read(page), flags=re.MULTILINE | re.DOTALL)
    shown = [line.replace("…", "x") for line in re.findall(r"`migrate ([^`]+)`", text)]
    shown += [
        command.removeprefix("migrate ")
        for block in blocks(read(page), "text")
        for command, _ in commands(block.body)
        if command.startswith("migrate ")
    ]
    # a command remembers how its first context calls for help
    top = click.Context(main.cli, info_name="migrate", **main.cli.context_settings)
    for line in shown:
        name, *words = shlex.split(line)
        command = main.command(name)
        assert command is not None, line
        # a command that is only named may lack what it must be given
        with contextlib.suppress(click.MissingParameter):
            command.make_context(
                name, [w for w in words if not re.fullmatch(r"\[.*\]", w)], parent=top
            )


def written(page: str) -> list[Any]:
    """What the YAML blocks without a file hold."""
    found = [b for b in blocks(read(page), "yaml") if not b.name and not b.not_run]
    return [one for b in found if (one := yaml.safe_load(b.body)) is not None]


@pytest.mark.parametrize("page", [p for p in PAGES if written(p)])
def test_rules_that_are_shown_can_be_loaded(page: str, tmp_path: Path) -> None:
    whole: list[dict[str, Any]] = []
    together: dict[str, Any] = {
        "id": "shown",
        "title": "shown",
        "lineage": "shown",
        "edge": ["v1", "v2"],
    }
    for shown in written(page):
        found = {"rules": shown} if isinstance(shown, list) else shown
        if "id" in found:
            whole.append(found)
        elif "layouts" in found:
            path = tmp_path / "layouts.yaml"
            path.write_text(
                yaml.safe_dump({"lineage": "shown", "title": "shown", **found}, sort_keys=False)
            )
            report = Report()
            assert load_layouts(path, report) is not None
            assert report.diagnostics == []
        else:
            for name, value in found.items():
                assert name in RuleFile.model_fields
                both = together.get(name)
                together[name] = (
                    value
                    if both is None
                    else both + value
                    if isinstance(value, list)
                    else {**both, **value}
                )
    if len(together) > 4:
        together.setdefault("rules", [{"name": "shown", "from": "shown", "to": "shown2"}])
        whole.append(together)
    for number, found in enumerate(whole):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(found, sort_keys=False, allow_unicode=True))
        (loaded,) = load_files([path])
        report = Report()
        compile_file(loaded, report)
        assert report.diagnostics == []


def made() -> dict[str, str]:
    import generate

    return {f"docs/{path}": text for path, text in generate.generated().items()}


def anchors(text: str) -> set[str]:
    """What links may name behind `#`: headings as the site spells them."""
    out = set()
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        if own := re.search(r"\{#([\w-]+)\}$", title):
            out.add(own[1])
            continue
        plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", title)
        out.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return out


def test_every_link_leads_somewhere() -> None:
    texts = {page: read(page) for page in PAGES} | made()
    wrong = []
    for page, text in texts.items():
        outside = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", outside):
            if re.match(r"https?:", target):
                continue
            path, _, anchor = target.partition("#")
            aim = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
            named = aim.relative_to(ROOT).as_posix()
            if named not in texts and not aim.exists():
                wrong.append(f"{page}: {target}")
            elif anchor and anchor not in anchors(texts.get(named, "")):
                wrong.append(f"{page}: {target}: no such heading")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", ".pre-commit-config.yaml"],
)
def test_pages_of_the_site_are_named_by_the_place_where_they_are(page: str) -> None:
    named = set(re.findall(r"\bdocs/[\w/-]+\.md\b", (ROOT / page).read_text(encoding="utf-8")))
    assert not {name for name in named if not (ROOT / name).exists()}


def test_the_life_of_one_key_names_functions_where_they_are() -> None:
    named = re.findall(
        r"`([\w.]+)`\s+(?:in\s+|\()\[`(migrate/[\w/]+\.py)`\]",
        read("docs/concepts/life-of-a-key.md"),
    )
    assert len(named) > 30
    for name, path in named:
        body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        for part in name.split("."):
            found = [node for node in body if getattr(node, "name", "") == part]
            assert found, f"{path} has no {name}"
            body = getattr(found[0], "body", [])


def test_the_site_has_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = re.findall(r": ([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {name.removeprefix("docs/") for name in (*PAGES, *made()) if name.startswith("docs/")}
    assert config["docs_dir"] == "docs"
    assert sorted(listed) == sorted(pages)


def test_every_public_name_and_every_command_has_its_place() -> None:
    import migrate

    pages = made()
    for name in migrate.__all__:
        assert f"\n### {name}\n" in pages["docs/reference/api.md"]
    for name in main.commands():
        assert f"\n## migrate {name}\n" in pages["docs/reference/cli.md"]
    # the fields of a report say what their schemas say
    assert "\n| `index_hash` | `str` | of keys, dtypes, " in pages["docs/reference/api.md"]
    for path in (ROOT / "schemas").glob("*.schema.json"):
        name = path.name.removesuffix(".schema.json")
        assert f"\n## {name}\n" in pages["docs/reference/schemas.md"]


@pytest.mark.parametrize(
    ("page", "verbs"),
    [
        (
            "docs/tutorial/first-rule.md",
            """install make.py inspect schema plan lint lint test plan apply verify history
            downgrade diff""",
        ),
        (
            "docs/tutorial/two-releases.md",
            """install convert.py new test lint inspect plan apply load.py downgrade diff seal
            install packs apply diff seal""",
        ),
    ],
)
def test_the_tutorials_use_every_verb_on_their_way(page: str, verbs: str) -> None:
    text = read(page)
    ran = [c.split()[1] for block in blocks(text, "console") for c, _ in commands(block.body)]
    assert ran == verbs.split()
    for word in re.findall(r"`migrate explain (\w+)`", text):
        done("explain", word)
