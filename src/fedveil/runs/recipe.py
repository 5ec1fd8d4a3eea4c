"""`Recipe`: one TOML file that says everything a run does, read strictly."""

from typing import Annotated

from pydantic import Field

from fedveil.base.checks import ROUNDS, SEED, whole
from fedveil.runs.sections.attack_section import AttackSection
from fedveil.runs.sections.client_section import ClientSection, SampleSection
from fedveil.runs.sections.clip_section import ClipSection
from fedveil.runs.sections.data_section import DataSection, ModelSection
from fedveil.runs.sections.keys import forms_of
from fedveil.runs.sections.noise_section import (
    BudgetSection,
    NoiseSection,
    NoNoiseSection,
    ShuffleSection,
)
from fedveil.runs.sections.section import Section
from fedveil.runs.sections.server_section import EngineSection, EvaluateSection, ServerSection


class Recipe(Section):
    """A run, as its author wrote it."""

    name: str = Field(description="What the run is called; its run directory begins with it.")
    seed: Annotated[int, SEED] = Field(
        default=1,
        description="Decides what is drawn: first model, partition, cohorts, batches and noise; "
        "with secure noise, only the first two.",
    )
    rounds: Annotated[int | None, ROUNDS] = Field(
        default=None,
        description="Rounds that are trained, if the budget allows. Left out: iterations is "
        "needed.",
    )
    iterations: Annotated[int | None, whole(1, "at least one is needed")] = Field(
        default=None,
        description="Local steps over all rounds, in place of rounds: rounds x client.steps. "
        "Left out: rounds is needed.",
    )
    data: DataSection = Field(description="Which records, and how they are divided among clients.")
    model: ModelSection = Field(description="Which model is trained.")
    sample: SampleSection = Field(description="Which clients take part in a round.")
    client: ClientSection = Field(description="What a client computes in a round.")
    clip: ClipSection | None = Field(
        default=None,
        description="How long a client's update may be; noise needs it. Left out: nothing is "
        "clipped.",
    )
    noise: NoiseSection = Field(
        default=NoNoiseSection(kind="none"),
        description="What hides a client's update, and who adds it. Left out: nothing does, and "
        "nothing is claimed.",
    )
    budget: BudgetSection | None = Field(
        default=None,
        description="What the run may spend; noise that is claimed needs it. Left out: only where "
        "nothing is claimed.",
    )
    shuffle: ShuffleSection | None = Field(
        default=None,
        description="An ideal shuffler between clients and server, for noise.kind 'two-point'. "
        "Left out: the server sees who sent what.",
    )
    server: ServerSection = Field(
        default=ServerSection(),
        description="How the server steps. Left out: with every key left out.",
    )
    attack: AttackSection | None = Field(
        default=None,
        description="Clients that attack the training: a simulation, whose result stands beside "
        "the claim. Left out: everybody is honest.",
    )
    evaluate: EvaluateSection = Field(
        default=EvaluateSection(),
        description="When the model is measured, and what is recorded. Left out: with every key "
        "left out.",
    )
    engine: EngineSection = Field(
        default=EngineSection(),
        description="How a round is computed; nothing here changes a result beyond rounding. "
        "Left out: with every key left out.",
    )

    @property
    def total_rounds(self) -> int:
        """The number of rounds; `load_recipe` has filled it in."""
        if self.rounds is None:
            raise AssertionError("a recipe is made by load_recipe")
        return self.rounds


FORMS = forms_of(Recipe)
"""The sections of a recipe in all their kinds, and the keys that stand before them."""
