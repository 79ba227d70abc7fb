"""Ops of torch's dispatcher: what they are called, what they take, what they are made of."""

from typing import Any

import torch
from torch._ops import OpOverload as OpOverload  # the target of every op in a trace

functional_collectives = torch.ops._c10d_functional  # collectives that compile, seen by modes
norms_of_all = torch._foreach_norm  # the norms of many tensors in few kernels
softmax = torch.ops.aten._softmax.default  # what F.softmax is below autograd
log_softmax = torch.ops.aten._log_softmax.default  # and F.log_softmax
to_copy = torch.ops.aten._to_copy.default  # what x.to(dtype) is below autograd
# Attention that gives its scores' log-sum-exp too, and its gradient from one.
flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
flash_forward = torch.ops.aten._scaled_dot_product_flash_attention.default  # on CUDA
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
scaled_product = torch._scaled_mm  # of 8-bit matrices, with the scales of tensors or rows
scale_all = torch._foreach_mul_  # many tensors times one number, in few kernels, in place


def op_name(target: Any) -> str:
    """``add_`` of ``aten.add_.Tensor``; empty of what is no op."""
    name: str = getattr(target, "_opname", "")
    return name


_AUGMENTED = {f"__i{name}__": f"__{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}
"""What ``x &= y`` calls, whose name has no ``_`` of an op in place, and what ``x & y`` does."""


def plain_name(target: Any) -> str:
    """`op_name` without what says that it writes in place: of ``add_`` ``add``."""
    name = op_name(target)
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1]
    return _AUGMENTED.get(name, name)


def overload_name(target: OpOverload) -> str:
    """``Tensor`` of ``aten.add_.Tensor``."""
    return target._overloadname


def schema_of(target: Any) -> Any:
    """What an op takes and gives, and what of it it writes into; None of what is no op."""
    return getattr(target, "_schema", None)


def returning(target: Any) -> Any:
    """``target``, or of an op that writes into an operand the one that takes the same and returns
    what it writes; None where there is none."""
    if not target._schema.is_mutable:
        return target
    packet = getattr(getattr(torch.ops, target.namespace), plain_name(target), None)
    names = [] if packet is None else packet.overloads()
    taken = [str(a.type) for a in target._schema.arguments]
    for overload in (getattr(packet, name) for name in names):
        same = [str(a.type) for a in overload._schema.arguments] == taken
        if same and not overload._schema.is_mutable:
            return overload
    return None


def breaks_itself_up(target: OpOverload) -> bool:
    """Whether the dispatcher has other ops for it wherever gradients are asked."""
    overload = overload_name(target)
    name = target._schema.name + f".{overload}" * (overload != "default")
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def decompositions() -> Any:
    """PyTorch's own table of what its ops are made of, by op."""
    from torch._decomp import core_aten_decompositions

    return core_aten_decompositions()


def made_from_signature(name: str) -> Any:
    """The function ``torch.name`` that is an op's own signature; None where Python wraps it."""
    return getattr(torch._C._VariableFunctions, name, None)


def will_run(node: Any, place: int) -> bool:
    """Whether the backward that runs now wants the gradient of a function's input at ``place``;
    ``node``: what the function's own backward is given. A backward of some gradients alone asks no
    function for the others, but tells only torch's own. `torch.autograd.grad` does not say: then it
    may be."""
    after, _ = node.next_functions[place]
    if not node.needs_input_grad[place]:
        return False
    try:
        return torch._C._will_engine_execute_node(after)
    except RuntimeError:
        return True
