"""Published data sets of rows: bits for membership inference, and numbers to predict.

Purchase100, Texas100 and Location30 (Shokri et al. 2017) come from the text files or archives as
published. Bits are [N, features] of 0 or 1, with a fixed 80/20 split.

Lending Club is the task of Fu et al. (arXiv 2101.04163): predict a loan's interest rate.
Features are what was known when the loan was made: ids, free text and what happened to the loan
later (payments, recoveries, status, ...) are left out. The rest becomes numbers: dates count
months, "36 months", "10+ years" and "< 1 year" give 36, 10 and 0, other text gives its rank in
the alphabet among the training loans (so grades keep their order). Columns more than 70 % empty
are dropped; then missing values and text unseen in training get the mean, columns are
standardised, and PCA keeps 10 directions, rounded so that the last bits of a BLAS do not show.

All of it is fitted on the training part, which is all clients' records, and in the clear: the
records say so, and a claim on the training does not cover it. Or it is fitted on the test part
alone, whose loans are no client's.
"""

import csv
import io
import math
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from fedveil.data.data_files import (
    check_codes,
    find_file,
    malformed,
    optional_module,
    read_npz,
    reading,
)
from fedveil.data.partition import Records
from fedveil.data.provenance import holdout
from fedveil.data.user_arrays import Array, Rows

_PLACES, _PLACE_BYTES = 446, 56  # features of Location30, and the bytes that they are packed into


def load_purchase100(root: Path) -> Records:
    """197,324 shoppers as 600 bits, what they bought, in 100 clusters.

    The text file wins over the archive. Raises BadInput if both are missing, or one is malformed.
    """
    file = "dataset_purchase"
    path = find_file(
        root,
        [f"purchase100/{file}", f"purchase100/{file}.tgz"],
        expected=f"{file}.tgz, or the file in it, as published for membership inference",
    )
    bits, y = _read_labelled_bits(path, file, features=600, classes=100)
    return Records.with_holdout("purchase100", bits, y, classes=100)


def load_texas100(root: Path) -> Records:
    """67,330 hospital stays as 6,169 bits, in 100 procedures. They take 1.7 GB as numbers.

    Unpacked files win over the archive. Raises BadInput if both are missing, or one is malformed.
    """
    path = find_file(
        root,
        ["texas100/feats", "texas100/texas/100/feats", "texas100/dataset_texas.tgz"],
        expected="dataset_texas.tgz, or feats and labels in it, as published for membership "
        "inference",
    )
    labels_path = path if path.suffix == ".tgz" else path.with_name("labels")
    if not labels_path.is_file():
        raise malformed(path, "a file labels beside it", "none")
    wanted = "lines of 6169 bits, separated by commas"
    bits = _read_whole_numbers(path, "texas/100/feats", 6169, wanted)
    _check_bits(path, bits, wanted)
    labels = _read_whole_numbers(labels_path, "texas/100/labels", 1, "lines of one label")[:, 0]
    check_codes(labels_path, labels, records=len(bits), count=100, first=1)
    return Records.with_holdout("texas100", bits, labels.astype(np.int64) - 1, classes=100)


def load_location30(root: Path) -> Records:
    """5,010 users as 446 bits, the places they visited, in 30 clusters.

    The text file wins over the npz. Raises BadInput if both are missing, or one is malformed.
    """
    path = find_file(
        root,
        ["location30/bangkok", "location30/location30.npz"],
        expected="the file bangkok of dataset_location.tgz, as published for membership inference",
    )
    if path.suffix == ".npz":
        bits, y = _read_location_npz(path)
    else:
        bits, y = _read_labelled_bits(path, "bangkok", features=_PLACES, classes=30)
    return Records.with_holdout("location30", bits, y, classes=30)


