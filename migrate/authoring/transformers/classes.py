"""The class of a checkpoint, built on the meta device from its config.json.

Nothing of the checkpoint is imported: a class is one of the installed transformers, and a
checkpoint whose class is code beside its weights is refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...core.errors import did_you_mean, fail, option, printable

# the release whose internals this package was written against
WORKS = "5.23.0"
_NEEDED = {
    "transformers.core_model_loading": (
        "WeightConverter", "WeightRenaming", "rename_source_key", "revert_weight_conversion",
        "dot_natural_key",
    ),
    "transformers.conversion_mapping": ("get_model_conversion_mapping",),
    "transformers.modeling_utils": ("PreTrainedModel",),
    "transformers.models.auto.configuration_auto": ("CONFIG_MAPPING",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Library:
    """The installed transformers: its version and the parts of it that are used here."""

    version: str
    parts: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.parts[name]


@dataclass(frozen=True, slots=True)
class Built:
    """A model without data, its configuration, and what config.json says."""

    model: Any
    config: Any
    settings: Mapping[str, Any]
    dtype: str


def library() -> Library:
    """The installed transformers; M990 where there is none or its internals have moved."""
    try:
        package = import_module("transformers")
        import_module("torch")
    except ImportError as error:
        fail(
            "M990",
            f"{error.name or error} is not installed",
            help="pip install 'ckpt-migrate[transformers]'",
        )
    version = str(package.__version__)
    parts: dict[str, Any] = {}
    for module, names in _NEEDED.items():
        try:
            held = import_module(module)
            parts |= {name: getattr(held, name) for name in names}
        except (ImportError, AttributeError) as error:
            _moved(version, f"{module} is not what it was: {error}")
    _try_semantics(version, parts)
    return Library(version, parts)


def _try_semantics(version: str, parts: Mapping[str, Any]) -> None:
    """The two kinds of transforms do to two keys what they did in the release that works."""
    try:
        renaming = parts["WeightRenaming"]("old", "new")
        converter = parts["WeightConverter"](["a.*.w", "a.*.v"], "b", [_NoOperation()])
        moved = [
            parts["rename_source_key"](key, [renaming], [converter], "", {})
            for key in ("x.old.y", "a.3.w")
        ]
        known = inspect.signature(parts["get_model_conversion_mapping"]).parameters
    except Exception as error:  # noqa: BLE001 - whatever it is, no mapping could be read
        _moved(version, f"its transforms cannot be tried: {error}")
    if moved != [("x.new.y", None), ("b", "a.*.w")] or "hf_quantizer" not in known:
        _moved(version, f"its transforms answer {moved}")


class _NoOperation:
    supports_many_to_many = True


def _moved(version: str, what: str) -> Any:
    fail(
        "M990",
        f"transformers {version} cannot be read: {printable(what, 300)}",
        help=f"transformers {WORKS} works: pip install transformers=={WORKS}",
    )


def built(held: Library, settings: Mapping[str, Any], named: str | None, dtype: str) -> Built:
    """The class `named`, or the one that config.json names, on the meta device."""
    import torch

    kind = settings.get("model_type")
    mapping = held.CONFIG_MAPPING
    architectures = settings.get("architectures") or [None]
    custom = settings.get("auto_map")
    if not isinstance(kind, str) or kind not in mapping:
        if custom:
            fail(
                "M991",
                f"the class of this checkpoint is code beside its weights ({_first(custom)}), "
                "and nothing of a checkpoint is executed",
                help=f"its model type {kind!r} is not in transformers {held.version}: write its "
                "rules by hand, or from two checkpoints",
            )
        close = did_you_mean(kind, list(mapping)) if isinstance(kind, str) else None
        fail(
            "M991",
            f"transformers {held.version} has no model type {printable(str(kind))}",
            help=close or "config.json says it in `model_type`",
        )
    configuration = mapping[kind]
    cls = _class(held, kind, named or architectures[0], configuration, custom)
    values = {k: v for k, v in settings.items() if k not in ("quantization_config", "auto_map")}
    try:
        config = configuration.from_dict(values)
        wanted = getattr(cls, "config_class", None)
        if wanted is not None and not isinstance(config, wanted):
            config = _part(config, wanted) or wanted.from_dict(values)
        with ExitStack() as stack:
            contexts = cls.get_init_context(getattr(torch, dtype), False, False, None)
            for context in contexts:
                stack.enter_context(context)
            model = cls(config)
    except ImportError as error:
        fail(
            "M991",
            f"{cls.__name__} needs a package that is not installed: {_package(error)}",
            help="install it beside transformers",
        )
    except Exception as error:  # noqa: BLE001 - whatever a class raises
        fail(
            "M991",
            f"{cls.__name__} cannot be built from this config.json: {type(error).__name__}: "
            f"{printable(str(error), 300)}",
            help=f"transformers {held.version} cannot load the checkpoint either",
        )
    return Built(model, config, settings, dtype)


def tied(held: Library, model: Any) -> set[str]:
    """The parameters that may be other names of one, which `config.json` decides; a file need not
    have them.
    """
    names = [*model.state_dict()]
    out: set[str] = set()
    for before, module in model.named_modules():
        own = getattr(module, "_tied_weights_keys", None)
        if isinstance(module, held.PreTrainedModel) and isinstance(own, Mapping):
            start = f"{before}." if before else ""
            found = [re.compile(pattern) for pattern in own]
            inside = (name for name in names if name.startswith(start))
            out.update(n for n in inside if any(f.fullmatch(n[len(start) :]) for f in found))
    return out


def _part(config: Any, wanted: type) -> Any:
    """The part of a composite configuration that is one of `wanted`."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return next((part for part in parts if isinstance(part, wanted)), None)


