"""fedveil: differentially private federated learning whose epsilon can be checked.

    from fedveil import Training, train

What is public stands in `__init__.pyi`, as plain imports that editors and type checkers read. Here
a name is imported when it is first used, so that the command line starts without torch.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # what is imported here delays the moment from which Ctrl-C is caught
    from typing import Any


def __getattr__(name: str) -> "Any":
    homes = _homes()
    if name == "__all__":
        return sorted(homes)
    if name == "__version__":
        from importlib.metadata import version

        return version("fedveil")
    if name not in homes:
        raise AttributeError(f"module 'fedveil' has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(homes[name]), name)
    return found


def __dir__() -> "list[str]":
    return sorted({*globals(), *_homes(), "__version__"})


def _homes() -> "dict[str, str]":
    """The module of every public name."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}
