"""What the README and docs/distributed.md show of loading on several ranks, run as it stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import ROOT
from ranks import Ranks

pytestmark = pytest.mark.ranks
Start = Callable[[int], Ranks]

HERE = "by tests/live/test_dcp_examples_ranks.py, in processes of torch.distributed"


def shown(page: str, word: str) -> str:
    """The block of a page that uses a name."""
    from pages import PAGES, blocks

    text = PAGES[page].read_text(encoding="utf-8")
    (found,) = (b.body for b in blocks(text, "python") if b.not_run == HERE and word in b.body)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the pages take for granted, and the file of rules that docs/distributed.md writes."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "docs"))
    from pages import PAGES, SETUPS, blocks

    SETUPS["dcp"](tmp_path)
    for block in blocks(PAGES["docs/distributed.md"].read_text(encoding="utf-8"), "yaml"):
        if block.name:
            (tmp_path / block.name).write_text(block.body)
    return str(tmp_path)


def test_the_readme_loads_an_old_checkpoint_in_three_lines(ranks: Start, folder: str) -> None:
    code = shown("README.md", "MigratingReader")
    assert len(code.splitlines()) == 3
    ranks(2).run("dcp_examples_case", "happens_as_shown", folder, code)


@pytest.mark.parametrize("word", ["MigratingReader", "migrate.load", "migrate_state_dict"])
def test_a_sharded_model_is_loaded_as_shown(word: str, ranks: Start, folder: str) -> None:
    code = shown("docs/distributed.md", word)
    ranks(2).run("dcp_examples_case", "happens_as_shown", folder, code)


def test_a_hook_takes_shards_whose_names_change(ranks: Start, folder: str) -> None:
    code = shown("docs/distributed.md", "migrate.attach")
    ranks(2).run("dcp_examples_case", "attach_happens_as_shown", folder, code)


def test_all_that_is_left_to_this_file_is_run_here() -> None:
    pages = (ROOT / "README.md", ROOT / "docs" / "distributed.md")
    assert sum(page.read_text().count(HERE) for page in pages) == 5
