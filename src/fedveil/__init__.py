"""fedveil: differentially private federated learning whose epsilon can be checked.

    from fedveil import Training, train

What is public stands in `__init__.pyi`, as plain imports that editors and type checkers read. Most
people need the names there. Others are in modules, which have their public name after `as` there
and list their own public names in `__all__`: `fedveil.samplers.Poisson`. Here a name is imported
when it is first used, so that the command line starts without torch.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # what is imported here delays the moment from which Ctrl-C is caught
    from typing import Any


def __getattr__(name: str) -> "Any":
    if name == "__version__":
        from importlib.metadata import version

        return version("fedveil")
    homes = _homes()
    if name == "__all__":
        return sorted(homes)
    if name not in homes:
        raise AttributeError(f"module 'fedveil' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = homes[name]
    home = import_module(module)
    value = globals()[name] = getattr(home, attribute) if attribute else home
    return value


def __dir__() -> "list[str]":
    return sorted({*globals(), *_homes(), "__version__"})


def _homes() -> "dict[str, tuple[str, str]]":
    """The module of every public name, and its name there, which a module itself does not have."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {}
    for node in stub.body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if alias.asname:
                homes[alias.asname] = (f"{node.module}.{alias.name}", "")
            else:
                homes[alias.name] = (node.module or "", alias.name)
    return homes
