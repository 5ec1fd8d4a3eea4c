"""The list of planted bugs: how it is read, and whether it still fits the source."""

import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_KEYS = {"id", "file", "old", "new", "why"}


class Stale(Exception):
    """An entry of the list that does not fit the source any more."""


@dataclass(frozen=True)
class Project:
    """A repository with one package in `src`, tests that mirror it, and `mutants/list`."""

    root: Path

    @property
    def package(self) -> Path:
        """The folder of the package."""
        (found,) = (path.parent for path in (self.root / "src").glob("*/__init__.py"))
        return found

    def tests(self, pattern: str) -> list[Path]:
        """Test files below `tests`, in order."""
        return sorted(self.root.glob(f"tests/{pattern}"))


@dataclass(frozen=True)
class Mutant:
    """One planted bug: `old`, which occurs once in `file`, becomes `new`.

    `file` is relative to the package, `why` says what goes wrong, `equivalent` why nothing does.
    """

    id: str
    file: str
    old: str
    new: str
    why: str
    equivalent: str = ""

    def planted_in(self, text: str) -> str:
        """The text of the file with the bug in it; refused if it does not fit or compile."""
        found = text.count(self.old)
        if found != 1:
            raise Stale(f"{self.id}: `old` occurs {found} times in {self.file}, once is needed")
        changed = text.replace(self.old, self.new)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as e:
            raise Stale(f"{self.id}: {self.file} does not compile with it: {e}") from e
        if changed == text:
            raise Stale(f"{self.id}: it changes nothing")
        return changed


def read(project: Project) -> list[Mutant]:
    """All entries, in the order of the list; an entry with unknown keys is refused."""
    found = []
    for file in sorted((project.root / "mutants" / "list").glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["mutant"]:
            if not _KEYS <= entry.keys() <= _KEYS | {"equivalent"}:
                raise Stale(f"{file.name}: an entry has the keys {', '.join(sorted(_KEYS))}")
            found.append(Mutant(**entry))
    twice = [name for name, count in Counter(m.id for m in found).items() if count > 1]
    if twice:
        raise Stale(f"ids occur twice: {', '.join(twice)}")
    return found


def check(project: Project, mutants: list[Mutant]) -> list[str]:
    """What is wrong with the list: one line for each entry that is stale."""
    wrong = []
    for mutant in mutants:
        try:
            mutant.planted_in((project.package / mutant.file).read_text())
        except (Stale, OSError) as e:
            wrong.append(str(e))
    return wrong
