"""A short training run, as processes of its own, in which rank 1 fails in step 2; for the tests of faults.

    python tests/fault_runs.py "kill in backward" DIRECTORY      with RANK, WORLD_SIZE, ... as torchrun sets them

A fault is a kind and a moment. The kinds are those of ``Fault.happen``, the moments the calls of ``maybe`` in ``main``.
"""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

import megabuf_fx as mb

TIMEOUT = 8
"""Seconds after which the process group gives up."""

GATHER = "CollectiveError: the parameter gather of bucket 1 (0.bias ... 0.weight) failed in step"
ANY_GATHER = "CollectiveError: the parameter gather of bucket"
REDUCTION = "CollectiveError: the gradient reduction of bucket"
NUMBER = "CollectiveError: the reduction of a number over megabuf_grads (2 ranks) failed"


class Fault:
    """What happens to rank 1 in step 2, and when."""

    def __init__(self, name: str) -> None:
        self.kind, _, self.moment = name.partition(" in ")
        self.step = 0

    def maybe(self, moment: str) -> None:
        """Fail if the moment has come."""
        if self.is_at(moment):
            self.happen()

    def is_at(self, moment: str) -> bool:
        return dist.get_rank() == 1 and self.step == 2 and self.moment == moment

    def happen(self, *unused: object) -> None:
        if self.kind == "unplug":
            # Both ends of the pair lose their carrier. Nobody is told: connections stay open and packets get lost.
            subprocess.run(["ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down"], check=True)
            print(f"link down at {time.monotonic()}", flush=True)
        elif self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "raise":
            raise ValueError("planned")
        else:
            time.sleep(1000)


def main(name: str, root: str) -> None:
    fault = Fault(name)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    # Without overlap the gather is part of the optimizer's step.
    config = mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=30, overlap_param_gather=fault.moment != "gather")
    buf = mb.attach(model, config)
    call = torch.compile(model, backend="megabuf")
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    cast(torch.optim.Optimizer, optimizer.inner).register_step_post_hook(lambda *unused: fault.maybe("gather"))

    for step in range(4):
        fault.step = step
        fault.maybe("forward")
        output = call(torch.randn(4, 6))
        if fault.is_at("backward"):
            output.register_hook(fault.happen)
        output.square().mean().backward()
        if fault.is_at("reduce"):
            # Have what the others have sent, so that it is the next collective that fails.
            buf.finish_grad_sync()
        fault.maybe("reduce")
        optimizer.clip_grad_norm_(1.0)
        fault.maybe("step")
        optimizer.step()
        optimizer.zero_grad()
        fault.maybe("save")
        if fault.is_at("write"):
            # As with "reduce": the model's parameters are here, what fails is the exchange of those who write.
            buf.sync_params()
        fault.maybe("write")
        if step == 2:
            mb.save_checkpoint(root, step, model, optimizer)
        print(f"rank {dist.get_rank()} finished step {step}", flush=True)


def start_ranks(
    fault: str, root: Path, *, environments: Sequence[Mapping[str, str]], prefixes: Sequence[Sequence[str]] = ((), ())
) -> list[subprocess.Popen[str]]:
    """Start both ranks; ``environments`` say where they meet, ``prefixes`` are commands that run commands."""
    return [
        subprocess.Popen(
            [*prefix, sys.executable, __file__, fault, str(root)],
            env={**os.environ, **environment, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (environment, prefix) in enumerate(zip(environments, prefixes))
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
