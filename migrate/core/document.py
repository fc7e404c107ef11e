"""What public functions return, as far as all of it is alike: a JSON document that is read by
attributes and cannot be changed.

A subclass names its fields by annotations; nothing else is made of them until an attribute is asked
for, because a command starts with all of these classes and `dataclass` would take a millisecond for
each. An attribute is the field of its name in the document (`from_` for `from`), with lists as
tuples and objects as the class that the annotation names. A field left out is None.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import get_annotations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from .errors import Diagnostic, Span
from .types import FORMAT_VERSION

if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda cls: cls


_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass_transform(frozen_default=True, kw_only_default=True)
class DocumentPart:
    """An object of a document. Two are equal if they are of one class and say the same."""

    __slots__ = ("_document",)
    _document: dict[str, Any]
    # attributes that are called otherwise than their field
    RENAMED: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **fields: Any) -> None:
        self._keep(_named(type(self), {name: _plain(value) for name, value in fields.items()}))

    def _keep(self, document: dict[str, Any]) -> None:
        object.__setattr__(self, "_document", document)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The object of what `to_json` gave, or a command printed."""
        made = object.__new__(cls)
        made._keep(dict(document))
        return made

    def to_json(self) -> dict[str, Any]:
        """The document in plain dicts, lists, strings and numbers: the caller's own copy."""
        out: dict[str, Any] = _plain(self._document)
        return out

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            annotation = fields_of(type(self)).get(name)
            if annotation is None:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return _typed(
                self._document.get(_field(type(self), name)), annotation, type(self).__module__
            )

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *fields_of(type(self))})

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is read-only: `{name}` cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is read-only: `{name}` cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return (
            self._document == other._document
            if isinstance(other, DocumentPart) and type(other) is type(self)
            else NotImplemented
        )

    def __reduce__(self) -> Any:
        return type(self).from_json, (self._document,)

    def __repr__(self) -> str:
        said = (
            f"{name}={getattr(self, name)!r}"
            for name in fields_of(type(self))
            if _field(type(self), name) in self._document
        )
        return f"{type(self).__name__}({', '.join(said)})"


class Result(DocumentPart):
    """What a function returns. Reading it like the dict that it was works until the next release,
    with a DeprecationWarning.
    """

    __slots__ = ()
    KIND: ClassVar[str] = ""

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """The result with these fields, given as they are in the document and not copied."""
        head = {"format_version": FORMAT_VERSION, "kind": cls.KIND} if cls.KIND else {}
        made = object.__new__(cls)
        object.__setattr__(made, "_document", {**head, **fields})
        return made

    def _read(self, how: str, instead: str) -> dict[str, Any]:
        warnings.warn(
            f"{type(self).__name__}{how} is removed in the next release: use `{instead}`",
            DeprecationWarning,
            stacklevel=3,
        )
        return self._document

    def __getitem__(self, key: str) -> Any:
        return _plain(self._read(f"[{key!r}]", f".{_attribute(key)}")[key])

    def __contains__(self, key: object) -> bool:
        return key in self._read(f" with `{key!r} in`", f".{_attribute(str(key))} is not None")

    def __iter__(self) -> Iterator[str]:
        return iter(self._read(" with `iter`", ".to_json()"))

    def get(self, key: str, default: Any = None) -> Any:
        """As a dict's. Deprecated: read the attribute."""
        return _plain(self._read(f".get({key!r})", f".{_attribute(key)}").get(key, default))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # not as methods of the class: two of them are fields of `InspectReport`
            if name in ("keys", "items", "values") and name not in fields_of(type(self)):
                return self._as_dict(name)
            return DocumentPart.__getattr__(self, name)

    def _as_dict(self, name: str) -> Callable[[], Any]:
        def method() -> Any:
            return getattr(_plain(self._read(f".{name}()", ".to_json()")), name)()

        return method


def _named(cls: type, fields: dict[str, Any]) -> dict[str, Any]:
    known = fields_of(cls)
    if unknown := [name for name in fields if name not in known]:
        raise TypeError(f"{cls.__name__} has no field {', '.join(unknown)}")
    return {_field(cls, name): value for name, value in fields.items()}


def _field(cls: Any, name: str) -> str:
    return str(cls.RENAMED.get(name, name.rstrip("_")))


def _attribute(key: str) -> str:
    return "from_" if key == "from" else key


_FIELDS: dict[type, dict[str, str]] = {}


def fields_of(cls: type) -> dict[str, str]:
    """The fields of a subclass with their annotations, those of its bases first."""
    found = _FIELDS.get(cls)
    if found is None:
        found = _FIELDS[cls] = {}
        for base in reversed(cls.__mro__):
            if issubclass(base, DocumentPart) and base.__module__ != __name__:
                own = get_annotations(base).items()
                found.update({name: text for name, text in own if not text.startswith("ClassVar")})
    return found


@cache
def _class_named_in(annotation: str, module: str) -> Any:
    found = (getattr(sys.modules[module], word, None) for word in _NAME.findall(annotation))
    return next(
        (
            one
            for one in found
            if one is Diagnostic or (isinstance(one, type) and issubclass(one, DocumentPart))
        ),
        None,
    )


def _typed(value: Any, annotation: str, module: str) -> Any:
    """A value of a document as the annotation says; anything else is copied."""
    if isinstance(value, list):
        return (
            tuple(_typed(item, annotation, module) for item in value)
            if "tuple[" in annotation
            else _plain(value)
        )
    if not isinstance(value, dict):
        return value
    if annotation.startswith("Mapping["):
        inner = annotation.removeprefix("Mapping[")
        return MappingProxyType({name: _typed(item, inner, module) for name, item in value.items()})
    found = _class_named_in(annotation, module)
    if found is Diagnostic:
        spans = tuple(Span(**span) for span in value["spans"])
        return Diagnostic(
            value["code"],
            value["message"],
            spans,
            tuple(value["notes"]),
            value["help"],
            value["severity"],
        )
    return _plain(value) if found is None else found.from_json(value)


def _plain(value: Any) -> Any:
    """A copy in the types of JSON."""
    if isinstance(value, DocumentPart):
        return value.to_json()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
