"""An entry of the census: a model's class, its settings, its batch, and its loss where it has none.

The config is tiny by the rules of `census_configs`; what they do not get right are settings of the
entry. Layers are never dropped at random, which no program can: `wav2vec2` and `m2m_100` of
`census_types` show that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import autopar
from benchmarks.census_configs import tiny
from benchmarks.census_tasks.draws import Draws
from benchmarks.census_types import OWN

Batch = Callable[[Draws, Any], Mapping[str, Any]]
"""From draws and the config."""
Loss = Callable[[Any, Mapping[str, Any]], Any]
"""From the model and a batch."""


@dataclass(frozen=True, slots=True)
class Entry:
    """model:  the class, by its name in transformers.
    own:    settings over the rules, and over those of the type in `census_types`.
    config: makes the whole config, where it is put together from those of other types.
    loss:   where the model has none, or wants to be asked for it.
    """

    model: str
    batch: Batch
    own: Mapping[str, Any] = field(default_factory=dict)
    config: Callable[[], Any] | None = None
    loss: Loss | None = None

    def workload(self) -> autopar.Workload:
        """Raises where the library cannot build it."""
        import transformers

        made = getattr(transformers, self.model)
        config = _steady(self.config() if self.config else config_of(made.config_class, self.own))

        def build() -> Any:
            model = made(config=config)
            return model if self.loss is None else _with_loss(model, self.loss)

        return autopar.Workload(
            model=build,
            batch=lambda: self.batch(Draws(), config),
            optimizer="adamw",
            clip_norm=1.0,
        )


def config_of(config: type[Any], own: Mapping[str, Any]) -> Any:
    """The tiny config of a class, with the settings of its type and then ``own``."""
    return tiny(config, {**OWN.get(config.model_type, {}), **own})


def _with_loss(model: Any, loss: Loss) -> Any:
    from torch import nn

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Any) -> Any:
            return loss(self.model, batch)

    return WithLoss()


def _steady(config: Any) -> Any:
    """The config, with no layer that is dropped at random; configs in it alike."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if name.endswith("layerdrop"):
            setattr(config, name, 0.0)
        elif isinstance(value, PretrainedConfig):
            _steady(value)
    return config
