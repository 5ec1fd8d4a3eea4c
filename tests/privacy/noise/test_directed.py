"""Vectors with a component of their own law are drawn exactly, whatever floats make of them.

Statistical tests have a false-alarm rate of at most 1e-6 each and repeat themselves.
"""

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from fedveil.privacy.noise import directed
from fedveil.privacy.noise.directed import _Normal, _size_between, directed_int
from fedveil.privacy.noise.grid import normal_tail
from fedveil.privacy.noise.secure_random import SecureRandom

ALARM = 1e-6
SCALE = 1 << 10
HALF, ONE, NONE = Fraction(1, 2), Fraction(1), Fraction(0)
RARE = Fraction(1, 1 << 40) / 3
TAILS = {
    "everything": (NONE, ONE),
    "a cap": (NONE, Fraction(0.1)),
    "beside a cap": (Fraction(0.1), ONE),
    "a rare cap": (NONE, RARE),
    "beside a rare cap": (RARE, ONE),
    "a rare cap below": (1 - RARE, ONE),
    "the middle": (Fraction(4, 10), Fraction(6, 10)),
}
DIRECTIONS = {
    "one": [3],
    "minus one": [-(1 << 40)],
    "axis": [0, 0, 7, 0],
    "dense": [1, -1, 1, 1, -1],
    "uneven": [1 << 40, 1, -3, 0, -(1 << 39)],
    "long": list(range(-100, 101)),
}


class Recorded(SecureRandom):
    """Seeded words, which are kept."""

    def __init__(self, seed, smallest=0):
        self.generator = np.random.Generator(np.random.Philox(seed))
        self.kept, self.smallest = [], smallest

    def words(self, count):
        words = self.generator.integers(0, 2**64, count, dtype=np.uint64)
        if self.smallest and count > 2:
            words >>= np.uint64(self.smallest)
        self.kept.append(words.tolist())
        return words


def quantile(low, high, place, bits):
    """The number beyond which a normal one is with probability low + (high - low) place 2^-bits."""
    p = mpmath.mpf(low.numerator) / low.denominator
    p += (
        mpmath.mpf(place)
        / 2**bits
        * (mpmath.mpf((high - low).numerator) / (high - low).denominator)
    )
    side = min(p, 1 - p)
    size = mpmath.findroot(
        lambda x: mpmath.log(mpmath.erfc(x / mpmath.sqrt(2)) / 2) - mpmath.log(side),
        float(stats.norm.isf(float(side))),
        tol=1e-60,
    )
    return size if p < 0.5 else -size


def by_definition(kept, direction, low, high):
    """g from the words that were drawn, with 60 digits, written a second time."""
    (first,), words, (high_word, low_word) = kept
    place = first << 128 | high_word << 64 | low_word
    with mpmath.workdps(60):
        t = quantile(low, high, 2 * place + 1, 193)
        z = [quantile(NONE, ONE, 2 * word + 1, 65) for word in words]
        length = mpmath.sqrt(sum(a * a for a in direction))
        dot = sum(a * x for a, x in zip(direction, z, strict=True)) / length
        return [x + a / length * (t - dot) for a, x in zip(direction, z, strict=True)]


@pytest.mark.parametrize("tails", TAILS)
@pytest.mark.parametrize("direction", [name for name in DIRECTIONS if name != "long"])
def test_the_rounded_vector_is_that_of_its_definition(direction, tails):
    """But for one draw in 10^9, where 65 digits of z and what is drawn after them may disagree."""
    source = Recorded(1)
    found = directed_int(source, SCALE, np.array(DIRECTIONS[direction]), *TAILS[tails])
    wanted = by_definition(source.kept, DIRECTIONS[direction], *TAILS[tails])
    assert found.tolist() == [int(mpmath.nint(SCALE * x)) for x in wanted]


def in_integers(monkeypatch):
    """Let floats be off by more than half a step, and know it."""
    floats = directed._in_floats

    def unsure(*given):
        values, errors = floats(*given)
        return values + 0.6 / SCALE, errors + 1.2 / SCALE

    monkeypatch.setattr(directed, "_in_floats", unsure)


