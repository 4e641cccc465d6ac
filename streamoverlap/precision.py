"""In which precision layers multiply: factors as they are, or as float8 that is made for each product.

With ``"fp8"`` both factors of the forward pass and of x's gradient (dgrad) are float8_e4m3fn, with a scale a row; the
weight's gradient (wgrad) has the tensors themselves. This is torchao's recipe "rowwise_with_gw_hp": wgrad sums over
tokens, where rounding does most harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from streamoverlap import _C
from streamoverlap.serial import scaled_product

if TYPE_CHECKING:
    from streamoverlap.communicator import Communicator
    from streamoverlap.spec import PlanSpec
    from streamoverlap.work import Work

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_UNIT = 16  # of the sizes of products of float8


class Factors(NamedTuple):
    """Of products ``x @ weight.T``, as they are multiplied; and those products."""

    x: Tensor
    weights: Sequence[Tensor]
    scaling: _C.Scaling | None = None

    def all_gather_gemm(
        self,
        comm: Communicator,
        whole: Tensor,
        biases: Sequence[Tensor | None],
        keeps: bool,
        plan: PlanSpec | None,
        **options: Any,
    ) -> tuple[list[Tensor], Tensor | None]:
        """As of a communicator; what `keeps` asks for is gathered of `whole`, of which x was made.

        Where x is float8 that is another exchange, which hides behind the products, too.
        """
        if self.scaling is None or not keeps:
            return comm.all_gather_gemm(self.x, self.weights, biases, keeps, plan, scaling=self.scaling, **options)
        options["async_op"] = True
        products = comm.all_gather_gemm(self.x, self.weights, biases, False, plan, scaling=self.scaling, **options)
        gathering = comm.all_gather(whole, plan, **options)
        return products.wait()[0], gathering.wait()

    def sum_of_products(
        self, comm: Communicator, operation: str, bias: Tensor | None, plan: PlanSpec | None, **options: Any
    ) -> Tensor | Work:
        """gemm_reduce_scatter or gemm_all_reduce, as of a communicator."""
        return getattr(comm, operation)(self.x, self.weights[0], bias, plan, scaling=self.scaling, **options)

    def linear(self, bias: Tensor | None = None) -> Tensor:
        """Of this rank alone."""
        if self.scaling is None:
            return functional.linear(self.x, self.weights[0], bias)
        _C.validate_gemm_all_reduce(self.x, self.weights[0], bias, 1, self.scaling)
        return scaled_product(self.x, self.weights[0], bias, self.scaling)


# Of x and weights; `Factors` itself takes them as they are.
MakeFactors = Callable[[Tensor, Sequence[Tensor]], Factors]


class Precision(NamedTuple):
    """What is made of the factors of the two passes. wgrad has its own, as they are."""

    forward: MakeFactors
    dgrad: MakeFactors


def _float8(x: Tensor, weights: Sequence[Tensor], *, use_fast_accum: bool) -> Factors:
    """Dynamic row-wise scaling: the largest finite value of a row becomes 448. What is not finite becomes NaN."""
    _expect_dtype("x has dtype", x.dtype)
    for weight in weights:
        if weight.dtype != x.dtype:
            raise TypeError(f"weight has dtype {weight.dtype}; expected that of x, {x.dtype}")
    values, scales = _C.quantise_rows(x)
    made = [_C.quantise_rows(weight) for weight in weights]
    scaling = _C.Scaling(scales, [scale for _, scale in made], x.dtype, use_fast_accum)
    return Factors(values, [weight for weight, _ in made], scaling)


# Sums of gradients are longer in bits, as in Transformer Engine and torchao.
_forward, _dgrad = (partial(_float8, use_fast_accum=fast) for fast in (True, False))

AS_IT_IS = Precision(Factors, Factors)

# By the names that ops take: "" for None, and the name of a dgrad that is an op of its own.
_BY_NAME = {"": AS_IT_IS, "fp8": Precision(_forward, _dgrad), "fp8_dgrad": Precision(_dgrad, _dgrad)}
DGRAD = {"": "", "fp8": "fp8_dgrad"}


def precision_of(name: str) -> Precision:
    """Of the argument `precision` of an op, whose schema has a str."""
    if name not in _BY_NAME:
        raise ValueError(
            f"precision is {name!r}; expected '' (x and weight as they are), 'fp8' (of a forward pass) or 'fp8_dgrad' "
            "(of a gradient)"
        )
    return _BY_NAME[name]


def name_of(precision: str | None) -> str:
    """As ops take it, of a layer's argument."""
    if precision is not None and precision != "fp8":
        raise ValueError(f"precision is {precision!r}; expected None or 'fp8'")
    return precision or ""


def expect_weight(
    precision: str | None, dtype: torch.dtype, world: int, sharded: str, *, dtype_is: str = "dtype is", **sizes: int
) -> None:
    """That a layer can have it in that precision: what is wrong is told when it is made, not in its first call.

    Args:
        dtype: of the weight; `dtype_is`: what an error calls it.
        sharded: the size that ranks share out among them, a multiple of `world`.
        **sizes: of the whole weight, by name.
    """
    if precision is None:
        return
    _expect_dtype(dtype_is, dtype)
    for name, size in sizes.items():
        unit = _UNIT * world if name == sharded else _UNIT
        if size % unit:
            of_ranks = f" times the group's {world} ranks" if name == sharded else ""
            raise ValueError(
                f"{name} is {size}; expected a multiple of {_UNIT}{of_ranks} with precision={precision!r}, as products "
                "of float8 need"
            )


def _expect_dtype(it_is: str, dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise TypeError(f"{it_is} {dtype}; expected float32, bfloat16 or float16 with precision='fp8'")
