"""Which tests look at a mutant, in which order: those that should notice come first."""

import ast
from functools import cache
from pathlib import Path

from planted import Project

_ABOVE = {
    "data": ("runs",),
    "privacy": ("training", "runs"),
    "training": ("runs",),
    "tuning": ("papers",),
}
_WIDE = ("contracts", "statistical")


def stages_of(project: Project, file: str) -> list[list[Path]]:
    """Lists of test files, each to be run only if the ones before it noticed nothing.

    First the tests named after the file with its doctests, then tests of its package that import
    it, then contracts and statistics, then the rest of its package, of those above it, and e2e. A
    list may be empty.
    """
    path = Path(file)
    part = path.parts[0]
    importing = [
        test for test in project.tests(f"{part}/**/test_*.py") if file in _imported(project, test)
    ]
    wanted = [
        [*project.tests(f"{path.parent}/test_{path.stem}*.py"), project.package / file],
        importing,
        [test for name in _WIDE for test in project.tests(f"{name}/**/test_*.py")],
        *(project.tests(f"{name}/**/test_*.py") for name in (part, *_ABOVE.get(part, ()))),
        project.tests("e2e/**/test_*.py"),
    ]
    seen: set[Path] = set()
    stages = []
    for tests in wanted:
        stages.append([test for test in tests if test not in seen])
        seen.update(tests)
    return stages


@cache
def _imported(project: Project, test: Path) -> set[str]:
    """The files of the package from which a test imports something."""
    found = set()
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                first, *rest = name.split(".")
                if first == project.package.name and rest:
                    found.add("/".join(rest) + ".py")
    return found
