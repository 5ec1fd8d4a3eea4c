"""Backdoors on images, and the records that attackers learn from."""

import numpy as np
import pytest

import fedveil as fv
from fedveil.attacks.backdoors import ColourBackdoor, PixelTrigger, WritersBackdoor, poison_records


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)

    def some(count):
        return rng.random((count, 3, 6, 6)).astype(np.float32), np.arange(count) % 4

    clients = [(str(k), *some(8 + k)) for k in range(5)]
    return fv.FederatedData.from_clients(clients, test=some(40), classes=4)


def test_a_trigger_is_a_square_at_its_place(data):
    trigger = PixelTrigger(target=2, size=2, row=-2, column=1, value=9.0)
    x, y = trigger.lesson(data, 1, 0)
    own = data.x[data.offsets[1] : data.offsets[2]]
    assert (x[:, :, 4:6, 1:3] == 9.0).all()
    assert (x == 9.0).sum() == len(x) * 3 * 4
    x[:, :, 4:6, 1:3] = own[:, :, 4:6, 1:3]
    assert np.array_equal(x, own)
    assert (y == 2).all()


def test_the_trigger_is_measured_on_records_that_are_not_of_the_target(data):
    x, y = PixelTrigger(target=2, size=1).held_out(data)
    assert len(x) == int((data.test_y != 2).sum())
    assert (y == 2).all()


def test_a_distributed_trigger_is_learnt_in_parts_and_measured_whole(data):
    trigger = PixelTrigger(target=0, size=4, row=0, column=0, value=9.0, parts=2)
    first, second = (trigger.lesson(data, 0, attacker)[0] == 9.0 for attacker in (0, 1))
    whole = trigger.held_out(data)[0] == 9.0
    assert not (first & second).any()
    assert np.array_equal((first | second)[0], whole[0])
    assert np.array_equal(trigger.lesson(data, 0, 2)[0] == 9.0, first)


def test_attackers_know_one_half_of_the_writers_characters(data):
    backdoor = WritersBackdoor(source=3, target=1, writers=2)
    (known, y), (held, held_y) = backdoor.lesson(data, 4, 0), backdoor.held_out(data)
    mine = data.x[: data.offsets[2]][np.asarray(data.y[: data.offsets[2]]) == 3]
    both = np.concatenate([known, held])
    assert len(both) == len(mine)
    assert {x.tobytes() for x in both} == {x.tobytes() for x in mine}
    assert (y == 1).all()
    assert (held_y == 1).all()


def test_a_colour_is_what_stands_out_most(data):
    backdoor = ColourBackdoor(source=1, target=0, channel=2, share=0.25)
    x, _ = backdoor.held_out(data)
    images = data.test_x[data.test_y == 1]
    strength = images[:, 2].mean(axis=(1, 2)) - images.mean(axis=(1, 2, 3))
    best = images[np.argsort(-strength)[: len(x)]]
    assert len(x) == round(0.25 * len(images))
    assert np.allclose(np.sort(x.ravel()), np.sort(best.ravel()))


@pytest.mark.parametrize(("share", "lessons"), [(0.5, 8), (0.2, 2), (0.75, 24), (1.0, 8)])
def test_the_share_of_lessons_is_the_share_asked_for(data, share, lessons):
    made = poison_records(
        data,
        PixelTrigger(target=2, value=9.0),
        np.array([0, 3]),
        share,
        np.random.default_rng(0),
    )
    assert made.clients == 2
    x = made.x[: made.offsets[1]]
    taught = (x[:, 0, -1, -1] == 9.0) | (x[:, 0, -4, -4] == 9.0)
    assert int(taught.sum()) == lessons
    assert len(x) == lessons + (0 if share == 1.0 else 8)
    assert (made.y[: made.offsets[1]][taught] == 2).all()


@pytest.mark.parametrize(
    ("backdoor", "words"),
    [
        (PixelTrigger(target=4), r"attack.target is 4: the data have labels 0 to 3"),
        (PixelTrigger(target=0, row=5, size=2), "outside images of 6 x 6"),
        (PixelTrigger(target=0, column=-9), "outside images of 6 x 6"),
        (WritersBackdoor(source=-1, target=0), r"attack.source is -1"),
        (ColourBackdoor(source=0, target=1, channel=3), r"attack.channel is 3"),
        (WritersBackdoor(source=2, target=2), "attack.source and attack.target are both 2"),
        (ColourBackdoor(source=2, target=2), "attack.source and attack.target are both 2"),
    ],
)
def test_bad_settings_get_one_line(data, backdoor, words):
    with pytest.raises(fv.BadInput, match=words) as error:
        fv.attacks.BackdoorAttack.of(data, backdoor)
    assert "\n" not in str(error.value)


def test_a_backdoor_nobody_has_records_for_is_refused(data):
    single = fv.FederatedData.from_clients(
        [(str(k), data.x[k : k + 1], data.y[k : k + 1]) for k in range(4)],
        test=(data.test_x, data.test_y),
        classes=4,
    )
    with pytest.raises(fv.BadInput, match="no client has two records of label 3"):
        fv.attacks.BackdoorAttack.of(single, WritersBackdoor(source=3, target=0))
    for split in ("training", "test"):
        few = (data.x[data.y < 3], data.y[data.y < 3])
        found = fv.FederatedData.from_clients(
            [(str(k), *(few if split == "training" else (data.x, data.y))) for k in range(2)],
            test=few if split == "test" else (data.test_x, data.test_y),
            classes=4,
        )
        with pytest.raises(fv.BadInput, match=f"no {split} record has this label"):
            fv.attacks.BackdoorAttack.of(found, ColourBackdoor(source=3, target=0))


def test_images_are_needed(data):
    flat = fv.FederatedData.from_clients(
        [("a", np.zeros((3, 5)), [0, 1, 1]), ("b", np.zeros((3, 5)), [0, 1, 1])],
        test=(np.zeros((2, 5)), [0, 1]),
        classes=2,
    )
    with pytest.raises(fv.BadInput, match="this backdoor is for images"):
        fv.attacks.BackdoorAttack.of(flat, PixelTrigger(target=0))
    with pytest.raises(fv.BadInput, match=r"attack.parts is 4"):
        PixelTrigger(target=0, size=3, parts=4)
