"""Makes the lineages for the model types of the installed transformers, `make catalogue`, and says
what changed; with --check it only says so.

A lineage whose files were released is sealed: where a new release changes what its rules mean,
`migrate seal` refuses, and a person decides. --replace seals again what was never released. A file
with the line `# changed by hand: WHY` is left as it is.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import catalogue

import migrate
from migrate.rules import packaged

PAGE = catalogue.RULES.parent / "docs" / "reference" / "catalogue.md"
BEGIN, END = "<!-- made by make catalogue -->", "<!-- end -->"


def differences(files: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Each file that is not as it would be made, unless it says why, with the lines that differ."""
    homes = {name.split("/")[0] for name in files}
    there = {
        path.relative_to(catalogue.RULES).as_posix(): path.read_text("utf-8")
        for home in homes for path in (catalogue.RULES / home).rglob("*.yaml")
    }  # fmt: skip
    for name in sorted(files.keys() | there.keys()):
        old, new = there.get(name, ""), files.get(name, "")
        if old != new and catalogue.CHANGED not in old:
            yield name, [*difflib.unified_diff(old.splitlines(), new.splitlines(), name, name, "")]


def orphans(names: set[str]) -> list[str]:
    """Lineages that were made once and that no model type of the library gives any more."""
    shipped = {name for name, made in catalogue.shipped_types().values() if made}
    return sorted(shipped - names)


def page(found: Mapping[str, catalogue.Imported | str], all_: list[catalogue.Family]) -> str:
    """The table of the model types, for the reference."""
    import transformers

    homes = {kind: family for family in all_ for kind in family.types}
    shipped = catalogue.shipped_types()
    rows = []
    for kind, made in found.items():
        if kind in homes:
            family = homes[kind]
            rules = [draft.name for draft in family.rules]
            cells = [f"`{family.name}`", made.cls if not isinstance(made, str) else ""]
            cells.append(f"{len(rules)} rule{'s' * (len(rules) != 1)}")
        elif kind in shipped:
            cells = [f"`{shipped[kind][0]}`", "", "written by hand"]
        elif isinstance(made, str):
            cells = ["", "", made]
        else:
            cells = ["", made.cls, "nothing changes: both layouts have the same keys"]
        rows.append("| " + " | ".join([f"`{kind}`", *cells]).replace("  ", " ") + " |")
    said = (
        f"transformers {transformers.__version__}: {len(found)} model types, "
        f"{sum(kind in homes or kind in shipped for kind in found)} of them in "
        f"{len({*(f.name for f in all_), *(shipped[k][0] for k in found if k in shipped)})} "
        "lineages."
    )
    head = ["| model type | lineage | class | rules, or why there are none |", "|---|---|---|---|"]
    return "\n".join([BEGIN, "", said, "", *head, *rows, "", END])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--replace", action="store_true")
    args = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    found = dict(catalogue.made())
    known = {kind: made for kind, made in found.items() if not isinstance(made, str)}
    all_ = catalogue.families(known)
    files = {name: text for f in all_ for name, text in catalogue.files_of(f).items()}
    changed = list(differences(files))
    for name, lines in changed:
        print("\n".join(lines) if (catalogue.RULES / name).exists() else f"new: {name}")
    left = orphans({family.name for family in all_})
    for name in left:
        print(f"{name}: no model type of transformers {transformers.__version__} gives it")
    if args.check:
        return int(bool(changed or left))
    for name, _ in changed:
        path = catalogue.RULES / name
        if name in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[name], "utf-8")
        else:
            path.unlink()
    homes = [str(catalogue.RULES / name) for name in dict.fromkeys(f.name for f in all_)]
    try:
        migrate.seal(homes, replace=args.replace, rules=catalogue.RULES)
    except migrate.MigrateError as error:
        print(error)
        return 1
    for place, text in list(packaged.differences()):
        Path(place).write_text(text, "utf-8")
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text.split(BEGIN)[0] + page(found, all_) + text.split(END)[1], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
