"""What physics and arithmetic say of a prediction of any model; checked before it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cost_models.physics import Bound, band_bounds, memory_bounds, time_bounds
from autopar.nouns.graph import Graph
from autopar.nouns.prediction import Memory, Prediction
from autopar.pricing.step_time import StepTime


def state_bytes(graph: Graph) -> tuple[int, int]:
    """Of all parameters, and of those that are trained."""
    tensors = [tensor for _, tensor in graph.parameters()]
    trained = sum(tensor.size_bytes for tensor in tensors if tensor.differentiable)
    return sum(tensor.size_bytes for tensor in tensors), trained


def pipeline_bounds(ranks: Sequence[Memory], each: int, state: tuple[int, int]) -> list[Bound]:
    """Of the ranks of a pipeline, ``each`` as many devices: together they hold the whole model's
    ``state`` (`state_bytes`)."""
    stored, trained = state
    parameters = each * sum(memory.parameters for memory in ranks)
    gradients = each * sum(memory.gradients for memory in ranks)
    return [
        Bound("parameters of all ranks", parameters, stored, why="at least the model's"),
        Bound("gradients of all ranks", gradients, trained, why="at least the model's"),
    ]


def layout_bounds(
    time: StepTime, memory: Memory, at_peak_s: float, least: Mapping[str, float]
) -> list[Bound]:
    """Of what is predicted of any layout.

    at_peak_s: seconds of the model's arithmetic on all devices at their peaks.
    least:     bytes that each device has of the model at least, by part; of gradients where there
               are some at the peak, which may come before the first backward.
    """
    if not memory.gradients:
        least = {name: size for name, size in least.items() if name != "gradients"}
    parts_s = {
        "compute time": time.compute_s,
        "forward time": time.forward_s,
        "optimizer time": time.optimizer_s,
        "waiting time": time.waiting_s,
        "communication that is not hidden": time.exposed_s + time.model_communication_s,
    }
    held = memory_bounds(memory.total, memory.parts(), least)
    return time_bounds(time.total_s, parts_s, at_peak_s) + held


def prediction_bounds(predicted: Prediction, tokens: int | None) -> list[Bound]:
    """What a prediction says beside its layout's time and memory.

    tokens: of a global batch, None where they are not known.
    """
    step_s, memory = predicted.step_time_s, predicted.memory_bytes
    bounds = time_bounds(step_s, {}, 0.0, predicted.lower_bound_s)
    bounds += band_bounds("the step time", step_s, predicted.time_band_s)
    bounds += band_bounds("the memory", memory.total, predicted.memory_band_bytes)
    bounds.append(Bound("model FLOP/s utilization", predicted.mfu, 0.0, 1.0, "a share"))
    bounds.append(Bound("total memory", memory.total, 0.0, memory.limit, "within the limit"))
    if predicted.tokens_per_s is not None and tokens is not None:
        rate = tokens / step_s
        bounds.append(
            Bound("tokens/s", predicted.tokens_per_s, rate, rate, "tokens over step time")
        )
    return bounds
