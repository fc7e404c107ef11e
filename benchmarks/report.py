"""Turns what was measured into one table of ratios, each a median with its range, and the list of
targets.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Spread = tuple[float, float, float]


def spread(values: Sequence[float]) -> Spread:
    """(median, least, most)."""
    return statistics.median(values), min(values), max(values)


def ratios(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """a / b round by round, so that a slow minute of the machine hits both sides; rounds that only
    one side has are left out.
    """
    return [x / y for x, y in zip(a, b, strict=False)]


def shown(value: Sequence[float] | None) -> str:
    return "-" if value is None else f"{value[0]:.2f} [{value[1]:.2f}-{value[2]:.2f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A markdown table whose columns line up in a terminal as well."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    return [line(head), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)]


def render(result: dict[str, Any]) -> str:
    machine = result["machine"]
    libraries = ", ".join(
        f"{n} {machine[n]}"
        for n in ("torch", "numpy", "safetensors", "transformers", "xxhash")
        if n in machine
    )
    out = [
        f"# {result['size']}: {result['bytes'] / 1e9:.2f} GB of bf16, {result['rounds']} rounds",
        "",
        (
            f"{machine['date']}; {machine['cpu']}, {machine['cores']} cores, "
            f"{machine['memory_gib']} "
            f"GiB, Linux {machine['kernel']}."
        ),
        f"Python {machine['python']}, {libraries}.",
        (
            "Whole processes, page cache warm, no fsync; median [least-most] of ratios within one "
            "round. Private memory is RssAnon, sampled."
        ),
    ]
    if result["rows"]:
        head = [
            "task",
            "s",
            "start-up s",
            "of cp",
            "of cp, less start-up",
            "of cp, fsync",
            "x faster: script",
            "less start-up",
            "transformers",
            "private MB",
            "script's MB",
        ]
        rows = []
        for row in result["rows"]:
            synced = row["with_fsync"]
            rows.append(
                [
                    row["title"],
                    f"{statistics.median(row['seconds']['migrate']):.2f}",
                    f"{row['start_up']:.2f}",
                    shown(row["to_cp"]),
                    shown(row["copying_to_cp"]),
                    f"{synced['migrate'] / synced['cp']:.2f}" if synced else "-",
                    shown(row["faster"].get("script")),
                    shown(row["faster"].get("script, both less start-up")),
                    shown(row["faster"].get("transformers")),
                    f"{row['private_mb']['migrate']:.0f}",
                    f"{row['private_mb']['script']:.0f}",
                ]
            )
        out += ["", *table(head, rows)]
    judged = [(row["task"], limit) for row in result["rows"] for limit in row["limits"]]
    judged += [("command", limit) for limit in result["commands"]]
    if judged:
        out += ["", "Targets:", ""]
        out += [f"* {task}: {limit['text']}" for task, limit in judged]
        # an aim is a wish on top of the bound
        bounds = [limit["met"] for _, limit in judged if not limit["what"].startswith("(aim)")]
        out += ["", f"{sum(bounds)} of {len(bounds)} targets met."]
    if result["failed"]:
        out += ["", f"Could not be measured: {', '.join(result['failed'])}."]
    return "\n".join(out)
