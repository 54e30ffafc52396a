"""All that one attached model needs at run time: buffers, collectives and the state of the step.

[Note: when a bucket group is reduced]
In a graph, directly after its last write, when the graph covers the group and nobody else will write it (``roles.py``).
Otherwise by the host: from the AccumulateGrad hook of its last parameter, or in ``finish_grad_sync`` at the latest.
Slots that the step did not write are zeroed just before; nothing else is ever zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megabuf_fx.runtime.bucket_groups import GradReducer, ParamGatherer
from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.collectives import Comm
from megabuf_fx.runtime.flags import was_added_outside
from megabuf_fx.runtime.ops import register_target, unregister_target
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.step_state import StepState
from megabuf_fx.runtime.usage import UsageExchange


class ModelBuffers:
    """Buffers of one model, in the registry that graphs refer to (a ``SyncTarget``).

    ``grad_comm`` and ``param_comm`` are communicators of their own. ``scale`` and ``average`` as in ``GradReducer``.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[nn.Parameter],
        *,
        grad_comm: Comm,
        param_comm: Comm,
        scale: float,
        average: bool,
        overlap_grad_reduce: bool,
        overlap_param_gather: bool,
        find_unused_parameters: bool,
    ) -> None:
        self.plan = plan
        self.params = list(params)
        self._index = {id(param): index for index, param in enumerate(params)}
        self.locations = plan.locations
        self.group_of = plan.group_of_param
        self.overlap_grad_reduce = overlap_grad_reduce
        self.overlap_param_gather = overlap_param_gather
        device = params[0].device
        self.buffers = [ParamGradBuffer(layout, params, device=device, sharded=plan.sharded) for layout in plan.layouts]
        self.main_grads = [self.buffers[buffer].main_grads[i] for i, (buffer, _) in enumerate(self.locations)]
        self.token = torch.zeros(1, device=device)
        self.reducer = GradReducer(plan, self.buffers, grad_comm, scale=scale, average=average)
        self.gatherer = ParamGatherer(plan, self.buffers, param_comm) if plan.sharded else None
        self.state = StepState(plan)
        # Held, because autograd keeps the node of a leaf only while somebody does.
        self.accumulate_nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in params]
        self.owner: Callable[[], object] = lambda: None
        """Weak reference to the user's handle."""
        self.boundaries: dict[int, Any] = {}
        """Where compiled graphs start the reduction of each bucket group, for reports."""
        self.no_sync_depth = 0
        self.is_compiled = False
        """Some compiled graph uses this model."""
        self.is_closed = False
        self._backward_id = -1
        self._is_reduced = False
        """Not sharded: nothing was accumulated since the last reduction."""
        self._is_reduced_before = False
        """The same, when the running backward began."""
        self._untouched_id = -1
        self._usage = UsageExchange(grad_comm, len(self.params), device) if find_unused_parameters else None
        self._started_in: dict[int, int] = {}
        self._graph_wrote_in = [-1] * len(self.params)
        self._in_flight: set[int] = set()
        """Parameters that a graph wrote and whose AccumulateGrad node has not run since."""
        self._late: dict[int, Tensor] = {}
        self._has_agreed_on_late = False
        self.handle = register_target(self)

    # What graphs call.

    def start_grad_sync(self, group: int) -> None:
        """Reduce a bucket group whose gradients are final."""
        if self.gatherer is not None:
            # On every rank all gathers of the last step go out before the first reduction of this one, used or not.
            self.gatherer.start_all()
        for param in self.plan.groups[group].params:
            if not self.state.written[param]:
                self.main_grads[param].zero_()
        self._started_in[group] = self._backward_id
        self.reducer.start(group)

    def wait_param_sync(self, group: int) -> None:
        """Make the parameters of a bucket group current."""
        if self.gatherer is not None:
            self.gatherer.wait(group)

    # What wrappers of compiled graphs call.

    def index_of(self, param: object) -> int | None:
        """Index of an attached parameter, None if it is not ours."""
        index = self._index.get(id(param))
        return index if index is not None and self.params[index] is param else None

    def before_forward(self, *, in_backward: bool) -> None:
        """Start the gathers that the last step left; graphs wait for them bucket by bucket.

        Not sharded, nobody tells that a backward was aborted by an exception: reductions that it started and that its
        end did not finish are dropped here. ``in_backward`` is for recomputation, which happens inside a backward.
        """
        if self.is_closed:
            raise RuntimeError(
                "this graph was compiled for buffers that were detached; call torch.compiler.reset() and compile again"
            )
        if self.gatherer is not None:
            self.gatherer.start_all()
        elif not in_backward and any(self.reducer.is_started(group) for group in range(len(self.plan.groups))):
            self.reducer.reset()
            self.state.reopen()
            self._in_flight.clear()

    def enter_backward(self, backward_id: int) -> None:
        """``backward_id`` names the autograd pass that runs now (its graph task)."""
        if backward_id != self._backward_id:
            self._backward_id = backward_id
            self.state.is_unsynced = self.no_sync_depth > 0
            self._is_reduced_before, self._is_reduced = self._is_reduced, False
            if not self.plan.sharded:
                self._notice_zeroed()

    def _notice_zeroed(self) -> None:
        """Not sharded, any optimizer may have reset ``.grad`` to None: then the slot no longer holds a gradient."""
        for index, param in enumerate(self.params):
            if param.grad is None and index not in self._in_flight:
                self.state.written[index] = False

    def prepare_graph_write(self, param: int) -> None:
        """Before a graph decides between overwriting and adding: take over what the user put into ``.grad``.

        Not sharded, ``.grad`` is None while the graph runs, so that an eager contribution arrives on its own.
        """
        if self.plan.sharded:
            return
        self._refuse_second_sum(param)
        grad, main_grad = self.params[param].grad, self.main_grads[param]
        if grad is not None:
            if grad.data_ptr() != main_grad.data_ptr():
                main_grad.copy_(grad)
            self.state.written[param] = True
        self.params[param].grad = None

    def mark_graph_write(self, param: int) -> None:
        """The graph that runs next writes this slot."""
        self.state.written[param] = True
        self._graph_wrote_in[param] = self._backward_id
        self._in_flight.add(param)

    def mark_untouched(self) -> None:
        """The running backward hands out plain gradients; what autograd accumulates of them teaches nothing."""
        self._untouched_id = self._backward_id

    def _refuse_second_sum(self, param: int) -> None:
        """Without sharding, gradients may be added to reduced ones: averages add up. Sums over ranks do not."""
        is_sum = self.reducer.scale == 1.0 and not self.reducer.average and self.reducer.comm.size > 1
        if is_sum and self._is_reduced_before and self.params[param].grad is not None:
            raise RuntimeError(
                f"backward adds to the gradient of '{self.plan.params[param].name}', which was already summed over "
                "ranks (calculate_per_token_loss=True) and would be summed again. Run all micro-batches but the last "
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
            raise NotImplementedError(
                f"a fused kernel added the gradient of '{self.plan.params[param].name}' to main_grad by itself "
                "(grad_added_to_main_grad); turn off weight-gradient fusion in that module"
            )
        self._in_flight.discard(param)
        grad = tensor.grad
        if grad is not None and grad.layout != torch.strided:
            raise RuntimeError(
                f"parameter '{self.plan.params[param].name}' got a {grad.layout} gradient; contiguous buffers hold "
                "dense gradients only (build the embedding with sparse=False)"
            )
        if grad is not None and grad.data_ptr() != self.main_grads[param].data_ptr():
            if not self.plan.sharded and self._graph_wrote_in[param] != self._backward_id:
                # Autograd made a new tensor, so .grad was None: the user has zeroed.
                self.state.written[param] = False
            self.add_eager_gradient(param, grad)
            tensor.grad = None
        elif grad is not None:
            # Autograd has added in place: .grad is the buffer view (not sharded).
            self._refuse_second_sum(param)
            self.state.written[param] = True
        if not self.plan.sharded and self.state.written[param]:
            tensor.grad = self.main_grads[param]
        self._arrive(param)

    def refuse_reduced(self, group: int) -> None:
        """Raise when the group's gradients were reduced in an earlier backward and not reset since."""
        if self.reducer.is_started(group) and self._started_in.get(group) != self._backward_id:
            names = ", ".join(self.plan.params[p].name for p in self.plan.groups[group].params[:3])
            raise RuntimeError(
                f"backward writes bucket {group} ({names}, ...) whose gradients were already reduced. Run all "
                "micro-batches but the last inside `with buf.no_sync()`, and call zero_grad() after every step"
            )

    def zero(self, param: int) -> None:
        """Zero the slot of a parameter that some graph will add to."""
        self.main_grads[param].zero_()
        self.state.written[param] = True

    def add_eager_gradient(self, param: int, grad: Tensor) -> None:
        """Take a gradient that autograd accumulated outside compiled graphs.

        Raises:
            RuntimeError: the bucket was reduced before this gradient came.
        """
        group = self.group_of[param]
        self.refuse_reduced(group)
        if self._untouched_id != self._backward_id:
            if self._graph_wrote_in[param] == self._backward_id:
                self.state.eager_params.add(param)
            if self.is_compiled:
                self.state.eager_groups.add(group)
        if self.reducer.is_started(group):
            self._take_late(param, grad)
        elif self.state.written[param]:
            self.main_grads[param].add_(grad)
        else:
            self.main_grads[param].copy_(grad)
            self.state.written[param] = True

    def _arrive(self, param: int) -> None:
        """Start the group of ``param`` if all its contributions have come."""
        if self.no_sync_depth:
            return
        self.state.mark_arrived(param)
        group = self.group_of[param]
        if (
            self.overlap_grad_reduce
            and self.state.is_complete(group)
            and not self.reducer.is_started(group)
            and not self.state.is_awaited((self.handle, group))
        ):
            self.start_grad_sync(group)

    # What a step calls.

    def check_addresses(self) -> None:
        """Raise when somebody replaced ``param.data``: the buffer would no longer see the parameter (sharded only)."""
        for index, (param, (buffer, slot)) in enumerate(zip(self.params, self.locations)):
            data = self.buffers[buffer].param_data
            if data is not None and param.numel():
                expected = data.data_ptr() + slot.start * data.element_size()
                if param.data_ptr() != expected or param.dtype != data.dtype:
                    raise RuntimeError(
                        f"the data of parameter '{self.plan.params[index].name}' was replaced after attach, so it is "
                        "no longer in its buffer; copy values into it instead (param.data.copy_(...)), or detach, "
                        "change the model and attach again"
                    )

    def start_grad_syncs(self) -> None:
        """Start the reduction of every bucket group that has not started."""
        for group in range(len(self.plan.groups)):
            if not self.reducer.is_started(group):
                self.start_grad_sync(group)

    def finish_grad_sync(self) -> None:
        """Reduce what is left and wait for everything. Calling it again changes nothing until the next reset."""
        self.reducer.comm.check_alive()
        if self._is_reduced and any(param.grad is not None for param in self.params):
            return
        self.start_grad_syncs()
        if self._usage is not None:
            self._usage.start(self._used_here())
        for group in range(len(self.plan.groups)):
            self.reducer.wait(group)
        self._reduce_late()
        self.state.is_unsynced = False

    def used_params(self) -> list[bool]:
        """Which parameters got a gradient on some rank, after ``finish_grad_sync``.

        Without ``find_unused_parameters`` all did when sharded, and those that this rank wrote otherwise.
        """
        if self._usage is not None:
            return self._usage.wait()
        return [True] * len(self.params) if self.plan.sharded else self._used_here()

    def _used_here(self) -> list[bool]:
        if self.plan.sharded:
            return list(self.state.written)
        return [param.grad is not None for param in self.params]

    def reset(self) -> None:
        """A new step: every slot counts as unwritten. Drains reductions in flight, zeroes nothing."""
        self.reducer.reset()
        self.state.reset()
        if self._usage is not None:
            self._usage.reset()
        self._is_reduced = False
        self._in_flight.clear()
        self._late.clear()

    def reopen(self) -> None:
        """Allow further accumulation on top of reduced gradients (non-sharded: they are equal on all ranks)."""
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
        if not self.overlap_param_gather:
            self.gatherer.wait_all()
        elif self.state.eager_groups:
            self.gatherer.start_all()
            for group in sorted(self.state.eager_groups, reverse=True):
                self.gatherer.wait(group)

    def sync_params(self) -> None:
        """Make every parameter current."""
        if self.gatherer is not None:
            self.gatherer.wait_all()

    def close(self) -> None:
        """Drain, give parameters their own storage back, leave the registry and destroy the communicators."""
        self.sync_params()
        self.reducer.reset()
        self.is_closed = True
        unregister_target(self.handle)
        for buffer in self.buffers:
            buffer.release()
        self.reducer.comm.close()
        if self.gatherer is not None:
            self.gatherer.comm.close()

    # [Note: late gradients]
    # Until the first step has shown it, nobody knows that a parameter of a compiled graph also gets gradients from
    # eager code (a weight penalty in the loss, say), so its bucket may have been reduced before they come. In the first
    # step they are kept aside and reduced on their own; the ranks agree once on the buckets concerned. From then on
    # those parameters' buckets are left to the host. A new eager contribution in a later step is refused.

    def _take_late(self, param: int, grad: Tensor) -> None:
        if self._has_agreed_on_late:
            name, group = self.plan.params[param].name, self.group_of[param]
            raise RuntimeError(
                f"parameter '{name}' got a gradient from outside the compiled graph after its bucket {group} was "
                "reduced inside it, for the first time in this run. From now on the bucket is reduced later; repeat "
                "this step, or run the first such backward under `with buf.no_sync()` followed by "
                "`buf.finish_grad_sync()`"
            )
        self._late[param] = grad.clone()

    def _reduce_late(self) -> None:
        if self._has_agreed_on_late:
            return
        self._has_agreed_on_late = True
        mine = sorted({self.group_of[param] for param in self._late})
        answers = self.reducer.comm.all_gather_object(mine)
        for group in sorted({group for answer in answers if isinstance(answer, list) for group in answer}):
            results = [self.reducer.reduced_part(bucket) for bucket in self.plan.groups[group].buckets]
            kept = [part.clone() for part in results]
            for bucket in self.plan.groups[group].buckets:
                self.reducer.full_grad(bucket).zero_()
            for param in self.plan.groups[group].params:
                if param in self._late:
                    self.main_grads[param].copy_(self._late[param])
            self.reducer.reduce_again(group)
            for part, before in zip(results, kept):
                part.add_(before)
        self._late.clear()
