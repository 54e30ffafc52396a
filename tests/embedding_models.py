"""Small models that use an embedding in one way each, for tokens ``[4, 6]`` below ``VOCAB``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH = 11, 5


def tokens(step: int = 0, micro: int = 0, rank: int = 0) -> Tensor:
    """Every token several times."""
    generator = torch.Generator().manual_seed(step * 1009 + micro * 101 + rank)
    return torch.randint(0, VOCAB, (4, 6), generator=generator)


class Single(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.emb(x))


class Tied(Single):
    """Output layer and embedding share the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.emb(x)), self.emb.weight)


class Twice(Single):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.emb(x)) * self.emb(x.flip(0))
        return result


class TiedTwice(Single):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.emb(x) + self.emb(x.flip(0))), self.emb.weight)


class TiedDecay(Single):
    """The gradient is a product, a table and what is neither."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.emb(x)), self.emb.weight) + self.emb.weight.square().sum()


class Positions(Single):
    """A second table, with a gradient that is summed over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.emb(x) + self.position(torch.arange(x.shape[1])))


class Sliced(Positions):
    """Positions without an embedding: rows of a slice."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.emb(x) + self.position.weight[: x.shape[1]])


class VocabParallel(nn.Module):
    """Rank 1 of 2 of Megatron's ``VocabParallelEmbedding``: tokens of other ranks read row 0, and are masked."""

    first, last = 4, VOCAB

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(self.last - self.first, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        is_other = (x < self.first) | (x >= self.last)
        places = (x - self.first).clone()
        places[is_other] = 0
        rows = F.embedding(places, self.weight)
        rows[is_other, :] = 0.0
        return torch.tanh(rows)


class Indexed(Single):
    """``weight[x]``, where negative indices count from the end."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.emb.weight[x - 4])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.bag(x))


class TwoReaders(nn.Module):
    """Two parameters have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.right = nn.Parameter(torch.randn(VOCAB, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.left + self.right)


class Everything(nn.Module):
    """Tied tokens with padding, read twice, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH, padding_idx=3)
        self.position = nn.Embedding(8, WIDTH)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.emb(x) + self.emb(x.flip(0)) + self.position(torch.arange(x.shape[1]))
        return F.linear(torch.tanh(self.fc(rows)), self.emb.weight)
