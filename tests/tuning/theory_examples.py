"""Constants, a federation, noises and a rate that the tests of the theory share."""

from dataclasses import dataclass

from fedveil.tuning.theory import Constants, GaussianNoise, LaplaceNoise, Sizes


@dataclass(frozen=True)
class PowerNoise:
    """Any mechanism that states its z: std scale x turns^(z/2) x reach."""

    scale: float
    exponent: float

    def variance(self, reach, turns):
        return turns**self.exponent * (self.scale * reach) ** 2


LAPLACE, GAUSSIAN = LaplaceNoise(60.0, 5.0), GaussianNoise(0.05, 5.0)


def decayed(constants, steps):
    gamma = max(constants.least_gamma, steps)
    return lambda k: 2 / (constants.convexity * (k + gamma))


HAND = Constants(
    smoothness=2.0, convexity=0.5, heterogeneity=0.25, gradient=3.0, distance=7.0, exact=True
)
SOME = Sizes(clients=5, cohort=2, parameters=4)
