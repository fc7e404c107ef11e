"""Rules inferred of the pairs that transformers' conversion mapping makes, beside imported ones.

For an entry a small model is saved for the Hub. Its tensors are filled at random; what the imported
rules make of them, which `import_proof` compares with the library, is the other side. By values
what is inferred must do the same to other random tensors, or ask. By names, shapes and dtypes alone
what is answered without a question must be what the imported rules say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from import_proof import read_rules, saved, stored
from raw_states import State, applied, bits, opened

from migrate import ops
from migrate.authoring.infer import infer
from migrate.authoring.relations import Relation
from migrate.core.templates import group


@dataclass(frozen=True)
class InferredPair:
    """By values: `open` names what was asked or not explained, `wrong` what other tensors show.
    By headers: how many forms of new keys are answered, how many asked and how many left, and the
    keys that are answered wrongly.
    """

    entry: str
    cls: str
    open: tuple[str, ...]
    wrong: tuple[str, ...]
    answered: int
    asked: int
    left: int
    misread: tuple[str, ...]


def inferred_pair(entry: str, folder: Path) -> InferredPair:
    """What is inferred of one entry. LookupError and ImportError where it makes no pair."""
    cls, hub = saved(entry, folder / "hub")
    made = read_rules(hub, cls.__name__)
    specs = {
        key: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for key, tensor in stored(hub).items()
    }
    # some are of keys that other checkpoints of the class have
    relations = [
        _numbered(r, made.values)
        for r in made.relations
        if r.targets and all(key in specs for key in r.sources)
    ]
    pairs = []
    for seed in (1, 2):
        dice = np.random.default_rng(seed)
        old: State = {
            key: (dtype, bits(dice, dtype, shape)) for key, (dtype, shape) in specs.items()
        }
        pairs.append((old, applied(relations, old)))
    (old, new), (other, wanted) = pairs
    open_, wrong = _by_values(old, new, other, wanted)
    return InferredPair(
        entry, cls.__name__, tuple(open_), tuple(wrong), *_by_headers(old, new, relations)
    )


def _numbered(relation: Relation, values: Mapping[str, int]) -> Relation:
    """The relation with numbers in place of params."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(plain, value))
        if isinstance(value, str) and value.startswith("$"):
            return values[value[1:]]
        return value

    calls = [(name, dict(given or {})) for op in plain(relation.ops) for name, given in op.items()]
    # the outermost join, and the outermost part, take what there is
    for kind, keys, order in (("join", relation.sources, 1), ("part", relation.targets, -1)):
        left = len(keys)
        those = [given for name, given in calls[::order] if ops.get(name).kind == kind]
        for given in those:
            given.setdefault("count", len(given["sizes"]) if "sizes" in given else left)
            left //= given["count"]
    return replace(relation, ops=tuple({name: given} for name, given in calls))


def _by_values(old: State, new: State, other: State, wanted: State) -> tuple[list[str], list[str]]:
    found = infer(opened(old), opened(new))
    open_ = [q.target for q in found.questions] + [u.key for u in found.unexplained]
    if open_:
        return open_, []
    got = applied(found.relations, other)
    wrong = sorted(got.keys() ^ wanted.keys())
    for key in got.keys() & wanted.keys():
        (dtype, array), (kind, right) = got[key], wanted[key]
        if dtype != kind or array.shape != right.shape or not np.array_equal(array, right):
            wrong.append(key)
    return [], wrong


def _by_headers(
    old: State, new: State, relations: Sequence[Relation]
) -> tuple[int, int, int, tuple[str, ...]]:
    truth = {target: r for r in relations for target in r.targets}
    found = infer(opened(old), opened(new), headers=True)
    said = {r.targets[0]: r.sources[0] for r in found.relations if r.targets}
    # one tensor can have several names; each of them may be the one that goes on
    misread = [
        target
        for target, source in said.items()
        if source not in truth[target].sources or not _copies(truth[target])
    ]
    return len(group(said)), len(found.questions), len(found.unexplained), tuple(misread)


def _copies(relation: Relation) -> bool:
    """Whether every source is every target, by other names."""
    return all(name in ("copy", "tie", "same") for op in relation.ops for name in op)
