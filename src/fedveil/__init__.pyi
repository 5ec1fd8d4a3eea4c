from fedveil.api import open_run as open_run
from fedveil.api import resume as resume
from fedveil.api import rounds as rounds
from fedveil.api import run as run
from fedveil.attacks.adversary import Adversary as Adversary
from fedveil.attacks.adversary import AttackContext as AttackContext
from fedveil.attacks.adversary import AttackerNoise as AttackerNoise
from fedveil.attacks.adversary import BackdoorAttack as BackdoorAttack
from fedveil.attacks.adversary import ReportAttack as ReportAttack
from fedveil.attacks.adversary import When as When
from fedveil.attacks.backdoors import Backdoor as Backdoor
from fedveil.attacks.backdoors import ColourBackdoor as ColourBackdoor
from fedveil.attacks.backdoors import PhraseBackdoor as PhraseBackdoor
from fedveil.attacks.backdoors import PixelTrigger as PixelTrigger
from fedveil.attacks.backdoors import SentenceBackdoor as SentenceBackdoor
from fedveil.attacks.backdoors import WritersBackdoor as WritersBackdoor
from fedveil.base.errors import BadInput as BadInput
from fedveil.base.errors import BudgetExhausted as BudgetExhausted
from fedveil.base.errors import FedveilError as FedveilError
from fedveil.data.federated import FederatedData as FederatedData
from fedveil.data.schema import TableSchema as TableSchema
from fedveil.data.user_arrays import pad as pad
from fedveil.data.vocabulary import Vocabulary as Vocabulary
from fedveil.models.metrics import Metric as Metric
from fedveil.models.metrics import binary_cross_entropy as binary_cross_entropy
from fedveil.models.metrics import correct as correct
from fedveil.models.metrics import cross_entropy as cross_entropy
from fedveil.models.metrics import squared_error as squared_error
from fedveil.models.task import Task as Task
from fedveil.models.zoo import Lstm as Lstm
from fedveil.models.zoo import without_batch_norm as without_batch_norm
from fedveil.privacy.accounting.budget import Budget as Budget
from fedveil.privacy.accounting.budget import BudgetLine as BudgetLine
from fedveil.privacy.accounting.claims import Accountant as Accountant
from fedveil.privacy.accounting.claims import NoiseSource as NoiseSource
from fedveil.privacy.accounting.claims import PrivacyClaim as PrivacyClaim
from fedveil.privacy.accounting.claims import Relation as Relation
from fedveil.privacy.accounting.claims import Trust as Trust
from fedveil.privacy.accounting.claims import Unit as Unit
from fedveil.privacy.clip import Clip as Clip
from fedveil.privacy.clip import Clipped as Clipped
from fedveil.privacy.clip import Norm as Norm
from fedveil.privacy.clip_schedules import ClipSchedule as ClipSchedule
from fedveil.privacy.clip_schedules import Fixed as Fixed
from fedveil.privacy.clip_schedules import Median as Median
from fedveil.privacy.clip_schedules import PerGradient as PerGradient
from fedveil.privacy.clip_schedules import Poly as Poly
from fedveil.privacy.clip_schedules import Quantile as Quantile
from fedveil.privacy.clip_statistic import ClipStatistic as ClipStatistic
from fedveil.privacy.ledger.ledger import Ledger as Ledger
from fedveil.privacy.plan import PrivacyPlan as PrivacyPlan
from fedveil.privacy.plan import unprotected as unprotected
from fedveil.privacy.ranges import Perturb as Perturb
from fedveil.privacy.ranges import Ranges as Ranges
from fedveil.privacy.releases.central import CentralNoise as CentralNoise
from fedveil.privacy.releases.central import central as central
from fedveil.privacy.releases.client_noise import ClientNoise as ClientNoise
from fedveil.privacy.releases.client_noise import Published as Published
from fedveil.privacy.releases.client_noise import client_noise as client_noise
from fedveil.privacy.releases.dp_sgd import DpSgdSteps as DpSgdSteps
from fedveil.privacy.releases.dp_sgd import dp_sgd as dp_sgd
from fedveil.privacy.releases.priv_unit import PrivUnitReports as PrivUnitReports
from fedveil.privacy.releases.priv_unit import priv_unit as priv_unit
from fedveil.privacy.releases.release import Release as Release
from fedveil.privacy.releases.release import line_of as line_of
from fedveil.privacy.releases.two_point import TwoPointReports as TwoPointReports
from fedveil.privacy.releases.two_point import two_point as two_point
from fedveil.privacy.sampling import Everyone as Everyone
from fedveil.privacy.sampling import FixedSize as FixedSize
from fedveil.privacy.sampling import Poisson as Poisson
from fedveil.privacy.sampling import RoundRobin as RoundRobin
from fedveil.privacy.sampling import Sampler as Sampler
from fedveil.privacy.secure import planned_for as planned_for
from fedveil.privacy.secure import with_secure_noise as with_secure_noise
from fedveil.runs.opened_run import OpenedRun as OpenedRun
from fedveil.training.aggregates import Aggregate as Aggregate
from fedveil.training.aggregates import CoordinateMedian as CoordinateMedian
from fedveil.training.aggregates import Flame as Flame
from fedveil.training.aggregates import Krum as Krum
from fedveil.training.aggregates import TrimmedMean as TrimmedMean
from fedveil.training.cohort import Batches as Batches
from fedveil.training.engines.engine import Engine as Engine
from fedveil.training.engines.engine import Job as Job
from fedveil.training.engines.ray_cluster import RayCluster as RayCluster
from fedveil.training.exchange import client_report as client_report
from fedveil.training.exchange import server_sum as server_sum
from fedveil.training.gradients.modes import Mode as Mode
from fedveil.training.reports import CohortSum as CohortSum
from fedveil.training.round import RoundResult as RoundResult
from fedveil.training.server import AdagradServer as AdagradServer
from fedveil.training.server import AdamServer as AdamServer
from fedveil.training.server import RateSchedule as RateSchedule
from fedveil.training.server import RateShape as RateShape
from fedveil.training.server import ServerOptimizer as ServerOptimizer
from fedveil.training.server import ServerState as ServerState
from fedveil.training.server import SgdServer as SgdServer
from fedveil.training.server import Weights as Weights
from fedveil.training.server import YogiServer as YogiServer
from fedveil.training.session import Training as Training
from fedveil.training.session import new_ledger as new_ledger
from fedveil.training.session import train as train
from fedveil.training.work import Adam as Adam
from fedveil.training.work import ClientDpSgd as ClientDpSgd
from fedveil.training.work import ClientSgd as ClientSgd
from fedveil.training.work import ClientWork as ClientWork
from fedveil.training.work import Decay as Decay
from fedveil.training.work import OneGradient as OneGradient

