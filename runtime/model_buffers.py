"""All that one attached model needs at run time: buffers, collectives and the state of the step.

[Note: when a bucket group is reduced]
In a graph, directly after its last write, when the graph covers the group and nobody else will write it (``roles.py``).
Otherwise by the host: from the AccumulateGrad hook of its last parameter, or in ``finish_grad_sync`` at the latest.
Slots that the step did not write are zeroed just before; nothing else is ever zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from megabuf_fx.runtime.access import BufferAccess
from megabuf_fx.runtime.bucket_groups import GradReducer, ParamGatherer, ParamPhase
from megabuf_fx.runtime.buffers import MakeStore, ParamGradBuffer, find_promoted
from megabuf_fx.runtime.capture_state import CaptureState
from megabuf_fx.runtime.channels import make_channel
from megabuf_fx.runtime.drift import DriftCheck
from megabuf_fx.runtime.flags import was_added_outside, was_any_added_outside
from megabuf_fx.runtime.grad_checks import GradChecks
from megabuf_fx.runtime.late_gradients import LateGradients
from megabuf_fx.runtime.leaf_hooks import LeafHooks
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
        self.params_of = [frozenset(group.params) for group in plan.groups]
        """Indices of the parameters of each bucket group."""
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
        self.leaf_hooks = LeafHooks(params, [group.params for group in plan.groups])
        self.owner: Callable[[], object] = lambda: None
        """Weak reference to the user's handle."""
        self.boundaries: dict[int, Any] = {}
        """Where compiled graphs start the reduction of each bucket group, for reports."""
        self.no_sync_depth = 0
        self.is_compiled = False
        """Some compiled graph uses this model."""
        self.compiles = 0
        """Compiled variants of graphs with parameters of this model."""
        self.has_inductor_graphs = False
        """Inductor records CUDA graphs of some compiled graph (``mode="reduce-overhead"``)."""
        self.is_closed = False
        self.resets = 0
        """How often a new step began: what was derived from gradients of an earlier one is void."""
        self._backward_id = -1
        self._is_reduced = False
        """``publishes_grad``: nothing was accumulated since the last reduction."""
        self._is_reduced_before = False
        """The same, when the running backward began."""
        self._is_finished = False
        """Everything of this step is reduced; nothing can be added before the next reset."""
        self._is_finalized_before = False
        """The next, when the running backward began."""
        self.is_finalized = False
        """Gradients were reduced over other axes, too (``finalize_model_grads``); once in a step."""
        self._used_elsewhere: set[int] = set()
        """Parameters without gradient here whose copies on other axes have one."""
        self._untouched_id = -1
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
        self._started_in: dict[int, int] = {}
        self._graph_wrote: dict[int, set[int]] = {}
        """Parameters that graphs wrote, by the autograd pass they ran in; since the last forward."""
        self._in_flight: set[int] = set()
        """``publishes_grad``: parameters that a graph wrote and whose AccumulateGrad node has not run since."""
        self._writer: torch.cuda.Stream | None = None
        """The stream on which a graph wrote last."""
        self._late = LateGradients(self.reducer, self.comm, self.main_grads)

    # What graphs call: host ops.

    def start_grad_sync(self, group: int, *, scaled: bool = False) -> None:
        """Reduce a bucket group whose gradients are final; ``scaled`` when they have been multiplied by their factor
        of ``GradScaling``."""
        if self._writer is not None and self._writer != torch.cuda.current_stream(self.token.device):
            # Autograd synchronizes streams for gradients that it sees, and it sees none of a graph's.
            torch.cuda.current_stream(self.token.device).wait_stream(self._writer)
        if self.gatherer is not None:
            # On every rank all gathers of the last step go out before the first reduction of this one, used or not.
            self.gatherer.start_all()
        self.access.claim_gradients("gradients are reduced")
        for param in sorted(self.params_of[group] - self.state.written):
            self.main_grads[param].zero_()
        if self.checks is not None:
            self.checks.look(group, self.main_grads)
        self._started_in[group] = self._backward_id
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
        if not in_backward:
            self._graph_wrote.clear()
        if self.gatherer is not None and not self.options.align_param_gather:
            self.gatherer.start_ahead()
        if self.publishes_grad and not in_backward and self.reducer.has_started:
            self._is_finished = False
            self.reducer.reset()
            self.state.reopen()
            self._in_flight.clear()

    def enter_backward(self, backward_id: int) -> None:
        """``backward_id`` names the autograd pass that runs now (its graph task)."""
        if backward_id != self._backward_id:
            self._backward_id = backward_id
            self.state.is_unsynced = self.no_sync_depth > 0
            self._is_reduced_before, self._is_reduced = self._is_reduced, False
            self._is_finalized_before = self.is_finalized
            if self.publishes_grad:
                self._reopen_axes()
                self._notice_zeroed()

    def _reopen_axes(self) -> None:
        """Other axes have not seen the gradients that come now."""
        self.is_finalized = False
        self._used_elsewhere.clear()

    def _notice_zeroed(self) -> None:
        """Any optimizer may have reset ``.grad`` to None: then the slot no longer holds a gradient."""
        for index, param in enumerate(self.params):
            if param.grad is None and index not in self._in_flight:
                self.state.written.discard(index)

    def note_writer(self) -> None:
        """A graph is about to write on the current stream."""
        if self.token.is_cuda:
            self._writer = torch.cuda.current_stream(self.token.device)

    def prepare_graph_writes(self, params: Set[int]) -> None:
        """Before a graph decides between overwriting and adding: take over what the user put into ``.grad``.

        Where it is published, ``.grad`` is None while the graph runs, so that an eager contribution arrives on its own.
        """
        if not self.publishes_grad:
            return
        for param in params:
            grad = self.params[param].grad
            if grad is not None:
                self._refuse_second_sum(param)
                if grad.data_ptr() != self.main_grads[param].data_ptr():
                    self.main_grads[param].copy_(grad)
                self.state.written.add(param)
                self.params[param].grad = None

    def mark_graph_writes(self, params: Set[int]) -> None:
        """The graph that runs next writes these slots."""
        self.state.written.update(params)
        self._graph_wrote.setdefault(self._backward_id, set()).update(params)
        if self.publishes_grad:
            self._in_flight.update(params)

    def mark_untouched(self) -> None:
        """The running backward hands out plain gradients; what autograd accumulates of them teaches nothing."""
        self._untouched_id = self._backward_id
        self.wake(self.leaf_hooks.quiet)

    # [Note: quiet bucket groups]

    def hush(self, groups: Iterable[int]) -> None:
        """A graph covers these bucket groups: hooks need not run for gradients that it writes."""
        # Where .grad is published, they make it the view.
        for group in groups if not self.publishes_grad else ():
            if group not in self.state.eager_groups:
                self.leaf_hooks.hush(group)

    def wake(self, groups: Iterable[int]) -> None:
        """Something outside graphs may give gradients to those of these bucket groups that are quiet."""
        for group in self.leaf_hooks.quiet.intersection(groups):
            self.leaf_hooks.wake(group)

    def take_left_grads(self) -> None:
        """Take what autograd has left in ``.grad`` of parameters without hooks."""
        left = self._wake_left()
        if left:
            # The backward that left them may have come after one under `no_sync`.
            self.state.is_unsynced = self.state.is_unsynced and self.no_sync_depth > 0
        for param in left:
            self.after_accumulate(param)

    def clear_grads(self) -> None:
        """Make ``.grad`` of every parameter None."""
        self._wake_left()
        # The others have none.
        for param in self.leaf_hooks.hooked:
            self.params[param].grad = None

    def _wake_left(self) -> list[int]:
        """Wake the groups in which autograd has left gradients; the parameters that have them."""
        if not self.leaf_hooks.have_left_grads:
            return []
        quiet = [param for group in self.leaf_hooks.quiet for param in self.params_of[group]]
        left = sorted(param for param in quiet if self.params[param].grad is not None)
        self.wake({self.group_of[param] for param in left})
        return left

    def after_graph(self, groups: Iterable[int]) -> None:
        """The backward of a graph that covers these bucket groups has run: start those for which no hook will."""
        if self.no_sync_depth or not self.options.overlap_grad_reduce:
            return
        for group in groups:
            if (
                group in self.leaf_hooks.quiet
                and not self.reducer.is_started(group)
                and not self.state.is_awaited((self.handle, group))
            ):
                self.start_grad_sync(group)

    def _refuse_second_sum(self, param: int) -> None:
        """Published gradients may be added to reduced ones: averages add up. Sums over ranks do not."""
        is_sum = self.options.calculate_per_token_loss and self.comm.size > 1 and self._is_reduced_before
        if (is_sum or self._is_finalized_before) and self.params[param].grad is not None:
            reason = "calculate_per_token_loss=True" if is_sum else "finalize_model_grads"
            raise RuntimeError(
                f"backward adds to the gradient of '{self.plan.params[param].name}', which was already summed over "
                f"ranks ({reason}) and would be summed again. Run all micro-batches but the last "
                "inside `with buf.no_sync()`, and call zero_grad() after every step"
            )

    # What the hooks on AccumulateGrad nodes call.

    def after_accumulate(self, param: int) -> None:
        """Autograd has accumulated one backward's gradients of ``param`` outside graphs into ``.grad``, if any.

        Raises:
            RuntimeError: sparse gradient.
            NotImplementedError: a fused kernel outside our graphs added to ``main_grad``.
        """
        tensor = self.params[param]
        if was_added_outside(tensor):
            self._refuse_outside(param)
        if self.publishes_grad:
            self._in_flight.discard(param)
        grad = tensor.grad
        if grad is not None and grad.layout != torch.strided:
            raise RuntimeError(
                f"parameter '{self.plan.params[param].name}' got a {grad.layout} gradient; contiguous buffers hold "
                "dense gradients only (build the embedding with sparse=False)"
            )
        if grad is not None and grad.data_ptr() != self.main_grads[param].data_ptr():
            if self.publishes_grad and not self._has_graph_written(param):
                # Autograd made a new tensor, so .grad was None: the user has zeroed.
                self.state.written.discard(param)
            self.add_eager_gradient(param, grad)
            tensor.grad = None
        elif grad is not None:
            # Autograd has added in place: .grad is published, the buffer view.
            self._refuse_second_sum(param)
            self.state.written.add(param)
        if self.publishes_grad and param in self.state.written:
            tensor.grad = self.main_grads[param]
        self._arrive(param)

    def _refuse_outside(self, param: int) -> None:
        raise NotImplementedError(
            f"a fused kernel added the gradient of '{self.plan.params[param].name}' to main_grad by itself "
            "(grad_added_to_main_grad); turn off weight-gradient fusion in that module"
        )

    def refuse_reduced(self, group: int) -> None:
        """Raise when the group's gradients were reduced in an earlier backward and not reset since."""
        if self._started_in.get(group) != self._backward_id:
            self._refuse_started(group)
        self.access.claim_gradients("a backward writes gradients")

    def _refuse_started(self, group: int) -> None:
        if self.reducer.is_started(group):
            names = ", ".join(self.plan.params[p].name for p in self.plan.groups[group].params[:3])
            raise RuntimeError(
                f"backward writes bucket {group} ({names}, ...) whose gradients were already reduced. Run all "
                "micro-batches but the last inside `with buf.no_sync()`, and call zero_grad() after every step"
            )

    # What a captured micro-batch calls around its replays.

    def before_replay(self, writes: Sequence[int]) -> None:
        """The replay that follows writes the slots of these parameters: say whether it overwrites or adds.

        Raises:
            RuntimeError: one of them was reduced and not reset.
        """
        for group in sorted({self.group_of[param] for param in writes}):
            self._refuse_started(group)
        if self.publishes_grad:
            self._reopen_axes()
            self._notice_zeroed()
        self.sync_params()
        self.access.claim_gradients("a captured micro-batch writes gradients")
        is_later = not self.state.written.isdisjoint(writes)
        for param in writes if is_later else ():
            if param not in self.state.written:
                self.zero(param)
        self.capture.flags.accumulate.fill_(int(is_later))

    def after_replay(self, writes: Sequence[int]) -> None:
        """The slots of these parameters are written."""
        self.state.written.update(writes)
        for param in writes if self.publishes_grad else ():
            self.params[param].grad = self.main_grads[param]

    def zero(self, param: int) -> None:
        """Zero the slot of a parameter that some graph will add to."""
        if self.capture.is_micro_batch:
            # It keeps what an earlier micro-batch has left there.
            main_grad, flag = self.main_grads[param], self.capture.flags.accumulate
            main_grad.copy_(torch.where(flag != 0, main_grad, 0))
        else:
            self.main_grads[param].zero_()
        self.state.written.add(param)

    def add_eager_gradient(self, param: int, grad: Tensor) -> None:
        """Take a gradient that autograd accumulated outside compiled graphs.

        Raises:
            RuntimeError: the bucket was reduced before this gradient came.
        """
        group = self.group_of[param]
        self.refuse_reduced(group)
        if self._untouched_id != self._backward_id:
            if self._has_graph_written(param):
                self.state.eager_params.add(param)
            if self.is_compiled:
                self.state.eager_groups.add(group)
        if self.reducer.is_started(group):
            self._late.take(param, grad)
        elif param in self.state.written:
            self.main_grads[param].add_(grad)
        else:
            if self.capture.is_micro_batch:
                grad = torch.where(self.capture.flags.accumulate != 0, self.main_grads[param] + grad, grad)
            self.main_grads[param].copy_(grad)
            self.state.written.add(param)

    def _has_graph_written(self, param: int) -> bool:
        """Whether a graph has written the slot in the running backward."""
        return param in self._graph_wrote.get(self._backward_id, ())

    def _arrive(self, param: int) -> None:
        """Start the group of ``param`` if all its contributions have come."""
        if self.no_sync_depth:
            return
        self.state.mark_arrived(param)
        group = self.group_of[param]
        if (
            not self.reducer.is_started(group)
            and self.options.overlap_grad_reduce
            and self.state.is_complete(group, by_count=not self.is_compiled)
            and not self.state.is_awaited((self.handle, group))
        ):
            self.start_grad_sync(group)

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
        self.take_left_grads()
        for group in range(len(self.plan.groups)):
            if not self.reducer.is_started(group):
                self.start_grad_sync(group)

    def finish_grad_sync(self, *, force_all_reduce: bool = False) -> None:
        """Reduce what is left and wait for everything. Calling it again changes nothing until the next reset.

        Raises:
            RuntimeError: NaN or Inf was found; complete gradients are wanted of a group that was reduce-scattered.
        """
        self.comm.check_alive()
        if self._is_finished or (self._is_reduced and any(param.grad is not None for param in self.params)):
            return
        if was_any_added_outside(self.params):
            # In a quiet bucket group, where no hook runs when a kernel gives no gradient.
            self._refuse_outside(next(i for i, param in enumerate(self.params) if was_added_outside(param)))
        self._start_remaining(force_all_reduce=force_all_reduce)
        if self._usage is not None and not self.capture.is_active:
            self._usage.start(self._used_here())
        for group in range(len(self.plan.groups)):
            self.reducer.wait(group)
        self._late.reduce()
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
            for param in self._used_elsewhere:
                self.capture.used[param] = True
        return self.capture.used

    def note_used(self, param: int) -> None:
        """A copy of this parameter on another axis has a gradient, so all copies are updated."""
        self._used_elsewhere.add(param)
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
        self._is_finalized_before = False
        self._reopen_axes()
        self.count_step()
        self.state.reset()
        if self._usage is not None:
            self._usage.reset()
        self._is_reduced = False
        self._in_flight.clear()
        self._graph_wrote.clear()
        self._late.forget()
        self._writer = None

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
        self._is_reduced = True

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
        self.gatherer.phases = list(phases)

    def sync_params(self) -> None:
        """Make every parameter current."""
        if self.gatherer is not None:
            self.gatherer.wait_all()

    def drop_gradients(self) -> None:
        """Let go of all gradients of this step and of everything that holds them."""
        if self.access.is_shared:
            self.sync_params()
        self.reset()
        self.clear_grads()

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
