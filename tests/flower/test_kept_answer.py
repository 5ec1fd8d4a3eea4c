"""A kept answer comes back bit for bit, whatever it holds, and to its own ask alone."""

import stat

import pytest
import torch
from safetensors.torch import load_file

from fedveil.flower.kept_answer import KeptAnswer
from fedveil.flower.messages import Answer, RoundAsk

ASK = RoundAsk("1" * 32, 3, 1, "a" * 64, torch.arange(4.0), torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("width", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 1001])
def test_what_was_written_is_read(tmp_path, size, dtype, width):
    report = torch.randn(2 * size, dtype=dtype)[::2]  # which does not lie in one piece
    watched = torch.randn(width, dtype=torch.float64)
    answer = Answer(ASK.run, ASK.round, ASK.attempt, "north", report, watched)
    kept = KeptAnswer(tmp_path / "answer.safetensors")
    kept.write(ASK, answer)
    assert stat.S_IMODE(kept.file_path.stat().st_mode) == 0o600
    for found in (vars(kept.read(ASK, "north")), load_file(kept.file_path)):
        for name, value in {"report": report, "watched": watched}.items():
            assert found[name].dtype is value.dtype
            assert torch.equal(found[name], value)
    assert kept.read(ASK, "south") is None
    assert kept.read(RoundAsk(*[*vars(ASK).values()][:5], ASK.moving + 1), "north") is None


def test_an_answer_takes_the_place_of_the_one_before(tmp_path):
    kept = KeptAnswer(tmp_path / "answer.safetensors")
    none = torch.zeros(0, dtype=torch.float64)
    for number in (1.0, 2.0):
        kept.write(
            ASK, Answer(ASK.run, ASK.round, ASK.attempt, "north", torch.full((5,), number), none)
        )
    assert kept.read(ASK, "north").report.tolist() == [2.0] * 5
    assert [path.name for path in tmp_path.iterdir()] == ["answer.safetensors"]
