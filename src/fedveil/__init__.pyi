from fedveil import attacks as attacks
from fedveil import data as data
from fedveil import models as models
from fedveil.api import open_run, resume, rounds, run
from fedveil.base.errors import BadInput, BudgetExhausted, FedveilError
from fedveil.data.federated import FederatedData
from fedveil.data.table_check import check_table
from fedveil.models.metrics import binary_cross_entropy, correct, cross_entropy
from fedveil.models.task import Task
from fedveil.privacy import clip_schedules as clips
from fedveil.privacy import releases as releases
from fedveil.privacy import sampling as samplers
from fedveil.privacy.accounting import claims as claims
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.plan import PrivacyPlan, unprotected
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.privacy.releases.priv_unit import priv_unit
from fedveil.privacy.releases.two_point import two_point
from fedveil.runs.opened_run import OpenedRun
from fedveil.training import engines as engines
from fedveil.training import server as servers
from fedveil.training import work as work
from fedveil.training.cohort import Batches
from fedveil.training.round import RoundResult
from fedveil.training.session import Training, train
from fedveil.training.work import ClientDpSgd, ClientSgd

__version__: str

__all__ = [
    "BadInput",
    "Batches",
    "Budget",
    "BudgetExhausted",
    "ClientDpSgd",
    "ClientSgd",
    "FederatedData",
    "FedveilError",
    "Ledger",
    "OpenedRun",
    "PrivacyClaim",
    "PrivacyPlan",
    "RoundResult",
    "Task",
    "Training",
    "attacks",
    "binary_cross_entropy",
    "central",
    "check_table",
    "claims",
    "client_noise",
    "clips",
    "correct",
    "cross_entropy",
    "data",
    "dp_sgd",
    "engines",
    "models",
    "open_run",
    "priv_unit",
    "releases",
    "resume",
    "rounds",
    "run",
    "samplers",
    "servers",
    "train",
    "two_point",
    "unprotected",
    "work",
]
