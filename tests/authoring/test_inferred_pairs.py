"""What is inferred of the pairs of transformers' mapping, by values and by headers alone, is what
the imported rules say, or a question.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.libraries
pytest.importorskip("transformers")

from inferred_pairs import InferredPair, inferred_pair  # noqa: E402 - it needs transformers
from tiny_models import entries  # noqa: E402

# renamed, stacked, joined, cut; of each kind some
SAMPLE = (
    "mixtral", "detr", "ViTModel", "esm", "qwen2_moe", "llava", "deepseek_v3", "timesfm2_5",
    "GPTNeoXForCausalLM",
)  # fmt: skip
# that headers alone say all of, or all but what is asked
BY_NAMES = {"detr", "ViTModel", "llava"}


@pytest.mark.parametrize("entry", SAMPLE)
def test_nothing_that_is_answered_is_wrong(entry: str, tmp_path: Path) -> None:
    found = inferred_pair(entry, tmp_path)
    assert found.wrong == ()
    assert found.misread == ()
    assert found.open == ()
    assert found.answered > 0
    if entry in BY_NAMES:
        assert found.left == 0


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")
def test_nor_of_any_entry(tmp_path: Path) -> None:
    pairs: list[InferredPair] = []
    for entry in entries():
        try:
            pairs.append(inferred_pair(entry, tmp_path / "pair"))
        except (LookupError, ImportError):
            continue  # `make imports` says why there is none
        finally:
            shutil.rmtree(tmp_path / "pair", ignore_errors=True)
    print(summary(pairs))
    assert {one.entry: one.wrong for one in pairs if one.wrong} == {}
    assert {one.entry: one.misread for one in pairs if one.misread} == {}


def summary(pairs: list[InferredPair]) -> str:
    """The figures: how many pairs, and how many forms of keys headers alone answer."""
    whole = [one for one in pairs if not one.open]
    answered, asked = sum(one.answered for one in pairs), sum(one.asked for one in pairs)
    silent = [one for one in pairs if not (one.asked or one.left)]
    return (
        f"{len(pairs)} pairs: by values {len(whole)} are inferred whole, the others ask; "
        f"by headers {len(silent)} are without a question, "
        f"and {answered} of {answered + asked} forms of keys"
    )
