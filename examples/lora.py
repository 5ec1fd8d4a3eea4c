"""LoRA adapters in a frozen transformer under client-level DP: only what is new learns."""

import tempfile

import peft
import torch
from torch import nn
from transformers import BertConfig, BertModel

import fedveil as fv


class Rows(nn.Module):
    """Digits, read row by row by `base`."""

    def __init__(self, base: nn.Module, width: int, classes: int):
        super().__init__()
        self.embed, self.base, self.head = nn.Linear(8, width), base, nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.embed(x.squeeze(1))
        return self.head(self.base(inputs_embeds=rows).last_hidden_state.mean(1))


def make(classes: int, width: int = 16, rank: int = 4) -> nn.Module:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * width}
    base = BertModel(BertConfig(hidden_size=width, vocab_size=2, **sizes))  # or from_pretrained
    lora = peft.LoraConfig(r=rank, target_modules=["query", "value"])
    return Rows(peft.get_peft_model(base, lora), width, classes)


if __name__ == "__main__":
    torch.manual_seed(0)
    settings = {"rounds": 3, "data.clients": 100, "sample.rate": 0.3, "client.epochs": 1}
    with tempfile.TemporaryDirectory() as folder:
        run = fv.run("central", model=make(10), out=f"{folder}/run", set=settings, quiet=True)
        print(*run.claim.assumptions, sep="\n")
        print(run.claim, f"{run.task.size} numbers per update", sep="\n")
