"""`HeldOutPeople`: the people of a site on whom it measures models, and never trains."""

import logging
from dataclasses import dataclass

import torch

from fedveil.base.errors import BadInput
from fedveil.base.platforms import one_thread
from fedveil.data.federated import FederatedData
from fedveil.data.provenance import PUBLIC
from fedveil.models.task import Task
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.site_metrics import SiteMetrics
from fedveil.training.evaluate import Owners, held_out_owners, owner_means
from fedveil.training.session import Training

LOG = logging.getLogger("fedveil.site")


@dataclass(frozen=True, eq=False)
class HeldOutPeople:
    """The people (or records) whom a site holds out, and the metrics that are measured on them.

    Guarantee: none of their records is among the training records, and no person has records on
    both sides. What `noisy_sums` returns is one release of `site_metrics.line` about each of them.

    | edge | behaviour |
    |---|---|
    | nobody is held out | BadInput |
    | test records of people, or rows, that are trained on | BadInput |
    | it is known whose the training records are, and not whose the test records | BadInput |
    | public test records beside those held out | not measured |
    | delta is not below 1 / people | BadInput |
    | the measurement fails | zeros with noise: that it failed may depend on a record |
    """

    site_metrics: SiteMetrics
    owner_records: Owners
    task: Task

    @classmethod
    def of_site(cls, records: FederatedData, training: Training) -> "HeldOutPeople | None":
        """Return the held-out people of a site, None if its recipe lets no site measure.

        Args:
            records: The site's records, capped where the claim is about people.
            training: The training that the site has built for its plan.
        """
        metrics = training.plan.metrics
        if not isinstance(metrics, SiteMetrics):
            return None
        owner, persons = records.owners_of_test, records.test_persons
        chosen = owner < PUBLIC
        if not chosen.any():
            raise BadInput(
                "evaluate.where is 'site' and this site holds nobody out: set data.test to a share "
                "of its rows, such as 0.2, or save the data with a test split"
            )
        if (owner >= 0).any() or (persons is not None and (persons[chosen] < 0).any()):
            raise BadInput(
                "evaluate.where is 'site' and some test records are of people who are also trained "
                "on: each person's records must be on one side"
            )
        if records.persons is not None and persons is None:
            raise BadInput(
                "evaluate.where is 'site' and nobody says whose the test records are: name the "
                "column (data.person)"
            )
        people, delta = held_out_owners(records), metrics.line.budget.delta
        if delta >= 1 / len(people):
            raise BadInput(
                f"evaluate.delta is {delta:g}, not below 1 / {len(people)} that this site holds "
                "out: a delta that large would allow publishing somebody outright"
            )
        return cls(metrics, people, training.task)

    def __len__(self) -> int:
        """The number of people, or of records where nobody knows whose they are."""
        return len(self.owner_records)

    def noisy_sums(self, params: torch.Tensor, round: int, streams: Streams) -> torch.Tensor:
        """Return the sums that leave the site, float64 [W]. `params` [P] is the model.

        `streams` are those of this measurement alone.
        """
        names, clip = self.site_metrics.names, self.site_metrics.loss_clip
        try:
            with one_thread():
                means = owner_means(self.task, params, self.owner_records, names, clip)
        except Exception:
            LOG.exception("the metrics after round %d could not be computed", round)
            means = torch.zeros(len(self.owner_records), len(names), dtype=torch.float64)
        return self.site_metrics.noisy_sum(means, round, streams)
