"""Black-box membership inference by LiRA and RMIA.

The two models of one pair of shadow models are attacked, and all other pairs are the references. So
every record is once a member and once not. The attacker sees losses of final models, and knows the
recipe and the first model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedveil.audit.audit_cache import AuditCache
from fedveil.audit.findings import Leak
from fedveil.audit.likelihood import References, lira, lira_offline, rmia, rmia_offline
from fedveil.audit.roc import Roc, roc_figure
from fedveil.audit.seen import check_own
from fedveil.audit.shadow_models import OnTraining, ShadowModels
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.session import Training

ATTACK = "membership"
REFERENCES = 16
_LEAST = 4

Numbers = npt.NDArray[np.float64]
Scoring = Callable[[Numbers, Numbers, References], Numbers]
"""(losses of records, of the population, reference models) -> scores of the records."""

WAYS: tuple[tuple[str, Scoring], ...] = (
    ("LiRA", lambda losses, population, references: lira(losses, references)),
    ("LiRA, offline", lambda losses, population, references: lira_offline(losses, references)),
    ("RMIA", rmia),
    ("RMIA, offline", rmia_offline),
)


@dataclass(frozen=True)
class Membership:
    """The black-box membership attack.

    Attributes:
        references: The number of reference models, even.
        seed: Draws the shadow models' records.
        workers: Processes that train, 0 for one per core.
        cache: Where losses and figures are saved.
        cluster: The Ray cluster that trains instead of this machine.
    """

    references: int = REFERENCES
    seed: int = 0
    workers: int = 0
    cache: AuditCache = field(default_factory=AuditCache)
    cluster: RayCluster | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.references < _LEAST or self.references % 2:
            raise BadInput(
                f"--references is {self.references}: an even number from {_LEAST} on is needed, "
                "half of them with a record and half without"
            )

    def leaks(
        self,
        training: Training,
        claim: PrivacyClaim | None,
        on_training: OnTraining = lambda done, of: None,
    ) -> Iterator[Leak]:
        """One leak for each way of scoring, best known first."""
        check_own(training, ATTACK)
        curves = self.curves(
            ShadowModels(training, self.references // 2 + 1, self.seed), on_training
        )
        what = f"{training.data.records:,} records, in and out; {self.references} references"
        self.cache.save_figure(ATTACK, lambda: roc_figure(curves, what, claim))
        for way, roc in curves.items():
            yield Leak(ATTACK, f"{way}: {what}", roc.measures, claim)

    def curves(
        self, shadow_models: ShadowModels, on_training: OnTraining = lambda done, of: None
    ) -> dict[str, Roc]:
        """The ROC of each way of scoring."""
        losses = shadow_models.losses(self.cache, self.workers, self.cluster, on_training)
        return curves_of(losses, shadow_models.inside)


def curves_of(losses: Numbers, inside: npt.NDArray[np.bool_]) -> dict[str, Roc]:
    """Attack the first pair of models, with all others as references.

    Args:
        losses: [models, records and then population].
        inside: Which model was trained on which record, [models, records].

    Returns:
        The ROC of each way of scoring.
    """
    records = inside.shape[1]
    references = References(losses[2:, :records], inside[2:], losses[2:, records:])
    curves = {}
    for way, score in WAYS:
        scores = np.stack(
            [score(each[:records], each[records:], references) for each in losses[:2]]
        )
        members = np.where(inside[0], scores[0], scores[1])
        others = np.where(inside[0], scores[1], scores[0])
        curves[way] = Roc(members, others, paired=True)
    return curves
