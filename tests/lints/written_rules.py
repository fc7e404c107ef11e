"""Rule files written into a folder, and what lint finds in them."""

from __future__ import annotations

from pathlib import Path

from migrate.core.errors import Diagnostic
from migrate.lints.findings import LintFindings, lint

MODELINE = "# yaml-language-server: $schema=../../../schemas/rulefile.schema.json\n"
LAYOUTS = """# yaml-language-server: $schema=../../schemas/layouts.schema.json
lineage: demo
title: Demo
ordered: true
layouts:
  v1: {title: first, detect: {present: "old.{i:int}.w"}}
  v2: {title: second, detect: {present: "new.{i:int}.w"}}
"""


class Lineage:
    """A lineage `demo` in a folder; what is not said in a rule file is said as a careful author
    would.
    """

    def __init__(self, root: Path) -> None:
        self.root = root / "rules"
        self.layouts(LAYOUTS)

    def layouts(self, text: str) -> None:
        (self.root / "demo").mkdir(parents=True, exist_ok=True)
        (self.root / "demo" / "layouts.yaml").write_text(text)

    def rules(
        self,
        body: str,
        slug: str = "first",
        edge: tuple[str, str] = ("v1", "v2"),
        head: str | None = None,
    ) -> Path:
        made = (
            MODELINE + f"id: demo/{edge[1]}/{slug}\ntitle: Some rules\n" if head is None else head
        )
        path = self.root / "demo" / edge[1] / f"{slug}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            made + f'lineage: demo\nedge: [{edge[0]}, {edge[1]}]\nrequires: ">=0.1"\n{body}'
        )
        return path

    def lint(self, **keywords: object) -> LintFindings:
        return lint([self.root], **keywords)  # type: ignore[arg-type]

    def found(self, *only: str) -> list[Diagnostic]:
        """The findings, or those with these codes."""
        result = self.lint()
        assert not [d for d in result.problems if d.severity == "error"], [
            d.render() for d in result.problems
        ]
        return [d for d in result.findings if not only or d.code in only]

    def codes(self) -> list[str]:
        return [d.code for d in self.found()]
