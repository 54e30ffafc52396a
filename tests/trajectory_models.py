"""Models, data and decoding of ``oracle/trajectory.json.gz``; every formula is that of ``oracle/README.md``.

A model computes in the dtype of its parameters and hands out fp32.
"""

from __future__ import annotations

import base64
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from oracle_data import load
from torch import Tensor, nn

VOCAB = 61
CONTEXT = 8
SAMPLES = 4
"""Samples of one micro-batch."""


class TrajectoryMlp(nn.Module):
    """``mlp``: ``[4, 13]`` to ``[4, 5]``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(13, 37)
        self.fc2 = nn.Linear(37, 29, bias=False)
        self.ln = nn.LayerNorm(29)
        self.fc3 = nn.Linear(29, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.fc2(torch.tanh(self.fc1(x))))
        result: Tensor = self.fc3(self.ln(hidden))
        return result.float()


class TrajectoryExpert(nn.Module):
    """``expert``: ``[4, 13]`` to ``[4, 5]``; the middle layer is an expert, other ranks may have another one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(13, 24)
        self.expert = nn.Linear(24, 24)
        self.fc3 = nn.Linear(24, 5)
        for param in self.expert.parameters():
            param.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc3(torch.tanh(self.expert(torch.tanh(self.fc1(x)))))
        return result.float()


class _Block(nn.Module):
    # The projection of queries, keys and values has no bias: that of the keys has a true gradient of zero, and AdamW
    # would make full steps of its rounding (megatron_semantics section 22).
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        parts = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
        x = x + self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
        result: Tensor = x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))
        return result


class TrajectoryGpt(nn.Module):
    """``gpt`` (tied) and ``gpt_untied``: tokens ``[4, 8]``, int64, to logits ``[4, 8, 61]``."""

    def __init__(self, *, tied: bool, width: int = 24, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, width)
        self.wpe = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.lnf = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, VOCAB, bias=False)
        if tied:
            # Megatron's flag on the parameter itself; the layout gives it a bucket of its own.
            self.wte.weight.shared_embedding = True  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(CONTEXT))
        mask = torch.full((CONTEXT, CONTEXT), -1e4, dtype=x.dtype).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        weight = self.wte.weight if self.head is None else self.head.weight
        return F.linear(self.lnf(x), weight).float()


def make_model(name: str, dtype: torch.dtype = torch.float32, *, ep_rank: int = 0) -> nn.Module:
    """The model with its initial parameters, which are a formula, not random. ``ep_rank`` says which expert it has."""
    model: nn.Module
    if name == "mlp":
        model = TrajectoryMlp()
    elif name in ("gpt", "gpt_untied"):
        model = TrajectoryGpt(tied=name == "gpt")
    elif name == "expert":
        model = TrajectoryExpert()
    else:
        raise ValueError(f"no model {name!r}; expected mlp, gpt, gpt_untied or expert")
    with torch.no_grad():
        for j, (param_name, param) in enumerate(model.named_parameters()):
            k = torch.arange(param.numel(), dtype=torch.float64)
            if "ln" in param_name and param_name.endswith("weight"):
                values = 1 + 0.1 * torch.sin(0.7 * k + 0.3 * j)
            else:
                shift = 0.5 * ep_rank if "expert" in param_name else 0.0
                values = 0.2 * torch.sin(0.37 * k + 1.3 * j + 0.11 + shift)
            param.copy_(values.view(param.shape))
    return model.to(dtype)


class MicroBatch(NamedTuple):
    inputs: Tensor
    """``[4, 13]`` fp32 or tokens ``[4, 8]`` int64."""
    targets: Tensor
    """``[4, 5]`` fp32 or tokens ``[4, 8]`` int64."""


def micro_batch(model: str, step: int, micro: int, rank: int) -> MicroBatch:
    s = (step * 7 + micro) * 11 + rank
    if model in ("mlp", "expert"):
        x = torch.sin(0.61 * torch.arange(SAMPLES * 13, dtype=torch.float64) + 0.9 * s)
        target = torch.cos(0.83 * torch.arange(SAMPLES * 5, dtype=torch.float64) + 0.4 * s)
        return MicroBatch(x.float().view(SAMPLES, 13), target.float().view(SAMPLES, 5))
    i = torch.arange(SAMPLES * CONTEXT)
    inputs = (i**2 + 3 * i + 5 * s) % VOCAB
    targets = (i**2 + 5 * i + 4 + 5 * s) % VOCAB
    return MicroBatch(inputs.view(SAMPLES, CONTEXT), targets.view(SAMPLES, CONTEXT))


def count_tokens(micro: int, rank: int) -> int:
    """Samples that count in a ``per_token`` run."""
    return SAMPLES - (rank + micro) % 3


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error, or cross entropy per token."""
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def summed_loss(outputs: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """Sum over the first ``tokens`` samples of their mean squared errors (``per_token`` runs, ``mlp`` only)."""
    return (outputs - targets).square().mean(dim=1)[:tokens].sum()


def decode(values: dict[str, str], model: nn.Module) -> dict[str, Tensor]:
    """Base64 of little-endian float32, by parameter name, in the parameters' shapes."""
    shapes = {name: param.shape for name, param in model.named_parameters()}
    assert values.keys() == shapes.keys()
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32).view(shapes[name])
        for name, text in values.items()
    }


def initial_params(name: str, model: nn.Module) -> dict[str, Tensor]:
    """What the oracle started from, before a cast to 16 bits; ``name`` is that of the model, for experts with rank."""
    return decode(load("trajectory")["initial_params"][name], model)
