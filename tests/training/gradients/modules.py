"""Small modules by how their single-example gradients come about: by layers, or written out."""

import torch
from torch import nn
from torch.nn import functional

from fedveil.models.zoo import Lstm

VOCABULARY = 7


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 3, padding_idx=0)
        self.memory = Lstm(3, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.memory(self.words(x))[:, -1])


class Twice(nn.Module):
    """One layer used twice, one never, one whose output nobody looks at."""

    def __init__(self):
        super().__init__()
        self.layer, self.idle, self.unseen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        self.unseen(x)
        return self.out(self.layer(torch.tanh(self.layer(x))) + x)


class Tied(nn.Module):
    """The head is the table of words, used outside its layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 4)
        self.middle = nn.Linear(4, 4)

    def forward(self, x):
        h = torch.tanh(self.middle(self.words(x).mean(1)))
        return functional.linear(h, self.words.weight)


class TimeFirst(nn.Module):
    """Its first layer sees the examples along the second axis."""

    def __init__(self):
        super().__init__()
        self.each, self.out = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = torch.tanh(self.each(x.transpose(0, 1)))
        return self.out(h).mean(0)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.norm, self.out = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.norm(self.inside(x)))


class Free(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.scale * self.layer(x)


class Turned(nn.Module):
    """Each example by itself, but one of the layers sees them in another order."""

    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.inside(x)).flip(0)).flip(0)


class Centred(nn.Module):
    """Mixes examples: what counts is what it does to one alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x - 0.5 * x.mean(0))


class Merged(nn.Module):
    """Its first layer sees examples x steps along one axis."""

    def __init__(self):
        super().__init__()
        self.each, self.out = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = torch.tanh(self.each(x.reshape(-1, 6)))
        return self.out(h.view(len(x), -1, 5).mean(1))


class Placed(nn.Module):
    """The table of places is looked up once for all examples."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, 4), nn.Embedding(4, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        places = self.places(torch.arange(x.shape[1]))
        return self.out(torch.tanh(self.words(x) + places).mean(1))


class Factors(nn.Module):
    """Tables without an axis of steps."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Embedding(VOCABULARY, 4), nn.Embedding(VOCABULARY, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.left(x[:, 0]) * self.right(x[:, 1]))


class Frames(nn.Module):
    """Four images make one example."""

    def __init__(self):
        super().__init__()
        self.image, self.out = nn.Conv2d(1, 2, 2), nn.Linear(4, 3)

    def forward(self, x):
        h = torch.tanh(self.image(x.reshape(-1, 1, 2, 3)))
        return self.out(h.view(len(x), 4, 4).mean(1))


class Viewed(nn.Module):
    """A view that channels-last outputs do not have."""

    def __init__(self):
        super().__init__()
        self.image, self.out = nn.Conv2d(1, 4, 3), nn.Linear(16, 3)

    def forward(self, x):
        return self.out(torch.relu(self.image(x)).view(len(x), -1))


class Sorted(nn.Module):
    """Its second layer sees the examples in an order that depends on them."""

    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.out(torch.tanh(self.inside(x))[order])[order.argsort()]


class Rescaled(nn.Module):
    """Mixes examples, but only where one of them is large."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x / x.abs().max().clamp_min(10.0))


class Named(nn.Module):
    """Gives its layer the input by name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(input=x)


class Forked(nn.Module):
    """Which layer is used depends on all the examples together."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.small(x) if x.abs().max() < 10 else self.large(-x)


class Experts(nn.Module):
    """Each of its layers sees some of the examples."""

    def __init__(self):
        super().__init__()
        self.even, self.odd = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        odd, out = x.abs().amax(1) > 10, x.new_zeros(len(x), 3)
        if not bool(odd.all()):
            out[~odd] = self.even(x[~odd])
        if bool(odd.any()):
            out[odd] = self.odd(x[odd])
        return out


class Overwritten(nn.Module):
    """Changes a layer's output where no module says so."""

    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.inside(x).relu_())


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.memory = kind(6, 4, batch_first=True, **options)
        self.out = nn.Linear(8 if options.get("bidirectional") else 4, 3)

    def forward(self, x):
        return self.out(self.memory(x)[0][:, -1])


class StepsFirst(nn.Module):
    """One recurrent layer used twice, the second time with a state."""

    def __init__(self):
        super().__init__()
        self.memory, self.out = nn.GRU(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = x.transpose(0, 1)
        _, last = self.memory(x)
        return self.out(self.memory(x.flip(0), last)[0][-1])


class Halving(nn.GRU):
    """An own recurrent layer, for which vmap has no rule."""

    def forward(self, x):
        return super().forward(x)[0] / 2


class Refused(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.out = Halving(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.memory(x)[:, -1])


def in_place():
    return nn.Sequential(
        nn.Linear(6, 5),
        nn.ReLU(inplace=True),
        nn.Linear(5, 5),
        nn.LeakyReLU(inplace=True),
        nn.Linear(5, 3),
    )


def grouped():
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


ZOO = {
    "softmax": (6,),
    "mlp": (6,),
    "fu-cnn": (1, 28, 28),
    "small-cnn": (1, 28, 28),
    "vgg": (3, 32, 32),
}
LAYERED = {
    "words": (Words, "words"),
    "in-place": (in_place, (6,)),
    "twice": (Twice, (6,)),
    "steps": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)), 4),
    "bare": (lambda: nn.Linear(6, 3, bias=False), (6,)),
    "time-first": (TimeFirst, 4),
    "time-first-square": (TimeFirst, 3),
    "turned": (Turned, (6,)),
    "centred": (Centred, (6,)),
    "merged": (Merged, 4),
    "placed": (Placed, "words"),
    "factors": (Factors, "words"),
    "frames": (Frames, 4),
    "viewed": (Viewed, (1, 4, 4)),
    "sorted": (Sorted, (6,)),
    "rescaled": (Rescaled, (6,)),
    "overwritten": (Overwritten, (6,)),
    "lstm": (lambda: Recurrent(nn.LSTM), 4),
    "gru": (lambda: Recurrent(nn.GRU, bidirectional=True), 4),
    "rnn": (lambda: Recurrent(nn.RNN, num_layers=2, bias=False), 4),
    "recurrent-twice": (StepsFirst, 4),
    "grouped": (grouped, (2, 4, 4)),
}
MIXED = {
    "tied": (Tied, "words"),
    "layer-norm": (Normed, (6,)),
    "free": (Free, (6,)),
}
WRITTEN_OUT = {
    "named": (Named, (6,)),
    "forked": (Forked, (6,)),
    "experts": (Experts, (6,)),
    "refused-by-vmap": (Refused, 4),
}
