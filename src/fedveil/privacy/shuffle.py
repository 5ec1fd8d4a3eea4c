"""What a shuffler hands on: per position, how many reports are high and how many there are.

For two-valued reports (LDP-FL, Sun et al. 2021) the multiset of a position is two numbers. Every
claim behind a shuffler assumes an ideal one, a party that sees the messages, forgets their senders
and does not side with the server; where there is none, only the claims without a shuffler hold.
How a mixer makes these numbers from messages is in `fedveil.mixing`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.errors import BadArgument, BadInput

Flags = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class Multisets:
    """Per position, how many reports are high and how many there are, int64 [P] each, read-only.

    Guarantee: a function of the unordered reports at each position, and of nothing else.

    | edge | behaviour |
    |---|---|
    | no positions, or unequal numbers of them | BadInput |
    | a negative count, or more high than there are reports | BadInput |

    >>> pair = Multisets(high_counts=np.array([2, 0]), report_counts=np.array([3, 3]))
    >>> pair.sums(torch.zeros(2), torch.tensor([0.5, 2.0])).tolist()
    [0.5, -6.0]
    """

    high_counts: Counts
    report_counts: Counts

    def __post_init__(self) -> None:
        """Copy both counts to read-only int64, and raise BadInput for the edges above."""
        high = np.array(self.high_counts, dtype=np.int64)
        reports = np.array(self.report_counts, dtype=np.int64)
        if high.ndim != 1 or high.shape != reports.shape or not len(high):
            raise BadInput(
                f"multisets have {high.shape} high counts and {reports.shape} numbers of reports: "
                "one of each per position is needed"
            )
        if (high < 0).any() or (high > reports).any():
            raise BadInput("multisets count more high reports than reports, or fewer than none")
        for name, counts in (("high_counts", high), ("report_counts", reports)):
            counts.setflags(write=False)
            object.__setattr__(self, name, counts)

    def sums(self, centre: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
        """The sum of the reports at each position, float64 [P].

        High reports are centre + reach, low ones centre - reach, [P] each; reach is radius times
        kappa.

        Guarantee: with float32 centre and reach, and fewer than 2^29 reports, each sum is the sum
        of the reports as made, rounded once to float64.
        """
        high = torch.from_numpy(self.high_counts.copy())
        low = torch.from_numpy(self.report_counts - self.high_counts)
        return high * (centre + reach).double() + low * (centre - reach).double()


def highs(rows: torch.Tensor, centre: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """Which reports of rows [K, P] are high, bool [K, P]: the one bit that a message carries.

    Rows must be as `TwoPointMechanism.report_` left them, centre and reach [P] of the same dtype.

    Guarantee: the bits determine the rows exactly, or the rows are refused.

    | edge | behaviour |
    |---|---|
    | a value that is neither centre + reach nor centre - reach, NaN included | BadInput |
    | reach 0, or lost in rounding: both values are the same | low |
    """
    if rows.ndim != 2 or centre.shape != rows.shape[1:] or reach.shape != rows.shape[1:]:
        raise BadInput(
            f"reports {tuple(rows.shape)}, centre {tuple(centre.shape)}, reach "
            f"{tuple(reach.shape)}: [K, P], [P] and [P] are needed"
        )
    not_low = rows != centre - reach
    neither = not_low & (rows != centre + reach)
    if bool(neither.any()):
        row, position = neither.nonzero()[0].tolist()
        raise BadInput(
            f"report {row} holds {float(rows[row, position]):g} at position {position}: only "
            f"{float((centre - reach)[position]):g} and {float((centre + reach)[position]):g} are "
            "two-point reports"
        )
    return not_low


def multisets(
    rows: torch.Tensor, centre: torch.Tensor, reach: torch.Tensor, minimum: int
) -> Multisets:
    """The multisets that an ideal shuffler makes of report rows [K, P].

    Guarantee: `sums(centre, reach)` of the result are the column sums of the rows; the order of
    the rows does not matter, and nothing comes out below `minimum` reports.

    | edge | behaviour |
    |---|---|
    | minimum < 1 | BadInput |
    | fewer than `minimum` rows | BadInput, nothing is handed on |
    | a value that is no two-point report | BadInput, nothing is handed on |
    """
    high = torch.zeros(rows.shape[1:], dtype=torch.int64)
    for block in torch.split(rows, max(1, _BLOCK // max(1, len(centre)))):
        high += highs(block, centre, reach).sum(dim=0)
    return multisets_if_enough(
        high.numpy(), np.full(high.shape, len(rows), dtype=np.int64), minimum
    )


def multisets_if_enough(high: Counts, reports: Counts, minimum: int) -> Multisets:
    """Multisets of these counts [P]: high reports, and all reports, per position.

    Raises BadArgument if a position has fewer than `minimum` reports or `minimum` is below 1, and
    BadInput for counts that `Multisets` refuses.
    """
    if minimum < 1:
        raise BadArgument(
            f"{{minimum}} is {minimum}: at least one honest report is needed", "minimum"
        )
    made = Multisets(high, reports)
    fewest = int(made.report_counts.min())
    if fewest < minimum:
        raise BadArgument(
            f"a position has {fewest} reports and {{minimum}} is {minimum}: nothing is handed "
            "on; wait for more clients",
            "minimum",
        )
    return made
