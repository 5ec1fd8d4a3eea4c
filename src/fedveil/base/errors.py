"""The exceptions a user can meet. Each message is one line: the thing, its value, the way out."""

from collections.abc import Callable


class FedveilError(Exception):
    """Anything fedveil refuses or cannot continue after."""


class BadInput(FedveilError, ValueError):
    """A recipe, a data file or an argument is wrong."""


class BadArgument(BadInput):
    """Values of arguments that a constructor or function refuses.

    >>> str(BadArgument("{size} is 0: at least 1 is needed", "size"))
    'size is 0: at least 1 is needed'
    """

    def __init__(self, message: str, *arguments: str) -> None:
        """Store the message and the names of the `arguments`, which it has in braces."""
        super().__init__(message, *arguments)

    def __str__(self) -> str:
        """The message, with each argument in braces replaced by its name in the signature."""
        return self.with_names(lambda argument: argument)

    def with_names(self, name: Callable[[str], str]) -> str:
        """The message, with each argument in braces replaced by `name(argument)`.

        So a recipe's reader can be shown recipe keys instead of arguments.
        """
        message, *arguments = self.args
        for argument in arguments:
            message = message.replace(f"{{{argument}}}", name(argument))
        return str(message)


class UnsupportedEvent(BadInput):
    """No accountant knows this release under this neighbouring relation."""


class LedgerMismatch(BadInput):
    """A ledger belongs to another run, recipe or data set."""


class BudgetExhausted(FedveilError):
    """The next round would exceed the budget. Nothing was released."""


class CommonBudgetExhausted(BudgetExhausted):
    """The next round would exceed the budget of all runs on a shared ledger."""


def one_line(error: Exception) -> str:
    """The message of another library's error, on one line.

    After 200 characters it is cut off and ends with "...".
    """
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
