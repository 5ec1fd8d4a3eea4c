"""From a recipe's [attack] section to the adversary of its training."""

from fedveil.attacks.backdoor import Backdoor
from fedveil.attacks.backdoor_attack import AttackerNoise, BackdoorAttack, When
from fedveil.attacks.image_backdoors import ColourBackdoor, PixelTrigger, WritersBackdoor
from fedveil.attacks.text_backdoors import PhraseBackdoor, SentenceBackdoor
from fedveil.data.federated import FederatedData
from fedveil.errors import BadInput
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.recipe import Recipe
from fedveil.runs.sections.attack_section import (
    AttackSection,
    ColourSection,
    PhraseSection,
    PixelSection,
    SentenceSection,
    WritersSection,
)
from fedveil.runs.sections.client_section import DpSgdSection, GradientSection, SgdSection
from fedveil.training.batches import Batches
from fedveil.training.work import ClientSgd, ClientWork


def attack_of(recipe: Recipe, data: FederatedData, plan: PrivacyPlan) -> BackdoorAttack | None:
    """The attack that a recipe describes; None if there is none."""
    section = recipe.attack
    if section is None:
        return None
    data.check_tested("[attack]")
    if section.project and plan.schedule is None:
        raise BadInput("attack.project is true and updates are not clipped: leave it out")
    if section.start > recipe.total_rounds:
        raise BadInput(
            f"attack.start is {section.start} and there are {recipe.total_rounds} rounds: start "
            "sooner"
        )
    return BackdoorAttack.of(
        data,
        _backdoor(section),
        attackers=section.attackers,
        share=section.share,
        boost=_boost(recipe, plan) if section.boost is None else section.boost,
        project=section.project,
        noise=AttackerNoise(section.noise),
        when=When(section.start, section.end, section.every, section.present),
        work=_work(recipe, section),
        seed=recipe.seed,
    )


def _backdoor(section: AttackSection) -> Backdoor:
    match section:
        case PixelSection():
            return PixelTrigger(
                *(section.target, section.size, section.row, section.column),
                *(section.value, section.parts),
            )
        case WritersSection():
            return WritersBackdoor(section.source, section.target, section.writers)
        case ColourSection():
            return ColourBackdoor(
                section.source, section.target, section.channel, section.feature_share
            )
        case PhraseSection():
            return PhraseBackdoor(section.phrase, section.target)
        case SentenceSection():
            return SentenceBackdoor(tuple(section.sentences))


def _boost(recipe: Recipe, plan: PrivacyPlan) -> float:
    """What replaces the model: clients per round over the server's learning rate."""
    rate = recipe.server.lr if recipe.server.lr is not None else 1.0
    if recipe.server.optimizer != "sgd":
        raise BadInput(
            f"attack.boost is missing and server.optimizer is {recipe.server.optimizer!r}: only "
            "for 'sgd' it is known what replaces the model"
        )
    return plan.expected / rate


def _work(recipe: Recipe, section: AttackSection) -> ClientWork | None:
    """The attackers' own work; None where they train as honest clients do."""
    client = recipe.client
    skips = isinstance(client, DpSgdSection) and section.noise == "skip"
    if section.epochs is None and section.lr is None and not skips:
        return None
    if isinstance(client, DpSgdSection) and not skips:
        raise BadInput(
            "attack.epochs and attack.lr are for attackers that train in their own way: with "
            "dp-sgd, add attack.noise = 'skip', or leave them out"
        )
    if isinstance(client, GradientSection):
        raise BadInput("attack.epochs and attack.lr have no effect on one gradient: leave them out")
    lr = section.lr if section.lr is not None else client.lr
    if lr is None:
        raise BadInput("attack.lr is missing: honest clients have no single learning rate")
    if isinstance(client, SgdSection) and section.epochs is None:
        return ClientSgd(Batches(client.batch, client.epochs, client.steps), lr)
    size = client.batch if isinstance(client, SgdSection) else 0
    return ClientSgd(Batches(size, epochs=section.epochs or 1), lr)
