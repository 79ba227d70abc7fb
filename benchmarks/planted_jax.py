"""Errors in what plans, writes and runs JAX programs, one small change each."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks import planted_jax_pipelines, planted_jax_sequences
from benchmarks.planting import Case, Planted, in_emission, in_runtime

CASES: Mapping[str, Case] = {
    "jax gpt tp": Case("jax_gpt", {"tp": "2"}),
    "jax gpt zero 1": Case("jax_gpt", {"dp_shard": "2", "zero": "1"}),
    "jax gpt zero 3": Case("jax_gpt", {"dp_shard": "2", "zero": "3"}),
    "jax half zero 2": Case("jax_half", {"dp_shard": "2", "zero": "2"}),
    "jax narrow tp": Case("jax_narrow", {"tp": "2"}),
    "jax ops replicate": Case("jax_ops", {"dp_replicate": "2"}),
    **planted_jax_pipelines.CASES,
    **planted_jax_sequences.CASES,
}


def _capture(name: str, case: str, where: str, old: str, new: str) -> Planted:
    return Planted(name, "capture", f"jax {case}", f"frontends.jax.{where}", old, new)


def _lifting(name: str, case: str, where: str, old: str, new: str) -> Planted:
    return Planted(name, "lifting", f"jax {case}", f"frontends.jax.{where}", old, new)


def _rule(name: str, case: str, where: str, old: str, new: str) -> Planted:
    return Planted(name, "rules", f"jax {case}", where, old, new)


ERRORS: tuple[Planted, ...] = (
    _capture("select takes its sides the wrong way round", "ops replicate",
        "primitives:_select_n", "(condition, if_true, if_false)", "(condition, if_false, if_true)"),
    _capture("a cube becomes a square", "ops replicate",
        "primitives:_integer_pow", 'params["y"] == 2', 'params["y"] in (2, 3)'),
    _capture("clip from above alone", "ops replicate",
        "primitives:_clamp", "min=low.value", "min=-1e9"),
    _capture("pad with zeros whatever the value (jax)", "ops replicate",
        "enlarged:padded", "value=value.value", "value=0.0"),
    _capture("flip of another dim", "ops replicate",
        "primitives:_rev", "tuple(int(d) for d", "tuple(int(d) + 1 for d"),
    _capture("a strided slice starts at zero (jax)", "ops replicate",
        "primitives:_slice", "start=int(start), stop=int(stop)",
        "start=0, stop=int(stop) - int(start)"),
    _capture("counting starts at one", "ops replicate",
        "primitives:_iota", "start=0, stop=size", "start=1, stop=size + 1"),
    _capture("a derivative of the user's own is left out", "ops replicate",
        "jaxprs:_Walker._equation", "if name in (*CUSTOM, SOLVE) and self.rules is not None",
        "if False"),
    _lifting("a norm written out has another epsilon (jax)", "gpt tp",
        "idioms:_layer_norm", "eps=eps", "eps=1e-6"),
    _lifting("the scale of attention is inverted", "gpt tp",
        "attention_logits:Climb.settle", "scores.scale *=", "scores.scale /="),
    _lifting("a causal mask is taken for none", "gpt tp",
        "attention:_seen", "band = logits.band", "band = None"),
    _lifting("layers run in reverse order", "gpt zero 3",
        "finish:_Finisher._block", 'if node.attrs["reverse"]:', 'if not node.attrs["reverse"]:'),
    _rule("a sum over pieces counts as whole (jax)", "gpt tp",
        "rules.strategies:result_placement",
        "return PARTIAL if summed else WHOLE", "return WHOLE"),
    _rule("the gradient of what all ranks read is not summed (jax)", "gpt tp",
        "rules.strategies:operand_placement", "DEFERRED if differentiable else WHOLE", "WHOLE"),
    in_emission("a mean over pieces stays a mean (jax)", "ops replicate",
        "expressions:_reduction", "w.counts_globally", "False"),
    in_emission("a number first is written last (jax)", "ops replicate",
        "expressions:_operator", "sides.reverse()", "pass"),
    in_emission("attention is written without its mask", "gpt tp",
        "kinds:_attention", '["causal=True"] if w.attrs["causal"] else []', "[]"),
    in_emission("a copy's gradient is not reduced (jax)", "narrow tp",
        "steps:call", "call_of(step, kinds, x, first=scatters.get(step.axis))",
        'x if kinds == ("R", "D") else call_of(step, kinds, x, first=scatters.get(step.axis))'),
    in_runtime("copy_to sums nothing in backward (jax)", "narrow tp",
        "collectives:copy_to", "lambda g: lax.psum(g, axis)", "_same"),
    in_runtime("all_reduce divides its gradient among the ranks (jax)", "narrow tp",
        "collectives:all_reduce", "lambda x: lax.psum(x, axis), _same",
        "lambda x: lax.psum(x, axis), lambda g: g / 2"),
    in_runtime("a unit's parameters are mixed up", "gpt zero 3",
        "units:_unit", "start += part.size", "start = part.size"),
    in_runtime("a token sees those before it alone", "gpt tp",
        "attention_rows:seen", "(back >= 0) if window is None", "(back > 0) if window is None"),
    in_runtime("every rank updates the first piece", "gpt zero 1",
        "collectives:own_piece", "lax.axis_index(axis) * size", "0 * size"),
    in_runtime("second moments are not corrected", "gpt zero 3",
        "optimizer:optimizer_step", "v / _corrected(second, count)", "v"),
    in_runtime("weights do not decay", "gpt zero 1",
        "optimizer:optimizer_step", "p * (1 - rate * decay)", "p"),
    in_runtime("plain descent without decay (jax)", "ops replicate",
        "optimizer:optimizer_step", "(g + decay * p)", "g"),
    in_runtime("the norm counts copies once each (jax)", "gpt tp",
        "gradients:squares_of",
        "/ math.prod(layout.mesh[a] for a in axes if a not in cutting[k])", ""),
    in_runtime("clipping with another epsilon (jax)", "gpt zero 3",
        "gradients:clipped", "(norm + 1e-6)", "(norm + 1e-3)"),
    in_emission("sums deferred to the step's end are left out (jax)", "gpt tp",
        "train:_reduced", "gradient = lax.psum(gradient, leaf.parameter.deferred)", "pass"),
    in_emission("the loss of the own samples alone", "gpt zero 1",
        "staged:sums", 'lines.add(f"loss = lax.psum(loss, {axes_text(how.data)})")',
        'lines.add("loss = loss")'),
    in_runtime("a norm without its epsilon", "gpt zero 3",
        "ops:layer_norm", "keepdims=True) + eps)", "keepdims=True))"),
    in_runtime("layers are stacked in reverse order", "gpt zero 1",
        "layout:Layout._gathered",
        "for n in leaf.names]) if", "for n in leaf.names[::-1]]) if"),
    in_runtime("half of the loss's scale stays in gradients (jax)", "half zero 2",
        "step:Step.value_and_grad", "(g / scale)", "(2 * g / scale)"),
    *planted_jax_pipelines.ERRORS,
    *planted_jax_sequences.ERRORS,
)  # fmt: skip
