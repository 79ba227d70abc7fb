"""How the layers of a transformer are cut into stages."""

from __future__ import annotations

from autopar.nouns.layout import Layout
from autopar.pipeline.schedules.table import SCHEDULES


def stage_count(layout: Layout) -> int:
    """Places that a microbatch passes; one where there is no pipeline, whatever its schedule."""
    if layout.pp == 1:
        return 1
    return layout.pp * SCHEDULES[layout.schedule].stages * layout.interleave


def layers_of(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: as even as they can be; what is left over goes to the stages before the
    last, so that the last, which has the head, and then the first have fewer (Grattafiori et al.
    2024, section 3.3.2: Llama 3 405B has a layer less at either end)."""
    each, over = divmod(layers, stages)
    places = [*range(stages - 2, 0, -1), 0, stages - 1][:over]
    return tuple(each + (stage in places) for stage in range(stages))
