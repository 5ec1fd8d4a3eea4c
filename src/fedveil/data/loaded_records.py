"""`Records`: a data set as its loader returns it, before it is divided among clients."""

from dataclasses import dataclass

from fedveil.base.inputs import Inputs
from fedveil.data.schema import TableSchema
from fedveil.data.user_arrays import Array, described, target_of


@dataclass(frozen=True, eq=False)
class Records:
    """Training and test records of one data set.

    `x` is float32, images as [N, channels, height, width], or several inputs by name; `y` is int64
    labels, or float32 when `classes` is 0 (see `base.inputs.Target`). `owners[i]` is the index
    in `owner_names` of the person training record i came from, or None when the data set has no
    natural clients; `test_owners[i]` that of test record i. `lines[i]` is the place of training
    record i in its table, `test_lines[i]` that of test record i in the same table, or -1 if it is
    not from there. `public_test` says that the source has published the test split. `fitted` names
    what was fitted on clients' records in the clear, "" if nothing was, `fitted_on_test` what was
    fitted on the test records; `remarks` are what claims have to say besides, and `schema` is that
    of a table.
    """

    name: str
    x: Inputs[Array]
    y: Array
    test_x: Inputs[Array]
    test_y: Array
    classes: int
    owners: Array | None = None
    owner_names: Array | None = None
    test_owners: Array | None = None
    lines: Array | None = None
    test_lines: Array | None = None
    public_test: bool = False
    fitted: str = ""
    fitted_on_test: str = ""
    remarks: tuple[str, ...] = ()
    schema: TableSchema | None = None

    def __repr__(self) -> str:
        target = target_of(self.y, self.classes)
        return f"Records({self.name}, {described(self.x, self.test_x, target)})"


def public_words(column: str) -> str:
    """The assumption about a vocabulary that was counted in public texts."""
    return f"the words of {column!r} were counted in texts that were declared public"


def grouped(clients: int) -> str:
    """The assumption about clients that are groups of people.

    Whoever joins or leaves a group replaces it by another one: out with the old, in with the new.
    """
    return (
        f"clients are {clients} groups of owners, merged at random: a claim per client is about a "
        "whole group; one owner's records in it replace what the client sends, which has a larger "
        "epsilon unless neighbours replace clients"
    )


def scattered() -> str:
    """The assumption about clients that share the records of people."""
    return (
        "records of one owner are dealt to several clients: a claim per client is not about an "
        "owner"
    )


def left_out(least: int) -> str:
    """The assumption about clients that were left out because they have few records.

    How many there were is not said: it is computed from their records.
    """
    return f"which clients have at least {least} records is public: the others were left out"
