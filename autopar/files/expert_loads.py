"""A file of how many rows each expert of a layer gets, for ``--expert-loads``, in YAML or JSON:

    model.layers.0.mlp.experts: [912, 80, 133, 411]     # a number for each expert, in any unit
    model.layers.1.mlp.experts: [100, 240, 95, 101]

The key is the module that holds the layer's experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from autopar.files.file_errors import sentences, unique_yaml, yaml_sentence
from autopar.nouns.errors import UserError
from autopar.nouns.imbalance import Imbalance, of_loads

_Rows = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_LAYERS = TypeAdapter(dict[str, Annotated[list[_Rows], Field(min_length=1)]])
_LIKE = "write a line for each layer, as in 'model.layers.0.mlp.experts: [912, 80, 133, 411]'"


class ExpertLoadsError(UserError):
    """A file of rows by expert that cannot be used; the text says what to change."""


def read_loads(path: str | Path) -> Imbalance:
    """Raises `ExpertLoadsError`; of names and numbers of experts only a model can tell."""
    try:
        data = unique_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ExpertLoadsError(f"--expert-loads {path}: {error.strerror}; {_LIKE}") from None
    except UnicodeDecodeError:
        raise ExpertLoadsError(f"--expert-loads {path} is no text; {_LIKE}") from None
    except yaml.YAMLError as error:
        raise ExpertLoadsError(f"--expert-loads {path}: {yaml_sentence(error)}; {_LIKE}") from None
    try:
        layers = _LAYERS.validate_python(data, strict=True)
    except ValidationError as error:
        findings = "; ".join(sentences(error, dict, {}))
        raise ExpertLoadsError(f"--expert-loads {path}: {findings}; {_LIKE}") from None
    if not layers:
        raise ExpertLoadsError(f"--expert-loads {path} names no layer; {_LIKE}")
    for name, rows in layers.items():
        if not sum(rows):
            raise ExpertLoadsError(
                f"--expert-loads {path}: all of {name} are 0; give the rows of each expert, or "
                "leave the layer out"
            )
    loads = {name: tuple(map(float, rows)) for name, rows in layers.items()}
    return of_loads(loads, f"--expert-loads {Path(path).name}")
