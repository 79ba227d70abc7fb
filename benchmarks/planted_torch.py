"""Errors in what plans, writes and runs PyTorch programs, one small change each."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.planting import Case, Planted

CASES: Mapping[str, Case] = {
    "gpt tp": Case("gpt", {"tp": "2"}),
    "gpt replicate": Case("gpt", {"dp_replicate": "2"}),
    "gpt zero 1": Case("gpt", {"dp_shard": "2", "zero": "1", "microbatch": "2"}),
    "gpt zero 3": Case("gpt", {"dp_shard": "2", "zero": "3"}),
    "narrow tp": Case("narrow", {"tp": "2"}),
    "llama tp": Case("llama", {"tp": "2"}),
    "ops replicate": Case("ops", {"dp_replicate": "2"}),
    "images zero 3": Case("images", {"dp_shard": "2", "zero": "3"}),
}

_LIFTING = "frontends.pytorch"
_EMIT = "emit.pytorch"


def _capture(name: str, case: str, where: str, old: str, new: str) -> Planted:
    return Planted(name, "capture", case, f"{_LIFTING}.{where}", old, new)


def _lifting(name: str, case: str, where: str, old: str, new: str) -> Planted:
    return Planted(name, "lifting", case, f"{_LIFTING}.{where}", old, new)


def _rule(name: str, case: str, where: str, old: str, new: str) -> Planted:
    return Planted(name, "rules", case, where, old, new)


def _emission(name: str, case: str, where: str, old: str, new: str) -> Planted:
    return Planted(name, "emission", case, f"{_EMIT}.{where}", old, new)


def _runtime(name: str, case: str, where: str, old: str, new: str) -> Planted:
    return Planted(name, "runtime", case, f"runtime.pytorch.{where}", old, new, planned=False)


ERRORS: tuple[Planted, ...] = (
    _capture("a number less a tensor is turned round", "ops replicate",
        "aten_elementwise:_two", "[right], other=left, scalar_first=True", "[right], other=left"),
    _capture("clamp loses its upper bound", "ops replicate",
        "aten_elementwise:_clamp", "min=low, max=high)", "min=low, max=None)"),
    _capture("elu with the default slope", "ops replicate",
        "aten_elementwise:_elu", 'alpha=a["alpha"]', "alpha=1.0"),
    _capture("where takes its sides the wrong way round", "ops replicate",
        "aten_elementwise:_where", '(("a", "self"), ("b", "other"))',
        '(("b", "other"), ("a", "self"))'),
    _capture("logsumexp forgets the maximum", "ops replicate",
        "aten_elementwise:_logsumexp", '"add", [log, top]', '"sub", [log, top]'),
    _capture("a strided slice starts at zero", "ops replicate",
        "aten_shapes:_slice", "dim, start, max(start, stop), step",
        "dim, 0, max(start, stop) - start, step"),
    _capture("pad with zeros whatever the value", "ops replicate",
        "aten_shapes:_pad", "low_high=low_high, value=value", "low_high=low_high, value=0"),
    _capture("roll to the other side", "ops replicate",
        "aten_shapes:_roll", 'tuple(a["shifts"])', 'tuple(-s for s in a["shifts"])'),
    _capture("cat in reverse order", "ops replicate",
        "aten_shapes:_cat", 'for x in a["tensors"]:', 'for x in a["tensors"][::-1]:'),
    _capture("labels are not smoothed", "gpt tp",
        "aten_losses:_cross_entropy", 'label_smoothing=float(a["label_smoothing"])',
        "label_smoothing=0.0"),
    _capture("attention is not causal", "gpt tp",
        "aten:_attention", 'causal=a["is_causal"]', "causal=False"),
    _capture("attention with the default scale", "llama tp",
        "aten:_attention", 'scale=a["scale"]', "scale=None"),
    _capture("scores are not dropped", "gpt replicate",
        "aten:_attention", 'dropout_p=float(a["dropout_p"])', "dropout_p=0.0"),
    _capture("a norm's epsilon of another library", "gpt tp",
        "aten:_layer_norm", 'eps=a["eps"]', "eps=1e-6"),
    _capture("the padding token learns", "gpt tp",
        "aten:_embedding", "padding_idx=padding", "padding_idx=None"),
    _capture("running statistics with the default momentum", "images zero 3",
        "aten:_batch_norm", 'momentum=a["momentum"]', "momentum=0.1"),
    _capture("a norm of groups with another epsilon", "images zero 3",
        "aten:_group_norm", 'eps=a["eps"]', "eps=1e-3"),
    _lifting("a norm written out has another epsilon", "llama tp",
        "idioms:_root_mean_square", 'float(plus.attrs["other"])', "1e-6"),
    _lifting("rotation by sine and cosine swapped", "llama tp",
        "idioms:rotary", "for t in (cos, sin)]", "for t in (sin, cos)]"),
    _lifting("the exact gelu becomes the approximate one", "ops replicate",
        "idioms:gelu", '{"approximate": "none"}', '{"approximate": "tanh"}'),
    _lifting("a gate loses its factor", "llama tp",
        "idioms:silu", 'Node("silu", [x]', 'Node("sigmoid", [x]'),
    _lifting("a causal mask is dropped", "llama tp",
        "masks:_mask_attention", '"causal": True}', '"causal": False}'),
    _lifting("a product with a half counts as nothing", "ops replicate",
        "cleanup:_does_nothing", "bool(other == 1)", "bool(other in (1, 0.5))"),
    _rule("a sum over pieces counts as whole", "gpt tp",
        "rules.strategies:result_placement",
        'PARTIAL if bound.factors[choice].kind == "summed" else WHOLE', "WHOLE"),
    _rule("the gradient of what all ranks read is not summed", "gpt tp",
        "rules.strategies:operand_placement", "DEFERRED if differentiable else WHOLE", "WHOLE"),
    _rule("parameters are whole on data ranks before backward", "gpt replicate",
        "lowering.spread:lower", "batch = DEFERRED if tensor.differentiable else WHOLE",
        "batch = WHOLE"),
    _rule("a gathered piece gets its slice of every rank's gradient", "gpt tp",
        "rules.resharding:transition", "TRANSITIONS.get((source.kind, target.kind))",
        'TRANSITIONS.get((source.kind, "R" if source.kind == "S" and target.kind == "D" '
        "else target.kind))"),
    _emission("a mean over pieces divides by the local count", "ops replicate",
        "reductions:_reduction", "product(site.whole(0)[d] for d in dims)",
        "product(site.operand(0)[d] for d in dims)"),
    _emission("a mean over pieces stays a mean", "ops replicate",
        "reductions:_reduction", 'site.kind == "mean" and site.splits(0, dims)', "False"),
    _emission("parentheses on the right are lost", "ops replicate",
        "elementwise:_infix", "{right.within(level + 1)}", "{right.text}"),
    _emission("a number first is written last", "ops replicate",
        "elementwise:operands", "return scalar, site.args[0]", "return site.args[0], scalar"),
    _emission("a slice is written without its start", "ops replicate",
        "shapes:_slice", "{start or ''}", ""),
    _emission("pads are written high before low", "ops replicate",
        "shapes:_pad", "flat += [low, high]", "flat += [high, low]"),
    _emission("the scale of attention is not written", "llama tp",
        "layers:_attention", "if scale is not None and", "if False and"),
    _emission("the share that scores drop is not written", "gpt tp",
        "layers:_attention", 'if site.attrs.get("dropout_p")', "if False"),
    _emission("half of the share is dropped", "gpt replicate",
        "elementwise:_dropout", 'literal(float(site.attrs["p"]))',
        'literal(float(site.attrs["p"]) / 2)'),
    _emission("numbers are dropped in the place of features", "images zero 3",
        "elementwise:_dropout", 'bool(site.attrs.get("features"))', "False"),
    _emission("label smoothing is not written", "gpt tp",
        "layers:_cross_entropy", 'if site.attrs.get("label_smoothing", 0.0)', "if False"),
    _emission("statistics of the own samples alone", "images zero 3",
        "layers:_statistics_over", "if axes else []", "if False else []"),
    _emission("a copy's gradient is not reduced", "narrow tp",
        "steps:calls", '(f"copy_to({x}, {axis})", "backward: all_reduce")', '(x, "")'),
    _runtime("copy_to sums nothing in backward", "narrow tp",
        "collectives:_CopyTo.backward", "transport.all_reduce(grad, ctx.axis)", "grad"),
    _runtime("all_reduce divides its gradient among the ranks", "narrow tp",
        "collectives:_AllReduce.backward", "return grad, None", "return grad / 2, None"),
    _runtime("every rank has the first piece", "gpt tp",
        "parameters:cut", "whole.start + index * step", "whole.start"),
    _runtime("sums deferred to the step's end are left out", "gpt tp",
        "gradients:_by_axes", "if member.reduce and", "if not member.reduce and"),
    _runtime("the norm counts copies once each", "gpt tp",
        "gradients:total_norm", ".sum() / copies", ".sum()"),
    _runtime("the norm of the own pieces alone", "gpt zero 3",
        "gradients:total_norm", "if group is not None", "if False"),
    _runtime("clipping with another epsilon", "gpt replicate",
        "gradients:clip", "torch.clamp(max_norm / (norm + 1e-6)",
        "torch.clamp(max_norm / (norm + 1e-3)"),
    _runtime("decay as a part of the gradient", "gpt replicate",
        "optimizer:of_groups", "torch.optim.AdamW(", "torch.optim.Adam("),
    _runtime("betas of another library", "gpt zero 1",
        "optimizer:of_groups", "betas=workload.betas", "betas=(0.9, 0.95)"),
    _runtime("another epsilon of the optimizer", "gpt zero 3",
        "optimizer:of_groups", "eps=workload.eps", "eps=1e-6"),
    _runtime("plain descent without decay", "ops replicate",
        "optimizer:of_groups",
        "lr=workload.learning_rate,\n            weight_decay=workload.weight_decay",
        "lr=workload.learning_rate,\n            weight_decay=0.0"),
    _runtime("vectors are never updated", "gpt tp",
        "optimizer:trainable", "h.leaf.numel()", "h.leaf.dim() > 1"),
    _emission("only the first rank steps", "gpt zero 1",
        "train:_update", '"optimizer.step()"', '"state.ranks.rank or optimizer.step()"'),
    _emission("gradients pile up over steps", "gpt tp",
        "train:_backward", "state.zero_grad()", "pass"),
    _runtime("labels are counted on the own rank alone", "gpt replicate",
        "totals:total_counts", ", *state.ranks.data_axes", ""),
    _runtime("replicated gradients are means", "gpt replicate",
        "storage:Replicated._wrap", "float(self.ranks.size(*axes))", "1.0"),
    _runtime("sharded gradients are means", "gpt zero 3",
        "storage:Sharded._wrap", "set_gradient_divide_factor(1.0)",
        "set_gradient_divide_factor(2.0)"),
    _runtime("every microbatch is reduced for itself", "gpt zero 1",
        "storage:Sharded.microbatch", "last or split.gradients", "True"),
    _runtime("every rank takes the first samples", "gpt replicate",
        "batches:cut_batch", "(i * width + place) * rows", "i * width * rows"),
    _runtime("initial weights of another seed", "gpt tp",
        "initialize:initialize", "torch.manual_seed(seed)\n        replay",
        "torch.manual_seed(seed + 1)\n        replay"),
    _runtime("variance over one less", "images zero 3",
        "batch_norm:_Normalise.forward", "variance = squares / count",
        "variance = squares / (count - 1)"),
    _runtime("running variance is the biased one", "images zero 3",
        "batch_norm:batch_norm", "variance * (count / (count - 1))", "variance"),
    _runtime("a norm over the batch forgets part of its gradient", "images zero 3",
        "batch_norm:_Normalise.backward", "(wide - mean - result * scaled)", "(wide - mean)"),
    _runtime("what ranks split is not dropped", "gpt tp",
        "dropout:dropout", "if not (p and training):", "if True:"),
    _runtime("dropout scales what it keeps twice", "gpt tp",
        "dropout:dropout", "torch.dropout, x, p", "torch.dropout, x / (1 - p), p"),
)  # fmt: skip
