"""Made rules do what their relations say: written down, loaded, and applied to state dicts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import migrate
from migrate.authoring import writing
from migrate.authoring.compact import compact
from migrate.authoring.relations import Relation, RuleDraft
from migrate.core.templates import rank_of

HEADER = writing.FileHead("made/new/rules", "Made", "made", ("old", "new"))
WORDS = ["a", "b", "attn", "mlp", "q_proj", "k_proj", "weight", "bias", "0", "1", "2", "3", "10"]
NUMBERED = ["block_0", "block_1", "block_2", "block_10", "fc1", "fc2", "fc3"]


def rename(source: str, target: str, **fields: Any) -> Relation:
    return Relation((source,), (target,), **fields)


def written(
    folder: Path, relations: Iterable[Relation], params: dict[str, int] | None = None
) -> tuple[Path, list[RuleDraft]]:
    drafts = compact(relations, params=params)
    path = folder / "made.yaml"
    path.write_text(writing.text(drafts, HEADER), encoding="utf-8")
    return path, drafts


def applied(path: Path, old: dict[str, Any], **options: Any) -> dict[str, Any]:
    new = migrate.migrate_state_dict(old, rules=[path], allow=["drop"], **options)
    return {key: new[key].tolist() for key in new}


def check(folder: Path, relations: list[Relation]) -> None:
    """Renames go where they should, and back."""
    path, _ = written(folder, relations)
    numbered = {r.sources[0]: torch.tensor([n]) for n, r in enumerate(relations)}
    wanted = {r.targets[0]: [n] for n, r in enumerate(relations)}
    assert applied(path, numbered) == wanted, path.read_text()
    made = {key: torch.tensor(value) for key, value in wanted.items()}
    back = {key: value.tolist() for key, value in numbered.items()}
    assert applied(path, made, backwards=True) == back, path.read_text()


@st.composite
def renames(draw: st.DrawFn) -> list[Relation]:
    """Keys of a small tree of modules, and where they go: by words, by offsets, and at random."""
    seed = draw(st.integers(0, 2**32))
    chance = random.Random(seed)
    known = WORDS + chance.choice([[], NUMBERED])
    words = chance.sample(known, chance.randint(3, len(known)))
    keys = {
        ".".join(chance.choice(words) for _ in range(chance.randint(1, 4)))
        for _ in range(chance.randint(2, 24))
    }
    table = {word: chance.choice([word, word, f"new_{word}", "x.y"]) for word in words}
    for word in chance.choice([[], NUMBERED]):
        name, number = re.fullmatch(r"(.*?)([0-9]+)", word).groups()  # type: ignore[union-attr]
        table[word] = f"{name}s.{int(number) - chance.choice([0] * 9 + [1]) * (name == 'fc')}"
    shift = chance.choice([0, 0, 1, 5])
    out: dict[str, str] = {}
    for key in sorted(keys):
        moved = ".".join(
            str(int(word) + shift) if word.isdigit() else table[word] for word in key.split(".")
        )
        target = chance.choice([moved] * 6 + [key, f"model.{key}", key.replace("attn.", "")])
        if target and target not in out.values():
            out[key] = target
    return [rename(a, b) for a, b in out.items()]


@given(renames())
def test_renames_do_as_they_say_and_go_back(
    tmp_path_factory: pytest.TempPathFactory, relations: list[Relation]
) -> None:
    check(tmp_path_factory.mktemp("made"), relations)


HOSTILE = st.text("ab.0{}@|\"'\n\t\0\\:#-, \x85\u2028é𝛼", min_size=1, max_size=8)


@given(
    st.lists(
        # `@0` at the end of a key says which file it stands in, and is no part of its name
        HOSTILE.filter(lambda name: rank_of(f"new.{name}") is None),
        min_size=2,
        max_size=12,
        unique=True,
    )
)
def test_hostile_names_mean_themselves(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    half = len(names) // 2
    check(
        tmp_path_factory.mktemp("made"),
        [rename(a, f"new.{b}") for a, b in zip(names[:half], names[half:], strict=False)],
    )


def rows(n: int, start: int = 0) -> Any:
    return torch.arange(start, start + 2 * n).reshape(n, 2)


def test_joins_and_parts_say_their_captures_counts_and_starts(tmp_path: Path) -> None:
    relations = [
        # the first two experts are one tensor and the other three another one
        Relation(("e.0.w", "e.1.w"), ("first",), ({"stack": {"dim": 0}},)),
        Relation(("e.2.w", "e.3.w", "e.4.w"), ("rest",), ({"concat": {"dim": 0}},)),
        Relation(("qkv",), ("q.w", "k.w", "v.w"), ({"split": {"dim": 0, "sizes": [2, 1, 1]}},)),
        Relation(("all",), ("b.1", "b.2"), ({"unbind": {"dim": 0}},)),
        Relation(("x.w@0", "x.w@1"), ("x.w",), ({"concat": {"dim": 1}},)),
        Relation(("gone.3.bits",), (), ({"drop": {"why": "made again"}},)),
        Relation(
            ("p.0.a", "p.0.z.b"),
            ("p.0.joined",),
            ({"transpose": {"dims": [0, 1], "only": [1]}}, {"concat": {"dim": 0}}),
        ),
    ]
    old = {f"e.{n}.w": rows(2, 10 * n) for n in range(5)}
    old |= {"qkv": rows(4), "all": torch.stack([rows(1), rows(1, 5)])}
    old |= {"x.w@0": rows(1), "x.w@1": rows(1, 7), "gone.3.bits": rows(1)}
    old |= {"p.0.a": rows(2), "p.0.z.b": rows(2, 30)}
    path, _ = written(tmp_path, relations)
    wanted = {
        "first": torch.stack([old["e.0.w"], old["e.1.w"]]),
        "rest": torch.cat([old["e.2.w"], old["e.3.w"], old["e.4.w"]]),
        "q.w": rows(4)[:2],
        "k.w": rows(4)[2:3],
        "v.w": rows(4)[3:],
        "b.1": rows(1),
        "b.2": rows(1, 5),
        "x.w": torch.cat([rows(1), rows(1, 7)], 1),
        "p.0.joined": torch.cat([rows(2), rows(2, 30).T]),
    }
    made = {key: tensor.tolist() for key, tensor in wanted.items()}
    assert applied(path, old) == made, path.read_text()


def ranked(key: str, ranks: Iterable[int], to: str = "") -> list[Relation]:
    return [rename(f"{key}@{r}", f"{to or 'new.' + key}@{r}") for r in ranks]


def of_first(key: str, to: str) -> Relation:
    """What the first file alone has says no rank."""
    return rename(f"{key}@0", to)


# what becomes of the first rank is not what becomes of the others
APART = {
    "one key": [of_first("l.0.a", "first"), *ranked("l.0.a", [1, 2]), *ranked("l.0.b", [0, 1])],
    "some layers": [
        *(of_first(f"l.{n}.a", f"first.{n}") for n in (0, 2)),
        *(r for n in (0, 2) for r in ranked(f"l.{n}.a", [1, 2])),
        *ranked("l.1.a", range(3)),
    ],
    "the last word is rare": [
        *(r for n in range(4) for r in ranked(f"l.0.{n}.a", range(2))),
        of_first("l.0.old", "o"),
        *ranked("l.0.old", [1], "p"),
    ],
}


@pytest.mark.parametrize("case", APART)
def test_what_differs_by_rank_is_done_on_each_rank(tmp_path: Path, case: str) -> None:
    check(tmp_path, APART[case])


def test_a_number_that_equals_a_rank_is_not_the_rank(tmp_path: Path) -> None:
    stacked = Relation(("l.0.w@0", "l.1.w"), ("o@0",), ({"stack": {"dim": 0}},))
    old = {"l.0.w@0": rows(1), "l.1.w": rows(1, 4), "l.0.w@1": rows(1, 8)}
    path, _ = written(tmp_path, [stacked, rename("l.0.w@1", "o@1")])
    made = {"o@0": [[[0, 1]], [[4, 5]]], "o@1": [[8, 9]]}
    assert applied(path, old) == made, path.read_text()


def test_a_number_that_no_target_has_is_no_capture(tmp_path: Path) -> None:
    keys = ("g.q.1.w", "g.k.1.w", "g.q.2.w", "g.k.2.w")
    path, _ = written(tmp_path, [Relation(keys, ("o",), ({"stack": {"dim": 0}},))])
    old = {key: rows(1, 2 * n) for n, key in enumerate(keys)}
    made = {"o": [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]}
    assert applied(path, old) == made, path.read_text()


@pytest.mark.parametrize("turned", [False, True])
def test_a_number_that_a_word_ends_in_becomes_a_segment(tmp_path: Path, turned: bool) -> None:
    """And is a capture, so that the rules hold for more layers."""
    pairs = [
        *((f"block_{n}.{leaf}", f"blocks.{n}.{leaf}") for n in (0, 1) for leaf in ("fc1", "fc2")),
        *((f"stage{n}.norm", f"stages.{n - 1}.norm") for n in (1, 2, 3)),
    ]
    relations = [rename(b, a) if turned else rename(a, b) for a, b in pairs]
    path, drafts = written(tmp_path, relations)
    one, other = ("blocks.{n:int}.{k...}", "block_{n}.{k}")
    found = {draft.sources: draft.targets for draft in drafts}
    if not turned:
        one, other = "block_{n:int}.{k...}", "blocks.{n}.{k}"
        assert found["stage{n:int}.norm"] == "stages.{n-1}.norm"
    assert found[one] == other
    assert len(drafts) == 2
    check(tmp_path, relations)
    more = "blocks.7.fc1" if turned else "block_7.fc1"
    assert applied(path, {r.sources[0]: torch.tensor([0]) for r in relations} | {
        more: torch.tensor([5])
    })["block_7.fc1" if turned else "blocks.7.fc1"] == [5]  # fmt: skip


def test_two_words_with_numbers_are_no_series_with_an_offset(tmp_path: Path) -> None:
    pairs = {"fc1": "mlp.0", "fc2": "mlp.2", "norm1": "ln.0", "norm2": "ln.1"}
    relations = [rename(f"h_{n}.{a}", f"h.{n}.{b}") for n in (0, 1) for a, b in pairs.items()]
    _, (draft,) = written(tmp_path, relations)
    assert draft.sources == "h_{n:int}.{w:fc1|fc2|norm1|norm2}"
    assert draft.map == {"w": pairs}
    check(tmp_path, relations)


def test_what_two_subtrees_make_one_of_is_told_apart_by_their_branches(tmp_path: Path) -> None:
    pairs = {
        f"{root}.{branch}.{n}.{leaf}": f"{branch}.{n}.{leaf}"
        for root, branch in (("detector", "vision"), ("tracker", "mask"), ("tracker", "prompt"))
        for n in range(2)
        for leaf in ("a", "b")
    }
    relations = [rename(a, b) for a, b in pairs.items()]
    _, drafts = written(tmp_path, relations)
    assert {draft.sources: draft.targets for draft in drafts} == {
        "detector.vision.{k...}": "vision.{k}",
        "tracker.mask.{k...}": "mask.{k}",
        "tracker.prompt.{k...}": "prompt.{k}",
    }
    check(tmp_path, relations)


@pytest.mark.parametrize("inner", [("stack", 1), ("concat", 0), ("concat", 1)])
@pytest.mark.parametrize("outer", [("stack", 0), ("stack", 2), ("concat", 0), ("concat", 1)])
@pytest.mark.parametrize("back", [False, True])
def test_joins_of_keys_that_are_not_all_combinations_of_two_words(
    tmp_path: Path, inner: tuple[str, int], outer: tuple[str, int], back: bool
) -> None:
    """`d, c` and `b, a`, which no two captures make: of what torch joins and cuts."""
    joined: dict[str, Any] = {"stack": torch.stack, "concat": torch.cat}
    cut: dict[str, str] = {"stack": "unbind", "concat": "split"}
    (one, dim), (other, place) = inner, outer
    old = {f"m.{w}.w": torch.arange(6).reshape(2, 3) + 10 * n for n, w in enumerate("dcba")}
    tensors = list(old.values())
    pairs = [joined[one](tensors[at : at + 2], dim=dim) for at in (0, 2)]
    whole = joined[other](pairs, dim=place)
    first, second = {"dim": dim, "count": 2}, {"dim": place, "count": 2}
    if back:
        ops: tuple[Any, ...] = ({cut[other]: second}, {cut[one]: first})
        path, _ = written(tmp_path, [Relation(("whole",), tuple(old), ops)])
        assert applied(path, {"whole": whole}) == {k: t.tolist() for k, t in old.items()}
    else:
        ops = ({one: first}, {other: second})
        path, _ = written(tmp_path, [Relation(tuple(old), ("whole",), ops)])
        assert applied(path, old) == {"whole": whole.tolist()}, path.read_text()
    assert "rearrange" in path.read_text()


def test_joined_and_cut_in_two_steps_each(tmp_path: Path) -> None:
    two, three = {"dim": 0, "count": 2}, {"dim": 1, "count": 2}
    old = {f"m.{w}.w": torch.arange(6).reshape(2, 3) + 10 * n for n, w in enumerate("dcba")}
    joined = ({"stack": two}, {"stack": three})
    cut = ({"unbind": three}, {"unbind": two})
    targets = tuple(f"o.{w}.w" for w in "xwzy")
    path, _ = written(tmp_path, [Relation(tuple(old), targets, (*joined, *cut))])
    made = dict(zip(targets, (t.tolist() for t in old.values()), strict=True))
    assert applied(path, old) == made, path.read_text()


def test_bounds_are_params_where_one_alone_has_the_value(tmp_path: Path) -> None:
    relations = [
        rename(f"l.{n}.w", f"dense.{n}.w" if n < 3 else f"sparse.{n - 3}.w") for n in range(6)
    ]
    _, drafts = written(tmp_path, relations, {"dense": 3, "layers": 6})
    assert [d.where for d in drafts] == [{"n": {"max": "$dense - 1"}}, {"n": {"min": "$dense"}}]
    _, drafts = written(tmp_path, relations, {"dense": 3, "heads": 3})
    assert [d.where for d in drafts] == [{"n": {"max": 2}}, {"n": {"min": 3}}]


def test_ops_that_do_not_fit_their_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing joins"):
        compact([Relation(("a", "b"), ("c",))])
    with pytest.raises(ValueError, match="does not say how many"):
        compact([Relation(("a", "b", "c"), ("d",), ({"stack": {"count": 2}}, {"concat": {}}))])