__version__: str

__all__ = [
    "Accountant",
    "AdagradServer",
    "Adam",
    "AdamServer",
    "Adversary",
    "Aggregate",
    "AttackContext",
    "AttackerNoise",
    "Backdoor",
    "BackdoorAttack",
    "BadInput",
    "Batches",
    "Budget",
    "BudgetExhausted",
    "BudgetLine",
    "CentralNoise",
    "ClientDpSgd",
    "ClientNoise",
    "ClientSgd",
    "ClientWork",
    "Clip",
    "ClipSchedule",
    "ClipStatistic",
    "Clipped",
    "CohortSum",
    "ColourBackdoor",
    "CoordinateMedian",
    "Decay",
    "DpSgdSteps",
    "Engine",
    "Everyone",
    "FederatedData",
    "FedveilError",
    "Fixed",
    "FixedSize",
    "Flame",
    "Job",
    "Krum",
    "Ledger",
    "Lstm",
    "Median",
    "Metric",
    "Mode",
    "NoiseSource",
    "Norm",
    "OneGradient",
    "OpenedRun",
    "PerGradient",
    "Perturb",
    "PhraseBackdoor",
    "PixelTrigger",
    "Poisson",
    "Poly",
    "PrivUnitReports",
    "PrivacyClaim",
    "PrivacyPlan",
    "Published",
    "Quantile",
    "Ranges",
    "RateSchedule",
    "RateShape",
    "RayCluster",
    "Relation",
    "Release",
    "ReportAttack",
    "RoundResult",
    "RoundRobin",
    "Sampler",
    "SentenceBackdoor",
    "ServerOptimizer",
    "ServerState",
    "SgdServer",
    "TableSchema",
    "Task",
    "Training",
    "TrimmedMean",
    "Trust",
    "TwoPointReports",
    "Unit",
    "Vocabulary",
    "Weights",
    "When",
    "WritersBackdoor",
    "YogiServer",
    "binary_cross_entropy",
    "central",
    "client_noise",
    "client_report",
    "correct",
    "cross_entropy",
    "dp_sgd",
    "line_of",
    "new_ledger",
    "open_run",
    "pad",
    "planned_for",
    "priv_unit",
    "resume",
    "rounds",
    "run",
    "server_sum",
    "squared_error",
    "train",
    "two_point",
    "unprotected",
    "with_secure_noise",
    "without_batch_norm",
]
