"""Block of ``check.py``: what it runs on."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import torch
from gpu_context import Context, require


def versions(context: Context) -> str:
    triton = importlib.util.find_spec("triton")
    parts = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    if triton is not None:
        parts.append(f"triton {importlib.import_module('triton').__version__}")
    if context.is_cuda:
        major, minor = torch.cuda.get_device_capability(context.device)
        memory = torch.cuda.get_device_properties(context.device).total_memory / 2**30
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        parts += [torch.cuda.get_device_name(context.device), f"capability {major}.{minor}", f"{memory:.0f} GiB"]
        parts += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}", f"driver {find_driver()}"]
        require((major, minor) >= (8, 0), "bf16 needs capability 8.0")
    return ", ".join(parts)


def find_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
