"""What acts beside the ops of a forward (hooks, state that it leaves behind) is told, not lost."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-call, no-any-return"
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.pytorch import capture, errors
from autopar.frontends.shared.captured import Captured
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from tests.emit.harness import check, emitted
from tests.emit.random_stage import random_stage

B, D = 4, 8
Body = Callable[[Any, Tensor], Tensor]


def batch() -> dict[str, Tensor]:
    return {"x": torch.ones(B, D)}


class Model(nn.Module):
    def __init__(self, body: Body, prepare: Callable[[Any], object] = id) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("average", torch.zeros(D))
        self.register_buffer("cache", torch.zeros(D), persistent=False)
        self.plain, self.steps, self.seen = torch.zeros(D), 0, {"batches": 0}
        self.body = body
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x))


def captured(body: Body, prepare: Callable[[Any], object] = id) -> Captured:
    return capture(Workload(model=lambda: Model(body, prepare), batch=batch))


def numbers() -> dict[str, Tensor]:
    return {"x": torch.randn(B, D, generator=torch.Generator().manual_seed(1))}


def checked(body: Body, prepare: Callable[[Any], object] = id) -> None:
    """The program's loss, gradients and buffers are those of the model."""
    torch.manual_seed(0)
    model, made = Model(body, prepare), captured(body, prepare)
    for mesh in ("dp_replicate=2 x tp=2", "dp_shard=4"):
        check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, 0)), model, numbers())


def mean(m: Any, h: Tensor) -> Tensor:
    return h.mean()


# -- gradients that are changed on the way --------------------------------------------------------


def _hooked(m: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * 2)
    return h.mean()


def _hooked_weight(m: Any, h: Tensor) -> Tensor:
    m.linear.weight.register_hook(torch.zeros_like)
    return h.mean()


def _hooked_node(m: Any, h: Tensor) -> Tensor:
    assert h.grad_fn is not None
    h.grad_fn.register_hook(lambda made, given: None)
    return h.mean()


def _packed(m: Any, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.round, lambda t: t):
        return h.square().mean()


@pytest.mark.parametrize(
    ("body", "prepare", "words"),
    [
        (_hooked, id, "Tensor.register_hook inside the forward"),
        (_hooked_weight, id, "Tensor.register_hook inside the forward"),
        (_hooked_node, id, "grad_fn.register_hook inside the forward"),
        (_packed, id, "saved_tensors_hooks inside the forward"),
        (mean, lambda m: m.linear.weight.register_hook(torch.neg), "parameter linear.weight"),
        (
            mean,
            lambda m: m.linear.bias.register_post_accumulate_grad_hook(lambda p: None),
            "parameter linear.bias",
        ),
        (mean, lambda m: m.linear.register_full_backward_hook(print), "module linear"),
        (mean, lambda m: m.register_full_backward_pre_hook(print), "module Model"),
    ],
)
def test_hooks_on_gradients(body: Body, prepare: Callable[[Any], object], words: str) -> None:
    with pytest.raises(errors.UnsupportedOpError, match="would train without it") as caught:
        captured(body, prepare)
    assert words in str(caught.value)


def test_a_hook_of_every_module() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda m, made, given: None)
    try:
        with pytest.raises(errors.UnsupportedOpError, match="every module has a backward hook"):
            captured(mean)
    finally:
        handle.remove()


def test_hooks_are_possible_again_afterwards() -> None:
    captured(mean)
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: grad * 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        x.square().sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]


def test_offloading_gives_back_what_it_took() -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return h.square().mean()

    assert captured(body).graph.ops


# -- what a forward leaves behind -----------------------------------------------------------------


def _add(m: Any, h: Tensor) -> None:
    m.average.mul_(0.9).add_(h.detach().mean(0))


def _assign(m: Any, h: Tensor) -> None:
    m.average = 0.9 * m.average + h.detach().mean(0)


def _assign_unread(m: Any, h: Tensor) -> None:
    m.average = h.detach().mean(0)


def _out(m: Any, h: Tensor) -> None:
    torch.add(m.average, 1.0, out=m.average)


def _table(m: Any, h: Tensor) -> None:
    m._buffers["average"] = h.detach().mean(0)


