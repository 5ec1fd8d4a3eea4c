"""Names that recipes know, and what was meant by one that they do not."""

import subprocess
import sys

import pytest

from fedveil.base.checks import DATA_NAMES, DATA_SETS, MODEL_NAMES, MODELS, hint, meant, nearest
from fedveil.base.errors import BadInput

NAMES = {"data.name": DATA_NAMES, "model.name": MODEL_NAMES}


@pytest.mark.parametrize(
    ("key", "name"), [(k, name) for k, known in NAMES.items() for name in known.choices]
)
def test_known_names_pass(key, name):
    NAMES[key].check(key, name)


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("data.name", "minst", "data.name is 'minst': choose one of digits, .*did you mean mnist"),
        ("data.name", "fashion_mnist", r"; did you mean fashion-mnist\?$"),
        ("data.name", "imagenet", "reddit, saved, table$"),
        (
            "model.name",
            "sotfmax",
            r"one of linear, .*code; did you mean softmax\?$",
        ),
        ("model.name", "MLP", "transformer-lm, code$"),
        ("model.name", "", "model.name is ''"),
        ("model.name", "x\n" * 1000, "model.name is 'x"),
    ],
)
def test_other_names_are_refused_with_the_nearest(key, name, message):
    with pytest.raises(BadInput, match=message) as refusal:
        NAMES[key].check(key, name)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_saved_data_are_a_recipes_and_no_data_set():
    assert set(DATA_NAMES.choices) - set(DATA_SETS) == {"saved", "table"}
    assert MODEL_NAMES.choices == (*MODELS, "code")


def test_slips_of_one_letter_are_found():
    for names in (DATA_NAMES.choices, MODEL_NAMES.choices):
        for name in names:
            if len(name) > 3:
                for at in range(len(name)):
                    assert name in nearest(name[:at] + name[at + 1 :], names)


def test_what_is_like_nothing_has_no_hint():
    assert hint("zzz", DATA_SETS) == ""
    assert nearest("zzz", DATA_SETS) == []


def test_a_question_names_one_or_several():
    assert meant(["a"]) == "did you mean a?"
    assert meant(["a", "b"]) == "did you mean a or b?"
    assert meant(["a", "b", "c"]) == "did you mean a, b or c?"


def test_a_wrong_name_is_refused_before_anything_heavy_is_imported():
    program = (
        "import sys\n"
        "from fedveil.cli.main import main\n"
        "sys.argv = ['fedveil', 'run', '--set', 'model.name=sotfmax']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print([name for name in ('torch', 'numpy') if name in sys.modules])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "[]\n")
    assert ended.stderr.endswith("did you mean softmax?\n")
