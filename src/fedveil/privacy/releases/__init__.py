"""Ways to release what clients send: one file each, with its builder, its noise and its lines."""

from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.events import Gaussian, Laplace, PureReport
from fedveil.privacy.noise.mechanisms import GaussianMechanism, LaplaceMechanism
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.release import Channel, NoisySteps, Release, Requirements, Round, line_of
from fedveil.privacy.releases.central import CentralNoise
from fedveil.privacy.releases.central_sum import ClientShares
from fedveil.privacy.releases.client_noise import ClientNoise, Published
from fedveil.privacy.releases.dp_sgd import DpSgdSteps
from fedveil.privacy.releases.priv_unit import PrivUnitReports
from fedveil.privacy.releases.secure_sum import SecureSum
from fedveil.privacy.releases.sites import SiteNoise, sites
from fedveil.privacy.releases.two_point import TwoPointReports
from fedveil.privacy.secure import planned_for, with_secure_noise

__all__ = [
    "BudgetLine",
    "CentralNoise",
    "Channel",
    "ClientNoise",
    "ClientShares",
    "DpSgdSteps",
    "Gaussian",
    "GaussianMechanism",
    "Laplace",
    "LaplaceMechanism",
    "NoisySteps",
    "Perturb",
    "PrivUnitReports",
    "Published",
    "PureReport",
    "Ranges",
    "Release",
    "Requirements",
    "Round",
    "SecureSum",
    "SiteNoise",
    "TwoPointReports",
    "line_of",
    "planned_for",
    "sites",
    "with_secure_noise",
]
