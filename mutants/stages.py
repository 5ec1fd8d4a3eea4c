"""Which tests look at a mutant, in which order: those that should notice come first."""

from pathlib import Path

from planted import Project

_ABOVE = {"privacy": ("training", "runs"), "training": ("runs",), "runs": ()}
_NO_MIRROR = {
    "privacy/ledger_file.py": ("privacy/test_ledger.py", "privacy/test_verification.py"),
    "privacy/mechanisms.py": ("privacy/test_secure.py",),
    "training/chain.py": ("training/test_stacked.py",),
    "training/evaluate.py": ("training/test_engine.py",),
    "training/engines/chunks.py": ("training/test_engine.py",),
    "training/engines/local.py": ("training/test_engine.py",),
    "training/gradients.py": ("training/test_engine.py",),
    "training/turn.py": ("training/test_client.py", "training/test_stacked.py"),
    "training/vmapped.py": ("training/test_examples.py", "training/test_stacked.py"),
    "runs/disk.py": ("runs/test_run.py",),
    "runs/ledgers.py": ("runs/test_evidence.py",),
    "runs/metrics.py": ("runs/test_corruption.py",),
    "runs/sections.py": ("runs/test_recipe.py",),
}
_WIDE = ("contracts", "statistical")


def stages_of(project: Project, file: str) -> list[list[Path]]:
    """Lists of test files, each to be run only if the ones before it noticed nothing."""
    part = Path(file).parts[0]
    wanted = [
        _mirrors(project, file),
        [test for name in _WIDE for test in project.tests(f"{name}/**/test_*.py")],
        *(project.tests(f"{name}/**/test_*.py") for name in (part, *_ABOVE.get(part, ()))),
        project.tests("e2e/**/test_*.py"),
    ]
    seen: set[Path] = set()
    stages = []
    for tests in wanted:
        stage = [test for test in tests if test not in seen]
        seen.update(stage)
        if stage:
            stages.append(stage)
    return stages


def _mirrors(project: Project, file: str) -> list[Path]:
    """tests/<package>/test_<name>*.py, what is named for a file without such, and its doctests."""
    path = Path(file)
    found = project.tests(f"{path.parts[0]}/**/test_{path.stem}*.py")
    named = [project.root / "tests" / test for test in _NO_MIRROR.get(file, ())]
    return [*(test for test in named if test.is_file()), *found, project.package / file]
