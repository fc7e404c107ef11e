"""The lineages that ship for model types of transformers, made by the importer: `make catalogue`.

For each model type the class that has the most is built without data, and what the library does to
all that it saves is written down. Model types with the same rules share a lineage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiny_models
import yaml

from migrate.authoring import writing
from migrate.authoring.compact import compact
from migrate.authoring.examples import made_tests
from migrate.authoring.relations import Relation, RuleDraft
from migrate.authoring.transformers import Imported, imported_class

RULES = Path(__file__).resolve().parents[2] / "rules"
MADE = "Made by `make catalogue` from the conversion mapping of transformers."
NOTE = "without config.json it is not told from other families, many of which have these keys"
UNCOUNTED = re.compile(r"^    via: \[\{stack: \{over: \w+\}\}", re.MULTILINE)
WHY = "transformers 5 names and joins weights otherwise than the files on the Hub"
# in a file that was made and then changed, before why
CHANGED = "# changed by hand: "

LAYERS = 2
# parameters that a configuration may leave out of a module
NOT_ALWAYS = ("bias", "running_mean", "running_var", "num_batches_tracked")

# what `save_pretrained` writes for the hub where the files there have something else
_SAM3 = ((r"^tracker_model\.(detector_model|tracker_neck)\.", r"\1."),)
WRITTEN_WRONG: Mapping[str, tuple[tuple[str, str], ...]] = {
    "altclip": ((r"^(vision_model\.encoder\.)layer\.", r"\1layers."),),
    "esm": (
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
        (r"(\.layer\.)\*\.", r"\1#."),
    ),
    "sam3_tracker": _SAM3,
    "sam3_tracker_video": _SAM3,
    "vit_mae": ((r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),),
}


@dataclass(frozen=True)
class Family:
    """A lineage: its name, its model types, and what was imported for each."""

    name: str
    types: tuple[str, ...]
    made: tuple[Imported, ...]
    drafts: tuple[RuleDraft, ...]

    @property
    def rules(self) -> list[RuleDraft]:
        return [draft for draft in self.drafts if not draft.keep]


def lineage_name(model_type: str) -> str:
    return "hf-" + model_type.replace("_", "-")


def model_types() -> dict[str, list[str]]:
    """The model types of the library's mapping, each with the entries that are about it."""
    found: dict[str, list[str]] = {}
    for entry in tiny_models.entries():
        try:
            kind = tiny_models.class_of(entry).config_class.model_type
        except LookupError:
            continue
        found.setdefault(kind, []).append(entry)
    return dict(sorted(found.items()))


def hub_name(model_type: str, key: str, layers: int = LAYERS) -> list[str]:
    """The keys that files on the hub have where `save_pretrained` writes this one."""
    for pattern, there in WRITTEN_WRONG.get(model_type, ()):
        key = re.sub(pattern, there, key)
    return [key.replace("#", str(n)) for n in range(layers)] if "#" in key else [key]


def settings_of(model_type: str, **sizes: int) -> tuple[Any, dict[str, Any]]:
    """The class of a model type, and the `config.json` of a small model of it."""
    cls = tiny_models.class_of(model_type)
    config = tiny_models.configuration(model_type, cls, **sizes)
    text = config.to_json_string(use_diff=True)
    return cls, json.loads(text, object_hook=_number)


def _number(held: dict[str, Any]) -> Any:
    return float(held["__float__"]) if [*held] == ["__float__"] else held


def imported_type(model_type: str) -> Imported:
    cls, settings = settings_of(model_type)
    found = imported_class(settings, cls.__name__, lambda key: hub_name(model_type, key))
    return _with_params(found, cls.config_class().to_dict())


