"""Kernels: who computes one op on one rank, where a device has several ways.

An op that names a kernel in its attr ``kernel`` is priced by it and printed with it. A kernel never
changes what is computed but by rounding: verification computes in plain torch, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.nouns.cluster import Device
from autopar.nouns.errors import UserError
from autopar.nouns.graph import DTYPE_BYTES, Op, Tensor
from autopar.nouns.kernels import kernel_text

ATTR = "kernel"
FLASH, CUDNN, FLASH_3, FLASH_4 = "flash", "cudnn", "flash3", "flash4"
TRITON = "triton"
LOSS_HEAD = "linear_cross_entropy"
LOW = ("bfloat16", "float16")
NVIDIA = ("ampere", "ada", "hopper", "blackwell")
GATED = "gated_activation"


class KernelError(UserError, ValueError):
    """A kernel that cannot be registered."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row of the table.

    kind:      of the ops that it computes.
    provider:  what must be there, for people.
    families:  of devices that it runs on (`Device.family`, or its kind).
    dtypes:    of the operands.
    against:   "" or why it cannot compute an op of these tensors.
    rate:      of an attention, the constants by which it is priced, as `Software.attention` names
               them; empty: the usual ones.
    by_itself: the search takes it unasked: whatever brings torch to the device brings it.
    speed:     over its price, where its user says so.
    """

    kind: str
    name: str
    provider: str
    families: tuple[str, ...]
    dtypes: tuple[str, ...]
    against: Callable[[Op, Mapping[str, Tensor]], str]
    rate: str = ""
    by_itself: bool = True
    speed: float = 1.0
    function: Callable[..., object] | None = None
    """A user's."""

    @property
    def text(self) -> str:
        """As plans name it."""
        return kernel_text(self.kind, self.name)

    @property
    def own(self) -> bool:
        """Whether it is a user's function, ``module:function``."""
        return ":" in self.name

    def runs_on(self, device: Device) -> str:
        """ "" or why it does not run there."""
        if device.family in self.families or device.kind in self.families:
            return ""
        may = ", ".join(name.capitalize() for name in self.families)
        own = f", and its family is {device.family}" if device.family else ""
        return f"{self.provider} runs on {may}, not on {device.name}{own}"

    def computes(self, op: Op, tensors: Mapping[str, Tensor]) -> str:
        """ "" or why it cannot compute the op, with the numbers."""
        dtypes = [tensors[name].dtype for name in op.inputs if "float" in tensors[name].dtype]
        for dtype in dtypes:
            if dtype not in self.dtypes:
                return f"it computes in {' or '.join(self.dtypes)}, and the op reads {dtype}"
        return self.against(op, tensors)


def _attention(most: int | None = None) -> Callable[[Op, Mapping[str, Tensor]], str]:
    """For kernels of torch's whose heads have at most so many numbers, or for a user's. A mask that
    is a tensor, strips of a window, documents and sinks are calls of their own
    (`autopar.runtime.pytorch.layers`)."""

    def against(op: Op, tensors: Mapping[str, Tensor]) -> str:
        for name, what in (
            ("window", "a window"),
            ("documents", "documents"),
            ("sinks", "sinks"),
        ):
            if op.attrs.get(name):
                return f"it has {what}"
        if len(op.inputs) > 3:
            return "it has a mask that is a tensor"
        query, key, value = (tensors[name].shape for name in op.inputs)
        if op.attrs.get("causal") and query[2] != key[2]:
            return f"its causal mask is of {query[2]} rows and {key[2]} columns"
        if query[3] != value[3]:
            return f"its keys have {query[3]} numbers and its values {value[3]}"
        if most is None:
            return "it drops scores" if op.attrs.get("dropout_p") else ""
        if query[3] > most or query[3] % 8:
            return f"its heads have {query[3]} numbers, and may have multiples of 8 up to {most}"
        return ""

    return against


_OWN = {"attention": _attention(), GATED: lambda op, tensors: ""}
"""What users' kernels may run, and what is against it."""
_KERNELS: dict[tuple[str, str], Kernel] = {}


def register(kernel: Kernel) -> None:
    """A kernel more, or in the place of that of its kind and name."""
    _KERNELS[kernel.kind, kernel.name] = kernel


def unregister(kind: str, name: str) -> None:
    _KERNELS.pop((kind, name), None)


