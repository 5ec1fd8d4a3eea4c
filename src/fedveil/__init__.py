"""fedveil: differentially private federated learning whose epsilon can be checked.

    from fedveil import Training, train

Names are loaded on first use, so that the command line starts without torch.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # what is imported here delays the moment from which Ctrl-C is caught
    from typing import Any

_HOMES = {
    "FederatedData": "fedveil.data.federated",
    "Task": "fedveil.models.task",
    "cross_entropy": "fedveil.models.task",
    "squared_error": "fedveil.models.task",
    "correct": "fedveil.models.task",
    "Lstm": "fedveil.models.recurrent",
    "Budget": "fedveil.privacy.accounting.budget",
    "central": "fedveil.privacy.releases.central",
    "client_noise": "fedveil.privacy.releases.client_noise",
    "dp_sgd": "fedveil.privacy.releases.dp_sgd",
    "two_point": "fedveil.privacy.releases.two_point",
    "unprotected": "fedveil.privacy.releases.none",
    "PrivacyPlan": "fedveil.privacy.plan",
    "Clip": "fedveil.privacy.clip",
    "ClipSchedule": "fedveil.privacy.clip_schedules",
    "Watched": "fedveil.privacy.watching",
    "Fixed": "fedveil.privacy.clip_schedules",
    "Poly": "fedveil.privacy.clip_schedules",
    "Quantile": "fedveil.privacy.clip_schedules",
    "Median": "fedveil.privacy.clip_schedules",
    "PerGradient": "fedveil.privacy.clip_schedules",
    "Ranges": "fedveil.privacy.ranges",
    "Poisson": "fedveil.privacy.sampling",
    "FixedSize": "fedveil.privacy.sampling",
    "RoundRobin": "fedveil.privacy.sampling",
    "Everyone": "fedveil.privacy.sampling",
    "Batches": "fedveil.training.batches",
    "ClientSgd": "fedveil.training.work",
    "ClientDpSgd": "fedveil.training.dp_sgd",
    "OneGradient": "fedveil.training.work",
    "SgdServer": "fedveil.training.server",
    "AdamServer": "fedveil.training.server",
    "Weights": "fedveil.training.server",
    "Training": "fedveil.training.session",
    "train": "fedveil.training.session",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'fedveil' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
