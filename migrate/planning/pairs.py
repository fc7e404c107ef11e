"""Parts of one tensor that a plan would part: a weight that moves while its scale stays where no
reader looks for it.

Rules see keys, and a rule that renames `….weight` in a checkpoint of a number format may well
forget `….weight_scale_inv`. So the tables of names (`codecs.part_names`) are held against what went
in and what comes out, whatever edges lie between. Two parts are well if they come out under names
that belong together again, if they are decoded together, if both are dropped, or if both move to
names that no table knows. A weight stored in a wide float is not encoded, whatever stands beside
it.

What travels with a weight and is not needed to decode it, such as the scale of a layer's inputs,
may be dropped, and may stay where it is as long as the weight remains in the module. Not so what a
layer multiplies its inputs by because its weights were divided by it: that stays beside these
weights alone.

Where parts were joined or cut along an axis, their blocks must have been whole: no block size may
be left out of the request here, so only what fits no block size at all is an error, and the rest
shows where the parts are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .. import codecs
from ..core.errors import Report, listed, printable
from ..core.part_names import BESIDE_PRODUCTS, FLOAT8, OF_CACHES, OF_INPUTS, key_of_part
from ..core.spec import BITS
from ..core.templates import rank_of
from ..source.blobs import chunk_names, key_of
from .graph import Computation, ComputedTensor, Tensor
from .unscaled import Neighbours, check_unscaled, likely_scale

if TYPE_CHECKING:
    from ..core.part_names import Endings, PartNames
    from ..core.spec import Spec
    from ..rules.compiled import DirectedRule
    from ..source.blobs import StoredTensor
    from .bind import StepResult


# integers that hold several codes
PACKED_IN = ("int32", "int16")


class Pair(NamedTuple):
    """The keys of the part with the codes and of another one, which decoding needs (`decodes`) or
    which only travels with it.
    """

    weight: str
    part: str
    role: str
    decodes: bool


class _Fate(NamedTuple):
    """A pair, and the outputs that are made of each of its tensors."""

    pair: Pair
    weights: Mapping[str, None]
    parts: Mapping[str, None]


class _Planned(NamedTuple):
    """What went in, what comes out, by which rules, and which names belong together."""

    stored: Mapping[str, StoredTensor]
    outputs: Mapping[str, Tensor]
    steps: Sequence[StepResult]
    table: PartNames


def check_pairs(
    stored: Mapping[str, StoredTensor],
    outputs: Mapping[str, Tensor],
    steps: Sequence[StepResult],
    report: Report,
) -> None:
    """M408 for each pair of parts that comes apart between `stored` and `outputs`, M310 for blocks
    that were cut, M409 for numbers that are read without their scale; `steps` name the rules.
    """
    if not any(may_hold_codes(tensor.spec) for tensor in stored.values()):
        return
    table = codecs.part_names()
    found = list(_pairs(stored, table))
    pairs = [
        pair for pair in found if not all(_untouched(key, stored, outputs) for key in pair[:2])
    ]
    known = {pair.part for pair in found}
    scaled = {pair.weight for pair in found if pair.decodes}
    unscaled = [
        key
        for key, tensor in stored.items()
        if tensor.spec.dtype in FLOAT8
        and key not in scaled
        and key not in known
        and not _untouched(key, stored, outputs)
    ]
    if not pairs and not unscaled:
        return
    wanted = {key for pair in pairs for key in (pair.weight, pair.part)}
    users = _users(outputs, {*wanted, *(stored if unscaled else ())})
    _add_equal(users, wanted, steps)
    if unscaled:
        check_unscaled(stored, unscaled, users, outputs, steps, known, report)
    planned = _Planned(stored, outputs, steps, table)
    for pair in pairs:
        fate = _Fate(pair, users.get(pair.weight, {}), users.get(pair.part, {}))
        apart = (_apart if pair.decodes else _left)(fate, planned)
        if apart is not None:
            _report(fate, *apart, planned, report)
        elif pair.role == "scale":
            _check_blocks(fate, planned, report)
    _report_left(pairs, users, planned, report)


class _Held(NamedTuple):
    spec: Spec


def scales_beside(specs: Mapping[str, Spec], weights: Sequence[str]) -> dict[str, str]:
    """Of float8 tensors among `specs` those that have a scale beside them, with its key: one of a
    known name, or what is all but certainly one.
    """
    pairs = list(_pairs({key: _Held(spec) for key, spec in specs.items()}, codecs.part_names()))
    found = {pair.weight: pair.part for pair in pairs if pair.decodes and pair.role == "scale"}
    known = {pair.part for pair in pairs}
    neighbours = Neighbours(specs)
    out = {}
    for key in weights:
        scale = found.get(key) or likely_scale(
            key, {other: specs[other] for other in neighbours.of(key)}, known
        )
        if scale is not None:
            out[key] = scale
    return out


def _untouched(key: str, stored: Mapping[str, StoredTensor], outputs: Mapping[str, Tensor]) -> bool:
    """Whether the output of this name is the stored tensor of this name, and of no other."""
    made, at = outputs.get(key), stored[key]
    if made is None or made.spec != at.spec:
        return False
    return made.sources == chunk_names(key, at)


def may_hold_codes(spec: Spec) -> bool:
    """Whether a tensor of this spec may hold codes: floats of a byte and less, and integers that
    several codes are packed into.
    """
    return spec.dtype in PACKED_IN or (BITS[spec.dtype] <= 8 and spec.dtype != "bool")


def _split(key: str) -> tuple[str, str]:
    """The key without its rank, and the rank at the end."""
    if "@" in key and (rank := rank_of(key)) is not None:
        mark = f"@{rank}"
        return key[: -len(mark)], mark
    return key, ""


def _pairs(
    stored: Mapping[str, StoredTensor] | Mapping[str, _Held], table: PartNames
) -> Iterable[Pair]:
    found: dict[tuple[str, str], Pair] = {}
    find = table.others.find
    for key in stored:
        plain, rank = _split(key) if "@" in key else (key, "")
        for stem, _, entries in find(plain):
            for first, role, decodes in entries:
                weight = key_of_part(stem, first) + rank
                at = stored.get(weight)
                if at is not None and weight != key and may_hold_codes(at.spec):
                    before = found.get((weight, key))
                    if before is None or decodes > before.decodes:
                        found[weight, key] = Pair(weight, key, role, decodes)
    return found.values()


def _belongs(part: str, key: str, table: PartNames) -> bool:
    """Whether the part at one key would be looked for beside the codes at the other."""
    (plain, rank), (weight, of) = _split(part), _split(key)
    return rank == of and any(
        key_of_part(stem, first) == weight
        for stem, _, entries in table.others.find(plain)
        for first, _, _ in entries
    )


def _users(outputs: Mapping[str, Tensor], wanted: set[str]) -> dict[str, dict[str, None]]:
    """wanted source key -> the outputs that are made of it, directly or by computing."""
    within: dict[int, frozenset[str]] = {}

    def sources(tensor: Tensor) -> Iterable[str]:
        for source in tensor.sources:
            if isinstance(source, ComputedTensor):
                yield from of(source.computation)
            elif (key := key_of(source)) in wanted:
                yield key

    def of(call: Computation) -> frozenset[str]:
        found = within.get(id(call))
        if found is None:
            found = within[id(call)] = frozenset(
                key for tensor in call.inputs for key in sources(tensor)
            )
        return found

    users: dict[str, dict[str, None]] = {}
    for key, tensor in outputs.items():
        found = tensor.sources
        # most tensors have one source, and there may be hundreds of thousands
        one = found[0] if len(found) == 1 else None
        for source in (
            sources(tensor) if not isinstance(one, str) else (one,) if one in wanted else ()
        ):
            users.setdefault(source, {})[key] = None
    return users


def _add_equal(
    users: dict[str, dict[str, None]], wanted: set[str], steps: Sequence[StepResult]
) -> None:
    """What is made of one of several tensors that have to be equal is made of all of them: modules
    that become one share the scale of all their numbers.
    """
    for bound in steps:
        for check in bound.checks:
            if check.kind != "equal":
                continue
            sources = (source for tensor in check.tensors for source in tensor.sources)
            keys = [key_of(s) for s in sources if not isinstance(s, ComputedTensor)]
            made = {output: None for key in keys for output in users.get(key, ())}
            for key in keys:
                if made and key in wanted and key not in users:
                    users[key] = made


def _apart(fate: _Fate, planned: _Planned) -> tuple[str | None, str | None] | None:
    """None if the parts stay together; else an output of each that is alone (None: dropped)."""
    pair, weights, parts = fate
    stored, outputs, _, table = planned
    if not weights and not parts:
        return None
    if not weights or not parts:
        return next(iter(weights), None), next(iter(parts), None)
    kept = (
        pair.weight in weights
        and pair.part in parts
        and outputs[pair.weight].spec.dtype == stored[pair.weight].spec.dtype
    )
    if kept:
        return None
    for key in weights:
        if key in parts:
            # decoded together
            continue
        # codes may be stored in another dtype after they were recoded
        still_encoded = may_hold_codes(outputs[key].spec)
        if still_encoded and any(_belongs(part, key, table) for part in parts):
            continue
        others = [part for part in parts if part not in weights]
        known = (
            not still_encoded
            or _named(table.firsts, key)
            or any(_named(table.others, part) and not _is_word(part, pair) for part in others)
        )
        if known or pair.weight == key or pair.part in others:
            return key, next(iter(others), next(iter(parts)))
    return None


def _named(endings: Endings, key: str) -> bool:
    """Whether the key has one of the endings; not that which every key has."""
    return any(end for _, end, _ in endings.find(_split(key)[0]))


def _is_word(part: str, pair: Pair) -> bool:
    """Whether a part has moved to a name that is common beside number formats too: DeepSeek-V4 and
    torchao call a scale like that.
    """
    leaf = _split(part)[0].rpartition(".")[2]
    return leaf in ("scale", "scales") and not pair.part.endswith(f".{leaf}")


def _left(fate: _Fate, planned: _Planned) -> tuple[str | None, str | None] | None:
    """`_apart` for a part that only travels: left alone where the weight is dropped, or goes to
    another module and the part does not.
    """
    _, weights, parts = fate
    if not parts:
        return None
    if not weights:
        return None, next(iter(parts))
    for part in parts:
        module = part[: part.rfind(".") + 1]
        if not any(
            key in parts or key.startswith(module) or _belongs(part, key, planned.table)
            for key in weights
        ):
            return next(iter(weights)), part
    return None


_MEANT = {
    OF_INPUTS: "each layer multiplies its inputs by it",
    **dict.fromkeys(BESIDE_PRODUCTS[1:], "each layer adds a product with it to its own"),
}


def _report_left(
    pairs: Iterable[Pair],
    users: Mapping[str, Mapping[str, None]],
    planned: _Planned,
    report: Report,
) -> None:
    """Says what stays beside weights that are decoded and was meant for encoded ones; M408 where a
    layer without it computes something else.
    """
    left: dict[str, list[str]] = {}
    needed: list[_Fate] = []
    for pair in pairs:
        weight, part, role, decodes = pair
        made = users.get(weight, {})
        if decodes or role in OF_CACHES or part not in users.get(part, ()):
            continue
        dtype = planned.stored[weight].spec.dtype
        encoded = any(planned.outputs[key].spec.dtype == dtype for key in made)
        if role in BESIDE_PRODUCTS:
            fate = _Fate(pair, made, users[part])
            if made and not (encoded and weight in made) and _left(fate, planned) is None:
                needed.append(fate)
        elif not encoded:
            left.setdefault(role, []).append(part)
    for role, parts in left.items():
        planned.steps[-1].notes.append(
            f"`{role}` stays beside weights that are decoded ({listed(parts, 4)}): what reads "
            "plain weights does not use it"
        )
    if needed:
        rule = _rule(needed[0], planned.steps)
        who = f"rule {rule.name!r}" if rule is not None else "the plan"
        report.add(
            "M408",
            f"{who} makes other weights of those whose `{needed[0].pair.role}` stays: "
            f"{listed([printable(fate.pair.part) for fate in needed], 4)}",
            spans=(rule.span,) if rule is not None else (),
            help=f"{_MEANT[needed[0].pair.role]}, and what reads the new weights does not, so the "
            "model would compute something else: move it with a rule to where it is read, or "
            "`drop` it if that is meant",
        )


def _report(
    fate: _Fate, weight: str | None, part: str | None, planned: _Planned, report: Report
) -> None:
    pair = fate.pair
    rule = _rule(fate, planned.steps)
    who = f"rule {rule.name!r}" if rule is not None else "the plan"
    label = {
        pair.weight: printable(pair.weight),
        pair.part: f"its {pair.role} {printable(pair.part)}",
    }
    there = {pair.weight: weight, pair.part: part}
    # what goes is named first
    first, second = (
        (pair.part, pair.weight)
        if part is None or weight == pair.weight
        else (pair.weight, pair.part)
    )
    target = there[second]
    rest = "stays" if target == second else f"becomes {printable(target or '')}"
    moved = there[first]
    does = (
        f"drops {label[first]}" if moved is None else f"makes {printable(moved)} of {label[first]}"
    )
    report.add(
        "M408",
        f"{who} {does}, and {label[second]} {rest}",
        spans=(rule.span,) if rule is not None else (),
        help=(rule and _known_names(rule, pair.role))
        or "the two are one tensor: move them together, drop both, or decode them first with "
        "`dequantize`, as roles of one rule",
    )


def _known_names(rule: DirectedRule, role: str) -> str | None:
    """Advice for a rule that makes parts of parts, which are together but under names that are not
    known to belong together; None for any other rule.
    """
    call = next((call for call in rule.steps if call.name == "recode"), None)
    if call is None:
        return None
    codec = codecs.get(call.args.to.codec)
    found = {
        named.parts[role].split()[0].rstrip("?") for named in codec.names if role in named.parts
    }
    return (
        f"nothing that reads {codec.name} looks for the {role} of these codes under that name: it "
        f"is called {listed(sorted(found), 6)}, each beside codes of one name"
    )


def _rule(fate: _Fate, steps: Sequence[StepResult]) -> DirectedRule | None:
    """The last rule that did something to either part."""
    for bound in reversed(steps):
        for key in (*fate.weights, *fate.parts):
            made = bound.provenance.get(key)
            if made is not None and made.keys != (key,):
                return made.rule
        for key in (fate.pair.weight, fate.pair.part):
            if key in bound.dropped:
                return bound.dropped[key]
    return None


def _check_blocks(fate: _Fate, planned: _Planned, report: Report) -> None:
    pair, weights, parts = fate
    stored, outputs, steps, table = planned
    before, grid = stored[pair.weight].spec.shape, stored[pair.part].spec.shape
    # where codes are packed or scales transposed, axes do not answer to each other
    if stored[pair.weight].spec.dtype not in FLOAT8 or not 2 <= len(before) == len(grid):
        return
    for key in weights:
        partner = next((part for part in parts if _belongs(part, key, table)), None)
        if partner is None:
            continue
        after, blocks = outputs[key].spec.shape, outputs[partner].spec.shape
        if len(after) < 2 or len(blocks) < 2:
            continue
        for axis in (-2, -1):
            if after[axis] != before[axis] and not _fits(
                before[axis], grid[axis], after[axis], blocks[axis]
            ):
                rule = _rule(_Fate(pair, {key: None}, {partner: None}), steps)
                message = (
                    f"{printable(pair.weight)} {list(before)} has scales {list(grid)} and becomes "
                    f"{printable(key)} {list(after)} "
                    f"with {list(blocks)}: blocks along axis {axis} are cut, whatever their size"
                )
                report.add(
                    "M310",
                    message,
                    spans=(rule.span,) if rule is not None else (),
                    help="decode with `dequantize` before parts are joined",
                )
                return


def _fits(before: int, grid: int, after: int, blocks: int) -> bool:
    """Whether some block size makes `grid` blocks of `before` elements and `blocks` of `after`, the
    smaller length in whole blocks.
    """
    if not (before and grid and after and blocks):
        return True
    low = max(-(-before // grid), -(-after // blocks))
    high = min((n - 1) // (g - 1) if g > 1 else n for n, g in ((before, grid), (after, blocks)))
    shorter = min(before, after)
    # a single block may be larger than what it holds
    return any(shorter % size == 0 for size in range(low, min(high, shorter) + 1))
