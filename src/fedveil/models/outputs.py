"""The tensor that a module gives, out of whatever it returns."""

from collections.abc import Mapping

import torch

from fedveil.errors import BadInput


def tensor_of(returned: object) -> torch.Tensor:
    """The tensor itself; of several things, what is called `logits`, or the only tensor.

    So tuples, dicts and the `ModelOutput` of Hugging Face are taken. Which of several tensors is
    meant is not guessed.

    >>> tensor_of({"logits": torch.ones(2), "hidden": torch.zeros(2)})
    tensor([1., 1.])
    """
    if isinstance(returned, torch.Tensor):
        return returned
    kind = f"a {type(returned).__name__}"
    if isinstance(returned, Mapping):
        named, parts = returned.get("logits"), list(returned.values())
        kind += f" of {', '.join(map(repr, returned))}"
    else:
        named = getattr(returned, "logits", None)
        parts = list(returned) if isinstance(returned, tuple | list) else []
    if isinstance(named, torch.Tensor):
        return named
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) != 1:
        raise BadInput(
            f"the model returned {kind}, with {len(tensors)} tensors and none called 'logits': "
            "return one tensor of outputs, one row per example"
        )
    return tensors[0]