def _slice(m: Any, h: Tensor) -> None:
    m.average[:2] = 1.0


def _data(m: Any, h: Tensor) -> None:
    m.average.data = h.detach().mean(0)


def _index(m: Any, h: Tensor) -> None:
    m.average.index_copy_(0, torch.arange(D), h.detach().mean(0))


def _lerp(m: Any, h: Tensor) -> None:
    with torch.no_grad():
        m.average.lerp_(h.mean(0), 0.1)


def _queue(m: Any, h: Tensor) -> None:
    m.average = torch.cat((m.average[1:], h.detach().mean().view(1)))


UPDATES = [_add, _assign, _assign_unread, _out, _table, _slice, _data, _index, _lerp, _queue]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("read", [True, False])
def test_buffers_that_a_forward_updates(update: Callable[..., None], read: bool) -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        update(m, h)
        return (h - m.average).square().mean() if read else h.mean()

    checked(body)


def test_a_buffer_that_a_forward_makes() -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        m.register_buffer("average_2", h.detach().mean(0))
        return h.mean()

    with pytest.raises(errors.MutationError, match="'average_2'"):
        captured(body)


def test_spectral_norm() -> None:
    def prepare(m: Any) -> None:
        m.linear = nn.utils.parametrizations.spectral_norm(m.linear)

    checked(mean, prepare)


def _count(m: Any, h: Tensor) -> Tensor:
    m.steps += 1
    return h.mean() * m.steps


def _count_in_a_dict(m: Any, h: Tensor) -> Tensor:
    m.seen["batches"] += 1
    return h.mean() if m.seen["batches"] < 2 else h.sum()


@pytest.mark.parametrize(("body", "name"), [(_count, "steps"), (_count_in_a_dict, "seen")])
def test_counts_that_a_forward_computes_with(body: Body, name: str) -> None:
    with pytest.raises(errors.MutationError, match=f"counts in {name}"):
        captured(body)


def test_a_plain_tensor_that_the_next_forward_reads() -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        loss = (h - m.plain).square().mean()
        m.plain = h.detach().mean(0)
        return loss

    carried = [op.inputs[0] for op in captured(body).graph.ops if op.kind == "carry"]
    assert carried == ["plain"]


def _memory(m: Any, h: Tensor) -> Tensor:
    """As a recurrent memory that is zeros at first."""
    if m.width is None:
        m.width = torch.zeros_like(h)
    loss = (h + m.width).square().mean()
    m.width = h.detach()
    return loss


def _first_of_all(m: Any, h: Tensor) -> Tensor:
    """A centre that the first batch gives and the next ones read."""
    if not hasattr(m, "centre"):
        m.centre = h.detach().mean(0)
    return (h - m.centre).square().mean()


@pytest.mark.parametrize("body", [_memory, _first_of_all])
def test_what_one_forward_keeps_for_the_next(body: Body) -> None:
    with pytest.raises(errors.MutationError, match="From step to step a buffer is carried"):
        captured(body, lambda m: setattr(m, "width", None))


def _lazy_table(m: Any, h: Tensor) -> Tensor:
    if m.width is None or m.width.shape[0] < D:
        m.width = torch.arange(D) / D
    return (h * m.width[:D].to(h.device)).mean()


def test_a_table_that_is_made_when_it_is_first_needed() -> None:
    kinds = [op.kind for op in captured(_lazy_table, lambda m: setattr(m, "width", None)).graph.ops]
    assert "arange" in kinds


def _tell(m: Any, h: Tensor) -> None:
    m.steps += 1


def _keep(m: Any, h: Tensor) -> None:
    m.last = h


def _cache(m: Any, h: Tensor) -> None:
    m.cache = torch.arange(D) * 2.0


@pytest.mark.parametrize("leave", [_tell, _keep, _cache])
def test_what_no_later_forward_needs_may_be_left_behind(leave: Callable[..., None]) -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        leave(m, h)
        return (h * m.cache).mean()

    assert [op.kind for op in captured(body).graph.ops][:2] == ["linear", "add"]


def _prepare_once(m: Any, h: Tensor) -> None:
    """As torch prepares something once in a process: no result comes from it."""
    if m.width is None:
        torch.empty(0)
        m.width = h.shape[-1]


