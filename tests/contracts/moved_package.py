"""A copy of the package in which everything is somewhere else and has another name.

Every package and module is renamed, and so are all classes that state an identity, all
enumerations with their members, and all fields of parts. What the package computes stays the same.
"""

import ast
import io
import re
import shutil
import tokenize
from pathlib import Path

MOVED, RENAMED = "_moved", "Renamed"

FIELDS = '''
"""`dataclass` for parts: fields get other names, and properties are called as fields were."""

import dataclasses
import functools
import typing

KEPT = {kept!r}


def dataclass(cls=None, **options):
    if cls is None:
        return functools.partial(dataclass, **options)
    if not isinstance(vars(cls).get("identity"), property) or cls.__name__ in KEPT:
        return dataclasses.dataclass(cls, **options)
    notes = vars(cls).get("__annotations__", {{}})
    names = [name for name in notes if typing.get_origin(notes[name]) is not typing.ClassVar]
    new = {{name: "its_" + name for name in names}}
    cls.__annotations__ = {{new.get(name, name): note for name, note in notes.items()}}
    for name in names:
        if name in vars(cls):
            setattr(cls, new[name], vars(cls)[name])
            delattr(cls, name)
    cls = dataclasses.dataclass(cls, **options)
    first = cls.__init__

    @functools.wraps(first)
    def init(self, *args, **given):
        changed = {{new[name]: given.pop(name) for name in list(given) if name in new}}
        first(self, *args, **{{**given, **changed}})

    for name in names:
        setattr(cls, name, _called(new[name]))
    cls.__init__ = init
    cls.__match_args__ = tuple(names)
    return cls


def _called(name):
    return property(
        lambda self: getattr(self, name), lambda self, value: object.__setattr__(self, name, value)
    )
'''


class Moved:
    """Writes the copy: `names` are renamed everywhere, fields of the classes `kept` are not."""

    def __init__(self, source: Path, names: set[str], kept: set[str]) -> None:
        self.source, self.names, self.kept = source, names, kept
        parts = (path.relative_to(source.parent) for path in source.rglob("*.py"))
        self.modules = {_dotted(path) for path in parts}

    def write(self, target: Path) -> Path:
        """The copy under `target`, which is to be the path that Python imports from."""
        for path in sorted(self.source.rglob("*")):
            place = path.relative_to(self.source.parent)
            if path.is_dir() or "__pycache__" in place.parts:
                continue
            for new in {place, self._file(place)} if path.suffix != ".py" else {self._file(place)}:
                (target / new).parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".py":
                    (target / new).write_text(self.text(path.read_text()))
                else:
                    shutil.copy(path, target / new)
        (target / "fedveil" / "renamed_fields.py").write_text(FIELDS.format(kept=self._kept()))
        return target

    def _kept(self) -> set[str]:
        return {name + RENAMED for name in self.kept}

    def text(self, source: str) -> str:
        """A file of the package, or one that imports it, as it is written for the copy."""
        source = self._imports(source).replace(
            "@dataclass", "@__import__('fedveil.renamed_fields').renamed_fields.dataclass"
        )
        lines = source.splitlines(keepends=True)
        for token in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
            new = token.string
            if token.type == tokenize.NAME and new in self.names:
                new += RENAMED
            elif token.type == tokenize.STRING:
                new = re.sub(r"fedveil(\.\w+)+", lambda found: self._named(found[0]), new)
                if re.match(r"[a-zA-Z]*f[a-zA-Z]*['\"]", new, re.IGNORECASE):
                    new = re.sub(r"\b\w+\b", self._in_text, new)
            if new != token.string:
                _put(lines, token.start, token.end, new)
        return "".join(lines)

    def _in_text(self, word: re.Match[str]) -> str:
        return word[0] + RENAMED if word[0] in self.names else word[0]

    def _imports(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        tree = ast.walk(ast.parse(source))
        nodes = [node for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
            before = ast.dump(node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if f"{node.module}.{alias.name}" in self.modules:
                        alias.asname = alias.asname or alias.name
                        alias.name += MOVED
                node.module = self._named(node.module or "")
            else:
                for alias in node.names:
                    if alias.name in self.modules and alias.name != "fedveil":
                        raise AssertionError(f"import {alias.name}: write from ... import ...")
            if ast.dump(node) != before:
                end = (node.end_lineno or 0, node.end_col_offset or 0)
                _put(lines, (node.lineno, node.col_offset), end, ast.unparse(node))
        return "".join(lines)

    def _named(self, name: str) -> str:
        """Where a module is now; of a longer name, the part that is a module's."""
        parts = name.split(".")
        known = len(parts)
        while known and ".".join(parts[:known]) not in self.modules:
            known -= 1
        moved = [parts[0], *(part + MOVED for part in parts[1:known] if part != "__main__")]
        return ".".join([*moved, *parts[known:]]) if known > 1 else name

    def _file(self, place: Path) -> Path:
        top, *rest = place.parts
        folders = [part + MOVED for part in rest[:-1]]
        name = Path(rest[-1])
        if name.suffix == ".py" and not name.stem.startswith("__"):
            name = Path(name.stem + MOVED + ".py")
        return Path(top, *folders, name)


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _put(lines: list[str], start: tuple[int, int], end: tuple[int, int], text: str) -> None:
    """Replace what stands between two places (line from 1, column) of a file."""
    (a, left), (b, right) = start, end
    lines[a - 1 : b] = (lines[a - 1][:left] + text + lines[b - 1][right:]).splitlines(keepends=True)
