"""What modules return: the logits are taken, and which of several tensors is not guessed."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.base.inputs import tensor_of

LOGITS, OTHER = torch.ones(2, 3), torch.zeros(2, 3)


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


TAKEN = {
    "a tensor": LOGITS,
    "a tuple of one": (LOGITS,),
    "as of a recurrent layer": (LOGITS, (OTHER, OTHER)),
    "a tuple with nothing": (None, LOGITS, {}),
    "a list": [LOGITS],
    "a dict": {"logits": LOGITS, "hidden": OTHER},
    "a dict of one": {"scores": LOGITS, "past": None},
    "a named tuple": Pair(OTHER, LOGITS),
    "a data class": Output(LOGITS, OTHER),
}


@pytest.mark.parametrize("returned", TAKEN.values(), ids=TAKEN)
def test_the_logits_are_taken(returned):
    assert tensor_of(returned) is LOGITS


REFUSED = {
    "two": ((LOGITS, OTHER), "the model returned a tuple, with 2 tensors and none called 'logits'"),
    "none": ((), "a tuple, with 0 tensors"),
    "nothing": (None, "a NoneType, with 0 tensors"),
    "a dict of two": ({"a": LOGITS, "b": OTHER}, "a dict of 'a', 'b', with 2 tensors"),
    "logits that are none": ({"logits": None}, "a dict of 'logits', with 0 tensors"),
    "a number": (3.5, "a float"),
}


@pytest.mark.parametrize(("returned", "message"), REFUSED.values(), ids=REFUSED)
def test_what_could_be_either_is_refused(returned, message):
    with pytest.raises(BadInput) as refusal:
        tensor_of(returned)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_the_outputs_of_hugging_face():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    returned = outputs.SequenceClassifierOutput(logits=LOGITS, hidden_states=(OTHER,))
    assert tensor_of(returned) is LOGITS
