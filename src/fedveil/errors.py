"""The exceptions a user can meet. Each message is one line: the thing, its value, the way out."""


class FedveilError(Exception):
    """Anything fedveil refuses or cannot continue after."""


class BadInput(FedveilError, ValueError):
    """What was asked for cannot be done: a recipe, a data file or an argument is wrong."""


class UnsupportedEvent(BadInput):
    """No accountant knows this release under this neighbouring relation."""


class LedgerMismatch(BadInput):
    """A ledger belongs to another run, recipe or data set."""


class BudgetExhausted(FedveilError):
    """The next round would exceed the budget; nothing was released."""


class CommonBudgetExhausted(BudgetExhausted):
    """It is the budget that all runs on a shared ledger have in common."""


def one_line(error: Exception) -> str:
    """What another library says of a failure, on one line of reasonable length."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