def _first_call(m: Any, h: Tensor) -> None:
    """Doubles in the first forward alone."""
    if m.width is None:
        m.width = h.shape[-1]
        h.mul_(2)


def test_what_the_first_forward_alone_prepares() -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        m.prepare(m, h)
        return h.sum() / m.width

    def prepare(how: Callable[..., None]) -> Callable[[Any], None]:
        def set_up(m: Any) -> None:
            m.width, m.prepare = None, how

        return set_up

    assert [op.kind for op in captured(body, prepare(_prepare_once)).graph.ops][-1] == "div"
    with pytest.raises(errors.MutationError, match=r"counts in width \(None to 8\)"):
        captured(body, prepare(_first_call))


def test_a_table_that_the_first_batch_made_is_named_before_marks_of_hooks() -> None:
    """As transformers' Wav2Vec2-Conformer extends its positions, and notes that it has hooks."""

    def body(m: Any, h: Tensor) -> Tensor:
        m._output_capturing_hooks_installed, m.seen = True, True
        if m.scale.shape[0] < h.shape[-1]:
            m.scale = h.detach().abs().mean(0)
        return (h / m.scale).square().mean()

    def prepare(m: Any) -> None:
        m._output_capturing_hooks_installed, m.seen = None, None
        m.register_buffer("scale", torch.ones(1), persistent=False)

    with pytest.raises(errors.MutationError, match=r"the forward keeps scale and computes with it"):
        captured(body, prepare)


def test_marks_of_hooks_are_not_named() -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        m._output_capturing_hooks_installed = True
        return _count(m, h)

    def prepare(m: Any) -> None:
        m._output_capturing_hooks_installed, m.steps = None, 0

    with pytest.raises(errors.MutationError, match=r"counts in steps \(0 to 1\) and computes"):
        captured(body, prepare)


def _seeded(m: Any, h: Tensor) -> Tensor:
    torch.manual_seed(3)
    return (h * torch.rand_like(h)).mean()


def _forked(m: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return _seeded(m, h)


def _kept_and_put_back(m: Any, h: Tensor) -> Tensor:
    state = torch.get_rng_state()
    made = (h * torch.rand_like(h)).mean()
    torch.set_rng_state(state)
    return made


@pytest.mark.parametrize("body", [_seeded, _forked])
def test_a_forward_that_seeds_is_refused_with_its_place(body: Body) -> None:
    with pytest.raises(
        errors.UnsupportedOpError, match=r"torch.manual_seed\(3\) inside the"
    ) as caught:
        captured(body)
    assert f"{__file__}:{_seeded.__code__.co_firstlineno + 1}" in str(caught.value)
    torch.manual_seed(0)  # is possible again


def test_random_states_may_be_put_back() -> None:
    assert any(op.kind == "noise" for op in captured(_kept_and_put_back).graph.ops)


class _Counting(nn.Module):
    """Counts under the name that batch normalisation has for its counter."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, normalises: bool, reads: str) -> None:
        super().__init__()
        self.normalises, self.reads = normalises, reads
        self.register_buffer("running_mean", torch.zeros(D))
        self.register_buffer("running_var", torch.ones(D))
        self.register_buffer("num_batches_tracked", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        if self.reads == "before":
            h = h * self.num_batches_tracked
        self.num_batches_tracked.add_(1)
        if self.reads == "behind":
            h = h / self.num_batches_tracked
        if not self.normalises:
            return h
        return F.batch_norm(h, self.running_mean, self.running_var, training=True)


def _counted(normalises: bool, reads: str = "") -> Captured:
    return captured(
        lambda m, h: m.counting(h).square().mean(),
        lambda m: m.add_module("counting", _Counting(normalises, reads)),
    )


def test_a_counter_by_the_name_of_batch_normalisations() -> None:
    kinds = [o.kind for o in _counted(True).graph.ops]
    assert (kinds.count("batch_norm"), kinds.count("carry")) == (1, 0)
    for given in ((False,), (False, "behind"), (True, "before"), (True, "behind")):
        carried = [op.inputs[0] for op in _counted(*given).graph.ops if op.kind == "carry"]
        assert carried == ["counting.num_batches_tracked"]
