"""All that one attached model needs at run time: buffers, collectives and the state of the step.

[Note: when a bucket group is reduced]
In a graph, directly after its last write, when the graph covers the group and nobody else will write it (``roles.py``).
Otherwise by the host: from the AccumulateGrad hook of its last parameter, or in ``finish_grad_sync`` at the latest.
Slots that the step did not write are zeroed just before; nothing else is ever zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from megabuf_fx.runtime.access import BufferAccess
from megabuf_fx.runtime.bucket_groups import GradReducer, ParamGatherer, ParamPhase
from megabuf_fx.runtime.buffers import MakeStore, ParamGradBuffer, find_promoted
from megabuf_fx.runtime.capture_state import CaptureState
from megabuf_fx.runtime.channels import make_channel
from megabuf_fx.runtime.drift import DriftCheck
from megabuf_fx.runtime.grad_checks import GradChecks
from megabuf_fx.runtime.grad_writes import GradWrites
from megabuf_fx.runtime.memory import BufferMemory
from megabuf_fx.runtime.ops import all_reduce_, all_reduce_amax_, register_target, unregister_target
from megabuf_fx.runtime.options import RuntimeOptions
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.profile import Collective, CollectiveTrace, make_recorder
from megabuf_fx.runtime.quantized_weights import QuantizedWeights
from megabuf_fx.runtime.shared_storage import bucket_names
from megabuf_fx.runtime.step_state import StepState
from megabuf_fx.runtime.transports import Communicators
from megabuf_fx.runtime.usage import UsedParams


class ModelBuffers:
    """Buffers of one model, in the registry that graphs refer to (a ``SyncTarget``)."""

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[nn.Parameter],
        comms: Communicators,
        options: RuntimeOptions,
        make_store: MakeStore | None = None,
        memory: BufferMemory | None = None,
        *,
        rank: int = 0,
        is_profiling: Callable[[], bool] = lambda: False,
        version_of: Callable[[Tensor], int] = lambda tensor: 0,
    ) -> None:
        """``rank`` names what is written; ``is_profiling`` tells whether ``torch.profiler`` records now; ``version_of``
        a tensor changes when it is written in place."""
        self.handle = register_target(self)
        self.plan = plan
        self.params = list(params)
        self._index = {id(param): index for index, param in enumerate(params)}
        self.locations = plan.locations
        self.group_of = plan.group_of_param
        self.comms = comms
        self.comm = comms.dense.grads
        """Joins all ranks; everything but the collectives of expert buckets runs on it."""
        self.options = options
        device = params[0].device
        promoted = find_promoted(plan, options.param_name_patterns_for_fp32_local_accumulation)
        self._memory = memory or BufferMemory()
        with self._memory.allocating():
            self.buffers = [
                ParamGradBuffer(
                    layout,
                    params,
                    device=device,
                    sharded=plan.sharded,
                    promoted=promoted,
                    make_store=make_store if layout.key.param_dtype == torch.uint8 else None,
                )
                for layout in plan.layouts
            ]
        self._memory.register()
        self.main_grads = [self.buffers[buffer].main_grads[i] for i, (buffer, _) in enumerate(self.locations)]
        for number, buffer in enumerate(self.buffers):
            if plan.owners is not None:
                comm = comms.pair(is_expert=buffer.layout.key.is_expert_parallel).params
                owners = {index: plan.owners[index] for index in plan.layouts[number].params}
                names = bucket_names(buffer.layout, plan.params)
                buffer.own_whole(owners, names, size=comm.size, rank=comm.rank)
        self.publishes_grad = not plan.is_gathered and all(
            main_grad.dtype == spec.dtype for main_grad, spec in zip(self.main_grads, plan.params)
        )
        """After the reduction ``.grad`` is ``main_grad``, so that any optimizer finds it."""
        self.token = torch.zeros(1, device=device)
        channels = [make_channel(layout.key, comms, options) for layout in plan.layouts]
        self.reducer = GradReducer(plan, self.buffers, channels, handle=self.handle)
        self.gatherer = (
            ParamGatherer(
                plan,
                self.buffers,
                [comms.pair(is_expert=layout.key.is_expert_parallel).params for layout in plan.layouts],
                handle=self.handle,
                prefetch=options.param_gather_prefetch,
            )
            if plan.is_gathered
            else None
        )
        is_quantized = any(buffer.stored is not None for buffer in self.buffers)
        self.weights = (
            QuantizedWeights(plan, params, self.buffers, self._reduce_amax, version_of) if is_quantized else None
        )
        """The quantized parameters, if there are any."""
        self._places = [
            (index, number, slot.start * param.element_size(), param.dtype)
            for index, (param, (number, slot)) in enumerate(zip(params, self.locations))
            if self.buffers[number].holds_params and param.numel()
        ]
        """Parameters that lie in buffers, with buffer, offset in bytes and dtype."""
        self.access = BufferAccess(params, self.buffers, self.weights, self._memory, self.sync_params)
        self.state = StepState(plan)
        self.capture = CaptureState(device)
        recorder = make_recorder(
            options.dump_dir if options.profile else None,
            rank=rank,
            handle=self.handle,
            device=device,
            is_paused=lambda: self.capture.is_active,
        )
        self.trace = CollectiveTrace(plan, recorder, is_profiling)
        self.owner: Callable[[], object] = lambda: None
        """Weak reference to the user's handle."""
        self.boundaries: dict[int, Any] = {}
        """Where compiled graphs start the reduction of each bucket group, for reports."""
        self.compiles = 0
        """Compiled variants of graphs with parameters of this model."""
        self.has_inductor_graphs = False
        """Inductor records CUDA graphs of some compiled graph (``mode="reduce-overhead"``)."""
        self.is_closed = False
        self.resets = 0
        """How often a new step began: what was derived from gradients of an earlier one is void."""
        self._is_finished = False
        """Everything of this step is reduced; nothing can be added before the next reset."""
        self._usage = UsedParams(plan, comms, device) if options.find_unused_parameters else None
        checks = options.check_for_nan_in_grad or options.check_for_large_grads
        self.checks = (
            GradChecks(
                plan,
                lambda found: all_reduce_(found, self.handle, True),
                device,
                nan=options.check_for_nan_in_grad,
                large=options.check_for_large_grads,
            )
            if checks
            else None
        )
        every = options.check_for_drift_every
        self.drift = DriftCheck(plan, self.comms, self.access.values_of, every) if every is not None else None
        self.writes = GradWrites(
            plan,
            params,
            self.main_grads,
            state=self.state,
            reducer=self.reducer,
            access=self.access,
            capture=self.capture,
            comm=self.comm,
            options=options,
            handle=self.handle,
            publishes_grad=self.publishes_grad,
            start=self.start_grad_sync,
        )
        """Who writes gradients, and where they go."""

    # What graphs call: host ops.

    def start_grad_sync(self, group: int, *, scaled: bool = False) -> None:
        """Reduce a bucket group whose gradients are final; ``scaled`` when they have been multiplied by their factor
        of ``GradScaling``."""
        self.writes.before_start(group)
        if self.gatherer is not None:
            # On every rank all gathers of the last step go out before the first reduction of this one, used or not.
            self.gatherer.start_all()
        self.access.claim_gradients("gradients are reduced")
        for param in sorted(self.writes.params_of[group] - self.state.written):
            self.main_grads[param].zero_()
        if self.checks is not None:
            self.checks.look(group, self.main_grads)
        self.reducer.start(group, scaled=scaled)

    def wait_param_sync(self, group: int) -> None:
        """Make the parameters of a bucket group current."""
        if self.gatherer is not None:
            self.gatherer.wait(group)

    # Device ops.

    def start_reduction(self, group: int, *, scatter: bool) -> None:
        what: Collective = "reduce_scatter" if scatter else "all_reduce"
        self.trace.launch(what, group, lambda: self.reducer.start_reduction(group, scatter=scatter))

    def wait_reduction(self, group: int) -> None:
        self.trace.wait("reduction", group, lambda: self.reducer.wait_reduction(group))

    def start_gather(self, group: int) -> None:
        gatherer = self.gatherer
        assert gatherer is not None
        self.trace.launch("all_gather", group, lambda: gatherer.start_gather(group))

    def wait_gather(self, group: int) -> None:
        gatherer = self.gatherer
        assert gatherer is not None
        self.trace.wait("gather", group, lambda: gatherer.wait_gather(group))

    def all_reduce(self, value: Tensor, *, maximum: bool) -> None:
        if maximum:
            self.comm.all_reduce_max(value).wait()
        else:
            self.comm.reduce_scalar(value)

    def all_reduce_amax(self, amax: Tensor, *, is_expert: bool) -> None:
        self.comms.pair(is_expert=is_expert).grads.all_reduce_max(amax).wait()

    def _reduce_amax(self, amax: Tensor, is_expert: bool) -> None:
        all_reduce_amax_(amax, self.handle, is_expert)

    # What wrappers of compiled graphs call.

    def index_of(self, param: object) -> int | None:
        """Index of an attached parameter, None if it is not ours."""
        index = self._index.get(id(param))
        return index if index is not None and self.params[index] is param else None

    def before_forward(self, *, in_backward: bool) -> None:
        """Start the gathers that the last step left; graphs wait for them bucket by bucket.

        Where ``.grad`` is published, nobody tells that a backward was aborted by an exception: reductions that it
        started and that its end did not finish are dropped here. ``in_backward`` is for recomputation, which happens
        inside a backward.
        """
        if self.is_closed:
            raise RuntimeError(
                "this graph was compiled for buffers that were detached; call torch.compiler.reset() and compile again"
            )
        self.access.require_params("a forward runs")
        if self.token.is_cuda and not self.capture.is_active and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph of this model is being captured by other means; use megabuf_fx.capture_step or "
                "capture_micro_batch, which check that a replay does what the step did"
            )
        self.writes.before_forward(in_backward=in_backward)
        if self.gatherer is not None and not self.options.align_param_gather:
            self.gatherer.start_ahead()
        if self.publishes_grad and not in_backward and self.reducer.has_started:
            self._is_finished = False
            self.reducer.reset()
            self.state.reopen()
            self.writes.forget_in_flight()

    # What a step calls.

    def check_addresses(self) -> None:
        """Raise when somebody replaced ``param.data``: the buffer would no longer see the parameter (sharded only)."""
        if self.weights is not None:
            self.weights.refuse_replaced()
        bases = [buffer.param_data.data_ptr() if buffer.param_data is not None else 0 for buffer in self.buffers]
        for index, number, offset, dtype in self._places:
            param = self.params[index]
            if param.data_ptr() != bases[number] + offset or param.dtype != dtype:
                raise RuntimeError(
                    f"the data of parameter '{self.plan.params[index].name}' was replaced after attach, so it is "
                    "no longer in its buffer; copy values into it instead (param.data.copy_(...)), or detach, "
                    "change the model and attach again"
                )

    def start_grad_syncs(self) -> None:
        """Start the reduction of every bucket group that has not started."""
        self.writes.take_left_grads()
        for group in range(len(self.plan.groups)):
            if not self.reducer.is_started(group):
                self.start_grad_sync(group)

    def finish_grad_sync(self, *, force_all_reduce: bool = False) -> None:
        """Reduce what is left and wait for everything. Calling it again changes nothing until the next reset.

        Raises:
            RuntimeError: NaN or Inf was found; complete gradients are wanted of a group that was reduce-scattered.
        """
        self.comm.check_alive()
        if self._is_finished or (self.state.is_reduced and any(param.grad is not None for param in self.params)):
            return
        self.writes.refuse_added_outside()
        self._start_remaining(force_all_reduce=force_all_reduce)
        if self._usage is not None and not self.capture.is_active:
            self._usage.start(self._used_here())
        for group in range(len(self.plan.groups)):
            self.reducer.wait(group)
        self.writes.late.reduce()
        self.state.is_unsynced = False
        self._is_finished = True
        has_findings = self.checks is not None and self.checks.exchange()
        if not self.capture.is_active:
            self.report(has_findings=has_findings)

    def report(self, *, has_findings: bool) -> None:
        """What the host does with the findings of a step: gradient checks, and the drift check when it is due."""
        if self.checks is not None and has_findings:
            self.checks.report()
        if self.drift is not None and self.drift.is_due():
            self.sync_params()
            self.drift.check()

    def _start_remaining(self, *, force_all_reduce: bool) -> None:
        reducer = self.reducer
        if force_all_reduce and self.plan.sharded:
            for group in range(len(self.plan.groups)):
                if reducer.is_started(group) and not reducer.is_complete[group]:
                    raise RuntimeError(
                        f"finish_grad_sync(force_all_reduce=True), but bucket {group} was already reduce-scattered "
                        "inside the backward; set buf.force_all_reduce = True before the backward"
                    )
        before = reducer.force_all_reduce
        reducer.force_all_reduce = before or force_all_reduce
        try:
            self.start_grad_syncs()
        finally:
            reducer.force_all_reduce = before

    def used_params(self) -> list[bool]:
        """Which parameters got a gradient on some rank, after ``finish_grad_sync``.

        Without ``find_unused_parameters`` those that this rank wrote where ``.grad`` is published, otherwise all.
        """
        # A captured step uses the same parameters every time; asking would need the host.
        if not self.capture.is_active:
            if self._usage is not None:
                self.capture.used = self._usage.wait()
            else:
                used = self._used_here() if self.publishes_grad else range(len(self.params))
                self.capture.used = [param in used for param in range(len(self.params))]
            for param in self.state.used_elsewhere:
                self.capture.used[param] = True
        return self.capture.used

    def note_used(self, param: int) -> None:
        """A copy of this parameter on another axis has a gradient, so all copies are updated."""
        self.state.used_elsewhere.add(param)
        if self.publishes_grad:
            self.params[param].grad = self.main_grads[param]

    def _used_here(self) -> Set[int]:
        if self.publishes_grad:
            return {index for index, param in enumerate(self.params) if param.grad is not None}
        return self.state.written

    def reset(self) -> None:
        """A new step: every slot counts as unwritten. Drains reductions in flight, zeroes nothing."""
        self.reducer.reset()
        self.access.release_gradients()
        self._is_finished = False
        self.count_step()
        self.state.reset()
        if self._usage is not None:
            self._usage.reset()
        self.writes.reset()

    def count_step(self) -> None:
        """A step has ended, here or in a replay."""
        self.trace.end_step()
        self.resets += 1
        self.reducer.step = self.resets
        if self.gatherer is not None:
            self.gatherer.step = self.resets

    def reopen(self) -> None:
        """Allow further accumulation on top of published gradients, which are equal on all ranks."""
        self.trace.end_step()
        self._is_finished = False
        self.reducer.reset()
        self.state.reopen()
        self.state.is_reduced = True

    def after_step(self) -> None:
        """The optimizer has written this rank's shards: gather now, or leave it to the next forward.

        A compiled module runs its hooks in the graph, so eager code inside it (after a graph break) finds nobody who
        waits. Which buckets such code reads is known since the first backward; those are gathered now.
        """
        if self.gatherer is None:
            return
        self.gatherer.mark_stale()
        if self.options.debug_nan_stale_params:
            self.gatherer.poison_stale()
        if not self.options.overlap_param_gather:
            self.gatherer.wait_all()
            return
        if self.options.overlap_param_gather_with_optimizer_step or self.state.eager_groups:
            self.gatherer.start_all()
        for group in sorted(self.state.eager_groups, reverse=True):
            self.gatherer.wait(group)

    @property
    def gather_phases(self) -> list[ParamPhase]:
        """Of every bucket group. Settable for a captured step, which gathers by itself what was stale when it began."""
        if self.gatherer is None:
            return [ParamPhase.CURRENT] * len(self.plan.groups)
        return list(self.gatherer.phases)

    @gather_phases.setter
    def gather_phases(self, phases: Sequence[ParamPhase]) -> None:
        assert self.gatherer is not None
        self.gatherer.phases = phases

    def sync_params(self) -> None:
        """Make every parameter current."""
        if self.gatherer is not None:
            self.gatherer.wait_all()

    def drop_gradients(self) -> None:
        """Let go of all gradients of this step and of everything that holds them."""
        if self.access.is_shared:
            self.sync_params()
        self.reset()
        self.writes.clear_grads()

    def is_quantized(self, param: object) -> bool:
        """Whether this is a quantized parameter of the model."""
        index = self.index_of(param)
        return self.weights is not None and index is not None and index in self.weights

    def tensors(self) -> dict[str, Tensor]:
        """Everything on the device that lives from step to step, parameters apart, by name."""
        named: dict[str, Tensor] = {"token": self.token}
        if self.weights is not None:
            named.update(self.weights.tensors())
        for number, buffer in enumerate(self.buffers):
            named[f"grad_data[{number}]"] = buffer.grad_data
            if buffer.param_data is not None:
                named[f"param_data[{number}]"] = buffer.param_data
            for param in buffer.promoted:
                named[f"main_grad of {self.plan.params[param].name}"] = buffer.main_grads[param]
        named.update({f"flags.{name}": value for name, value in self.capture.flags.named().items()})
        if self.checks is not None:
            named.update({f"checks.{name}": value for name, value in self.checks.tensors().items()})
        return named

    def close(self) -> None:
        """Drain, give parameters their own storage back, leave the registry and destroy the communicators."""
        self.access.offload.restore("parameters")
        self.sync_params()
        self.reducer.reset()
        self.is_closed = True
        self.trace.close()
        self.capture.invalidate("the model was detached")
        unregister_target(self.handle)
        if self.weights is not None:
            self.weights.release()
        for buffer in self.buffers:
            buffer.release()
        self._memory.close()
        self.comms.close()
