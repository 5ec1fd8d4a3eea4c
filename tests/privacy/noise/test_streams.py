"""Every draw is a pure function of (seed, purpose, round, client, index).

Statistical tests use fixed seeds and a false-alarm rate of 1e-6 each.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.privacy.noise import streams as module
from fedveil.privacy.noise.streams import SecureKeys, Streams, add_normals_, bits, normal_, uniform_

ALARM = 1e-6


def normals(keys, width, dtype=torch.float32):
    return normal_(torch.empty(len(keys), width, dtype=dtype), keys)


# --- keys ---


PURPOSES = ("noise", "client-noise", "step-noise", "records", "dropout", "bits", "cohort")


@given(
    seeds=st.lists(st.integers(0, 2**128 - 1), min_size=1, max_size=3, unique=True),
    attempts=st.lists(st.integers(0, 10**6), min_size=2, max_size=8, unique=True),
    rounds=st.lists(st.integers(1, 10**6), min_size=1, max_size=3, unique=True),
)
@settings(max_examples=60, deadline=None)
def test_no_two_attempts_share_a_key(seeds, attempts, rounds):
    """Whatever attempt, seed, purpose and round: the third draws nothing that the second drew."""
    each = [Streams(seed).for_attempt(attempt) for seed in seeds for attempt in attempts]
    single = [
        s.derive_key(purpose, round) for s in each for purpose in PURPOSES for round in rounds
    ]
    assert len(set(single)) == len(single)
    rows = [s.keys(p, round, np.arange(5)) for s in each for p in PURPOSES for round in rounds]
    assert len(np.unique(np.concatenate(rows))) == 5 * len(rows)


def test_attempts_follow_from_the_first_alone():
    first = Streams(3)
    assert first.for_attempt(0) == first
    assert first.for_attempt(2) == Streams(3).for_attempt(2) != first.for_attempt(1).for_attempt(1)
    draws = [first.for_attempt(k).generator("cohort", 1).integers(2**62) for k in range(50)]
    assert len(set(draws)) == 50
    assert Streams(3, secure=True).for_attempt(5).secure


def test_calls_without_a_seed_share_nothing():
    """What is drawn without a seed comes from the operating system, call by call."""
    streams = Streams(1, secure=True)
    words = [bits(streams.keys("noise", 1, [0]), 2) for _ in range(50)]
    words += [
        bits(Streams(1, secure=True).for_attempt(1).keys("noise", 1, [0]), 2) for _ in range(50)
    ]
    assert len(np.unique(np.concatenate(words))) == 200


@given(st.integers(0, 2**63), st.permutations(range(12)), st.integers(1, 11))
@settings(max_examples=30, deadline=None)
def test_key_of_a_client_depends_neither_on_order_nor_on_chunks(seed, order, cut):
    streams = Streams(seed)
    whole = streams.keys("batch", 3, np.arange(12))
    pieces = [streams.keys("batch", 3, order[:cut]), streams.keys("batch", 3, order[cut:])]
    assert np.array_equal(np.concatenate(pieces), whole[order])


def test_keys_that_begin_alike_have_rows_of_their_own():
    """Of 200,000 clients some share the first 32 bits, which is what a seed of torch's keeps."""
    keys = Streams(1).keys("noise", 1, np.arange(200_000))
    seeds = bits(keys, 1)[:, 0] >> np.uint64(32)
    found, count = np.unique(seeds, return_counts=True)
    assert (count > 1).any()
    for seed in found[count > 1]:
        a, b = normals(keys[np.flatnonzero(seeds == seed)[:2]], 300)
        assert not torch.equal(a, b)
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.4


def test_secret_rows_share_no_word():
    words = np.concatenate([bits(SecureKeys(50), 4), bits(SecureKeys(50), 4)])
    assert words.shape == (100, 4)
    assert len(np.unique(words)) == 400


def test_keys_of_one_round_are_all_different():
    keys = Streams(1).keys("noise", 1, np.arange(200_000))
    assert len(np.unique(keys)) == 200_000


