"""The calls of a communicator: how each is chosen, validated and made, overlapped or serial."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap import _C, serial
from streamoverlap.call import PLAIN, Call, Mode, in_mode
from streamoverlap.errors import CommunicatorError
from streamoverlap.follow import FollowOnCpu
from streamoverlap.intercept import Asked, Intercepted, is_intercepting
from streamoverlap.spec import Choice, PlanSpec, of_wire, spec_of
from streamoverlap.streams import StreamSet, choose_streams
from streamoverlap.work import Work, seconds_of

if TYPE_CHECKING:
    from streamoverlap.communicator import Communicator
    from streamoverlap.plan_source import PlanSource


def one_call(find: Callable[..., Communicator | None]) -> Callable[[Callable], Callable]:
    """Of functions that make one call: after Ctrl-C in it nobody knows whether the peers have it, so the group fails.

    `find` gives the communicator for the arguments, if there is one.
    """

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except Exception:
                raise
            except BaseException as interrupt:
                if (found := find(*args, **options)) is not None:
                    found._fail_with(interrupt)
                raise

        return call

    return decorate


_own_call = one_call(lambda self, *_args, **_options: self)


class Calls:
    """What a communicator that is set up does; see `Communicator`, which sets it up and has the fields below."""

    name: str
    world: int
    rank: int
    device_type: str
    device: torch.device
    group: dist.ProcessGroup
    last_choice: Choice | None
    _impl: _C.Communicator | None
    _plans: PlanSource
    _follow: FollowOnCpu
    _timeout: float
    _connected: bool
    _process: int
    _error: CommunicatorError | None
    _serial_calls: Iterator[int]
    _serial_made: int

    @_own_call
    def all_gather_gemm(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        return_gathered: bool,
        plan: PlanSpec | None,
        *,
        scaling: _C.Scaling | None = None,
        **options: Any,
    ) -> tuple[list[Tensor], Tensor | None] | Work:
        """As `streamoverlap.all_gather_gemm`, on lists; so are the methods below, and so their keyword arguments."""
        identity = partial(_C.validate_all_gather_gemm, x, weights, biases, self.world, scaling)
        every_bias = biases or [None] * len(weights)
        asked = Asked("all_gather_gemm", x, weights, every_bias, identity, return_gathered, scaling=scaling)
        call = self._call(asked, plan, **options)
        if call.overlapped:
            given = (x, weights, biases, return_gathered)
            *result, work = call.impl.all_gather_gemm(*given, call.spec, call.options, scaling)
            return call.finish(tuple(result), work)
        on = self._enter_serial(identity(), call)

        def start() -> serial.Started:
            wait, finish = serial.all_gather_gemm(x, weights, every_bias, on, scaling)
            return serial.Started(wait, finish if return_gathered else lambda: (finish()[0], None))

        return call.serial(start, self._fail_with, [x, *weights, *every_bias, *_tensors_of(scaling)])

    @_own_call
    def gemm_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, plan: PlanSpec | None, **options: Any
    ) -> Tensor | Work:
        return self._sum_of_products("gemm_reduce_scatter", x, weight, bias, plan, **options)

    @_own_call
    def gemm_all_reduce(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, plan: PlanSpec | None, **options: Any
    ) -> Tensor | Work:
        return self._sum_of_products("gemm_all_reduce", x, weight, bias, plan, **options)

    def all_gather(self, x: Tensor, plan: PlanSpec | None, **options: Any) -> Tensor | Work:
        return self._exchange("all_gather", x, plan, **options)

    def reduce_scatter(self, x: Tensor, plan: PlanSpec | None, **options: Any) -> Tensor | Work:
        return self._exchange("reduce_scatter", x, plan, **options)

    def all_reduce(self, x: Tensor, plan: PlanSpec | None, **options: Any) -> Tensor | Work:
        return self._exchange("all_reduce", x, plan, **options)

    def _sum_of_products(
        self,
        operation: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: PlanSpec | None,
        scaling: _C.Scaling | None = None,
        quantised: bool = False,
        **options: Any,
    ) -> Tensor | Work:
        identity = partial(getattr(_C, f"validate_{operation}"), x, weight, bias, self.world, scaling, quantised)
        asked = Asked(operation, x, (weight,), (bias,), identity, scaling=scaling, quantised=quantised)
        call = self._call(asked, plan, **options)
        if call.overlapped:
            return call.finish(*getattr(call.impl, operation)(x, weight, bias, call.spec, call.options, scaling))
        on = self._enter_serial(identity(), call)
        start = partial(getattr(serial, operation), x, weight, bias, on, scaling)
        return call.serial(start, self._fail_with, [x, weight, bias, *_tensors_of(scaling)])

    @_own_call
    def _exchange(
        self,
        operation: str,
        x: Tensor,
        plan: PlanSpec | None,
        copy_input: bool = False,
        quantised: bool = False,
        **options: Any,
    ) -> Tensor | Work:
        """A plain collective, which has the same name everywhere."""
        wire = of_wire(quantised)  # all_gather knows none
        identity = partial(getattr(_C, f"validate_{operation}"), x, self.world, **wire)
        asked = Asked(operation, x, (), (), identity, copy_input=copy_input, quantised=quantised)
        call = self._call(asked, plan, **options)
        if call.overlapped:
            return call.finish(*getattr(call.impl, operation)(x, call.spec, call.options))
        on = self._enter_serial(identity(), call)
        copies = copy_input and call.async_op

        def start() -> serial.Started:
            return getattr(serial, operation)(x.clone() if copies else x, on)

        return call.serial(start, self._fail_with, [x])

    def _enter_serial(self, identity: tuple[int, str], call: Call) -> serial.Collectives:
        """Agrees with the peers on the call, in shared memory if there is any, else by a message."""
        on = serial.Collectives(self.group, lambda: call.timeout or self._timeout, self._check, self._fail, None)
        self._serial_made += 1
        on_cpu = self.device_type == "cpu"
        if self._connected:
            number = self._impl.enter_serial(*identity, call.timeout if on_cpu else None)
            return on._replace(watch=serial.Watch(self._impl, number))
        if on_cpu:
            serial.agree(identity, next(self._serial_calls), on)
        return on

    def _fail_with(self, cause: BaseException) -> None:
        """This rank's part of a call that peers make was not done."""
        if isinstance(cause, CommunicatorError) or self._process != os.getpid() or self._impl is None:
            return
        told = f"{type(cause).__name__} {cause}".splitlines()[0].strip()
        if self._connected:
            self._impl.abort(told)
        elif self._error is None:
            text = f"group '{self.name}' cannot be used any more: this rank failed in a call: {told}"
            self._error = CommunicatorError(text, self.name, peer=self.rank)

    def _call(
        self,
        asked: Asked,
        plan: PlanSpec | None,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        streams: StreamSet | None = None,
    ) -> Call:
        device = asked.x.device
        if device != self.device:
            raise ValueError(f"x is on {device}; expected {self.device}, the device of this communicator")
        impl = self._open()
        self._check()
        asked = asked._replace(streams=choose_streams(streams, self.device_type))
        if is_intercepting():
            raise Intercepted(self, asked, plan)
        wait = 0.0 if timeout is None else seconds_of(timeout)
        self.last_choice = choice = self._plans.choose(asked, plan, wait)
        return Call(impl, self._spec_of(asked, choice.plan), self.device, self._follow, async_op, wait, asked.streams)

    def _spec_of(self, asked: Asked, plan: PlanSpec) -> _C.Spec | None:
        if plan.algorithm == "serial":
            return None
        flags = asked.keep_gathered, asked.copy_input, asked.scaling is not None, asked.quantised
        return spec_of(asked.operation, plan, self.world, *flags)

    def _again(self, asked: Asked, plan: PlanSpec, mode: Mode = PLAIN) -> object:
        """Makes a call that was asked for, with that plan."""
        options: dict[str, Any] = {"plan": plan, "streams": asked.streams, **of_wire(asked.quantised)}
        with in_mode(mode):
            if asked.weights:
                options["scaling"] = asked.scaling
            if asked.operation == "all_gather_gemm":
                gathers = asked.keep_gathered
                return self.all_gather_gemm(asked.x, asked.weights, asked.biases, gathers, **options)
            if asked.weights:
                return getattr(self, asked.operation)(asked.x, asked.weights[0], asked.biases[0], **options)
            return getattr(self, asked.operation)(asked.x, copy_input=asked.copy_input, **options)


def _tensors_of(scaling: _C.Scaling | None) -> list[Tensor]:
    return [] if scaling is None else [scaling.x, *scaling.weights]