def _with_params(found: Imported, defaults: Mapping[str, Any]) -> Imported:
    """Params for any checkpoint of the class: the default is the one that the library has. A number
    that only says how many keys there must be may be unknown.
    """
    via = repr([(d.via, d.where) for d in found.drafts])
    params = {}
    for name, said in found.params.items():
        counts = len(re.findall(rf"'count': '\${name}'", via))
        asked = len(re.findall(rf"\${name}\b", via))
        kept = {n: v for n, v in said.items() if n != "default"}
        if counts == asked and "tie" not in via:
            params[name] = {"type": "int", "minimum": 1} | kept | {"optional": True}
            params[name]["title"] = params[name].pop("title")
            continue
        paths = said["config"] if isinstance(said["config"], list) else [said["config"]]
        default = next((v for p in paths if isinstance(v := _at(defaults, p), int)), None)
        params[name] = kept if default is None else {**kept, "default": default}
    return replace(found, params=params)


def _at(settings: Any, path: str) -> Any:
    for name in path.split("."):
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings


# -------------------------------------------------------------- what is shared


def families(found: Mapping[str, Imported]) -> list[Family]:
    """The model types by their rules; those in whose checkpoints nothing changes are left out."""
    alike: dict[str, list[str]] = {}
    for kind, made in found.items():
        if any(not draft.keep for draft in made.drafts):
            alike.setdefault(_meaning(made.drafts, made), []).append(kind)
    shipped = shipped_types()
    out = []
    for said, kinds in alike.items():
        kinds = [kind for kind in kinds if shipped.get(kind, (None, True))[1]]
        while kinds:
            some = [kinds[0]]
            drafts = list(found[kinds[0]].drafts)
            for kind in kinds[1:]:
                both = compact(
                    _together([found[k] for k in (*some, kind)]), params=found[kind].values
                )
                both = [_uncounted(d, drafts) for d in both]
                if _meaning(both, found[kind]) == said:
                    some, drafts = [*some, kind], both
            names = [shipped[kind][0] for kind in some if kind in shipped]
            own = [lineage_name(kind) for kind in some]
            name = next((n for n in names if n in own), own[0])
            out.append(Family(name, tuple(some), tuple(found[k] for k in some), tuple(drafts)))
            kinds = [kind for kind in kinds if kind not in some]
    return sorted(out, key=lambda family: family.name)


def _uncounted(draft: RuleDraft, known: Iterable[RuleDraft]) -> RuleDraft:
    """The ops as the importer left them, which says no number of one checkpoint."""
    same = next((d for d in known if d.sources == draft.sources and not d.keep), None)
    return draft if same is None or draft.keep else replace(draft, via=same.via)


def _together(made: Iterable[Imported]) -> list[Relation]:
    out: dict[tuple[Any, Any], Relation] = {}
    for one in made:
        for relation in one.relations:
            out.setdefault((relation.sources, relation.targets), relation)
    return list(out.values())


def _meaning(drafts: Iterable[RuleDraft], made: Imported) -> str:
    rules = [(d.sources, d.targets, d.via, d.map, d.where, d.fields) for d in drafts if not d.keep]
    return repr((rules, made.params))


def shipped_types() -> dict[str, tuple[str, bool]]:
    """Model type -> the shipped lineage of transformers' layouts for it, and whether it is made."""
    out = {}
    for path in sorted(RULES.glob("hf-*/layouts.yaml")):
        text = path.read_text("utf-8")
        for layout in yaml.safe_load(text)["layouts"].values():
            kinds = layout["detect"]["config"]["model_type"]
            for kind in [kinds] if isinstance(kinds, str) else kinds:
                out[kind] = (path.parent.name, MADE in text)
    return out


# ------------------------------------------------------------- what is written


def files_of(family: Family) -> dict[str, str]:
    """The files of a lineage by their place in `rules`."""
    first = family.made[0]
    slug, title = _titled(family.rules)
    head = writing.FileHead(
        f"{family.name}/v5/{slug}", title, family.name, ("v4", "v5"), WHY,
        params=first.params, comments=(MADE,),
    )  # fmt: skip
    tests = made_tests(first.drafts, first.relations, first.specs, first.read, head, first.values)
    return {
        f"{family.name}/layouts.yaml": layouts_text(family),
        f"{family.name}/v5/{slug}.yaml": UNCOUNTED.sub(
            r"    # migrate: allow M651 because no setting says how many there are\n\g<0>",
            writing.text(family.drafts, head, tests.tests),
        ),
    }