def _read_location_npz(path: Path) -> tuple[Array, Array]:
    """(bits as uint8 [N, 446], labels from 0 on) of Location30's npz file."""
    arrays = read_npz(path, ("x_packed", "n_features", "y"))
    packed, features, labels = arrays["x_packed"], arrays["n_features"].tolist(), arrays["y"]
    if packed.dtype != np.uint8 or packed.shape[1:] != (_PLACE_BYTES,) or features != _PLACES:
        raise malformed(
            path,
            f"{_PLACES} features packed into x_packed of {_PLACE_BYTES} bytes a record",
            f"n_features {features} and x_packed {packed.dtype} {packed.shape}",
        )
    check_codes(path, labels, records=len(packed), count=30)
    return np.unpackbits(packed, axis=1, count=_PLACES), labels.astype(np.int64)


def _read_labelled_bits(
    path: Path, member: str, *, features: int, classes: int
) -> tuple[Array, Array]:
    """(bits as uint8 [N, features], labels from 0 on) of lines that begin with a label from 1 on.

    Raises BadInput for lines of another form.

    Args:
        path: A text file, or an archive that ends in .tgz.
        member: The file in the archive. A text file ignores it.
        features: Bits of a line.
        classes: The number of labels.
    """
    wanted = f"lines of a label and {features} bits, separated by commas"
    table = _read_whole_numbers(path, member, 1 + features, wanted)
    labels, bits = table[:, 0], table[:, 1:]
    _check_bits(path, bits, wanted)
    check_codes(path, labels, records=len(table), count=classes, first=1)
    return bits, labels.astype(np.int64) - 1


@contextmanager
def _open_member(path: Path, member: str, wanted: str) -> Iterator[TextIO]:
    """Context manager: open a text file, or the file `member` in a .tgz archive, to be read.

    Raises BadInput if the archive has no such file. `wanted` is the expected content, for the
    message.
    """
    if path.suffix != ".tgz":
        with path.open() as stream:
            yield stream
        return
    with tarfile.open(path, "r:gz") as archive:
        try:
            found = archive.extractfile(member)
        except KeyError as e:
            raise malformed(path, wanted, f"no file {member}") from e
        if found is None:
            raise malformed(path, wanted, f"{member}, which is no file")
        with io.TextIOWrapper(found) as stream:
            yield stream


def _read_whole_numbers(path: Path, member: str, width: int, wanted: str) -> Array:
    """Lines of `width` whole numbers from 0 to 255, separated by commas, as uint8 [N, width].

    `path` and `member` are those of `_open_member`. Raises BadInput for lines of another form, with
    `wanted` as the expected content.
    """
    with reading(path, wanted, OverflowError, tarfile.TarError):
        if path.stat().st_size == 0:
            raise malformed(path, wanted, "an empty file")
        with _open_member(path, member, wanted) as stream:
            table: Array = np.loadtxt(
                stream, dtype=np.uint8, delimiter=",", quotechar='"', ndmin=2, comments=None
            )
    if len(table) == 0 or table.shape[1] != width:
        raise malformed(path, wanted, f"{table.shape[1]} values a line")
    return table


def _check_bits(path: Path, bits: Array, wanted: str) -> None:
    """Raise BadInput for values other than 0 and 1. `path` and `wanted` are for the message."""
    if bits.max(initial=0) > 1:
        raise malformed(path, wanted, f"values from {bits.min()} to {bits.max()}")


Floats = npt.NDArray[np.float64]

TARGET = "int_rate"
FITTED = "means, standard deviations, categories and principal components of the features"
COMPONENTS = 10
MOST_EMPTY = 0.7
LARGEST = 1e30  # what is beyond is no amount, and its square would be no number

