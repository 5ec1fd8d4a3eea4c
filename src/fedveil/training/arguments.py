"""The arguments of a training, checked one by one before anything is done with them.

Enumerations are compared by identity: the text of a member would be accepted and have no effect.
"""

from fedveil.base.checks import ANY_COUNT, COUNT, SEED, check_workers, one_of, shown
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.gradients.modes import Mode
from fedveil.training.server import Weights


def check_arguments(
    *,
    task: object,
    data: object,
    plan: object,
    work: object,
    server: object,
    weights: object,
    seed: object,
    mode: object,
    chunk: object,
    memory: object,
    workers: object,
    every: object,
    clients_every: object,
) -> None:
    """Refuse arguments of `Training` that are not what they are called.

    | edge | behaviour |
    |---|---|
    | weights "examples", mode "looped" as strings | BadInput: use the enumeration |
    | seed, chunk, memory, workers or every that is not whole | BadInput |
    | work or server that is a class and not one of its instances | BadInput |
    """
    for name, value, kind in (
        ("task", task, Task),
        ("data", data, FederatedData),
        ("plan", plan, PrivacyPlan),
    ):
        if not isinstance(value, kind) or (kind is PrivacyPlan and type(value) is not kind):
            raise BadInput(f"{name} is {shown(value)}: a {kind.__name__} is needed")
    _check_method("work", work, "updates", "ClientSgd, ClientDpSgd or OneGradient")
    _check_method("server", server, "step", "SgdServer, AdamServer or another server optimiser")
    one_of("weights", weights, Weights)
    if mode is not None:
        one_of("mode", mode, Mode)
    SEED.check("seed", seed)
    ANY_COUNT.check("chunk", chunk)
    COUNT.check("memory", memory)
    check_workers("workers", workers)
    COUNT.check("every", every)
    if clients_every is not None:
        COUNT.check("clients_every", clients_every)


def _check_method(name: str, value: object, method: str, such: str) -> None:
    if isinstance(value, type) or not callable(getattr(value, method, None)):
        raise BadInput(f"{name} is {shown(value)}: an instance of {such} is needed")
