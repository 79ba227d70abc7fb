"""Running the forward on fake tensors and writing down every aten op that it calls.

The trace is taken before autograd and before composite ops are broken up: `linear`, attention and
cross-entropy stay one op. Beside each op stand the module and the line of the user that called it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from autopar.frontends.pytorch.alike import Repeats
from autopar.frontends.pytorch.autocast import autocast_of_devices_refused
from autopar.frontends.pytorch.build import Built, check_batch, without_cache
from autopar.frontends.pytorch.calls import Kind, NotAlike
from autopar.frontends.pytorch.constant_values import node_of
from autopar.frontends.pytorch.conversions import idle_conversions
from autopar.frontends.pytorch.ctc import kept_ctc_losses
from autopar.frontends.pytorch.errors import CaptureError
from autopar.frontends.pytorch.experts import CalledExperts, kept_experts
from autopar.frontends.pytorch.forward_errors import explained, loss_of
from autopar.frontends.pytorch.functions import Called, kept_functions
from autopar.frontends.pytorch.held import Named, fakes_inside, made_and_kept
from autopar.frontends.pytorch.hooks import check_hooks, hooks_refused
from autopar.frontends.pytorch.inner_gradients import inner_gradients_refused
from autopar.frontends.pytorch.known_forwards import known_forwards
from autopar.frontends.pytorch.left_behind import (
    Numbers,
    check_tensors,
    numbers_of,
    write_replaced,
)
from autopar.frontends.pytorch.mask_functions import mask_functions_broadcast
from autopar.frontends.pytorch.noting import Sources
from autopar.frontends.pytorch.python_numbers import numbers_stay_tensors
from autopar.frontends.pytorch.quiet import quiet_fake_tensors
from autopar.frontends.pytorch.same_numbers import SameNumbers, answering
from autopar.frontends.pytorch.samples_alike import samples_shared
from autopar.frontends.pytorch.seeds import seeds_allowed, seeds_refused
from autopar.frontends.pytorch.value_checks import value_checks_pass
from autopar.torch_private.modes import causal_check, exporting


@dataclass(frozen=True, slots=True)
class Trace:
    """What was written down.

    graph:   the fx graph; placeholders are the batch entries in order, ``batch`` their names.
    root:    holds what ``get_attr`` nodes name.
    named:   the model's tensors by ``id`` of the tensor that stood for them in the trace.
    aliases: every other name of a tied tensor, to the first one.
    functions: calls of hand-written derivatives, by their number in the graph; ``experts`` those of
        a library's experts.
    before, left: plain attributes of the model around the forward.
    made:    the nodes of tensors that the forward put into attributes, by the attribute's name; ""
        for one that no op made. kept: attributes and buffers that hold what it was given.
    dense:   modules all of whose experts multiply every token.
    numbers: by entry of the batch those that every sample has, where the forward asked for them.
    """

    graph: fx.Graph
    root: nn.Module
    batch: tuple[str, ...]
    named: dict[int, Named]
    aliases: dict[str, str]
    kinds: list[Kind]
    functions: list[Called]
    experts: list[CalledExperts]
    sources: Sources
    before: Numbers
    left: Numbers
    made: dict[str, str]
    kept: frozenset[str]
    dense: tuple[str, ...] = ()
    numbers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@contextmanager
def _as_a_trace_takes_it(model: nn.Module) -> Iterator[None]:
    """Inside, a forward computes what it does elsewhere, in ops that can be lifted; what a graph
    cannot say is refused."""
    with ExitStack() as stack:
        stack.enter_context(idle_conversions())
        stack.enter_context(kept_ctc_losses())
        stack.enter_context(hooks_refused())
        stack.enter_context(seeds_refused())
        stack.enter_context(inner_gradients_refused())
        stack.enter_context(autocast_of_devices_refused())
        stack.enter_context(numbers_stay_tensors(model))
        stack.enter_context(_masks_unread())
        stack.enter_context(mask_functions_broadcast())
        stack.enter_context(value_checks_pass())
        stack.enter_context(quiet_fake_tensors())
        yield


def take_trace(
    built: Built, repeats: Repeats, whole: tuple[str, ...] = (), asked: bool = False
) -> Trace:
    """Traces the forward once, repeated layers once each.

    asked: answer with numbers that all samples have; ``whole``: entries without samples.

    Raises `NotAlike` for layers that turn out to differ, else a `CaptureError`.
    """
    model = built.model
    names = tuple(built.batch)
    entries: dict[str, fx.Node | None] = {}
    sources = Sources(model, lambda: _values(entries, built))
    alike = SameNumbers(entries, lambda: _batch_values(built), whole) if asked else None
    calls = repeats.calls(sources.note)
    check_hooks(model)
    before = numbers_of(model)
    functions: list[Called] = []
    experts: list[CalledExperts] = []
    made: dict[str, str] = {}
    kept: set[str] = set()

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        entries.update(zip(names, map(node_of, tensors), strict=True))
        with sources.recording(calls), calls.patched(named):
            loss = loss_of(model(**dict(zip(names, tensors, strict=True))))
        write_replaced(model, held, _read_so_far())
        fresh, same = made_and_kept(model, held)
        nodes = {name: node_of(tensor) for name, tensor in fresh.items()}
        made.update((name, "" if node is None else node.name) for name, node in nodes.items())
        kept.update(same)
        return loss

    with ExitStack() as stack:
        named, aliases, held = stack.enter_context(fakes_inside(model, built.mode))
        stack.enter_context(without_cache(model))
        stack.enter_context(exporting())
        stack.enter_context(kept_functions(functions, built.mode, calls))
        stack.enter_context(kept_experts(experts, model, built.mode, calls))
        dense = stack.enter_context(known_forwards(model))
        stack.enter_context(_as_a_trace_takes_it(model))
        stack.enter_context(answering(alike))
        stack.enter_context(built.mode)
        try:
            traced = make_fx(run, pre_dispatch=True)(*built.batch.values())
        except (NotAlike, CaptureError):
            raise
        except Exception as error:  # a user's forward
            if calls.failure is not None:
                raise calls.failure from error
            differing = "" if alike is None else alike.differing
            raise explained(error, model, sources.module, differing) from error
        if calls.failure is not None:
            raise calls.failure
        sources.chosen.check()
        if alike is not None and alike.read:
            samples = check_batch(built.batch, whole)
            samples_shared(traced.graph, traced, alike.values(), samples)
        sources.settle(traced.graph)
        check_tensors(model, held, _read(traced.graph, traced))
    left = numbers_of(model)
    return Trace(
        *(traced.graph, traced, names, named, aliases, calls.kinds, functions, experts),
        *(sources, before, left, made, frozenset(kept), dense),
        {} if alike is None else alike.read,
    )


def _batch_values(built: Built) -> Mapping[str, torch.Tensor]:
    with seeds_allowed():
        return built.values()


def _values(entries: Mapping[str, fx.Node | None], built: Built) -> dict[fx.Node, torch.Tensor]:
    """Of the batch, by its places in the trace."""
    values = _batch_values(built)
    return {node: values[name] for name, node in entries.items() if node is not None}


def _read(graph: fx.Graph, root: Any) -> set[int]:
    """By ``id``, the tensors from outside that ops of the graph read."""
    names = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
    return {id(operator.attrgetter(name)(root)) for name in names}


def _read_so_far() -> set[int]:
    mode: Any = get_proxy_mode()
    return _read(mode.tracer.graph, mode.tracer.root)


@contextmanager
def _masks_unread() -> Iterator[None]:
    """Inside, `nn.Transformer` takes every mask as it is: it looks into one that comes without a
    hint, only to leave it out where it is causal, which is found here anyway."""
    module, name = causal_check
    plain = getattr(module, name)
    setattr(module, name, lambda mask, is_causal=None, size=None: is_causal is True)
    try:
        yield
    finally:
        setattr(module, name, plain)
