"""The rule file of what transformers does to a checkpoint when it loads it.

The class is built on the meta device from config.json; the keys of the checkpoint are pushed
through the class's conversion mapping and those of its sub-models, and what becomes of them is
written as rules, for any number of layers and experts. With `reverse` the checkpoint is in the
layout of the model already, and the keys of the other layout are those that `save_pretrained`
writes; they are pushed through the mapping as well, so that the rules never rest on a pattern read
backwards.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ...core.errors import Report, fail, listed, option, printable
from ...core.keys import parse
from ...core.spec import Spec
from ...source.index import Source
from ..compact import compact, patterns
from ..relations import Relation, RuleDraft
from ..writing import FileHead
from . import classes
from .mapping import Mapped, mapped
from .operations import Wanted
from .values import LONGEST, readers, shortened

# an axis of a class that is made small beforehand
_SMALL = 128
_FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Imported:
    """The rules, the relations between keys that they were made of, and what a file says of them.

    `params` are declared as in a rule file, `values` are theirs for this checkpoint. `specs` are
    the keys of the hub's layout with short axes, `read` numbers for them, and what transformers
    makes of these. `missing` are parameters of the class that no key becomes.
    """

    cls: str
    model_type: str
    version: str
    drafts: tuple[RuleDraft, ...]
    relations: tuple[Relation, ...]
    params: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, int]
    specs: Mapping[str, Spec]
    read: tuple[Any, Any]
    missing: tuple[str, ...]

    def header(self, head: FileHead) -> FileHead:
        """What stands at the head of the file, with where the rules come from."""
        comments = [
            f"Made from the conversion mapping of transformers {self.version} for {self.cls}."
        ]
        if self.missing:
            comments.append(f"Not in the checkpoint: {listed(list(self.missing), 3)}")
        return replace(
            head,
            title=f"Move {self.cls} to the layout of transformers 5",
            why="transformers 5 names and joins weights otherwise than the files on the Hub",
            params=self.params,
            comments=tuple(comments),
        )


def imported(source: Source, cls: str | None = None, *, reverse: bool = False) -> Imported:
    """The rules for an opened checkpoint's class; M990 to M992 where there can be none."""
    header: Mapping[str, Spec] = {k: stored.spec for k, stored in source.index.tensors.items()}
    settings = _settings(source)
    held = classes.library()
    built = classes.built(held, settings, cls, _dtype(header))
    if reverse:
        header = _hub_header(held, built, header)
    found = mapped(held, built, header)
    if not found.untold and not any(r.targets for r in found.relations):
        _refuse_others(type(built.model), found.missing, header, cls)
    return _written_down(held, built, header, found)


def _refuse_others(
    cls: type, missing: Sequence[str], header: Mapping[str, Spec], named: str | None
) -> NoReturn:
    """M991 for a checkpoint of which the class takes no key."""
    fail(
        "M991",
        f"no key of the checkpoint is one of {cls.__name__}",
        notes=(
            f"the checkpoint has {listed(list(header), 3)}" if header else "it has no tensors",
            f"the class has {listed(list(missing), 3)}",
        ),
        help=f"leave {option('cls')} out" if named else f"name its class: {option('cls', 'CLASS')}",
    )


def imported_class(
    settings: Mapping[str, Any], cls: str, stored: Callable[[str], Iterable[str]] = lambda k: (k,)
) -> Imported:
    """The rules for a class as `config.json` describes it, without a checkpoint: from what it
    writes for the Hub to what it writes otherwise. What may be tied is in neither, or in both.

    `stored` are the keys that checkpoints have where `save_pretrained` writes one.
    """
    held = classes.library()
    built = classes.built(held, settings, cls, "float32")
    left_out = getattr(built.model, "_keys_to_ignore_on_save", None) or ()
    saved = {
        key: Spec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for key, tensor in built.model.state_dict().items()
        if key not in left_out
    }
    header = _hub_header(held, built, saved)
    hub = {key: spec for written, spec in header.items() for key in stored(written)}
    found = mapped(held, built, hub, whole=True)
    tied = classes.tied(held, built.model)
    found.relations = [
        r
        if r.kept or not tied & {*r.targets}
        else replace(r, fields={**r.fields, "optional": True})
        for r in found.relations
    ]
    return _written_down(held, built, hub, found, longest=_SMALL)