def test_keys_differ_over_seed_purpose_round_part_and_client():
    keys = [
        int(k)
        for seed in (0, 1, 11)
        for purpose in ("noise", "batch", "cohort")
        for round in (1, 2, 11, 111)
        for parts in ((), (1,), (11,), (1, 1))
        for k in Streams(seed).keys(purpose, round, np.arange(20), *parts)
    ]
    assert len(set(keys)) == len(keys)


def test_key_separates_its_parts():
    """Without a separator (1, 11) and (11, 1) would be one stream."""
    streams = Streams(1)
    assert streams.derive_key("p", 1, 11) != streams.derive_key("p", 11, 1)
    assert streams.derive_key("p", 1) != streams.derive_key("p1")
    assert Streams(11).derive_key("p") != Streams(1).derive_key("1p")


def test_single_bit_of_a_client_id_flips_half_of_its_key():
    streams = Streams(5)
    base = streams.keys("noise", 1, [0])
    flipped = streams.keys("noise", 1, [1 << b for b in range(63)])
    changed = np.array([int(k ^ base[0]).bit_count() for k in flipped])
    assert changed.min() >= 10
    assert abs(changed.mean() - 32) < 5 * 4 / np.sqrt(63)


@pytest.mark.slow
def test_streams_are_the_same_in_another_process():
    code = (
        "import numpy as np, torch\n"
        "from fedveil.privacy.noise.streams import Streams, normal_\n"
        "s = Streams(7)\n"
        "print(s.generator('cohort', 2).integers(10**9))\n"
        "print(normal_(torch.empty(1, 3), s.keys('noise', 2, [4])).tolist())\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = out.stdout.splitlines()
    assert int(first) == Streams(7).generator("cohort", 2).integers(10**9)
    assert second == str(normals(Streams(7).keys("noise", 2, [4]), 3).tolist())


def test_generator_starts_anew_on_every_call():
    streams = Streams(3)
    first = streams.generator("cohort", 1).random(5)
    streams.generator("cohort", 2).random(100)
    assert np.array_equal(streams.generator("cohort", 1).random(5), first)
    assert not np.array_equal(streams.generator("cohort", 2).random(5), first)
    assert not np.array_equal(streams.generator("order", 1).random(5), first)


# --- bits ---


def test_bits_extend_without_changing():
    keys = Streams(1).keys("batch", 1, np.arange(5))
    assert np.array_equal(bits(keys, 40)[:, :7], bits(keys, 7))
    assert np.array_equal(bits(keys, 40)[2:4], bits(keys[2:4], 40))


def test_bits_of_nothing_are_nothing():
    assert bits(np.empty(0, np.uint64), 4).shape == (0, 4)
    assert bits(Streams(1).keys("batch", 1, [1]), 0).shape == (1, 0)


def test_bits_are_uniform():
    words = bits(Streams(2).keys("batch", 1, np.arange(200)), 500)
    uniform = (words.ravel() >> np.uint64(11)) * 2.0**-53
    assert stats.kstest(uniform, "uniform").pvalue > ALARM


def test_every_bit_is_fair():
    words = bits(Streams(2).keys("batch", 2, np.arange(100)), 1000).ravel()
    for position in range(64):
        ones = int(((words >> np.uint64(position)) & np.uint64(1)).sum())
        assert stats.binomtest(ones, len(words)).pvalue > ALARM / 64


# --- normals ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 256, 257, 1000])
def test_normals_of_a_row_depend_on_its_key_only(width, dtype):
    keys = Streams(1).keys("noise", 1, np.arange(9))
    whole = normals(keys, width, dtype)
    assert torch.equal(normals(keys[::-1].copy(), width, dtype), whole.flip(0))
    assert torch.equal(
        torch.cat([normals(keys[:4], width, dtype), normals(keys[4:], width, dtype)]), whole
    )


def test_normals_do_not_touch_the_global_generator():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    normals(Streams(1).keys("noise", 1, [0]), 10)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(2)
    assert torch.equal(
        normals(Streams(1).keys("noise", 1, [0]), 10), normals(Streams(1).keys("noise", 1, [0]), 10)
    )


@pytest.mark.parametrize("width", [4, 64, 500])
def test_keys_with_equal_low_words_give_different_normals(width):
    keys = np.array([5 + (k << 32) for k in range(50)], dtype=np.uint64)
    rows = normals(keys, width)
    assert len(torch.unique(rows, dim=0)) == 50


def test_keys_with_equal_high_words_give_different_normals():
    rows = normals(np.arange(50, dtype=np.uint64) + np.uint64(9 << 32), 300)
    assert len(torch.unique(rows, dim=0)) == 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "width"), [(20_000, 5), (100, 2000)])
