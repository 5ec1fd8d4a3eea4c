"""What all sections of a recipe share.

A key's description says what it means and when it has an effect. Where the key may be left out and
its default does not speak for itself, " Left out: ..." ends it. What a value may be by itself is
part of the key's type: `Annotated[float, POSITIVE]`, with anything that has a `check(name, value)`
and a `text`. `fedveil explain` and docs/recipes.md are made of these.

A section builds its own part of a training. What that takes is imported when it is built, so that
recipes can be read without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedveil.base.errors import BadArgument, BadInput


@contextmanager
def in_keys(section: str = "", **keys: str) -> Iterator[None]:
    """Name the recipe's key where a part that is built refuses an argument.

    Args:
        section: The section whose keys are called like the arguments; "" for none.
        keys: The recipe's keys of all other arguments.
    """
    try:
        yield
    except BadArgument as e:
        prefix = f"{section}." if section else ""
        raise BadInput(e.text(lambda argument: keys.get(argument, prefix + argument))) from e


class Section(BaseModel):
    """Frozen, and strict about keys and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=True)

    def check_values(self, where: str = "") -> None:
        """Refuse values that are out of range and keys that do not go together.

        Args:
            where: The section's own name, which messages put before each key.
        """
        for key, field in type(self).model_fields.items():
            value = getattr(self, key)
            path = f"{where}.{key}" if where else key
            if isinstance(value, Section):
                value.check_values(path)
            elif value is not None:
                for limits in field.metadata:
                    limits.check(path, value)
        self.check_together()

    def check_together(self) -> None:
        """Refuse keys of this section that contradict each other."""

    def given(self, *keys: str) -> dict[str, Any]:
        """Those of the keys that were not left out, with their values."""
        return {key: value for key in keys if (value := getattr(self, key)) is not None}