def _written_down(
    held: classes.Library,
    built: classes.Built,
    header: Mapping[str, Spec],
    found: Mapped,
    longest: int = LONGEST,
) -> Imported:
    name = type(built.model).__name__
    _refuse(found, name, held.version)
    params = {n: w.value for n, w in found.params.items() if isinstance(w.value, int)}
    relations = found.relations
    drafts = compact(relations, params=params)
    if taken := [r for r in found.absent if any(_takes(d, r.sources[0]) for d in drafts)]:
        relations = [*relations, *taken]
        drafts = compact(relations, params=params)
    drafts = [_uncounted(draft, params) for draft in drafts]
    used = set(re.findall(r"\$(\w+)", repr([(d.via, d.where) for d in drafts])))
    values = {n: v for n, v in params.items() if n in used}
    return Imported(
        name,
        str(built.settings["model_type"]),
        held.version,
        tuple(drafts),
        tuple(relations),
        {n: _param(w) for n, w in found.params.items() if n in used},
        values,
        (small := shortened(header, relations, values, longest)),
        readers(built, found, small),
        tuple(found.missing),
    )


def _param(wanted: Wanted) -> Mapping[str, Any]:
    path = wanted.path[0] if len(wanted.path) == 1 else list(wanted.path)
    return {"type": "int", "config": path, "default": wanted.value, "title": wanted.title}


def _takes(draft: RuleDraft, key: str) -> bool:
    return any("...}" in p and parse(p).match(key) is not None for p in patterns(draft.sources))


def _uncounted(draft: RuleDraft, params: Mapping[str, int]) -> RuleDraft:
    """The rule without the numbers of one checkpoint: others have more experts."""
    return replace(
        draft, via=tuple({n: _free(n, a, params) for n, a in op.items()} for op in draft.via)
    )


def _free(name: str, args: Mapping[str, Any], params: Mapping[str, int]) -> Mapping[str, Any]:
    if name != "stack":
        return args
    count, start = args.get("count"), args.get("start")
    if not isinstance(count, str):
        return {k: v for k, v in args.items() if k != "count"}
    each = params.get(count.removeprefix("$"), 0)
    if isinstance(start, int) and start and each and not start % each:
        return {**args, "start": count if start == each else f"{start // each} * {count}"}
    return args


def _settings(source: Source) -> Mapping[str, Any]:
    side = {file.path for file in source.index.side_files}
    if "config.json" not in side:
        fail(
            "M991",
            "there is no config.json beside the tensors, which names the class",
            help="name a folder that has it",
        )
    try:
        settings = json.loads(source.side_file("config.json"), object_hook=_number)
    except ValueError as error:
        fail("M991", f"config.json: {printable(str(error), 300)}")
    if not isinstance(settings, dict):
        fail("M991", "config.json is no object")
    if settings.get("quantization_config"):
        method = settings["quantization_config"].get("quant_method")
        fail(
            "M992",
            f"the checkpoint is quantized ({printable(str(method))}), and the mapping is for the "
            "numbers themselves",
            help="dequantize it first: `migrate history` lists the lineages of number formats",
        )
    return settings


def _number(held: dict[str, Any]) -> Any:
    """transformers writes a number that JSON does not have as an object."""
    return float(held["__float__"]) if [*held] == ["__float__"] else held


def _dtype(header: Mapping[str, Spec]) -> str:
    """The dtype of most of the numbers."""
    sizes: Counter[str] = Counter()
    for spec in header.values():
        if spec.dtype in _FLOATS:
            sizes[spec.dtype] += spec.numel
    return max(sizes, key=lambda d: sizes[d], default="float32")


def _hub_header(
    held: classes.Library, built: classes.Built, header: Mapping[str, Spec]
) -> Mapping[str, Spec]:
    """The keys and shapes that `save_pretrained` writes for a checkpoint in the model's layout."""
    state = built.model.state_dict()
    strange = [key for key in header if key not in state]
    if strange:
        fail(
            "M992",
            f"{type(built.model).__name__} has no parameter {listed(strange, 3)}",
            help=f"{option('reverse', True)} is for a checkpoint in the layout of the model",
        )
    import torch

    tensors = {
        key: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        for key, spec in header.items()
    }
    try:
        made = held.revert_weight_conversion(built.model, tensors)
    except Exception as error:  # noqa: BLE001 - whatever the library raises
        fail("M992", f"transformers cannot write the other layout: {printable(str(error), 300)}")
    return {
        key: Spec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for key, tensor in made.items()
    }


def _refuse(found: Mapped, name: str, version: str) -> None:
    report = Report()
    for problem in found.untold:
        report.add("M992", f"{name} of transformers {version}: {problem}")
    report.check()


__all__ = ["Imported", "imported"]
