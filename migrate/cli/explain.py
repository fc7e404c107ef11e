"""`migrate explain`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from . import render
from .options import as_json
from .terminal import safe


@click.command()
@click.argument("word", required=False)
@as_json
def command(word: str | None, form: str) -> None:
    """Explain a diagnostic, an op or a codec.

    WORD is a code (M207) or its name, an op (stack) or a codec (fp8-block). Without
    it, all of them are listed.
    """
    from ..rules.reference import explanation

    document = explanation(word)
    render.emit(document, form, _listed if word is None else _explained)


def _listed(document: Mapping[str, Any]) -> str:
    return "\n".join(
        render.columns(
            [[t["about"], t["name"], t["title"]] for t in safe(document)["topics"]],
            indent="",
        )
    )


def _explained(document: Mapping[str, Any]) -> str:
    topic = document["topics"][0]
    head = f"{topic['name']}   ({topic['about']})"
    if topic["about"] == "diagnostic":
        head = (
            f"{topic['name']}: {topic['title']}   ({topic['severity']}, exit status "
            f"{topic['exit']})"
        )
    return f"{head}\n\n{topic['text']}"


COMMAND = command
