"""Who writes the gradients of a step, and where they go: graphs, autograd outside of them, captured micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

import torch
from torch import Tensor, nn

from megabuf_fx.runtime.access import BufferAccess
from megabuf_fx.runtime.bucket_groups import GradReducer
from megabuf_fx.runtime.capture_state import CaptureState
from megabuf_fx.runtime.collectives import Comm
from megabuf_fx.runtime.flags import was_added_outside, was_any_added_outside
from megabuf_fx.runtime.late_gradients import LateGradients
from megabuf_fx.runtime.leaf_hooks import LeafHooks
from megabuf_fx.runtime.options import RuntimeOptions
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.step_state import StepState


class GradWrites:
    """What the writers of one model's gradients call: wrappers of compiled graphs, hooks, captured micro-batches.

    ``start`` starts the reduction of a bucket group. With ``publishes_grad``, ``.grad`` is ``main_grad`` afterwards.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[nn.Parameter],
        main_grads: Sequence[Tensor],
        *,
        state: StepState,
        reducer: GradReducer,
        access: BufferAccess,
        capture: CaptureState,
        comm: Comm,
        options: RuntimeOptions,
        handle: int,
        publishes_grad: bool,
        start: Callable[[int], None],
    ) -> None:
        self._plan = plan
        self._params = params
        self._main_grads = main_grads
        self._group_of = plan.group_of_param
        self.params_of = [frozenset(group.params) for group in plan.groups]
        """Indices of the parameters of each bucket group."""
        self._state = state
        self._reducer = reducer
        self._access = access
        self._capture = capture
        self._comm = comm
        self._options = options
        self._handle = handle
        self._publishes_grad = publishes_grad
        self._start = start
        self._device = params[0].device
        self.leaf_hooks = LeafHooks(params, [group.params for group in plan.groups])
        self.late = LateGradients(reducer, comm, main_grads)
        self._backward_id = -1
        self._was_reduced = False
        """``StepState.is_reduced`` when the running backward began."""
        self._was_finalized = False
        """``StepState.is_finalized`` when the running backward began."""
        self._untouched_id = -1
        self._started_in: dict[int, int] = {}
        """The autograd pass in which each bucket group was started last."""
        self._graph_wrote: dict[int, set[int]] = {}
        """Parameters that graphs wrote, by the autograd pass they ran in; since the last reset, or the last forward
        where ``.grad`` is published and nobody tells when a step ends."""
        self._in_flight: set[int] = set()
        """``publishes_grad``: parameters that a graph wrote and whose AccumulateGrad node has not run since."""
        self._writer: torch.cuda.Stream | None = None
        """The stream on which a graph wrote last."""

    def reset(self) -> None:
        """A new step begins."""
        self._was_finalized = False
        self._in_flight.clear()
        self._graph_wrote.clear()
        self.late.forget()
        self._writer = None

    def before_start(self, group: int) -> None:
        """The reduction of the bucket group starts."""
        if self._writer is not None and self._writer != torch.cuda.current_stream(self._device):
            # Autograd synchronizes streams for gradients that it sees, and it sees none of a graph's.
            torch.cuda.current_stream(self._device).wait_stream(self._writer)
        self._started_in[group] = self._backward_id

    # What wrappers of compiled graphs call.

    def before_forward(self, *, in_backward: bool) -> None:
        """A forward begins, inside a backward when it is recomputation."""
        if self._publishes_grad and not in_backward:
            self._graph_wrote.clear()

    def forget_in_flight(self) -> None:
        """The backward in which graphs wrote was aborted."""
        self._in_flight.clear()

    def enter_backward(self, backward_id: int) -> None:
        """``backward_id`` names the autograd pass that runs now (its graph task)."""
        if backward_id != self._backward_id:
            self._backward_id = backward_id
            self._state.is_unsynced = self._state.no_sync_depth > 0
            self._was_reduced, self._state.is_reduced = self._state.is_reduced, False
            self._was_finalized = self._state.is_finalized
            if self._publishes_grad:
                self._state.reopen_axes()
                self._notice_zeroed()

    def _notice_zeroed(self) -> None:
        """Any optimizer may have reset ``.grad`` to None: then the slot no longer holds a gradient."""
        for index, param in enumerate(self._params):
            if param.grad is None and index not in self._in_flight:
                self._state.written.discard(index)

    def note_writer(self) -> None:
        """A graph is about to write on the current stream."""
        if self._device.type == "cuda":
            self._writer = torch.cuda.current_stream(self._device)

    def prepare_graph_writes(self, params: Set[int]) -> None:
        """Before a graph decides between overwriting and adding: take over what the user put into ``.grad``.

        Where it is published, ``.grad`` is None while the graph runs, so that an eager contribution arrives on its own.
        """
        if not self._publishes_grad:
            return
        for param in params:
            grad = self._params[param].grad
            if grad is not None:
                self._refuse_second_sum(param)
                if grad.data_ptr() != self._main_grads[param].data_ptr():
                    self._main_grads[param].copy_(grad)
                self._state.written.add(param)
                self._params[param].grad = None

    def mark_graph_writes(self, params: Set[int]) -> None:
        """The graph that runs next writes these slots."""
        self._state.written.update(params)
        self._graph_wrote.setdefault(self._backward_id, set()).update(params)
        if self._publishes_grad:
            self._in_flight.update(params)

    def mark_untouched(self) -> None:
        """The running backward hands out plain gradients; what autograd accumulates of them teaches nothing."""
        self._untouched_id = self._backward_id
        self.wake(self.leaf_hooks.quiet)

    # See [Note: quiet bucket groups] in leaf_hooks.py.

    def hush(self, groups: Iterable[int]) -> None:
        """A graph covers these bucket groups: hooks need not run for gradients that it writes."""
        # Where .grad is published, they make it the view.
        for group in groups if not self._publishes_grad else ():
            if group not in self._state.eager_groups:
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
            self._state.is_unsynced = self._state.is_unsynced and self._state.no_sync_depth > 0
        # Nothing starts here: a graph may be about to write the same bucket.
        for param in left:
            self._take(param)

    def clear_grads(self) -> None:
        """Make ``.grad`` of every parameter None."""
        self._wake_left()
        # The others have none.
        for param in self.leaf_hooks.hooked:
            self._params[param].grad = None

    def _wake_left(self) -> list[int]:
        """Wake the groups in which autograd has left gradients; the parameters that have them."""
        if not self.leaf_hooks.have_left_grads:
            return []
        quiet = [param for group in self.leaf_hooks.quiet for param in self.params_of[group]]
        left = sorted(param for param in quiet if self._params[param].grad is not None)
        self.wake({self._group_of[param] for param in left})
        return left

    def after_graph(self, groups: Iterable[int]) -> None:
        """The backward of a graph that covers and writes these bucket groups has run: start those for which no hook
        will."""
        if self._state.no_sync_depth or not self._options.overlap_grad_reduce:
            return
        for group in groups:
            if (
                group in self.leaf_hooks.quiet
                and not self._reducer.is_started(group)
                and not self._state.is_awaited((self._handle, group))
            ):
                self._start(group)

    def _refuse_second_sum(self, param: int) -> None:
        """Published gradients may be added to reduced ones: averages add up. Sums over ranks do not."""
        is_sum = self._options.calculate_per_token_loss and self._comm.size > 1 and self._was_reduced
        if (is_sum or self._was_finalized) and self._params[param].grad is not None:
            reason = "calculate_per_token_loss=True" if is_sum else "finalize_model_grads"
            raise RuntimeError(
                f"backward adds to the gradient of '{self._plan.params[param].name}', which was already summed over "
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
        self._take(param)
        self._arrive(param)

    def _take(self, param: int) -> None:
        """Move what ``.grad`` holds into the buffer."""
        tensor = self._params[param]
        if was_added_outside(tensor):
            self._refuse_outside(param)
        if self._publishes_grad:
            self._in_flight.discard(param)
        grad = tensor.grad
        if grad is not None and grad.layout != torch.strided:
            raise RuntimeError(
                f"parameter '{self._plan.params[param].name}' got a {grad.layout} gradient; contiguous buffers hold "
                "dense gradients only (build the embedding with sparse=False)"
            )
        if grad is not None and grad.data_ptr() != self._main_grads[param].data_ptr():
            if self._publishes_grad and not self._has_graph_written(param):
                # Autograd made a new tensor, so .grad was None: the user has zeroed.
                self._state.written.discard(param)
            self.add_eager_gradient(param, grad)
            tensor.grad = None
        elif grad is not None:
            # Autograd has added in place: .grad is published, the buffer view.
            self._refuse_second_sum(param)
            self._state.written.add(param)
        if self._publishes_grad and param in self._state.written:
            tensor.grad = self._main_grads[param]

    def refuse_added_outside(self) -> None:
        """Raise when a fused kernel has added to ``main_grad``. No hook sees it where the kernel gives no gradient."""
        if was_any_added_outside(self._params):
            self._refuse_outside(next(i for i, param in enumerate(self._params) if was_added_outside(param)))

    def _refuse_outside(self, param: int) -> None:
        raise NotImplementedError(
            f"a fused kernel added the gradient of '{self._plan.params[param].name}' to main_grad by itself "
            "(grad_added_to_main_grad); turn off weight-gradient fusion in that module"
        )

    def refuse_reduced(self, group: int) -> None:
        """Raise when the group's gradients were reduced in an earlier backward and not reset since."""
        if self._started_in.get(group) != self._backward_id:
            self._refuse_started(group)
        self._access.claim_gradients("a backward writes gradients")

    def _refuse_started(self, group: int) -> None:
        if self._reducer.is_started(group):
            names = ", ".join(self._plan.params[p].name for p in self._plan.groups[group].params[:3])
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
        for group in sorted({self._group_of[param] for param in writes}):
            self._refuse_started(group)
        if self._publishes_grad:
            self._state.reopen_axes()
            self._notice_zeroed()
        self._access.claim_gradients("a captured micro-batch writes gradients")
        is_later = not self._state.written.isdisjoint(writes)
        for param in writes if is_later else ():
            if param not in self._state.written:
                self.zero(param)
        self._capture.flags.accumulate.fill_(int(is_later))

    def after_replay(self, writes: Sequence[int]) -> None:
        """The slots of these parameters are written."""
        self._state.written.update(writes)
        for param in writes if self._publishes_grad else ():
            self._params[param].grad = self._main_grads[param]

    def zero(self, param: int) -> None:
        """Zero the slot of a parameter that some graph will add to."""
        if self._capture.is_micro_batch:
            # It keeps what an earlier micro-batch has left there.
            main_grad, flag = self._main_grads[param], self._capture.flags.accumulate
            main_grad.copy_(torch.where(flag != 0, main_grad, 0))
        else:
            self._main_grads[param].zero_()
        self._state.written.add(param)

    def add_eager_gradient(self, param: int, grad: Tensor) -> None:
        """Take a gradient that autograd accumulated outside compiled graphs.

        Raises:
            RuntimeError: the bucket was reduced before this gradient came.
        """
        group = self._group_of[param]
        self.refuse_reduced(group)
        if self._untouched_id != self._backward_id:
            if self._has_graph_written(param):
                self._state.eager_params.add(param)
            if self._state.is_compiled:
                self._state.eager_groups.add(group)
        if self._reducer.is_started(group):
            self.late.take(param, grad)
        elif param in self._state.written:
            self._main_grads[param].add_(grad)
        else:
            if self._capture.is_micro_batch:
                grad = torch.where(self._capture.flags.accumulate != 0, self._main_grads[param] + grad, grad)
            self._main_grads[param].copy_(grad)
            self._state.written.add(param)

    def _has_graph_written(self, param: int) -> bool:
        """Whether a graph has written the slot in the running backward."""
        return param in self._graph_wrote.get(self._backward_id, ())

    def _arrive(self, param: int) -> None:
        """Start the group of ``param`` if all its contributions have come."""
        if self._state.no_sync_depth:
            return
        self._state.mark_arrived(param)
        group = self._group_of[param]
        if (
            not self._reducer.is_started(group)
            and self._options.overlap_grad_reduce
            and self._state.is_complete(group, by_count=not self._state.is_compiled)
            and not self._state.is_awaited((self._handle, group))
        ):
            self._start(group)
