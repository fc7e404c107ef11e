"""The page of `migrate plan --html` in a browser: with 100,000 keys it does little at once, and
what a checkpoint holds stays text. Needs `pip install playwright` and Chromium, that of Debian or
the one that `playwright install chromium` fetches.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import done, mixtral, rules, run, safetensors
from test_plan_page import HOSTILE

pytestmark = [pytest.mark.libraries]
playwright = pytest.importorskip("playwright.sync_api", reason="no browser without playwright")

# keys that are compared in one turn, so that a letter that is typed is never waited for
STEP = 4000
# rows that are made at a time on either side
ROWS = 300
# what is done is counted: elements that are made, and keys that are compared in one turn
COUNTED = """
window.done = { now: 0, most: 0, made: 0 };
const includes = String.prototype.includes, later = window.setTimeout;
String.prototype.includes = function (...given) {
  window.done.most = Math.max(window.done.most, ++window.done.now);
  return includes.apply(this, given);
};
window.setTimeout = (call, wait, ...given) =>
  later((...all) => { window.done.now = 0; call(...all); window.done.now = 0; }, wait, ...given);
const create = Document.prototype.createElement;
Document.prototype.createElement = function (...given) {
  window.done.made++;
  return create.apply(this, given);
};
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = shutil.which("chromium") or started.chromium.executable_path
        if not Path(found).exists():
            pytest.skip("Chromium is not installed")
        opened = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


class Opened:
    """A page in the browser, what it asked for, and what went wrong in it."""

    def __init__(self, browser: Any, file: Path) -> None:
        self.page = browser.new_page()
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page.on("request", lambda asked: self.asked.append(asked.url))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.page.on("console", lambda said: self.wrong.append(said.text))
        self.page.add_init_script(COUNTED)
        self.page.goto(file.as_uri())
        self.url = file.as_uri()

    def count(self, name: str) -> int:
        return int(self.page.evaluate(f"window.done.{name}"))

    @property
    def elements(self) -> int:
        return int(self.page.evaluate("document.querySelectorAll('*').length"))

    def found(self, text: str) -> None:
        self.page.wait_for_function(
            "text => document.getElementById('found').textContent === text", arg=text
        )


def planned(folder: Path, layers: int, experts: int) -> Path:
    """The page of a plan for a checkpoint of so many layers and experts."""
    keys = mixtral(layers=layers, experts=experts)
    path = safetensors(folder / f"{layers}.safetensors", keys, holes=True)
    page = folder / f"{layers}.html"
    done("plan", path, "--to", "hf-mixtral@v5", "--html", page)
    return page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Pages of some tens of keys, and of 100,000."""
    folder = tmp_path_factory.mktemp("pages")
    return planned(folder, 2, 2), planned(folder, 130, 256)


def test_what_is_drawn_at_first_does_not_grow_with_the_keys(
    browser: Any, pages: tuple[Path, Path]
) -> None:
    small, large = (Opened(browser, page) for page in pages)
    assert large.page.locator("#before-head").text_content() == "Before, 100,623 keys"
    # a line for each form of keys, of which both have the same
    assert large.elements <= 2 * small.elements
    assert large.count("made") <= 2 * small.count("made")
    assert (small.wrong, large.wrong) == ([], [])
    assert large.asked == [large.url]


def test_typing_is_never_waited_for(browser: Any, pages: tuple[Path, Path]) -> None:
    opened = Opened(browser, pages[1])
    search = opened.page.locator("#search")
    for number, letter in enumerate(wanted := "experts.25"):
        search.press(letter)
        assert search.input_value() == wanted[: number + 1]
    # 25 and 250 to 255, in three tensors each; a search that another letter overtook says nothing
    opened.found(f"{130 * 7 * 3:,} keys")
    assert 0 < opened.count("most") <= STEP
    assert opened.page.locator("#before .row").count() == ROWS + 1
    assert opened.page.locator("#after .row").count() == 0
    opened.page.locator("#before .row").last.click()
    assert opened.page.locator("#before .row").count() == 2 * ROWS + 1
    search.fill("")
    assert opened.page.locator("#found").text_content() == ""
    assert opened.wrong == []


def test_a_key_says_what_becomes_of_it(browser: Any, pages: tuple[Path, Path]) -> None:
    opened = Opened(browser, pages[1])
    key = "model.layers.7.block_sparse_moe.experts.3.w1.weight"
    opened.page.locator("#search").fill(key)
    opened.found("1 key")
    opened.page.locator("#before .row").first.click()
    assert opened.page.locator("#name").text_content() == key
    told = opened.page.locator("#account").text_content()
    assert "to   model.layers.7.mlp.experts.gate_up_proj" in told
    assert "rule gate-up, hf-mixtral/v5/fuse-experts.yaml:" in told
    opened.page.locator("#links .row").first.click()
    assert opened.page.locator("#name").text_content() == "model.layers.7.mlp.experts.gate_up_proj"
    assert opened.wrong == []


def test_a_fold_opens_in_parts(browser: Any, pages: tuple[Path, Path]) -> None:
    opened = Opened(browser, pages[1])
    before = opened.elements
    opened.page.locator("#before .row", has_text="experts").first.click()
    assert before < opened.elements <= before + 2 * (ROWS + 1)


def test_what_keys_say_is_text_and_does_nothing(browser: Any, tmp_path: Path) -> None:
    path = safetensors(tmp_path / "x.safetensors", {key: ("F32", [2]) for key in HOSTILE})
    text = 'rules:\n  - {name: "</script><b>", from: "{k...}", to: "n.{k}"}\n'
    done("plan", path, "--rules", rules(tmp_path, text), "--html", tmp_path / "page.html")
    opened = Opened(browser, tmp_path / "page.html")
    shown = opened.page.locator("#before .row").all_text_contents()
    assert any("</script><script>window.acted = 1</script>" in row for row in shown)
    for number in range(len(shown)):
        opened.page.locator("#before .row").nth(number).click()
    assert opened.page.evaluate("window.acted") is None
    assert opened.page.evaluate("document.querySelectorAll('img, b, script').length") == 2
    assert (opened.wrong, opened.asked) == ([], [opened.url])


def test_problems_are_shown_with_their_keys(browser: Any, tmp_path: Path) -> None:
    path = safetensors(tmp_path / "x.safetensors", {"a.w": ("F32", [2]), "b": ("F32", [2])})
    text = 'rules:\n  - {name: r, from: "b", to: "c"}\n'
    run("plan", path, "--rules", rules(tmp_path, text), "--html", tmp_path / "page.html")
    opened = Opened(browser, tmp_path / "page.html")
    assert opened.page.locator("#title").text_content() == "There is no plan"
    said = opened.page.locator("#facts").text_content()
    assert "error[M211]: a.w is handled by no rule" in said
    assert "help: add a rule for it" in said
    for key, told in (("a.w", True), ("b", False)):
        opened.page.locator("#search").fill(key)
        opened.found("1 key")
        opened.page.locator("#before .row").first.click()
        assert ("M211" in opened.page.locator("#account").text_content()) is told
    assert opened.wrong == []
