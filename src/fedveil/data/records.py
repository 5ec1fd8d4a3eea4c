"""`Records`: a data set as its loader returns it, before it is divided among clients."""

from dataclasses import dataclass

from fedveil.data.arrays import Array, described


@dataclass(frozen=True, eq=False)
class Records:
    """Training and test records of one data set.

    `x` is float32, images as [N, channels, height, width]; `y` is int64 labels, or float32 when
    `classes` is 0. `owners[i]` is the index in `owner_names` of the person training record i
    came from, or None when the data set has no natural clients; `test_owners[i]` that of test
    record i. `fitted` names what was fitted on training records in the clear, "" if nothing was.
    """

    name: str
    x: Array
    y: Array
    test_x: Array
    test_y: Array
    classes: int
    owners: Array | None = None
    owner_names: Array | None = None
    test_owners: Array | None = None
    fitted: str = ""

    def __repr__(self) -> str:
        return f"Records({self.name}, {described(self.x, self.test_x, self.classes)})"
