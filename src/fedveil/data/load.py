"""Load a data set by its name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedveil.base.checks import DATA_SETS, hint
from fedveil.base.errors import BadInput
from fedveil.data.data_files import data_root
from fedveil.data.loaded_records import Records

EMBEDDED = ("digits", "diabetes", "saved", "table")
"""What no data folder is needed for: scikit-learn's own, and data that name their path."""

_OPTIONS = {
    "femnist": ("min_records", "digits"),
    "lending-club": ("grades", "held_out"),
    "diabetes": ("held_out",),
    "sentiment140": ("columns", "statistics", "test", "min_records"),
    "reddit": ("columns", "statistics", "test", "min_records"),
}
FITTING = tuple(name for name, options in _OPTIONS.items() if "held_out" in options)
"""The data sets whose features are fitted on records."""

TEXTS = tuple(name for name, options in _OPTIONS.items() if "columns" in options)
"""The data sets of texts, which are read as a table is."""


def load_records(name: str, root: Path | None = None, **options: Any) -> Records:
    """Load a data set from its subfolder of `root` (or FEDVEIL_DATA).

    `digits` and `diabetes` come with scikit-learn and need neither.

    Options: `min_records` and `digits` of femnist, `grades` of lending-club, and `held_out` of
    those that fit their features: on the test split instead of the clients' records. Those of
    `TEXTS` are what `FederatedData.from_table` takes. All of them are published, so that the test
    split is public wherever it is not of the clients themselves.
    """
    return replace(_loaded(name, root, options), public_test=True)


def _loaded(name: str, root: Path | None, options: dict[str, Any]) -> Records:
    if name not in DATA_SETS:
        listed = f"use one of {', '.join(DATA_SETS)}{hint(name, DATA_SETS)}"
        raise BadInput(f"data set {name!r} is unknown: {listed}")
    known = _OPTIONS.get(name, ())
    for option in options:
        if option not in known:
            raise BadInput(
                f"{name} has no option {option!r}: it takes {', '.join(known) or 'none'}"
            )
    match name:
        case "digits":
            from fedveil.data import digits

            return digits.load()
        case "diabetes":
            from fedveil.data import diabetes

            return diabetes.load(**options)
        case "mnist" | "fashion-mnist":
            from fedveil.data import mnist

            return mnist.load(data_root(root), name)
        case "femnist":
            from fedveil.data import femnist

            return femnist.load(data_root(root), **options)
        case "cifar10":
            from fedveil.data import cifar10

            return cifar10.load(data_root(root))
        case "sentiment140":
            from fedveil.data import sentiment140

            return sentiment140.load(data_root(root), **options)
        case "reddit":
            from fedveil.data import reddit

            return reddit.load(data_root(root), **options)
        case "location30":
            from fedveil.data import membership_sets

            return membership_sets.load_location30(data_root(root))
        case "purchase100":
            from fedveil.data import membership_sets

            return membership_sets.load_purchase100(data_root(root))
        case "texas100":
            from fedveil.data import membership_sets

            return membership_sets.load_texas100(data_root(root))
        case _:
            from fedveil.data import lending_club

            return lending_club.load(data_root(root), **options)
