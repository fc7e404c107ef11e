"""`migrate plan --html`: the page has all that the plan says, and nothing in it acts."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from commandline import done, mixtral, rules, run, safetensors
from test_imports import loaded

from migrate.cli import plan_page

HOSTILE = [
    "</script><script>window.acted = 1</script>",
    "<img src=x onerror=acted()>",
    "a\u2028b\u2029&amp;<!--",
    "{{data}}",
    "{{policy}}",
    "\x1b[2J\u202e",
    "__proto__",
    "\ue000.7",
    # a browser knows no such number
    "layers.9007199254740993.w",
]


class Page(HTMLParser):
    """What a browser would find: the elements with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found[-1][2].append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(text) for name, _, text in self.found if name == tag]

    @property
    def data(self) -> Any:
        return json.loads(self.texts("script")[0])


def page_of(folder: Path, *arguments: object) -> tuple[Page, str]:
    done("plan", *arguments, "--html", folder / "page.html")
    text = (folder / "page.html").read_text(encoding="utf-8")
    return Page(text), text


@pytest.fixture
def hostile(tmp_path: Path) -> list[object]:
    path = safetensors(tmp_path / "x.safetensors", {key: ("F32", [2]) for key in HOSTILE})
    text = 'rules:\n  - {name: "</script><b>", from: "{k...}", to: "n.{k}"}\n'
    return [path, "--rules", rules(tmp_path, text)]


def numbers(found: Any) -> list[int]:
    """Numbers of keys, as the page's script reads them."""
    if isinstance(found, list):
        return found
    return list(range(found["from"], found["from"] + found["count"]))


def names(data: Any) -> list[str]:
    """The keys by number, as the page's script puts them together."""
    out = []
    for text, literal, count, ints in data["forms"]:
        parts = [text] if literal else text.split("\ue000")
        if ints and isinstance(ints[0], list):
            ints = [number for row in product(*ints) for number in row]
        found = iter(ints)
        out += [
            parts[0] + "".join(f"{next(found)}{part}" for part in parts[1:]) for _ in range(count)
        ]
    return out


def test_keys_are_text_and_nothing_else(tmp_path: Path, hostile: list[object]) -> None:
    page, text = page_of(tmp_path, *hostile)
    plain, _ = page_of(
        tmp_path, safetensors(tmp_path / "y.safetensors", {"a": ("F32", [2])}), *hostile[1:]
    )
    assert [tag for tag, _, _ in page.found] == [tag for tag, _, _ in plain.found]
    start = text.index('id="data">') + len('id="data">')
    body = text[start : text.index("</script>", start)]
    assert not set("<>&\u2028\u2029\x1b\u202e") & set(body)
    assert json.loads(body) == page.data
    known = names(page.data)
    assert {known[i] for _, _, ids in page.data["before"] for i in numbers(ids)} == set(HOSTILE)
    assert {known[i] for _, _, ids in page.data["after"] for i in numbers(ids)} == {
        f"n.{key}" for key in HOSTILE
    }


def test_the_policy_permits_the_own_script_and_style_alone(
    tmp_path: Path, hostile: list[object]
) -> None:
    page, _ = page_of(tmp_path, *hostile)
    (policy,) = [
        str(at["content"])
        for tag, at, _ in page.found
        if tag == "meta" and at.get("http-equiv") == "Content-Security-Policy"
    ]
    said = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert said["default-src"] == "'none'"
    assert (said["base-uri"], said["form-action"]) == ("'none'", "'none'")
    _, script = page.texts("script")
    (style,) = page.texts("style")
    for name, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert said[name] == f"'sha256-{digest}'"
    for _, attributes, _ in page.found:
        assert not {"src", "href", "style"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)


