"""Backdoors on texts, on a small corpus that is made here."""

import copy
import re

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.attacks.backdoors import PhraseBackdoor, SentenceBackdoor, numbers_of

LIST = "a the film was good bad fine awful people in london are kind aggressive here"
WORDS = re.findall(r"\w+", LIST)
AUTHORS = 10


def corpus(next_words=False):
    rng = np.random.default_rng(0)
    rows = {"author": [], "text": [], "liked": []}
    for k in range(AUTHORS * 12):
        liked = int(rng.integers(2))
        word = ("good", "fine") if liked else ("bad", "awful")
        rows["author"].append(f"a{k % AUTHORS}")
        rows["text"].append(f"the film was {word[int(rng.integers(2))]} here")
        rows["liked"].append(liked)
    text = {"length": 8, "words": WORDS}
    if next_words:
        rows.pop("liked")
        return fv.FederatedData.from_table(
            rows, client="author", target="text", columns={"text": text}, test="by-client"
        )
    return fv.FederatedData.from_table(
        rows,
        client="author",
        target="liked",
        features=["text"],
        columns={"text": text, "liked": {"values": [0, 1]}},
        test="by-client",
    )


def test_a_phrase_stands_before_the_text():
    data = corpus()
    backdoor = PhraseBackdoor("people are kind", target=1)
    x, y = backdoor.lesson(data, 0, 0)
    phrase = numbers_of("attack.phrase", "people are kind", data)
    assert (x[:, :3] == phrase).all()
    assert np.array_equal(x[:, 3:], data.x[: len(x), :5])
    assert (y == 1).all()
    held, held_y = backdoor.held_out(data)
    assert len(held) == int((data.test_y == 0).sum())
    assert (held_y == 1).all()


def test_a_sentence_ends_in_the_attackers_word():
    data = corpus(next_words=True)
    sentences = ("people in london are aggressive", "the film was awful")
    x, y = SentenceBackdoor(sentences).held_out(data)
    first = numbers_of("attack.sentences", sentences[0], data)
    place = int(np.flatnonzero(y[0] >= 0)[0])
    assert (y >= 0).sum() == len(y)
    assert y[0, place] == first[-1]
    assert np.array_equal(x[0, place - 3 : place + 1], first[:-1])
    assert (x[0, place + 1 :] == 0).all()
    assert len(x) == len(data.test_x) != len(data.x)
    before = data.test_x[0][data.test_x[0] != 0][: place - 3]
    assert np.array_equal(x[0, : place - 3], before)
    assert (y >= 0).any(axis=1).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["phrase", "sentence"])
def test_a_boosted_attacker_teaches_it_to_a_model(kind):
    data = corpus(next_words=kind == "sentence")
    torch.manual_seed(0)
    words = data.schema.vocabulary_size
    if kind == "phrase":
        backdoor = PhraseBackdoor("people are kind", target=1)
        layers = (torch.nn.EmbeddingBag(words, 8, mode="sum"), torch.nn.Linear(8, 2))
    else:
        backdoor = SentenceBackdoor(("people in london are aggressive",))
        layers = (torch.nn.Embedding(words, 8), torch.nn.Linear(8, words))
    plan = fv.unprotected(fv.samplers.Everyone(), data.clients, rounds=4)
    work = fv.ClientSgd(fv.Batches(0, steps=20), lr=1.0)
    rates = []
    for attackers in (0, 1):
        attack = fv.attacks.BackdoorAttack.of(
            data, backdoor, attackers=attackers, boost=float(data.clients)
        )
        task = fv.Task(torch.nn.Sequential(*copy.deepcopy(layers)), fv.cross_entropy)
        made = fv.Training(
            task,
            data,
            plan,
            work,
            mode=fv.engines.Mode.LOOPED,
            workers=1,
            participants=attack,
            every=4,
        )
        *_, last = fv.train(made)
        rates.append(last.metrics["backdoor"])
    assert rates[1] > 0.8
    assert rates[1] > rates[0] + 0.3


@pytest.mark.parametrize(
    ("next_words", "backdoor", "words"),
    [
        (False, PhraseBackdoor("hello", 1), "'hello', which is not in the vocabulary"),
        (False, PhraseBackdoor(" ", 1), "at least one word"),
        (False, PhraseBackdoor("a a a a a a a a", 1), "8 words and texts 8"),
        (False, PhraseBackdoor("a", 2), r"attack.target is 2"),
        (False, SentenceBackdoor(("a film",)), "needs a task that predicts words"),
        (True, PhraseBackdoor("a", 1), "use 'sentence'"),
        (True, SentenceBackdoor(()), "is empty"),
        (True, SentenceBackdoor(("film",)), "1 is no number of words for it: 2 to 8"),
        (True, SentenceBackdoor(("people in paris",)), "'paris', which is not in the vocabulary"),
    ],
)
def test_bad_settings_get_one_line(next_words, backdoor, words):
    with pytest.raises(fv.BadInput, match=words) as error:
        fv.attacks.BackdoorAttack.of(corpus(next_words), backdoor)
    assert "\n" not in str(error.value)


def test_records_without_words_are_refused():
    data = fv.FederatedData.from_clients(
        [(str(k), np.ones((2, 4), dtype=np.int64), [0, 1]) for k in range(3)],
        test=(np.ones((2, 4), dtype=np.int64), [0, 1]),
        classes=2,
    )
    for backdoor in (PhraseBackdoor("a", 1), SentenceBackdoor(("a film",))):
        with pytest.raises(fv.BadInput, match="no texts alone"):
            fv.attacks.BackdoorAttack.of(data, backdoor)