def _first(custom: Any) -> str:
    names = list(custom.values()) if isinstance(custom, Mapping) else [custom]
    return printable(str(names[0] if names else custom))


def _package(error: ImportError) -> str:
    return error.name or printable(str(error).strip().replace("\n", " "), 300)


def _class(held: Library, kind: str, name: str | None, configuration: Any, custom: Any) -> Any:  # noqa: RET503 - `fail` does not return
    """The class `name`, looked for where the library exports it and beside its configuration."""
    if name is None:
        auto = import_module("transformers.models.auto.modeling_auto").MODEL_MAPPING
        found = auto.get(configuration, None)
        if found is None:
            fail(
                "M991",
                f"config.json names no class, and transformers has no default one for {kind}",
                help=f"say which with {option('cls')}",
            )
        return found[0] if isinstance(found, (list, tuple)) else found
    package = import_module("transformers")
    modules = [package]
    home = configuration.__module__.replace(".configuration_", ".modeling_")
    try:
        modules.append(import_module(home))
    except ImportError as error:
        if error.name and not home.startswith(error.name):
            fail(
                "M991",
                f"{printable(name)} needs a package that is not installed: {_package(error)}",
                help="install it beside transformers",
            )
    known: list[str] = []
    for module in modules:
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, held.PreTrainedModel):
            return found
        if found is not None and getattr(found, "_backends", None):
            fail(
                "M991",
                f"{name} needs packages that are not installed: {', '.join(found._backends)}",
                help="install them beside transformers",
            )
        if module is not package:
            known = [
                each for each, value in vars(module).items()
                if isinstance(value, type) and issubclass(value, held.PreTrainedModel)
            ]  # fmt: skip
    if custom:
        fail(
            "M991",
            f"{printable(name)} is code beside the weights of this checkpoint ({_first(custom)}), "
            "and nothing of a checkpoint is executed",
            help=f"a class of transformers {held.version} can be named with {option('cls')}: "
            f"{', '.join(known[:8]) or kind}",
        )
    for file in sorted(Path(package.__path__[0]).glob("models/*/modeling_*.py")):
        if re.search(rf"^class {re.escape(name)}\(", file.read_text("utf-8"), re.MULTILINE):
            held_there = import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            return getattr(held_there, name)
    close = did_you_mean(name, known)
    fail(
        "M991",
        f"transformers {held.version} has no class {printable(name)}",
        help=close or f"of {kind} there is {', '.join(known[:8]) or 'no class'}",
    )
