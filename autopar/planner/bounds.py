"""What physics and arithmetic say of a prediction of any model; checked before it is shown."""

from __future__ import annotations

from autopar.cost_models.physics import Bound, band_bounds, memory_bounds, time_bounds
from autopar.nouns.plan import Prediction
from autopar.planner.question import Question


def prediction_bounds(
    said: Prediction, question: Question, at_peak_s: float, tokens: int | None
) -> list[Bound]:
    """Every bound on ``said``.

    at_peak_s: seconds of the model's arithmetic on all devices at their peaks.
    tokens:    of a global batch, None where they are not known.
    """
    step_s, memory = said.step_time_s, said.memory_bytes
    parts_s = {
        "compute time": said.compute_time_s,
        "forward time": said.forward_time_s,
        "optimizer time": said.optimizer_time_s,
        "waiting time": said.waiting_time_s,
        "communication that is not hidden": said.exposed_communication_s,
    }
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        "buffers": memory.buffers,
    }
    devices = question.cluster.device_count
    stored = trained = 0
    for _, tensor in question.graph.parameters():
        stored += tensor.size_bytes
        trained += tensor.size_bytes if tensor.differentiable else 0
    least = {"parameters": stored / devices, "gradients": trained / devices}
    found = time_bounds(step_s, parts_s, at_peak_s, said.lower_bound_s)
    found += memory_bounds(memory.total, parts, least)
    found += band_bounds("the step time", step_s, said.time_band_s)
    found += band_bounds("the memory", memory.total, said.memory_band_bytes)
    found.append(Bound("model FLOP/s utilization", said.mfu, 0.0, 1.0, "a share"))
    found.append(Bound("total memory", memory.total, 0.0, memory.limit, "within the limit"))
    if said.tokens_per_s is not None and tokens is not None:
        rate = tokens / step_s
        found.append(Bound("tokens/s", said.tokens_per_s, rate, rate, "tokens over step time"))
    return found
