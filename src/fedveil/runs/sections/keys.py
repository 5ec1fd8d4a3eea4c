"""Which keys there are, by section and kind, and what was meant by one that there is not."""

from collections.abc import Sequence
from typing import Any, get_args, get_origin

from fedveil.base.checks import meant, nearest
from fedveil.runs.sections.section import Section

Forms = dict[str, dict[str, type[Section]]]
"""By section, then by kind, "" where a section has none; a key before all sections has no forms."""

_LONGEST = 100


def forms_of(recipe: type[Section]) -> Forms:
    """All forms of a recipe's sections."""
    return {name: _forms(field.annotation) for name, field in recipe.model_fields.items()}


def is_key(forms: Forms, path: Sequence[str]) -> bool:
    """Whether there is such a section, or such a key in any kind of it, or of a table in it."""
    section, *rest = path
    if not rest:
        return section in forms
    known = [form.model_fields.get(rest[0]) for form in forms.get(section, {}).values()]
    fields = [field for field in known if field is not None]
    if len(rest) == 1:
        return bool(fields)
    tables = [tabled(field.annotation) for field in fields]
    return len(rest) == 3 and any(t is not None and rest[2] in t.model_fields for t in tables)


def tabled(annotation: Any) -> type[Section] | None:
    """The section of which a key holds one for each name, as `data.columns` does; None if none."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is dict:
            inner = get_args(part)[1]
            if isinstance(inner, type) and issubclass(inner, Section):
                return inner
    return None


def unknown(forms: Forms, path: Sequence[str], kind: str | None = None) -> str:
    """What is said of a key that there is not: which was meant, or which kinds have it.

    `path` is a section and a key, or one word; `kind` is the section's, where that is known.
    """
    section, key = path[0], path[-1]
    if len(path) == 1 or section not in forms:
        near = nearest(section, forms) or _without_section(forms, section)
        return f"{_line(section)} is no key: {_way(near, 'fedveil explain lists all sections')}"
    if not forms[section]:
        return f"{_line('.'.join(path))} is no key: {section} has none"
    having = [repr(name) for name, form in forms[section].items() if key in form.model_fields]
    if kind and having:
        way = f"it belongs to kind {' and '.join(having)}"
    else:
        known = [form for name, form in forms[section].items() if kind in (None, name)]
        near = nearest(key, dict.fromkeys(name for form in known for name in form.model_fields))
        near = [f"{section}.{name}" for name in near]
        way = _way(near, f"fedveil explain {section} lists its keys")
    return f"{_line('.'.join(path))} is no key{f' of kind {kind!r}' if kind else ''}: {way}"


def _forms(annotation: Any) -> dict[str, type[Section]]:
    if isinstance(annotation, type):
        if not issubclass(annotation, Section):
            return {}
        kind = annotation.model_fields.get("kind")
        names = get_args(kind.annotation) if kind else ()
        return {names[0] if len(names) == 1 else "": annotation}
    return {kind: form for part in get_args(annotation) for kind, form in _forms(part).items()}


def _without_section(forms: Forms, word: str) -> list[str]:
    """The keys that are called so, or nearly so, with the sections that the word lacks."""
    paths: dict[str, dict[str, None]] = {}
    for section, kinds in forms.items():
        for form in kinds.values():
            for name in form.model_fields:
                paths.setdefault(name, {})[f"{section}.{name}"] = None
    names = [word] if word in paths else nearest(word, paths)
    return [path for name in names for path in paths[name]]


def _way(near: list[str], otherwise: str) -> str:
    return meant(near) if near else otherwise


def _line(text: str) -> str:
    line = " ".join(text.split()) or "''"
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