def forget_own() -> None:
    """Unregisters what users registered: another model's file is about to say its own."""
    for row in [row for row in _KERNELS.values() if row.own]:
        unregister(row.kind, row.name)


def kernels_of(kind: str) -> list[Kernel]:
    """Of ops of ``kind``, in the order of their registration."""
    return [row for row in _KERNELS.values() if row.kind == kind]


def all_kernels() -> list[Kernel]:
    return list(_KERNELS.values())


def kernel_named(kind: str, name: str) -> Kernel | None:
    return _KERNELS.get((kind, name))


def kernel_for(op: Op) -> Kernel | None:
    """That which an op names."""
    return _KERNELS.get((op.kind, str(op.attrs.get(ATTR, ""))))


def register_kernel(
    kind: str,
    function: Callable[..., object],
    *,
    devices: Sequence[str] = ("cpu", "gpu"),
    dtypes: Sequence[str] = ("float32", *LOW),
    speed: float = 1.0,
) -> None:
    """A kernel of one's own, which plans may run ops of ``kind`` by; called in the model's file.

    kind:     ``attention`` or ``gated_activation``.
    function: of (q [b, h, s, d], k and v [b, g, t, d], causal, scale), where g divides h and a
              scale of None is 1 / sqrt(d); or of (gate [..., f], up, activation), ``silu`` or
              ``gelu_tanh``. Its result is differentiable, and it writes none of its arguments.
    devices:  that it runs on: ``cpu``, ``gpu``, or families such as ``hopper``.
    dtypes:   that it computes in. Verification in float64 computes the op with torch's ops.
    speed:    how many times as fast it is as autopar prices the op: an attention by torch's usual
              kernel, all else as one pass that moves each operand and result once. Of several
              kernels plans take the fastest; ``--fix kernels=module:function`` (or ``attention=``)
              pins this one.

    Raises `KernelError`.
    """
    if kind not in _OWN:
        raise KernelError(
            f"register_kernel({kind!r}, ...): kernels run {' or '.join(_OWN)} so far; a call of "
            "your own in the model with a rule beside it (autopar.register_rule) runs anything"
        )
    place = (getattr(function, "__module__", None), getattr(function, "__qualname__", ""))
    if not callable(function) or not place[0] or not place[1].isidentifier():
        raise KernelError(
            f"register_kernel({kind!r}, {function!r}): give a function of a module, whose name "
            "plans can hold"
        )
    name = ":".join(map(str, place))
    if wrong := [d for d in dtypes if d not in DTYPE_BYTES or "float" not in d]:
        raise KernelError(
            f"register_kernel({kind!r}, {name!r}): {wrong[0]!r} is no dtype of a kernel, which are "
            "float32, bfloat16, float16 and float64"
        )
    if not speed > 0:
        raise KernelError(
            f"register_kernel({kind!r}, {name!r}): speed={speed!r} is how many times as fast the "
            "kernel is, a number above 0"
        )
    against, of = _OWN[kind], (tuple(devices), tuple(dtypes))
    register(Kernel(kind, name, name, *of, against, speed=float(speed), function=function))


# Torch's backends of `scaled_dot_product_attention`: FlashAttention-2 on every device from Ampere
# on, cuDNN's made for Hopper and Blackwell (torch takes that by itself there from cuDNN 9.15 on,
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). FlashAttention-3 and -4 come as packages
# that `torch.nn.attention.activate_flash_attention_impl` puts in the place of its own.
for _row in (
    Kernel(
        "attention", FLASH, "torch's FlashAttention-2", NVIDIA, LOW, _attention(256),
        "flash",
    ),
    Kernel(
        "attention", CUDNN, "cuDNN's attention", ("hopper", "blackwell"), LOW, _attention(128),
        "flash_new",
    ),
    Kernel(
        "attention", FLASH_3, "FlashAttention-3 (package flash-attn-3)", ("hopper",), LOW,
        _attention(256), "flash_new", by_itself=False,
    ),
    Kernel(
        "attention", FLASH_4, "FlashAttention-4 (package flash-attn-4)", ("blackwell",), LOW,
        _attention(128), "flash_4", by_itself=False,
    ),
    Kernel(
        LOSS_HEAD, TRITON, "triton", NVIDIA, ("float32", *LOW), lambda op, tensors: "",
    ),
    Kernel(
        GATED, TRITON, "triton", NVIDIA, ("float32", *LOW), lambda op, tensors: "",
    ),
):  # fmt: skip
    register(_row)
