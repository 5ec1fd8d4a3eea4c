"""Which records are held out for testing. It follows from counts and names, never from a seed."""

import hashlib

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput

HELD_OUT = 5  # one owner in so many
SHARE = 0.2

Rows = npt.NDArray[np.intp]

_STREAM = int.from_bytes(b"partition", "big")
_SEED = 0
_ROUNDING = 1e-9


def holdout(records: int, share: float = SHARE) -> tuple[Rows, Rows]:
    """Training and test rows of records without a split of their own: always the same ones."""
    if records < 2:
        raise BadInput(f"{records} records cannot be split: training and test need one each")
    seed = np.random.SeedSequence((_SEED, _STREAM))
    rows = np.random.Generator(np.random.Philox(seed)).permutation(records)
    cut = min(records - 1, max(1, int(records * (1 - share) + _ROUNDING)))
    return rows[:cut], rows[cut:]


def held_out(owners: Rows, names: npt.NDArray[np.str_]) -> Rows:
    """A fifth of the owners, at least one. `names[k]` is the name of owner k.

    It follows from an owner's name alone, whatever the seed and whoever else is there: whoever is
    held out of one run is held out of all, and a test split is never another run's clients.
    """
    places = {owner: _place(str(names[owner])) for owner in owners.tolist()}
    held = [owner for owner in owners.tolist() if places[owner] < 1 / HELD_OUT]
    return np.array(held or [min(places, key=places.__getitem__)], dtype=np.intp)


def share_of_each(owners: Rows, names: npt.NDArray[np.str_], share: float) -> Rows:
    """Test rows: of every owner's records the same share, one at least and never all.

    Which of them follows from the owner's name and number of records, so that nobody's records
    decide which of somebody else's are trained on.
    """
    everyone, first = np.unique(np.sort(owners), return_index=True)
    of_each = np.split(np.argsort(owners, kind="stable"), first[1:])
    chosen = []
    for owner, rows in zip(everyone.tolist(), of_each, strict=True):
        name = str(names[owner])
        if len(rows) < 2:
            raise BadInput(
                f"client {name!r} has one record, too few to hold a share of them out: leave such "
                "clients out (min_records = 2), or hold out whole clients (test = 'by-client')"
            )
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _STREAM))))
        count = min(len(rows) - 1, max(1, round(len(rows) * share)))
        chosen.append(random.permutation(rows)[:count])
    return np.sort(np.concatenate(chosen))


def _place(name: str) -> float:
    """A number in [0, 1) that is a hash of a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48