def test_normals_are_standard_normal(rows, width, dtype):
    """Narrow rows take another path through torch than wide ones."""
    draws = normals(Streams(3).keys("noise", 1, np.arange(rows)), width, dtype)
    assert stats.kstest(draws.double().numpy().ravel(), "norm").pvalue > ALARM


def in_one_piece(key, width):
    """A row by torch's generator in one call, without the tails."""
    generator = torch.Generator()
    state = generator.manual_seed(0).get_state().numpy()
    words = bits(key[None], 624)[0] >> np.uint64(32)
    state[24 : 24 + 8 * 624] = words.view(np.uint8)
    generator.set_state(torch.from_numpy(state))
    return torch.empty(width).normal_(generator=generator)


@pytest.mark.parametrize("more", [1, 15, 16, 17, 1000, 1 << 16, (1 << 17) + 3])
def test_wide_rows_are_drawn_in_pieces_as_they_would_be_at_once(more):
    width = (1 << 16) + more
    keys = Streams(2).keys("noise", 1, np.arange(2))
    drawn = normals(keys, width)
    for row, key in zip(drawn, keys, strict=True):
        whole = in_one_piece(key, width)
        near = whole.abs() <= 4.8
        assert torch.equal(row[near], whole[near])
        assert (row[~near].abs() > 4.8).all()


def test_normals_are_added_in_their_scales():
    keys, width = Streams(3).keys("noise", 1, np.arange(3)), (1 << 16) + 100
    for dtype in (torch.float32, torch.float64):
        rows = torch.full((3, width), 0.25, dtype=dtype)
        scales = torch.tensor([[0.5], [2.0], [8.0]], dtype=dtype)
        added = add_normals_(rows.clone(), scales, keys)
        assert torch.allclose(added, rows + scales * normals(keys, width, dtype), atol=1e-5)


def test_tails_of_pieces_are_not_alike(monkeypatch):
    monkeypatch.setattr(module, "_FAR_NORMAL", 1e-9)  # all values are drawn from the tail
    keys = Streams(4).keys("noise", 1, np.arange(1))
    row = normals(keys, 3 << 16, torch.float64)[0]
    assert len(torch.unique(row.abs())) == len(row)


LONG = (1 << 20) + (1 << 18) + 5


def test_blocks_of_long_rows_are_standard_normal_far_out_too_and_share_nothing():
    """Sums of large models: two rows of six blocks, the last one short."""
    rows = normals(Streams(8).keys("noise", 1, [4, 5]), LONG, torch.float64).numpy()
    assert (rows != 0).all()
    assert stats.kstest(rows.ravel()[::3], "norm").pvalue > ALARM / 3
    far = int((np.abs(rows) > 4.5).sum())
    assert stats.binomtest(far, rows.size, 2 * stats.norm.sf(4.5)).pvalue > ALARM / 3
    blocks = rows[:, : 5 << 18].reshape(10, 1 << 18)
    correlation = np.corrcoef(blocks)[np.triu_indices(10, 1)]
    limit = stats.norm.isf(ALARM / 6 / len(correlation)) / np.sqrt(1 << 18)
    assert np.abs(correlation).max() < limit