def _titled(rules: Iterable[RuleDraft]) -> tuple[str, str]:
    ops = {name for draft in rules for call in draft.via for name in call}
    if "stack" in ops:
        return "stack-experts", "Stack the experts of a layer, and rename as transformers 5 does"
    if ops - {"drop", "tie", "cast"}:
        return "join-weights", "Join, cut and rename weights as transformers 5 does"
    return "rename", "Rename weights as transformers 5 does"


def layouts_text(family: Family) -> str:
    old, new = signs(family)
    kinds = list(family.types)
    config: dict[str, Any] = {"model_type": kinds if len(kinds) > 1 else kinds[0]}
    classes = [one.cls for one in family.made]
    said: list[str] = [
        "# yaml-language-server: $schema=../../schemas/layouts.schema.json", f"# {MADE}",
        *writing.entry("lineage", family.name, 0),
        *writing.entry("title", f"{_listed(classes)} in transformers", 0),
    ]  # fmt: skip
    others = [lineage_name(kind) for kind in kinds if lineage_name(kind) != family.name]
    if others:
        said += writing.entry("aliases", others, 0)
    said += ["ordered: true", 'requires: ">=0.1"', "layouts:"]
    for name, title, status, own, other in (
        ("v4", "as transformers 4 and the files on the Hub have it", "supported", old, new),
        ("v5", "as transformers 5 has it in memory", "current", new, old),
    ):
        detect: dict[str, Any] = {
            n: v for n, v in (("present", list(own)), ("absent", list(other))) if v
        }
        detect |= {"config": config, "configured": True}
        said += [f"  {name}:", f"    title: {title}", f"    status: {status}", "    detect:"]
        for field, value in detect.items():
            said += writing.entry(field, value, 6)
        said += writing.entry("note", NOTE, 4)
    return "\n".join(said) + "\n"


def _listed(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def signs(family: Family) -> tuple[list[str], list[str]]:
    """Patterns that only keys of the old layout fit, and only keys of the new one: few, of what
    every checkpoint has.
    """
    kinds = len(family.made)
    found: tuple[dict[str, int], dict[str, int]] = ({}, {})
    only_some: set[str] = set()
    for one in family.made:
        moved = [r for r in one.relations if r.targets and r.note is None]
        before = {pattern(key): r for r in moved for key in r.sources}
        after = {pattern(key): r for r in moved for key in r.targets}
        for count, own, other in zip(found, (before, after), (after, before), strict=True):
            for text, relation in own.items():
                if text not in other:
                    count[text] = count.get(text, 0) + 1
                    only_some |= {text} if relation.fields else set()
    every = [[text for text, count in side.items() if count == kinds] for side in found]
    return _few(every[0], only_some), _few(every[1], only_some)


def pattern(key: str) -> str:
    """What stands for a key and for those that differ from it in their numbers."""
    names = iter("nijlhbcd")
    return ".".join(
        f"{{{next(names)}:int}}" if re.fullmatch("0|[1-9][0-9]*", part) else part
        for part in key.split(".")
    )


def _few(patterns: list[str], only_some: Collection[str]) -> list[str]:
    """Two of them that every checkpoint has: of experts, or of what each layer has."""

    def rank(text: str) -> tuple[Any, ...]:
        leaf = text.rpartition(".")[2]
        rare = text in only_some and "expert" not in text
        return rare, "expert" not in text, "{" not in text, leaf in NOT_ALWAYS, len(text), text

    ranked = sorted(patterns, key=rank)
    if ranked and ranked[0] not in only_some:
        ranked = [text for text in ranked if text not in only_some]
    if not ranked:
        return []
    stem = ranked[0].split(".{")[0]
    other = next((p for p in ranked[1:] if p.split(".{")[0] != stem), None)
    return [ranked[0], *([other] if other else ranked[1:2])]


def made(asked: Iterable[str] = ()) -> Iterator[tuple[str, Imported | str]]:
    """Of each model type what was imported, or why there is nothing."""
    for kind in asked or model_types():
        try:
            yield kind, imported_type(kind)
        except Exception as error:  # noqa: BLE001 - which is what the table says of it
            yield kind, str(error).splitlines()[0]
