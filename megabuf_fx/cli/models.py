"""What MODEL on the command line names: a model on the meta device, or the parameters in a dump."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from megabuf_fx.cli.errors import CliError
from megabuf_fx.config import suggest
from megabuf_fx.dump import FORMAT_VERSION
from megabuf_fx.runtime.layout import BucketEnds, ParamSpec

T = TypeVar("T")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_LLAMA = {"model_type": "llama", "vocab_size": 32000, "tie_word_embeddings": False}
_FUSED = {"model_type": "phi3", "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}

KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    # The configs published with the models, as far as they decide the shapes of parameters.
    "llama-7b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 11008},
    "llama-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    # Phi-3 has the layers of Llama with query, key, value in one weight and gate, up in one; so Megatron stores Llama.
    "megatron-llama-7b": {**_LLAMA, **_FUSED, "hidden_size": 4096, "intermediate_size": 11008},
    "gpt2": {"model_type": "gpt2"},
}
"""Names that need no download: arguments of transformers' config classes."""


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A whole model, without storage."""

    name: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class DumpedModel:
    """The parameters of one rank, as a dump lists them, and the layout they had."""

    name: str
    specs: tuple[ParamSpec, ...]
    dp_size: int
    sharded: bool
    digest: str
    bucket_ends: BucketEnds
    """Where buckets end, whatever decided about it."""


def load_model(text: str, *, dtype: torch.dtype | None) -> MetaModel | DumpedModel:
    """The model that ``text`` names: ``module:function``, a directory of dumps, a JSON file with a Hugging Face config,
    one of ``KNOWN_SHAPES``, or the name of a Hugging Face config.

    ``dtype`` is that of the parameters; None leaves a function's model as it is and takes bf16 for configs.

    Raises:
        CliError: nothing of that name, or it cannot be read; a dump of another version.
    """
    path = Path(text)
    if path.is_dir():
        if dtype is not None:
            raise CliError(f"a dump has dtypes already; leave out --dtype with '{text}'")
        return _read_dump(path)
    if path.is_file():
        return _from_config(text, lambda auto: _config_from_json(auto, path), dtype)
    if text in KNOWN_SHAPES:
        return _from_config(text, lambda auto: auto.for_model(**KNOWN_SHAPES[text]), dtype)
    if ":" in text:
        return _call_function(text, dtype)
    if path.suffix or text.startswith((".", os.sep)):
        raise CliError(f"no file or directory '{text}'")
    return _from_config(text, lambda auto: auto.from_pretrained(text), dtype)


def _call_function(text: str, dtype: torch.dtype | None) -> MetaModel:
    module_name, _, function_name = text.partition(":")
    # A script installed elsewhere does not look into the working directory by itself.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = importlib.import_module(module_name)
        for name in function_name.split("."):
            function = getattr(function, name)
        with torch.device("meta"):
            model = function()  # type: ignore[operator]
    except Exception as error:
        # Whatever the user's code raises, it is about that code.
        raise CliError(f"cannot build '{text}': {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise CliError(f"'{text}' returned {type(model).__name__}, not a torch.nn.Module")
    return MetaModel(text, model if dtype is None else model.to(dtype))


def _from_config(text: str, make_config: Callable[[Any], Any], dtype: torch.dtype | None) -> MetaModel:
    try:
        import transformers
    except ImportError as error:
        raise CliError(
            f"'{text}' needs the package transformers (pip install transformers); module:function does not"
        ) from error
    try:
        config = make_config(transformers.AutoConfig)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        near = suggest(text, list(KNOWN_SHAPES)) if difflib.get_close_matches(text, KNOWN_SHAPES) else "."
        raise CliError(
            f"unknown model '{text}'{near} It is neither module:function, nor a file, nor a directory, nor one of "
            f"{', '.join(KNOWN_SHAPES)}, nor a Hugging Face config that could be loaded ({first})"
        ) from error
    auto_model: Any = transformers.AutoModelForCausalLM  # half annotated
    try:
        with torch.device("meta"):
            model = auto_model.from_config(config, dtype=dtype or torch.bfloat16)
    except ValueError as error:
        raise CliError(f"'{text}' has no causal language model: {error}") from error
    return MetaModel(text, model)


def _config_from_json(auto: Any, path: Path) -> Any:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError("it has no model_type")
    return auto.for_model(**content)


def _read_dump(directory: Path) -> DumpedModel:
    """The first plan below ``directory``; all graphs and variants of one model have equal ones."""
    found = sorted(directory.rglob("plan.json"))
    if not found:
        raise CliError(f"no plan.json in or below '{directory}'; dumps are written with MEGABUF_DUMP=directory")
    path = found[0]
    content = _parsed(path, lambda: json.loads(path.read_text(encoding="utf-8")))
    version = _parsed(path, lambda: content["format_version"])
    if version != FORMAT_VERSION:
        raise CliError(
            f"'{path}' has format version {version}, this is version {FORMAT_VERSION}; compile again with MEGABUF_DUMP"
        )
    models = _parsed(path, lambda: list(content["models"].values()))
    if len(models) != 1:
        raise CliError(f"'{path}' holds {len(models)} attached models; plan them one at a time")
    (model,) = models
    return _parsed(
        path,
        lambda: DumpedModel(
            name=str(directory),
            specs=tuple(_spec_from_json(entry) for entry in model["params"]),
            dp_size=model["dp_size"],
            sharded=model["sharded"],
            digest=model["digest"],
            bucket_ends=_bucket_ends_from_json(model),
        ),
    )


def _bucket_ends_from_json(model: dict[str, Any]) -> BucketEnds:
    """As ``BucketPlan.bucket_ends``."""
    places = {entry["name"]: place for place, entry in enumerate(model["params"])}
    ends: dict[tuple[int, int], int] = {}
    for number, buffer in enumerate(model["buffers"]):
        for param in buffer["params"]:
            key, place = (number, param["bucket"]), places[param["name"]]
            ends[key] = min(place, ends.get(key, place))
    return BucketEnds(frozenset(ends.values()))


def _spec_from_json(entry: dict[str, Any]) -> ParamSpec:
    return ParamSpec(**{**entry, "shape": tuple(entry["shape"]), "dtype": getattr(torch, entry["dtype"])})


def _parsed(path: Path, parse: Callable[[], T]) -> T:
    """What ``parse`` makes of the file, or an error that names it."""
    try:
        return parse()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(f"'{path}' is no dump of megabuf_fx: {type(error).__name__}: {error}") from error
