"""Models of the ``transformers`` package in small: random weights, no dropout, built from configs, nothing downloaded.

Deviations from a config's defaults, apart from sizes: ``initializer_range`` is larger, so that gradients are not small
from the start, and ConvNeXt's layer scale begins at 1 instead of 1e-6, which would hide everything inside the blocks.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Read when `transformers` is first imported, in this process and in those of the ranks.
os.environ["HF_HUB_OFFLINE"] = "1"

VOCABULARY = 61
CLASSES = 5

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class RealModel:
    """How to build one model and its data; ``build`` is called after seeding."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    zero_gradients: str = ""
    """End of the names of parameters whose true gradient is zero, empty for none. A key bias adds the same to all
    scores of a query, and the softmax takes it out again. What such a parameter gets is rounding, which AdamW enlarges
    to steps of full size."""
    has_unused: bool = False
    """Whether some parameters get no gradient on any rank, always or in some steps."""
    is_data_dependent: bool = False
    """Whether Python loops over what the data chose (experts with tokens), so that Dynamo keeps finding new graphs."""


def hub() -> Any:
    """The ``transformers`` package; imported late because it takes seconds, untyped because mypy would take minutes."""
    return importlib.import_module("transformers")


DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""Shared by Llama and its descendants: grouped-query attention, RMSNorm, gated feed-forward."""

BERT_LIKE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
}

T5_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}


def gpt2() -> nn.Module:
    """Tied embedding and head; ``Conv1D`` keeps weights transposed."""
    config = hub().GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=24,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = hub().GPT2LMHeadModel(config)
    return model


def llama() -> nn.Module:
    model: nn.Module = hub().LlamaForCausalLM(hub().LlamaConfig(**DECODER))
    return model


def qwen3() -> nn.Module:
    """Norms of queries and keys; embedding and head tied."""
    config = hub().Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True)
    model: nn.Module = hub().Qwen3ForCausalLM(config)
    return model


def mixtral(experts: str) -> nn.Module:
    """Two of four experts per token, with the router's balancing loss. ``experts`` says how they are computed: by an
    operator of ``transformers`` itself (``grouped_mm``, the default), ``batched_mm``, or a loop (``eager``)."""
    config = hub().MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    config._experts_implementation = experts
    model: nn.Module = hub().MixtralForCausalLM(config)
    return model


def switch() -> nn.Module:
    """Every expert is a module of its own, so that one without tokens has parameters without gradient."""
    config = hub().SwitchTransformersConfig(
        **{**T5_LIKE, "num_layers": 1, "num_decoder_layers": 1},
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=0,
        num_experts=8,
        expert_capacity=16,
        router_jitter_noise=0.0,
    )
    model: nn.Module = hub().SwitchTransformersForConditionalGeneration(config)
    return model


def bert() -> nn.Module:
    config = hub().BertConfig(**BERT_LIKE, vocab_size=VOCABULARY, max_position_embeddings=24)
    model: nn.Module = hub().BertForMaskedLM(config)
    return model


class TokenTagger(nn.Module):
    """A loss on the hidden states alone: BERT's pooler runs, but nothing depends on it."""

    def __init__(self) -> None:
        super().__init__()
        config = hub().BertConfig(**BERT_LIKE, vocab_size=VOCABULARY, max_position_embeddings=24)
        self.bert = hub().BertModel(config)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.bert(input_ids).last_hidden_state)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def t5() -> nn.Module:
    """One embedding for encoder, decoder and head; both encoder layers use the relative position bias of the first."""
    model: nn.Module = hub().T5ForConditionalGeneration(hub().T5Config(**T5_LIKE, num_decoder_layers=1))
    return model


def vit() -> nn.Module:
    """The first forward writes ``problem_type`` into the config, so that the second is compiled anew."""
    config = hub().ViTConfig(**BERT_LIKE, image_size=16, patch_size=4, num_labels=CLASSES)
    model: nn.Module = hub().ViTForImageClassification(config)
    return model


def resnet() -> nn.Module:
    """BatchNorm in training mode."""
    config = hub().ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        layer_type="basic",
        num_labels=CLASSES,
        problem_type="single_label_classification",
    )
    model: nn.Module = hub().ResNetForImageClassification(config)
    return model


def convnext() -> nn.Module:
    config = hub().ConvNextConfig(
        hidden_sizes=[8, 16],
        depths=[1, 2],
        num_stages=2,
        patch_size=2,
        layer_scale_init_value=1.0,
        initializer_range=0.1,
        num_labels=CLASSES,
        problem_type="single_label_classification",
    )
    model: nn.Module = hub().ConvNextForImageClassification(config)
    return model


def next_tokens(generator: torch.Generator) -> Batch:
    ids = torch.randint(2, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids}


def masked_tokens(generator: torch.Generator) -> Batch:
    """A third of the positions is predicted, the others have label -100."""
    ids = torch.randint(2, VOCABULARY, (2, 12), generator=generator)
    is_masked = torch.arange(12) % 3 == 0
    return {"input_ids": torch.where(is_masked, 1, ids), "labels": torch.where(is_masked, ids, -100)}


def tagged_tokens(generator: torch.Generator) -> Batch:
    ids = torch.randint(2, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids % CLASSES}


def sequence_pair(generator: torch.Generator) -> Batch:
    return {
        "input_ids": torch.randint(2, VOCABULARY, (2, 12), generator=generator),
        "labels": torch.randint(2, VOCABULARY, (2, 8), generator=generator),
    }


def short_pair(generator: torch.Generator) -> Batch:
    """Fewer tokens than experts."""
    return {
        "input_ids": torch.randint(2, VOCABULARY, (1, 4), generator=generator),
        "labels": torch.randint(2, VOCABULARY, (1, 6), generator=generator),
    }


def images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(4, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (4,), generator=generator)}


MODELS: dict[str, RealModel] = {
    # Queries, keys and values share one projection, and so their biases one parameter.
    "GPT-2": RealModel(gpt2, next_tokens, zero_gradients="attn.c_attn.bias"),
    "Llama": RealModel(llama, next_tokens),
    "Qwen3": RealModel(qwen3, next_tokens),
    "Mixtral": RealModel(partial(mixtral, "grouped_mm"), next_tokens),
    "Mixtral, batched": RealModel(partial(mixtral, "batched_mm"), next_tokens),
    "Mixtral, loop": RealModel(partial(mixtral, "eager"), next_tokens, is_data_dependent=True),
    "Switch": RealModel(switch, short_pair, has_unused=True, is_data_dependent=True),
    "BERT": RealModel(bert, masked_tokens, zero_gradients="attention.self.key.bias"),
    "BERT, tagger": RealModel(TokenTagger, tagged_tokens, zero_gradients="attention.self.key.bias", has_unused=True),
    "T5": RealModel(t5, sequence_pair),
    "ViT": RealModel(vit, images, zero_gradients="attention.k_proj.bias"),
    "ResNet": RealModel(resnet, images),
    "ConvNeXt": RealModel(convnext, images),
}
