"""Between replays: what has changed since the capture is followed, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from capture_runs import Run, differences, refusal
from torch import nn

import megabuf_fx as mb

INVALID = " is not valid any more: "
CHANGED = INVALID + "it does not begin as it did, "


def test_hyper_parameters() -> None:
    for mode in ("sharded", "plain"):
        run = Run(mode)
        captured = run.capture()
        captured(run.batch(0))
        for key, value in (("weight_decay", 0.5), ("betas", (0.5, 0.5)), ("eps", 0.1)):
            before = run.optimizer.param_groups[0][key]
            run.optimizer.param_groups[0][key] = value
            text = refusal(lambda: captured(run.batch(1)))  # noqa: B023
            assert CHANGED + f"param_groups[0]['{key}'] was {before!r} and is {value!r}: change" in text
            run.optimizer.param_groups[0][key] = before
        captured(run.batch(1))


@pytest.mark.parametrize("mode", ["sharded", "plain"])
def test_learning_rates_are_followed(mode: str) -> None:
    run, other = Run(mode), Run(mode)
    captured = other.capture()
    for index, lr in enumerate((0.01, 0.5, 0.0, 0.5)):
        for each in (run, other):
            (group,) = each.optimizer.param_groups
            group["lr"] = group["lr"].fill_(lr) if mode == "plain" else lr
        before = other.state()
        run.step(run.batch(index))
        captured(run.batch(index))
        assert not differences(run.state(), other.state())
        assert ("fc1.weight" in differences(before, other.state())) == (lr > 0)


def test_a_learning_rate_that_is_another_tensor() -> None:
    run = Run("plain")
    captured = run.capture()
    run.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    text = refusal(lambda: captured(run.batch(0)))
    assert INVALID in text
    assert "param_groups[0]['lr']" in text


def test_detached() -> None:
    run = Run()
    captured = run.capture()
    run.buf.detach()
    assert INVALID + "the model was detached. " in refusal(lambda: captured(run.batch(0)))


@pytest.mark.parametrize("mode", ["sharded", "plain"])
def test_loaded(mode: str, tmp_path: Path) -> None:
    run = Run(mode)
    captured = run.capture()
    captured(run.batch(0))
    path = mb.save_checkpoint(tmp_path, 1, run.model, run.optimizer)
    captured(run.batch(1))
    mb.load_checkpoint(path, run.model, run.optimizer)
    text = refusal(lambda: captured(run.batch(1)))
    assert INVALID in text
    # An optimizer of torch gets new tensors for its state and for its lr.
    assert re.search(
        "optimizer state was loaded, into other memory" if mode == "sharded" else r"of parameter \d|'lr'", text
    )
    # Captured again, it goes on from what was loaded.
    other = Run(mode)
    other.train(other.step, range(2))
    expected, found = other.state(), run.capture()
    found(run.batch(1))
    assert not differences(run.state(), expected)


@pytest.mark.parametrize("mode", ["sharded", "plain"])
def test_optimizer_state_loaded(mode: str) -> None:
    run = Run(mode)
    captured = run.capture()
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    text = refusal(lambda: captured(run.batch(0)))
    assert INVALID in text
    assert ("optimizer state was loaded" in text) == (mode == "sharded")


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager_path"])
def test_gradients_left_by_a_backward(is_compiled: bool) -> None:
    run = Run(is_compiled=is_compiled)
    captured = run.capture()
    captured(run.batch(0))
    with run.buf.no_sync():
        run.backward(run.batch(1))
    text = refusal(lambda: captured(run.batch(1)))
    assert re.search(r"gradients in '?fc1.weight'? was \(False, False\) and is \(True, False\): end the step", text)
    assert CHANGED in text
    run.optimizer.zero_grad()
    captured(run.batch(1))


def test_training_mode() -> None:
    run = Run(build=lambda: nn.Sequential(nn.Linear(13, 5), nn.BatchNorm1d(5)))
    captured = run.capture()
    run.model.eval()
    assert "modules in eval mode was [] and is ['the model', " in refusal(lambda: captured(run.batch(0)))
    run.model.train()
    captured(run.batch(0))
    run.model[1].eval()
    assert "eval" in refusal(lambda: captured(run.batch(0)))


def test_frozen_parameters() -> None:
    run = Run()
    captured = run.capture()
    run.model.fc1.weight.requires_grad_(False)
    assert "'fc1.weight'" in refusal(lambda: captured(run.batch(0)))


def test_a_replaced_parameter() -> None:
    for mode in ("sharded", "plain"):
        run = Run(mode)
        captured = run.capture()
        run.model.fc2.weight.data = run.model.fc2.weight.data.clone()
        text = refusal(lambda: captured(run.batch(0)))  # noqa: B023
        assert INVALID + "parameter fc2.weight is in other memory than when it was captured" in text


def test_replaced_tensors_of_the_model() -> None:
    """Other objects under the same names, as ``load_state_dict(assign=True)`` leaves them."""
    run = Run(build=lambda: nn.Sequential(nn.Linear(13, 5), nn.BatchNorm1d(5)))
    captured = run.capture()
    run.model[1].running_mean = torch.zeros(5)
    text = refusal(lambda: captured(run.batch(0)))
    assert INVALID + "'1.running_mean' is another tensor than when it was captured" in text
    run = Run()
    captured = run.capture()
    run.model.load_state_dict({name: value.clone() for name, value in run.model.state_dict().items()}, assign=True)
    assert INVALID + "'fc1.weight' is another tensor" in refusal(lambda: captured(run.batch(0)))


def test_hooks_added_to_a_compiled_module() -> None:
    run = Run(is_compiled=True)
    captured = run.capture()
    run.model.fc1.register_forward_hook(lambda *args: None)
    with pytest.raises(RuntimeError, match="hooks of module 'fc1' changed after it was compiled"):
        captured(run.batch(0))


def test_inside_no_sync() -> None:
    run = Run()
    captured = run.capture()
    with run.buf.no_sync():
        assert "leave `with buf.no_sync()` inside the step" in refusal(lambda: captured(run.batch(0)))


def test_complete_gradients_wanted() -> None:
    run = Run()
    captured = run.capture()
    run.buf.force_all_reduce = True
    assert "force_all_reduce was False and is True" in refusal(lambda: captured(run.batch(0)))


def test_weights_written() -> None:
    """Weights of fp32 models are their own masters; those of others are warned about, as before an ordinary step."""
    run = Run()
    captured = run.capture()
    with torch.no_grad():
        run.model.fc1.weight.mul_(2)
    captured(run.batch(0))
    run = Run(dtype=torch.bfloat16)
    captured = run.capture()
    with torch.no_grad():
        run.model.fc1.weight.mul_(2)
    with pytest.warns(UserWarning, match="weights were written since the last step"):
        captured(run.batch(0))
