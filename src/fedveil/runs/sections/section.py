"""What all sections of a recipe share.

A key's description says what it means and when it has an effect. Where the key may be left out and
its default does not speak for itself, " Left out: ..." ends it. `fedveil explain` and
docs/recipes.md are made of these.
"""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, and strict about keys and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=True)
