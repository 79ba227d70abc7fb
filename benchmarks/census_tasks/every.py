"""All entries, by name: the task, a slash, the model type; behind a plus what is particular."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.census_tasks import (
    dense,
    image_text,
    images,
    objects,
    pages,
    pairs,
    series,
    sound,
    texts,
)
from benchmarks.census_tasks.entry import Entry

ENTRIES: Mapping[str, Entry] = {
    **texts.ENTRIES,
    **images.ENTRIES,
    **dense.ENTRIES,
    **objects.ENTRIES,
    **sound.ENTRIES,
    **series.ENTRIES,
    **pairs.ENTRIES,
    **pages.ENTRIES,
    **image_text.ENTRIES,
}
