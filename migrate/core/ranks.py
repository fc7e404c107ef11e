"""Ranks: keys that stand in several files of one checkpoint are called `key@0`, `key@1`.

A pattern that does not speak of ranks sees each rank's keys without their `@r`; one that does sees
a key of a single file as rank 0. All keys of a template have the same rank, so both are settled
once per template.
"""

from __future__ import annotations

from collections.abc import Sequence

from .keys import Pattern
from .templates import Template, is_integer, matches, matching


def rank_of(key: str) -> int | None:
    """The rank that stands at the end of a key of several files, `key@1`; None for a plain key."""
    base, at, digits = key.rpartition("@")
    return int(digits) if at and base and is_integer(digits) else None


def names_rank(pattern: Pattern) -> bool:
    """Whether the pattern speaks of ranks: `@{r:int}` or `@0` at its end."""
    return pattern.ranked or rank_of(pattern.text) is not None


def without_rank(template: Template) -> tuple[Template, int | None]:
    """The template with its rank cut off, which is the same for all its keys, and that rank."""
    rank = rank_of(template.text)
    if rank is None:
        return template, None
    end = -len(f"@{rank}")
    return Template(
        template.text[:end], [key[:end] for key in template.keys], template.ints, template.literal
    ), rank


def with_rank_0(pattern: Pattern, template: Template, rank: int | None) -> Template:
    """The template as a pattern with `@{r:int}` sees it: a key that stands in one file has rank
    0.
    """
    if rank is not None or not pattern.ranked:
        return template
    return Template(
        f"{template.text}@0", [f"{key}@0" for key in template.keys], template.ints, template.literal
    )


def as_seen(pattern: Pattern, key: str) -> str:
    """The key as a pattern sees it: with rank 0 where it stands in one file and the pattern has
    `@{r:int}`, without its rank where the pattern does not speak of ranks."""
    rank = rank_of(key)
    if not names_rank(pattern):
        return key if rank is None else key[: -len(f"@{rank}")]
    return f"{key}@0" if pattern.ranked and rank is None else key


def takes(pattern: Pattern, key: str) -> bool:
    """Whether the pattern fits the key, under whatever reading."""
    return matches(pattern, as_seen(pattern, key))


def fitting(
    pattern: Pattern, template: Template, cut: tuple[Template, int | None] | None = None
) -> Sequence[bool]:
    """For each key of the template whether the pattern fits it, ranks seen as the pattern sees
    them.

    `cut` is what `without_rank` says of the template, where it is known already.
    """
    base, rank = cut or without_rank(template)
    return matching(pattern, with_rank_0(pattern, template, rank) if names_rank(pattern) else base)
