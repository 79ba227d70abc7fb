"""From a `Workload` to a `Captured` model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.frontends.pytorch.alike import Repeats
from autopar.frontends.pytorch.assemble import assemble
from autopar.frontends.pytorch.averages import averages_as_buffers
from autopar.frontends.pytorch.build import Built, build, check_batch, without_values
from autopar.frontends.pytorch.calls import NotAlike
from autopar.frontends.pytorch.documents import with_length
from autopar.frontends.pytorch.errors import BatchError, DataDependentError, ForwardError
from autopar.frontends.pytorch.finite_clamps import check_precision
from autopar.frontends.pytorch.function_rules import with_rules
from autopar.frontends.pytorch.gradients import (
    check_owners,
    find_gradients,
    stop_gradients,
    unreached,
)
from autopar.frontends.pytorch.held import Named, attributes_kept
from autopar.frontends.pytorch.host_draws import without_host_draws
from autopar.frontends.pytorch.ir import Value, dtype_name, like
from autopar.frontends.pytorch.lift import lift
from autopar.frontends.pytorch.limits import Limits, limits_of
from autopar.frontends.pytorch.program import Program, cut, prune
from autopar.frontends.pytorch.rewrite import rewrite
from autopar.frontends.pytorch.same_again import check_same_again
from autopar.frontends.pytorch.trace import Trace, take_trace
from autopar.frontends.shared.captured import Captured, ModelTensor
from autopar.frontends.shared.kept_state import KeptState
from autopar.nouns.batch import BatchEntry, sample_dims, tokens_of
from autopar.nouns.errors import first_of
from autopar.nouns.workload import Workload
from autopar.rules.joined_samples import in_turns, joined_note

NAMED = 5
"""How many parameters or places a note names."""
SKIPPED = (
    "A branch that is skipped where a mask chooses no row runs at every step, and what its layers "
    "have there are gradients of zeros; on one device they have none then, and the optimizer "
    "leaves them alone in that step"
)
CHOSEN = (
    "Rows that a mask chooses are all computed, and the mask says which count, so a step takes as "
    "long for few of them as for all"
)
PAIRS = "The program and its checkpoints hold complex parameters as pairs of real numbers"
NO_DOCUMENTS = (
    "document_tokens is not used: no attention has a mask that compares a number of each row with "
    "one of each column, which packed documents would have"
)
DENSE = (
    "Every expert multiplies every token, and the routes choose among the results: the products "
    "take as long as for routes to all experts"
)
CLAMPED = (
    "A branch that clamps a tensor where not all of it is finite runs at every step; what is "
    "finite it leaves as it is"
)
ALIKE = (
    "The forward makes sizes of numbers that every sample of the batch has, so the program is that "
    "of batches which have them, and refuses others"
)
LIMITED = (
    "Parameters that the forward writes between limits are brought there before each step and each "
    "evaluation"
)
UNCHECKED = "The program does not check values where the forward does, and takes them for right"


def capture(workload: Workload) -> Captured:
    """Builds the model without memory, traces it and lifts it.

    Raises a `CaptureError` (see `errors`) for whatever in the model or the batch prevents that,
    `StateError` for what they keep from call to call.
    """
    with KeptState(workload, without_values) as state:
        built = build(workload, state.empty_caches)
        captured = capture_built(built, workload.whole_inputs, workload.precision)
    notes = (*captured.notes, *state.notes)
    if workload.document_tokens is None:
        return replace(captured, notes=notes)
    graph = with_length(captured.graph, workload.document_tokens)
    unused = (NO_DOCUMENTS,) if graph == captured.graph else ()
    return replace(captured, graph=graph, notes=(*notes, *unused))


def capture_built(
    built: Built, whole_inputs: tuple[str, ...] = (), precision: str = "float32"
) -> Captured:
    """`capture` for a model that stands already."""
    repeats = Repeats(built.model)
    asked = False
    while True:
        try:
            with attributes_kept(built.model):
                once = partial(take_trace, built, repeats, whole_inputs, asked)
                trace = without_host_draws(built.model, once)
                if trace.left != trace.before or trace.made:
                    check_same_again(trace, once())
            trace = averages_as_buffers(trace)
            trace.functions[:] = with_rules(trace.functions, built.mode)
            walk = lift(trace)
            program = cut(walk, trace.kinds)
            rewrite(program)
            prune(program)
            stop_gradients(program)
            gradients = find_gradients(program)
            check_owners(program, gradients, trace.kinds)
            break
        except NotAlike as error:  # told apart from now on
            repeats.split(error)
        except (DataDependentError, ForwardError):
            if asked:  # for what not all samples have
                raise
            asked = True
    limits, skips = limits_of(walk), trace.sources.skips
    check_precision({skip.place: skip.clamps for skip in skips if skip.clamps}, precision)
    tensors = _tensors(trace, program, limits)
    _check_names(tensors, built.batch)
    untrained = unreached(program, gradients, [t.name for t in tensors.values() if t.trainable])
    graph = assemble(program, gradients, _unread(tensors))
    batch = tuple(
        BatchEntry(
            name,
            tuple(t.shape),
            dtype_name(t.dtype),
            None if name in whole_inputs or t.ndim == 0 else 0,
            numbers=trace.numbers.get(name, ()),
        )
        for name, t in built.batch.items()
    )
    samples = check_batch(built.batch, whole_inputs)
    graph, joined = in_turns(graph, sample_dims(batch))
    classes = {path: type(m).__name__ for path, m in built.model.named_modules()}
    notes = (
        *_untrained(untrained),
        *joined_note(joined),
        *_where(PAIRS, [n.name for n in trace.named.values() if _is_pairs(n)]),
        *_where(CHOSEN, walk.chosen.table.places),
        *_where(DENSE, trace.dense),
        *_where(LIMITED, limits),
        *_where(UNCHECKED, trace.sources.checks),
        *_where(SKIPPED, [skip.place for skip in skips if not skip.clamps]),
        *_where(ALIKE, [f"{n} {list(numbers)}" for n, numbers in trace.numbers.items()]),
        *_where(CLAMPED, [skip.place for skip in skips if skip.clamps]),
    )
    return Captured(graph, tensors, batch, samples, tokens_of(batch), classes, notes=notes)


def _unread(tensors: Mapping[str, ModelTensor]) -> list[Value]:
    """Parameters that no op reads: held all the same, since checkpoints have them."""
    return [
        Value(t.shape, t.dtype, "parameter", t.name)
        for t in tensors.values()
        if t.role == "parameter" and not t.used
    ]


def _untrained(names: Sequence[str]) -> Iterator[str]:
    if names:
        several = "s" if names[1:] else ""
        yield (
            f"The loss does not depend on {len(names)} trainable parameter{several}, held and "
            f"saved but not trained, as without a gradient in PyTorch: "
            f"{first_of(names, NAMED)}."
        )


def _where(note: str, places: Iterable[str]) -> Iterator[str]:
    """``note`` with the first of its places, where there are any."""
    if shown := first_of(places, NAMED):
        yield f"{note}: {shown}."


def _tensors(
    trace: Trace, program: Program, limits: Mapping[str, Limits]
) -> dict[str, ModelTensor]:
    also: dict[str, list[str]] = {}
    for alias, name in trace.aliases.items():
        also.setdefault(name, []).append(alias)
    used = _used(program)
    return {
        n.name: ModelTensor(
            n.name,
            *_held_as(n),
            n.role,
            n.role == "parameter" and n.tensor.requires_grad,
            n.persistent,
            n.name in used,
            tuple(also.get(n.name, ())),
            limits.get(n.name),
        )
        for n in sorted(trace.named.values(), key=_order)
    }


def _held_as(named: Named) -> tuple[tuple[int, ...], str]:
    """The shape and dtype in programs, where a complex parameter is pairs [..., 2]."""
    if _is_pairs(named):
        value = like(named.tensor)
        return value.shape, value.dtype
    return tuple(named.tensor.shape), dtype_name(named.tensor.dtype)


def _is_pairs(named: Named) -> bool:
    return named.role == "parameter" and named.tensor.is_complex()


def _check_names(tensors: Mapping[str, ModelTensor], batch: Iterable[str]) -> None:
    """Raises `BatchError` where an entry of the batch bears the name of a tensor of the model."""
    for name in batch:
        if name in tensors and tensors[name].used:
            role = tensors[name].role
            raise BatchError(
                f"batch[{name!r}] is named like a {role} of the model, and a program has one "
                f"tensor of a name: rename the {role}, or the entry and the argument of forward"
            )


def _order(held: Named) -> tuple[bool, str]:
    """Parameters as the model has them, then buffers by name: some come out of Python sets."""
    return (True, held.name) if held.role == "buffer" else (False, "")


def _used(program: Program) -> set[str]:
    """Full names of the model's tensors that some op reads."""
    used = {v.name for n in program.nodes for v in n.inputs if v.name and v.role != "input"}
    for body in program.bodies.values():
        inner = {v.name for n in body.nodes for v in n.inputs if v.name}
        for call in program.calls(body.number):
            used |= {f"{call.attrs['instance']}{name.removeprefix(body.path)}" for name in inner}
    return used
