"""One stage of a pipeline, as :mod:`~lightning_sdpipe.pipeline.flush` and the schedules of
``torch.distributed.pipelining`` drive it.

They decide the order of forwards and backwards. Torch's own ``PipelineStage`` fixes every shape in advance,
wants a gradient for everything that it sends, and runs an extra forward to learn shapes; this stage offers the
schedules the same methods, and does its communication itself, inside the forward and the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from lightning_sdpipe.p2p import labelled
from lightning_sdpipe.partition.message import Message
from lightning_sdpipe.pipeline.link import StageLink

Forward = Callable[[int, Message | None], Message | Tensor]

NOTHING = nullcontext()


class CutStage:
    """Stage ``stage_index`` of ``num_stages``, on worker ``stage_index % num_workers`` of its pipeline.

    A mini-batch begins with :meth:`begin`; then a schedule calls the other methods.
    """

    def __init__(self, module: nn.Module, stage_index: int, num_stages: int, num_workers: int, link: StageLink) -> None:
        self.submod = module
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = link.device
        self.group: dist.ProcessGroup = link.group
        self.group_size = num_workers
        self.group_rank = stage_index % num_workers  # the schedules number workers by their first stage
        self.is_first = stage_index == 0
        self.is_last = stage_index == num_stages - 1
        self.has_backward = True
        self.output_chunks: list[Any] = []
        self.args_recv_info: dict[int, tuple[Any, ...]] = {0: ()}
        self.act_send_info: dict[int, list[Any]] = {}
        self._link = link
        self._own = [p for p in module.parameters() if not p.is_meta]

    def begin(
        self,
        count: int,
        keys: Sequence[Hashable],
        forward: Forward,
        before_backward: Callable[[], None],
        computing: Callable[[], AbstractContextManager[None]],
        last_backward: AbstractContextManager[object],
    ) -> None:
        """Prepare for a mini-batch.

        Args:
            count: number of its micro-batches.
            keys: the key of each micro-batch, which identifies the shapes of its messages, if there are any.
            forward: runs this stage's part of the step on micro-batch ``i``, given what was received; returns the
                message to send, or on the last stage the loss.
            before_backward: called before each backward, when the gradients that it starts from have come.
            computing: held while gradients are computed.
            last_backward: entered around the last backward, if that one computes parameters' gradients.
        """
        self._computing = computing
        self._last_backward = last_backward
        self._backwards_left = count
        self._before_backward = before_backward
        self._keys = keys
        self._forward = forward
        self._next_expected = 0
        self._received: dict[int, Sequence[Tensor]] = {}
        self._sent: dict[int, Sequence[Tensor]] = {}
        self._left: dict[int, Callable[[], object]] = {}

    def forward_one_chunk(self, index: int, *_: Any, **__: Any) -> Tensor | None:
        """Receive micro-batch ``index``, run it and send it on. Return the loss on the last stage."""
        received = None
        if not self.is_first:
            received = self._link.receive_activations(self._keys[index])
            if index + 1 < len(self._keys):
                self._link.expect_activations(self._keys[index + 1])
            self._received[index] = [t for t in received.tensors if t.requires_grad]
        outcome = self._forward(index, received)
        if isinstance(outcome, Message):
            self._link.send_activations(outcome, self._keys[index])
            self._sent[index] = [t for t in outcome.tensors if t.requires_grad]
            return None
        return outcome

    def backward_one_chunk(self, index: int, loss: Tensor | None = None, full_backward: bool = True, **_: Any) -> None:
        """Receive the gradients of micro-batch ``index`` (on the last stage: starts from its loss), compute those of
        the parameters and of what was received, and send the latter back.

        Without ``full_backward`` the parameters' gradients are left for :meth:`backward_weight_one_chunk`.
        """
        outputs, gradients = self._outputs_and_gradients(index, loss)
        self._before_backward()
        inputs = self._received.pop(index, ())
        self._backwards_left -= 1
        if full_backward:
            last = NOTHING if self._backwards_left else self._last_backward
            with labelled("backward", index), self._computing(), last:
                if outputs:  # else all that was sent is frozen
                    torch.autograd.backward(outputs, gradients)
            found: Sequence[Tensor | None] = [t.grad for t in inputs]
        else:
            with labelled("backward", index):
                found = self._backward_inputs(index, outputs, gradients, inputs)
        if not self.is_first:
            self._link.send_gradients(inputs, found)

    def _backward_inputs(
        self, index: int, outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of ``inputs``; those of the parameters are left for later."""
        if not outputs:
            self._left[index] = lambda: None
            return [None] * len(inputs)
        # torch finds the parameters between the inputs and one output; so several outputs are joined into one
        output: Tensor = _Joined.apply(gradients or [torch.ones_like(outputs[0])], *outputs)  # type: ignore[no-untyped-call]
        weights = [p for p in self._own if p.requires_grad]
        found: Sequence[Tensor | None] = ()
        if inputs:
            with self._computing():
                found, groups = stage_backward_input([output], None, list(inputs), iter(weights))
        if any(gradient is not None for gradient in found):
            # a parameter that several groups use (a shared scale) needs the graph more than once
            self._left[index] = lambda: stage_backward_weight(iter(weights), groups, retain_graph=True)
        else:  # all earlier blocks are frozen: only parameters are left
            self._left[index] = lambda: torch.autograd.backward(outputs, gradients)
        return found or [None] * len(inputs)

    def backward_weight_one_chunk(self, index: int, **_: Any) -> None:
        """Compute the parameters' gradients of micro-batch ``index`` that :meth:`backward_one_chunk` left."""
        with labelled("backward of weights", index), self._computing():
            self._left.pop(index)()

    def _outputs_and_gradients(self, index: int, loss: Tensor | None) -> tuple[Sequence[Tensor], list[Tensor] | None]:
        if loss is not None:
            return [loss], None
        return self._link.receive_gradients(self._sent.pop(index))

    # The schedules call the methods below, which do nothing: communication happens above.

    def get_fwd_recv_ops(self, index: int) -> list[dist.P2POp]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        pass

    def clear_runtime_states(self) -> None:
        pass

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        pass

    def scale_grads(self, grad_scale_factor: int) -> None:
        pass


class _Joined(torch.autograd.Function):
    """One output in place of several: its gradient of one becomes the given gradient of each of them."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.ones((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)
