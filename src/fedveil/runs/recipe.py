"""`Recipe`: one TOML file that says everything a run does, read strictly."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.base.checks import ROUNDS, SEED, whole
from fedveil.runs.sections.attack_section import AttackSection
from fedveil.runs.sections.client_section import ClientSection, SampleSection
from fedveil.runs.sections.clip_section import ClipSection
from fedveil.runs.sections.data_section import DataSection
from fedveil.runs.sections.model_section import ModelSection
from fedveil.runs.sections.noise_section import (
    BudgetSection,
    NoiseSection,
    NoNoiseSection,
    ShuffleSection,
)
from fedveil.runs.sections.section import Section, forms_of, setting
from fedveil.runs.sections.server_section import EngineSection, EvaluateSection, ServerSection

if TYPE_CHECKING:
    from fedveil.data.federated import FederatedData


class Recipe(Section):
    """A run, as its author wrote it."""

    name: str
    """What the run is called; its run directory begins with it."""
    seed: int = setting(SEED, 1)
    """Decides what is drawn: first model, partition, cohorts, batches and noise; with secure noise,
    only the first two."""
    rounds: int | None = setting(ROUNDS, None)
    """Rounds that are trained, if the budget allows. Left out: iterations is needed."""
    iterations: int | None = setting(whole(1, "at least one is needed"), None)
    """Local steps over all rounds, in place of rounds: rounds x client.steps. Left out: rounds is
    needed."""
    data: DataSection
    """Which records, and how they are divided among clients."""
    model: ModelSection
    """Which model is trained."""
    sample: SampleSection
    """Which clients take part in a round."""
    client: ClientSection
    """What a client computes in a round."""
    clip: ClipSection | None = None
    """How long a client's update may be; noise needs it. Left out: nothing is clipped."""
    noise: NoiseSection = NoNoiseSection(kind="none")
    """What hides a client's update, and who adds it. Left out: nothing does, and nothing is
    claimed."""
    budget: BudgetSection | None = None
    """What the run may spend; noise that is claimed needs it. Left out: only where nothing is
    claimed."""
    shuffle: ShuffleSection | None = None
    """An ideal shuffler between clients and server, for noise.kind 'two-point'. Left out: the
    server sees who sent what."""
    server: ServerSection = ServerSection()
    """How the server steps. Left out: with every key left out."""
    attack: AttackSection | None = None
    """Clients that attack the training: a simulation, whose result stands beside the claim. Left
    out: everybody is honest."""
    evaluate: EvaluateSection = EvaluateSection()
    """When the model is measured, and what is recorded. Left out: with every key left out."""
    engine: EngineSection = EngineSection()
    """How a round is computed; nothing here changes a result beyond rounding. Left out: with every
    key left out."""

    @property
    def total_rounds(self) -> int:
        """The number of rounds; `load_recipe` has filled it in."""
        if self.rounds is None:
            raise AssertionError("a recipe is made by load_recipe")
        return self.rounds

    def load_data(self, root: Path | None = None) -> "FederatedData":
        """Load the records and divide them. They depend on `[data]` and the seed alone.

        Args:
            root: The folder with published data sets.
        """
        return self.data.divide(self.data.load(root), self.seed)


FORMS = forms_of(Recipe)
"""The sections of a recipe in all their kinds, and the keys that stand before them."""