_TABLES = (
    "lending_club/loan.csv",
    "lending_club/accepted_*.csv",
    "lending_club/lending_club_loans.parquet",
)
_NO_FEATURE = re.compile(
    "|Unnamed.*|source|id|member_id|url|desc|title|emp_title"
    "|loan_status|pymnt_plan|out_prncp.*|total_pymnt.*|total_rec_.*|recoveries"
    "|collection_recovery_fee|last_.*|next_pymnt_d|.*hardship.*|.*settlement.*|deferral_term"
    "|payment_plan_start_date|orig_projected_additional_accrued_interest"
)
_PRICING = ("grade", "sub_grade", "installment")
_QUANTITY = re.compile(r"(<?) ?(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\+? ?(?:%|months?|years?)?")
_MISSING = ("", "n/a", "NA", "NaN", "nan", "null")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_NUMERIC_DATE = re.compile(r"(\d{4})-(\d\d)")
_NAMED_DATE = re.compile(rf"({'|'.join(_MONTHS)})-(\d{{4}})")


def load_lending_club(root: Path, *, grades: bool = True, held_out: bool = False) -> Records:
    """Loans as 10 principal components, with the interest rate in percent as the target.

    The 80/20 split is fixed. With `grades` the features include what the lender fixed together with
    the rate: grade and sub_grade, which nearly determine it, and the installment, from which it
    follows given amount and term. Without, the rate has to be predicted from the application. Loans
    without a rate are left out. A published csv wins over the compact parquet. With `held_out`
    everything is fitted on the test split instead of the training split.
    """
    expected = "the public file of accepted Lending Club loans, as on Kaggle"
    path = find_file(root, _TABLES, expected=expected)
    table = _read_loans(path, () if grades else _PRICING)
    rate = _numbers(table[TARGET])
    loans = np.flatnonzero(np.isfinite(rate))
    if len(loans) < 2:
        raise malformed(path, f"loans with a number in {TARGET}", len(loans))
    table, y = table.take(loans), rate[loans].astype(np.float32)
    train, test = holdout(len(loans))
    fitted_rows = test if held_out else train
    columns = [_numbers(table[c], fitted_rows) for c in table.column_names if c != TARGET]
    x = _components(path, columns, fitted_rows)
    return Records.with_holdout("lending-club", x, y, classes=0, **_fitted_field(FITTED, held_out))


def _fitted_field(what: str, held_out: bool) -> dict[str, str]:
    """{"fitted": what}, or {"fitted_on_test": what} if `held_out`, for `Records`."""
    return {"fitted_on_test" if held_out else "fitted": what}


def _read_loans(path: Path, left_out: tuple[str, ...]) -> Any:
    """The target and the feature columns of Lending Club as an Arrow table of texts and float64.

    `left_out` are names of columns that are dropped. Raises BadInput without pyarrow, and for a
    file that is no table of loans.
    """
    arrow, parquet, arrow_csv = (
        optional_module(module, package="pyarrow", needed_by="lending-club")
        for module in ("pyarrow", "pyarrow.parquet", "pyarrow.csv")
    )
    with reading(path, "a table of loans", arrow.ArrowException):
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as lines:
                names = next(csv.reader(lines), [])
        else:
            names = list(parquet.read_schema(path).names)
        if TARGET not in names or len(set(names)) != len(names):
            raise malformed(path, f"distinct columns, one {TARGET}", ", ".join(names) or "none")
        columns = [c for c in names if c not in left_out and not _NO_FEATURE.fullmatch(c)]
        if path.suffix == ".csv":
            strings = dict.fromkeys(columns, arrow.string())
            table = arrow_csv.read_csv(
                path,
                parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
                convert_options=arrow_csv.ConvertOptions(
                    include_columns=columns, column_types=strings
                ),
            )
        else:
            table = parquet.read_table(path, columns=columns)
        kinds = [arrow.string() if _is_text(c) else arrow.float64() for c in table.columns]
        return table.cast(arrow.schema(list(zip(table.column_names, kinds, strict=True))))


