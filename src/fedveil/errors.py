"""The exceptions a user can meet. Each message is one line: the thing, its value, the way out."""


class FedveilError(Exception):
    """Anything fedveil refuses or cannot continue after."""


class BadInput(FedveilError, ValueError):
    """A recipe, a data file or an argument is wrong."""


class UnsupportedEvent(BadInput):
    """No accountant knows this release under this neighbouring relation."""


class LedgerMismatch(BadInput):
    """A ledger belongs to another run, recipe or data set."""


class BudgetExhausted(FedveilError):
    """The next round would exceed the budget. Nothing was released."""


class CommonBudgetExhausted(BudgetExhausted):
    """The next round would exceed the budget of all runs on a shared ledger."""


def one_line(error: Exception) -> str:
    """Another library's error message, on one line of at most 203 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