@pytest.mark.parametrize("tails", TAILS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_floats_and_integers_decide_alike(monkeypatch, direction, tails):
    given = (SCALE, np.array(DIRECTIONS[direction]), *TAILS[tails])
    count = 1 if direction == "long" else 20
    by_floats = [directed_int(Recorded(seed), *given) for seed in range(count)]
    in_integers(monkeypatch)
    for seed, found in enumerate(by_floats):
        assert np.array_equal(found, directed_int(Recorded(seed), *given))


def test_digits_that_were_drawn_for_floats_are_those_of_integers(monkeypatch):
    given = (1 << 20, np.array(DIRECTIONS["uneven"]), NONE, HALF)
    by_floats = [directed_int(Recorded(seed, 55), *given) for seed in range(20)]
    in_integers(monkeypatch)
    for seed, found in enumerate(by_floats):
        assert np.array_equal(found, directed_int(Recorded(seed, 55), *given))


class Played(SecureRandom):
    """The words of a list, in order."""

    def __init__(self, *words):
        self.left = list(words)

    def words(self, count):
        taken, self.left = self.left[:count], self.left[count:]
        assert len(taken) == count
        return np.array(taken, dtype=np.uint64)


def test_each_digit_is_a_new_one():
    number = _Normal(5)
    number.extend(Played(6, 7))
    assert (number.place, number.bits) == (5 << 128 | 6 << 64 | 7, 192)


def test_a_number_whose_first_digits_are_zeros_draws_more_of_them():
    source = Played(0, 5, 1 << 63, 9)
    found = _Normal(0).near(source)
    with mpmath.workdps(60):
        wanted = quantile(NONE, ONE, 5 << 128 | 1 << 127 | 9, 320)
    assert abs(mpmath.mpf(found) - wanted) < 2.0**-46
    assert not source.left


def test_more_words_are_drawn_until_every_coordinate_is_clear(monkeypatch):
    """With few digits at first, integers have to come back."""
    given = (SCALE, np.array(DIRECTIONS["dense"]), NONE, Fraction(0.1))
    wanted = [directed_int(Recorded(seed), *given) for seed in range(50)]
    floats, rounds = directed._in_floats, []
    monkeypatch.setattr(directed, "_in_floats", lambda *a: (floats(*a)[0], np.full(5, 1.0)))
    monkeypatch.setattr(directed, "_FINE_BITS", 18)
    between = _Normal.between

    def counted(self, source, bits):
        rounds.append(bits)
        return between(self, source, bits)

    monkeypatch.setattr(_Normal, "between", counted)
    found = [directed_int(Recorded(seed), *given) for seed in range(50)]
    assert np.array_equal(found, wanted)
    assert rounds.count(18) == 300
    assert 0 < rounds.count(36) < 300


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("spread", ["even", "axis", "geometric"])
def test_floats_err_by_less_than_they_say(size, spread):
    """The integers of a scale of 2^50 are the reference; errors stay below a third of the bound."""
    generator = np.random.default_rng(size)
    direction = {
        "even": generator.choice([-(1 << 40), 1 << 40], size),
        "axis": np.eye(1, size, size // 2, dtype=np.int64)[0] * 5,
        "geometric": (2.0 ** (40 - 40 * np.arange(size) / size)).astype(np.int64),
    }[spread]
    source = Recorded(size)
    words = source.words(size)
    along = _Normal(int(source.words(1)[0]), NONE, Fraction(1e-3))
    near, known = directed._near(source, words)
    values, errors = directed._in_floats(near, direction.astype(np.float64), along.near(source))
    normals = [known.get(i) or _Normal(word) for i, word in enumerate(words.tolist())]
    exact = directed._in_integers(
        source, 1 << 60, direction.tolist(), normals, along, np.arange(size)
    )
    off = [
        abs(Fraction(n, 1 << 60) - Fraction(float(values[i]))) / Fraction(float(errors[i]))
        for i, n in exact
    ]
    assert len(off) == size
    assert max(off) < Fraction(1, 3)
    assert errors.max() < 40 * 2.0**-44 * (
        1
        + math.sqrt(size)
        * np.abs(direction).max()
        / math.sqrt(float((direction.astype(float) ** 2).sum()))
    )


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("size", [1, 5, 300])
@pytest.mark.parametrize("spread", ["even", "uneven"])
def test_bounds_hold_for_the_worst_errors_of_what_floats_are_given(size, spread, sign):
    """z and t may be off by 2^-44 each, all of them in the worst direction."""
    generator = np.random.default_rng(size)
    direction = generator.choice([-1.0, 1.0], size) * 2.0**40
    direction *= 1.0 if spread == "even" else generator.uniform(0, 1, size)
    direction = np.rint(direction)
    z, t, most = generator.standard_normal(size), -3.0, 0.999 * 2.0**-44
    moved = z + sign * most * np.where(np.arange(size) == 0, -1, 1) * np.sign(direction)
    values, errors = directed._in_floats(moved, direction, t - sign * most)
    with mpmath.workdps(60):
        length = mpmath.sqrt(sum(int(a) ** 2 for a in direction))
        dot = sum(mpmath.mpf(x) * int(a) for x, a in zip(z, direction, strict=True)) / length
        wanted = [x + int(a) / length * (t - dot) for x, a in zip(z, direction, strict=True)]
        off = [abs(v - w) / e for v, w, e in zip(values, wanted, errors, strict=True)]
    assert max(off) < 0.75
    assert max(off) > 0.05  # the bound is no idle one


@pytest.mark.parametrize("smallest", [17, 30, 60])
def test_far_tails_are_drawn_in_integers(smallest):
    """Words below 2^47 stand for normals beyond 4.2, which floats alone do not decide."""
    source, direction = Recorded(3, smallest), [1, 2, -3]
    found = directed_int(source, SCALE, np.array(direction), NONE, Fraction(0.1))
    more = iter(source.kept[2:5])
    with mpmath.workdps(60):
        z = []
        for word in source.kept[1]:
            high, low = next(more)
            z.append(quantile(NONE, ONE, 2 * (word << 128 | high << 64 | low) + 1, 193))
        high, low = source.kept[5]
        t = quantile(
            NONE, Fraction(0.1), 2 * (source.kept[0][0] << 128 | high << 64 | low) + 1, 193
        )
        dot = sum(a * x for a, x in zip(direction, z, strict=True)) / mpmath.sqrt(14)
        wanted = [x + a / mpmath.sqrt(14) * (t - dot) for a, x in zip(direction, z, strict=True)]
    assert found.tolist() == [int(mpmath.nint(SCALE * x)) for x in wanted]


@pytest.mark.parametrize("p", [0.999999, 0.5, 1e-3, 1e-10, 1e-35])
@pytest.mark.parametrize("width", [1, 1 << 120, 1 << 200])
@pytest.mark.parametrize("bits", [10, 64, 96, 192])
def test_quantiles_lie_between_their_bounds(p, width, bits):
    units = 320
    least = int(Fraction(p) * (1 << units))
    low, high = _size_between(least, least + width, units, bits)
    assert normal_tail(Fraction(low, 1 << bits), units) >= least + width or low == 0
    assert normal_tail(Fraction(high, 1 << bits), units) <= least
    slope = math.sqrt(2 / math.pi) * math.exp(-((low / 2**bits) ** 2) / 2)
    assert high - low <= 4 + 8 * width * 2.0 ** (bits - units) / slope


@pytest.mark.parametrize("tails", ["a cap", "beside a cap", "a rare cap", "the middle"])
def test_the_component_and_the_rest_have_their_laws(tails):
    low, high = TAILS[tails]
    direction = np.array([4, 0, -3])
    draws = np.array([directed_int(Recorded(s), SCALE, direction, low, high) for s in range(1500)])
    g = (draws + np.random.default_rng(1).uniform(-0.5, 0.5, draws.shape)) / SCALE
    along = g @ direction / 5
    tail = (stats.norm.sf(along) - float(low)) / float(high - low)
    if tails != "a rare cap":  # the grid is coarse beside so steep a tail
        assert stats.kstest(tail, "uniform").pvalue > ALARM
    assert tail.max() < 1 + 0.02
    for across in (g[:, 1], g @ np.array([3, 0, 4]) / 5):
        assert stats.kstest(across, "norm").pvalue > ALARM
        assert abs(np.corrcoef(across, along)[0, 1]) < 5.5 / math.sqrt(len(draws))


def test_words_are_those_that_are_paid_for():
    """The sampler's share counts eight words a coordinate: on average fewer are drawn."""
    for size in (1, 650):
        used = []
        for seed in range(100):
            source = Recorded(seed)
            directed_int(source, SCALE, np.arange(1, size + 1), NONE, Fraction(1e-6))
            used.append(sum(map(len, source.kept)) + 3)  # the side and the sign take three
        assert np.mean(used) < 8 * size


REFUSED = {
    "a direction is 0": (SCALE, [0, 0], NONE, HALF),
    "a direction is 1099511627777": (SCALE, [(1 << 40) + 1, 0], NONE, HALF),
    "a direction is 1099511627778": (SCALE, [-(1 << 40) - 2, 0], NONE, HALF),
    "no component.*1/2 to 1/2": (SCALE, [1], HALF, HALF),
    "no component.*-1 to 1/2": (SCALE, [1], -ONE, HALF),
    "no component.*1/2 to 2": (SCALE, [1], HALF, 2 * ONE),
    "no component.*0 to 1/680564733841876926926749214863536422912": (
        (SCALE, [1], NONE, Fraction(1, 1 << 129))
    ),
    "the scale is 0": (0, [1], NONE, HALF),
    "the scale is 3": (3, [1], NONE, HALF),
    "the scale is 2097152": (1 << 21, [1], NONE, HALF),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_drawn_is_refused(message):
    scale, direction, low, high = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        directed_int(SecureRandom(), scale, np.array(direction), low, high)


def test_the_smallest_tail_and_the_largest_scale_are_drawn():
    tail = Fraction(1, 1 << 128)
    for (low, high), sign in itertools.product([(NONE, tail), (1 - tail, ONE)], (1, -1)):
        found = directed_int(SecureRandom(), 1 << 20, np.array([sign]), low, high)[0] / (1 << 20)
        assert 13.05 < found * sign * (1 if low == 0 else -1) < 16


@pytest.mark.parametrize("units", [128, 191])
@pytest.mark.parametrize("share", [2.0**-40, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("width", [2.0**-30, 0.1])
def test_a_normal_lies_between_the_integers_whose_tails_bound_it(units, share, width):
    """The middle is never enough where the probability is known to a few digits only."""
    least = int(share * 2**units)
    most = int(share * (1 + width) * 2**units)
    low, high = directed._size_between(least, most, units, 64)
    room = 300
    scale = 1 << room - units
    assert low == 0 or normal_tail(Fraction(low, 1 << 64), room) + 2 >= most * scale
    assert normal_tail(Fraction(high, 1 << 64), room) - 2 <= least * scale
    assert high - low <= 64 * max(4, width * 2**64)