def _numbers(column: Any, fitted_rows: Rows | None = None) -> Floats:
    """A column as numbers, NaN where missing or absurdly large.

    Texts such as "36 months" and dates are numbers. If some text in `fitted_rows` is not, all texts
    become their rank among those of `fitted_rows`, NaN for others.
    """
    if _is_text(column):
        encoded = column.combine_chunks().dictionary_encode()
        codes: Rows = encoded.indices.fill_null(-1).to_numpy()
        words = [word.strip() for word in encoded.dictionary.to_pylist()]
        numbers = {word: _quantity(word) for word in words}
        if fitted_rows is not None:
            fitted = {words[code] for code in np.unique(codes[fitted_rows]) if code >= 0}
            fitted = fitted.difference(_MISSING)
            if any(math.isnan(numbers[word]) for word in fitted):
                numbers = {word: float(rank) for rank, word in enumerate(sorted(fitted))}
        # The last entry is that of code -1.
        lookup = np.array([*(numbers.get(word, math.nan) for word in words), math.nan])
        values: Floats = lookup[codes]
    else:
        values = column.to_numpy()
    return np.where(np.abs(values) < LARGEST, values, math.nan)


def _is_text(column: Any) -> bool:
    """Whether an Arrow column holds strings."""
    return "string" in str(column.type)


def _quantity(word: str) -> float:
    """The number in a text such as "36 months", or the months of a date. NaN for anything else.

    "< 1 year" is 0.
    """
    if date := _NUMERIC_DATE.fullmatch(word):
        return int(date[1]) * 12 + int(date[2]) - 1
    if date := _NAMED_DATE.fullmatch(word):
        return int(date[2]) * 12 + _MONTHS.index(date[1])
    if quantity := _QUANTITY.fullmatch(word):
        return 0.0 if quantity[1] else float(quantity[2])
    return math.nan


def _components(path: Path, columns: list[Floats], fitted_rows: Rows) -> npt.NDArray[np.float32]:
    """The principal components of the columns, float32 [rows, 10], fitted on `fitted_rows`.

    Missing values are filled in, and columns standardised. Raises BadInput, about `path`, for fewer
    than ten usable columns.
    """
    usable = [c for c in columns if _is_usable(c[fitted_rows])]
    if len(usable) < COMPONENTS:
        raise malformed(path, f"at least {COMPONENTS} usable feature columns", len(usable))
    values = np.column_stack(usable)
    means = np.nanmean(values[fitted_rows], axis=0)
    values = np.where(np.isnan(values), means, values) - means
    values /= values[fitted_rows].std(axis=0)
    _, directions = np.linalg.eigh(values[fitted_rows].T @ values[fitted_rows])
    top = directions[:, : -COMPONENTS - 1 : -1]
    largest = np.abs(top).argmax(axis=0)
    top = top * np.sign(top[largest, np.arange(COMPONENTS)])
    projected: Floats = (values @ top).round(4)
    return projected.astype(np.float32)


def _is_usable(column: Floats) -> bool:
    """Whether a column has at most 70 % empty entries and more than one value."""
    missing = np.isnan(column)
    return bool(missing.mean() <= MOST_EMPTY and np.ptp(column[~missing]) > 0)


DIABETES_FITTED = "means and standard deviations of the features"


def load_diabetes(*, held_out: bool = False) -> Records:
    """Disease progression after a year, in hundreds, from ten standardised measurements.

    The embedded regression task: a linear model has 11 parameters, as on Lending Club. Features
    come standardised over all patients, which no claim covers. With `held_out` they are
    standardised over the test split alone, whose patients are no clients. The target is divided by
    100, a public constant.
    """
    from sklearn import datasets

    x, y = datasets.load_diabetes(return_X_y=True, scaled=not held_out)
    test = holdout(len(x))[1]
    x = (x - x[test].mean(axis=0)) / x[test].std(axis=0) if held_out else x * np.sqrt(len(x))
    x, y = x.astype(np.float32), (y / 100).astype(np.float32)
    fits = _fitted_field(DIABETES_FITTED, held_out)
    return Records.with_holdout("diabetes", x, y, classes=0, **fits)
