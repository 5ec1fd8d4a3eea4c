"""`SiteSums`: a site's part in the secure sums of a federation, as its owner has set it up."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedveil.base.errors import BadInput
from fedveil.flower.federation_files import SiteFile, SumKeys, check_secure
from fedveil.flower.masking_keeper import Keeper, KeeperStep, KeeperTask, running_keeper
from fedveil.flower.messages import MaskedAsk, SumStep, bytes_tensor
from fedveil.flower.site_ledger import LOG, Declined
from fedveil.flower.sum_terms import sum_terms
from fedveil.masking.sum_messages import MAGIC, Kind, Place
from fedveil.privacy.clip import Clip
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.releases.secure_sum import SecureSum, report_grid

_STEPS = {Kind.CLOSING: KeeperStep.ANSWER, Kind.CERTIFICATE: KeeperStep.REVEAL}
_JOURNAL = "sums.db"
_NO_MASKS = "this site cannot go on with the secure sum: its owner was told why"


@dataclass(frozen=True)
class SiteSums:
    """What a site does in a secure sum, with the keys that the owner has from joining.

    Guarantee: docs/proofs/secure-sum.md. What a site sends of its report is masked, for a roster
    that the node keys of its own `site.toml` have signed. Terms follow from the owner's copy of the
    recipe. The caller charges the attempt between `join_round` and `masked_report`.

    | edge | behaviour |
    |---|---|
    | a message that is none of the protocol's, or for another site | Declined |
    | there is no process with the masking keys | Declined: nothing is masked with others |
    | that process has ended, or a key or the journal cannot be used | the same, the owner is told |
    | a report that is not on the grid | BadInput, and nothing is sent |

    Attributes:
        secure_sum: The secure sum of the plan.
        site_keys: The keys in site.toml.
        name: The site's name.
        number: The site's number.
        digest: The digest of the plan.
        size: The number of parameters.
        plan: The plan, from which the grid of reports follows.
        journal: The file with what this site has masked and answered.
        keeper: Finds whoever holds the masking keys.
    """

    secure_sum: SecureSum
    site_keys: SumKeys
    name: str
    number: int
    digest: str
    size: int
    plan: PrivacyPlan
    journal: Path
    keeper: Callable[[], Keeper | None] = field(default=running_keeper, compare=False)

    @classmethod
    def of_site(
        cls, file: SiteFile, plan: PrivacyPlan, digest: str, size: int
    ) -> "SiteSums | None":
        """Return the part that a site has by its site.toml, None if its plan has no secure sum.

        Raises BadInput if there is a secure sum and no keys, or the reverse, if the noise is
        seeded, or if the keys are not those of the plan's sites.
        """
        channel = plan.release.channel
        if not isinstance(channel, SecureSum):
            if file.sum_keys is not None:
                raise BadInput("[sum_keys] in site.toml is for recipes with [sum]: omit it")
            return None
        if file.sum_keys is None or file.number is None:
            raise BadInput(
                "the recipe has [sum] and site.toml no [sum_keys] with the sites' keys: join the "
                "federation again (fedveil site join)"
            )
        check_secure(plan)
        section = file.sum_keys
        if len(section.public_keys) != channel.sites:
            raise BadInput(
                f"public_keys are {len(section.public_keys)} and the plan has {channel.sites} "
                "sites: one key each, in the order of their numbers"
            )
        sum_terms(channel, section.public_keys, digest, "0" * 32, size + plan.width)  # bad keys
        journal = Path(file.ledger) / _JOURNAL
        return cls(channel, section, file.name, file.number, digest, size, plan, journal)

    def join_round(self, ask: MaskedAsk) -> None:
        """Take part in the round of an ask's roster. MessageRefused if that is refused."""
        self._perform(KeeperStep.BEGIN, ask, ask.roster_message.numpy().tobytes())

    def masked_report(self, ask: MaskedAsk, report: torch.Tensor, clip: Clip | None) -> SumStep:
        """Return the report under the masks of the round that was begun.

        `report`, float64 [P + W], is what the site reports, and the statistic of an adaptive clip.
        """
        grid = report_grid(self.plan, clip, self.size)
        if not grid.holds(report):
            raise BadInput("a report is not on the grid of secure noise, and is not sent")
        vector = grid.quantise(report).numpy().astype("<i8").tobytes()
        return self._reply(ask, self._perform(KeeperStep.MASK, ask, vector))

    def reply_to(self, step: SumStep) -> tuple[str, SumStep]:
        """Return what the site does in a step after the ask, as a word for its log, and its reply.

        An empty message asks for the site's keys. MessageRefused if the protocol refuses it.
        """
        if step.site != self.name:
            raise Declined(f"a step of a secure sum is for {step.site!r}")
        content = step.encoded
        kind = KeeperStep.KEYS
        if content:
            known = {MAGIC + bytes([each]): word for each, word in _STEPS.items()}
            found = known.get(content[: len(MAGIC) + 1])
            if found is None:
                raise Declined("a step of a secure sum is neither a closing nor a certificate")
            kind = found
        return kind.value, self._reply(step, self._perform(kind, step, content))

    def _perform(self, kind: KeeperStep, about: MaskedAsk | SumStep, content: bytes) -> bytes:
        """Let the keeper do a step of the round that a message is about."""
        keeper = self.keeper()
        if keeper is None:
            raise Declined("this site has no process with masking keys: its owner starts it anew")
        words = self.size + self.plan.width
        terms = sum_terms(
            self.secure_sum, self.site_keys.public_keys, self.digest, about.run, words
        )
        place = Place(about.round, about.attempt)
        task = KeeperTask(kind, terms, self.number, self.site_keys.key, str(self.journal), place)
        try:
            return keeper.perform(task, content)
        except BadInput as e:  # a key, a journal or a process that is gone: nothing for a server
            LOG.error("round %d of run %s: %s", about.round, about.run, e)
            raise Declined(_NO_MASKS) from e

    def _reply(self, about: MaskedAsk | SumStep, content: bytes) -> SumStep:
        """Return this site's step in the round that a message is about."""
        return SumStep(
            about.run, about.round, about.attempt, self.digest, self.name, bytes_tensor(content)
        )
