"""Random words that repeat themselves, and how often a test on them may fail by context."""

import numpy as np

from fedveil.privacy.noise.secure_random import SecureRandom

ALARM = 1e-6


class Seeded(SecureRandom):
    """Words from a seed, all of them with a place below `below`."""

    def __init__(self, seed, below=2**63):
        self.generator = np.random.Generator(np.random.Philox(seed))
        self.below = below

    def words(self, count):
        if count == 2:
            return self.generator.integers(0, 2**64, 2, dtype=np.uint64)
        return self.generator.integers(0, 2 * self.below, count, dtype=np.uint64)