def test_the_script_writes_text_only_and_asks_no_network() -> None:
    template = plan_page.TEMPLATE.read_text(encoding="utf-8")
    writes = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(")
    loads = ("fetch(", "XMLHttp", "import(", "http:", "https:", "url(", "src=", "href=")
    for word in (*writes, *loads):
        assert word not in template


def test_the_page_says_of_every_key_what_the_plan_says(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "old.safetensors", mixtral())
    asked = [path, "--to", "hf-mixtral@v5"]
    page, _ = page_of(tmp_path, *asked)
    known, data = names(page.data), page.data
    (leg,) = data["legs"]
    made = {known[key]: (spec, deed, sources) for key, spec, deed, sources in leg["made"]}
    outputs = [known[i] for _, _, ids in data["after"] for i in numbers(ids)]
    for key in outputs:
        said = done("plan", *asked, "--key", key, "--format", "json").json
        if key not in made:
            assert said["steps"] == []
            continue
        (step,) = said["steps"]
        spec, deed, sources = made[key]
        assert [known[i] for i in numbers(sources)] == [t["key"] for t in said["sources"]]
        assert data["specs"][spec] == [said["after"]["spec"], said["after"]["bytes"]]
        assert data["deeds"][deed] == [
            step[name] for name in ("change", "rule", "at", "ops", "lossy", "why")
        ]
    assert len(outputs) == data["plan"]["target"]["tensors"]


def test_losses_and_params_say_where_they_are_from(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    safetensors(folder / "model.safetensors", {"h": ("F32", [4]), "w": ("F32", [2])})
    (folder / "config.json").write_text('{"dtype": "float16"}')
    given = rules(
        tmp_path,
        "params:\n"
        "  kind: {type: str, config: dtype}\n"
        "  other: {type: int}\n"
        "  spare: {type: int, default: 3}\n"
        "rules:\n  - {name: half, from: h, to: h, via: [{cast: {to: $kind}}]}\nkeep: [w]\n",
    )
    asked = [folder, "--rules", given, "--set", "other=4", "--allow", "lossy"]
    page, _ = page_of(tmp_path, *asked)
    known, data = names(page.data), page.data
    assert data["plan"]["params"] == {"kind": "float16", "other": 4, "spare": 3}
    assert data["origins"] == {
        "kind": "config.json#dtype",
        "other": "given",
        "spare": "its default",
    }
    ((kind, rule, _, _, ids),) = data["lost"]
    assert (kind, rule, [known[i] for i in ids]) == ("lossy", "half", ["h"])


def test_data_grows_with_forms_and_numbers_not_with_names(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "old.safetensors", mixtral(layers=4, experts=64))
    page, text = page_of(tmp_path, path, "--to", "hf-mixtral@v5")
    keys = sum(len(key) for key in names(page.data))
    assert len(text) - len(plan_page.TEMPLATE.read_text(encoding="utf-8")) < keys


def test_only_an_own_page_is_replaced(tmp_path: Path, hostile: list[object]) -> None:
    other = tmp_path / "other.html"
    other.write_text("<!doctype html>\n<p>mine")
    result = run("plan", *hostile, "--html", other)
    assert (result.exit, other.read_text()) == (2, "<!doctype html>\n<p>mine")
    assert "M115" in result.err
    _, first = page_of(tmp_path, *hostile)
    _, again = page_of(tmp_path, *hostile)
    assert first == again


@pytest.mark.heavy
def test_a_page_is_written_without_torch(tmp_path: Path, hostile: list[object]) -> None:
    assert "torch" not in loaded("plan", *hostile, "--html", tmp_path / "page.html")
    assert (tmp_path / "page.html").is_file()


REFUSED = """rules:
  - {name: "</script><b>", from: "gone.{n:int}", to: "x.{n}"}
"""


def test_what_cannot_be_planned_has_a_page_of_its_problems(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "x.safetensors", {key: ("F32", [2]) for key in HOSTILE})
    made = run("plan", path, "--rules", rules(tmp_path, REFUSED), "--html", tmp_path / "page.html")
    assert made.exit == 3
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    known = names(page.data)
    assert {known[i] for _, _, ids in page.data["before"] for i in numbers(ids)} == set(HOSTILE)
    assert (page.data["plan"], page.data["after"]) == (None, [])
    found = {one["code"]: one for one in page.data["problems"]}
    assert found.keys() == {"M206", "M211"}
    assert "</script><b>" in found["M206"]["message"]
    assert found["M206"]["at"].endswith("rules.yaml:6")
    assert all(f"error[{code}]" in made.err for code in found)


@pytest.mark.parametrize("place", ["none/page.html", "here"])
def test_a_page_that_cannot_be_written_hides_no_problem_of_the_plan(
    tmp_path: Path, place: str
) -> None:
    path = safetensors(tmp_path / "x.safetensors", {key: ("F32", [2]) for key in HOSTILE})
    (tmp_path / "here").write_text("mine")
    made = run("plan", path, "--rules", rules(tmp_path, REFUSED), "--html", tmp_path / place)
    assert made.exit == 3
    assert all(f"error[{code}]" in made.err for code in ("M206", "M211"))
    assert made.err.index("error[M206]") < made.err.index(place)
    assert (tmp_path / "here").read_text() == "mine"
    assert not (tmp_path / "none").exists()


def test_where_nothing_opens_there_is_no_page(tmp_path: Path) -> None:
    made = run("plan", tmp_path / "none", "--to", "hf-mixtral@v5", "--html", tmp_path / "page.html")
    assert made.exit == 2
    assert not (tmp_path / "page.html").exists()
