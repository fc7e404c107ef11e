"""Random rule sets through files, against a witness written from docs/reference/rules.md alone:
keys, dtypes, shapes and bytes of what `apply` writes, what it refuses, what `verify`
says, and the way back where the plan calls it exact."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from commandline import ROOT, run
from naive_ops import BITS, EACH, JOIN, PART, Refused, Tensor, concat, unbind
from naive_rules import converted
from rule_parts import RANKED, RuleSet
from rule_sets import rule_set
from stored_sets import store, stored, write_rules

SETS = 1000
# RULE_SET=345 runs the set of that number, as a failure of the campaign names it
NUMBERS = [int(os.environ["RULE_SET"])] if "RULE_SET" in os.environ else range(10)
EVERY = (
    *EACH,
    *JOIN,
    *PART,
    *BITS,
    *(f"form {form}" for form in ("safetensors", "shards", "pt", "nested pt", *RANKED)),
    *(f"map {kind}" for kind in ("alternatives", "plain", "int", "path")),
    *(f"roles {way}" for way in ("stay", "join", "make", "list", "flat")),
    *(
        "drop",
        "keep",
        "keep_source",
        "if_exists",
        "where",
        "when",
        "optional",
        "optional roles",
        "arithmetic",
        "only",
        "param",
        "param condition",
    ),
    *(
        "alternatives",
        "plain",
        "int",
        "path",
        "narrower",
        "swap",
        "scalar",
        "empty tensor",
        "several tiles",
        "several shards asked for",
        "mutated",
    ),
)


def differences(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    out = [f"{key} is missing" for key in sorted(set(wanted) - set(got))] + [
        f"{key} is too many" for key in sorted(set(got) - set(wanted))
    ]
    for key in sorted(set(wanted) & set(got)):
        one, other = got[key], wanted[key]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            out.append(f"{key} is {one.dtype} {one.shape}, expected {other.dtype} {other.shape}")
        elif not one.equals(other):
            out.append(f"{key} has other bits")
    return out


def compared(made: RuleSet, folder: Path) -> str:
    """Runs a set and compares; the outcome: refused, accepted or exact (with the way back). An
    AssertionError names the set.
    """
    told = f"set {made.number} (RULE_SET={made.number} pytest {Path(__file__).name}), in {folder}"
    rules = write_rules(folder / "rules.yaml", made.file)
    old = store(folder, made)
    before = stored(old)
    values = [
        f"--set={name}={','.join(value) if isinstance(value, list) else str(value).lower()}"
        for name, value in made.params.items()
        if value is not None
    ]
    common = ["--rules", rules, *values, *(f"--allow={what}" for what in made.allow)]
    limit = [] if made.max_shard is None else ["--max-shard-size", made.max_shard]
    try:
        wanted, refused = converted(made.file, made.tensors, made.params, made.allow), ""
    except Refused as problem:
        wanted, refused = {}, str(problem)
    several = made.max_shard is not None or any(not key.endswith("@0") for key in wanted)
    new = folder / ("new" if several else f"new{old.suffix}")
    answer = run("apply", old, "-o", new, *common, *limit)
    said = f"{answer.out}{answer.err}"
    if refused:
        assert answer.exit in (2, 3), (
            f"{told}\nthe page refuses this ({refused}), apply left with {answer.exit}\n{said}"
        )
        assert "error[M" in said, f"{told}\n{said}"
        left = sorted(path.name for path in folder.iterdir() if path not in (rules, old))
        assert not left, f"{told}\nrefused, and left {left}"
        return "refused"
    assert answer.exit == 0, f"{told}\nthe page accepts this, apply left with {answer.exit}\n{said}"
    assert not (wrong := differences(stored(new), wanted)), f"{told}\n" + "\n".join(wrong)
    checked = run("verify", new, "--source", old, *common)
    assert checked.exit == 0, f"{told}\nverify left with {checked.exit}\n{checked.out}{checked.err}"
    if "downgrade: exact" not in answer.out:
        return "accepted"
    back = folder / f"back{old.suffix}"
    returned = run("downgrade", new, "-o", back, *common)
    assert returned.exit == 0, (
        f"{told}\nthe plan called the downgrade exact, it left with "
        f"{returned.exit}\n{returned.out}{returned.err}"
    )
    assert not (wrong := differences(stored(back), before)), (
        f"{told}\non the way back:\n" + "\n".join(wrong)
    )
    return "exact"


def outcomes(numbers: Iterable[int], folder: Path) -> tuple[Counter[str], Counter[str], list[str]]:
    """The outcomes of sets, what the accepted ones had, and what did not agree."""
    found, seen, wrong = Counter[str](), Counter[str](), list[str]()
    for number in numbers:
        made, own = rule_set(number), folder / str(number)
        own.mkdir()
        try:
            outcome = compared(made, own)
        except AssertionError as problem:
            wrong.append(str(problem))
            continue
        shutil.rmtree(own)
        found[outcome] += 1
        if outcome != "refused":
            seen.update(set(made.seen))
    return found, seen, wrong


@pytest.mark.parametrize("number", NUMBERS)
def test_a_rule_set_gives_what_the_page_says(number: int, tmp_path: Path) -> None:
    compared(rule_set(number), tmp_path)


@pytest.mark.campaign
def test_a_thousand_rule_sets_give_what_the_page_says(tmp_path: Path) -> None:
    found, seen, wrong = outcomes(range(SETS), tmp_path)
    assert not wrong, f"{len(wrong)} of {SETS}:\n" + "\n".join(wrong)
    # what the sets are made of, so that they cannot become empty
    assert found["accepted"] + found["exact"] >= SETS / 2, found
    assert found["exact"] >= SETS / 5, found
    assert found["refused"] >= SETS / 10, found
    assert not {what: seen[what] for what in EVERY if seen[what] < SETS / 250}, seen
    assert min(seen["scalar"], seen["ranks"], seen["several tiles"] * 5) >= SETS / 10, seen


def test_every_op_of_the_page_is_in_the_sets() -> None:
    told = set(
        re.findall(
            r"^\| `(\w+)",
            (ROOT / "docs" / "reference" / "rules.md")
            .read_text()
            .split("## Ops")[1]
            .split("## The downgrade")[0],
            re.MULTILINE,
        )
    )
    elsewhere = {
        "neg_exp",
        "lora_merge",
        "reciprocal",
        "dequantize",
        "recode",
        "extra_state",
        "resize",
    }  # no exact numbers, a page of their own, or what is kept beside the model (test_resized)
    assert told - elsewhere <= {*EACH, *JOIN, *PART, "drop"}
    assert set(EVERY) >= {*EACH, *JOIN, *PART, "drop"}


@pytest.mark.parametrize(
    ("op", "of", "instead"),
    [
        pytest.param(
            "concat",
            JOIN,
            lambda members, *rest: concat(members[::-1], *rest),
            id="parts in another order",
        ),
        pytest.param("flip", EACH, lambda tensor, *rest: tensor, id="an op left out"),
        pytest.param(
            "unbind", PART, lambda *given: unbind(*given)[::-1], id="another tensor for each name"
        ),
    ],
)
def test_a_difference_is_found(
    op: str,
    of: dict[str, Any],
    instead: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A witness that does one thing otherwise than the page is contradicted by the first sets that
    have it.
    """
    monkeypatch.setitem(of, op, instead)
    numbers = itertools.islice(
        (n for n in range(SETS) if rule_set(n).seen[op] and not rule_set(n).seen["several tiles"]),
        8,
    )
    assert outcomes(numbers, tmp_path)[2]