def test_long_rows_depend_on_their_keys_only_and_not_on_threads():
    keys = Streams(1).keys("noise", 1, np.arange(2))
    whole = normals(keys, LONG, torch.float64)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(normals(keys[1:], LONG, torch.float64), whole[1:])
    finally:
        torch.set_num_threads(before)


def test_long_rows_are_drawn_where_the_system_does_not_tell_its_cores(monkeypatch):
    keys = Streams(1).keys("noise", 1, np.arange(1))
    whole = normals(keys, LONG, torch.float64)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert torch.equal(normals(keys, LONG, torch.float64), whole)


def test_first_normal_of_many_rows_is_standard_normal():
    """Poorly mixed generator states show in the first draws."""
    draws = normals(Streams(4).keys("noise", 1, np.arange(10_000)), 260)
    for column in (0, 8, 259):
        assert stats.kstest(draws[:, column].double().numpy(), "norm").pvalue > ALARM / 3


def test_rows_of_neighbouring_clients_and_rounds_are_uncorrelated():
    streams, width = Streams(5), 5000
    rows = torch.cat(
        [normals(streams.keys("noise", r, np.arange(12)), width) for r in range(1, 5)]
    ).double()
    correlation = np.corrcoef(rows.numpy())[np.triu_indices(len(rows), 1)]
    limit = stats.norm.isf(ALARM / 2 / len(correlation)) / np.sqrt(width)
    assert np.abs(correlation).max() < limit


@pytest.mark.parametrize("width", [32, 300])
def test_columns_are_uncorrelated(width):
    rows = normals(Streams(6).keys("noise", 1, np.arange(5000)), width).double().numpy()[:, -32:]
    correlation = np.corrcoef(rows.T)[np.triu_indices(32, 1)]
    assert np.abs(correlation).max() < stats.norm.isf(ALARM / 2 / len(correlation)) / np.sqrt(5000)


@pytest.mark.parametrize("fill", [normal_, uniform_])
@pytest.mark.parametrize("width", [4, 1000])
@pytest.mark.parametrize(("rows", "keys"), [(2, 3), (3, 1), (1, 2)])
def test_row_count_must_match_key_count(rows, keys, width, fill):
    """One key for three rows would put the same noise on all of them."""
    with pytest.raises(AssertionError, match=f"{rows} rows for {keys} keys"):
        fill(torch.empty(rows, width), Streams(1).keys("noise", 1, np.arange(keys)))


@pytest.mark.parametrize("shape", [(0, 4), (0, 1000), (3, 0)])
@pytest.mark.parametrize("fill", [normal_, uniform_])
def test_nothing_to_fill_is_filled(shape, fill):
    keys = Streams(1).keys("noise", 1, np.arange(shape[0]))
    assert fill(torch.empty(shape), keys).shape == shape


# --- uniforms ---


@pytest.mark.parametrize("width", [7, 256, 257, 3000])
def test_uniforms_of_a_row_depend_on_its_key_only(width):
    keys = Streams(1).keys("batch", 1, np.arange(6))
    whole = uniform_(torch.empty(6, width), keys)
    pieces = [uniform_(torch.empty(3, width), keys[i : i + 3]) for i in (0, 3)]
    assert torch.equal(torch.cat(pieces), whole)
    assert len(torch.unique(whole, dim=0)) == 6


@pytest.mark.parametrize(("rows", "width"), [(20_000, 5), (20, 5000)])
def test_uniforms_are_uniform_multiples_of_their_step(rows, width):
    draws = uniform_(torch.empty(rows, width), Streams(7).keys("batch", 1, np.arange(rows)))
    values = draws.double().numpy().ravel()
    assert values.min() >= -1
    assert values.max() < 1
    assert np.array_equal(values * 2**23, np.round(values * 2**23))
    assert stats.kstest(values, stats.uniform(-1, 2).cdf).pvalue > ALARM
