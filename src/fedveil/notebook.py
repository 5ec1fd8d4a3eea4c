"""A run followed in a notebook: one bar that moves."""

import html
import sys
from typing import Any

from fedveil.console import Follower
from fedveil.runs.run import Run


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookProgress:
    """The progress line of the terminal under a bar, in the output of the cell."""

    def __init__(self, run: Run) -> None:
        self._follower = Follower(run)
        self._handle: Any = None

    def __enter__(self) -> "NotebookProgress":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last line on the screen."""

    def show(self, line: dict[str, Any]) -> None:
        """Follow one round."""
        from IPython import display

        bar = f'<progress value="{line["round"]}" max="{self._follower.rounds}"></progress>'
        shown: Any = display.HTML(f"{bar} {html.escape(self._follower.text(line))}")
        if self._handle is None:
            self._handle = display.display(shown, display_id=True)
        else:
            self._handle.update(shown)
