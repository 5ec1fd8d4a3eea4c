"""`Target`: what is to be predicted for every record."""

from dataclasses import dataclass

PADDING = -100
"""The label of a place that counts for nothing, such as one behind the end of a text."""


@dataclass(frozen=True)
class Target:
    """Labels, several labels at once, or numbers.

    | `classes` | targets | what they are |
    |---|---|---|
    | 0 | real numbers [records, *shape] | numbers, one without a `shape` |
    | C | whole numbers [records, *shape] | one of C labels in each place; -100 in none |
    | C | real numbers [records, C] | `several` of C labels at once: how true each is, 0 to 1 |

    >>> print(Target(10), Target(500, (20,)), Target(0, (3,)), sep="; ")
    10 labels; 500 labels in each of (20,) places; (3,) numbers to predict
    """

    classes: int
    shape: tuple[int, ...] = ()
    several: bool = False

    @property
    def plain(self) -> bool:
        """Whether there is one label or one number per record."""
        return not self.shape

    @property
    def outputs(self) -> tuple[int, ...]:
        """The shape of a model's outputs for one record."""
        if self.classes and not self.several:
            return (*self.shape, self.classes)
        return self.shape or (1,)

    def __str__(self) -> str:
        if self.several:
            return f"{self.classes} labels, several of them at once"
        if not self.classes:
            return f"{self.shape} numbers to predict" if self.shape else "a number to predict"
        return f"{self.classes} labels" + (f" in each of {self.shape} places" if self.shape else "")
