"""What ``train.py`` says of a pipeline: how each stage ends a step."""

from __future__ import annotations

from autopar.emit.jax.how import How, axes_text, overflowing
from autopar.emit.text import Lines


def sums(how: How, lines: Lines) -> None:
    """Adds the sums of loss and gradients over devices."""
    if how.data and how.staged:
        lines.add("if LOSS in step.stage.gives:")
        lines.lines.append(f"        loss = lax.psum(loss, {axes_text(how.data)})")
    elif how.data:
        lines.add(f"loss = lax.psum(loss, {axes_text(how.data)})")
    own = f"lax.psum(g, {axes_text(how.data)})" if how.data else "g"
    if how.differs:
        lines.add("leaves = step.layout.leaves")
        more = ", step.reduces_in" * how.casts_sums + ", step.scatters" * how.sums_in_turn
        own = f"reduced(leaves[name], g{more})"
    if own != "g":
        lines.add(f"gradients = {{name: {own} for name, g in gradients.items()}}")


def summed(how: How) -> list[str]:
    """The function behind the last backward of a stage."""
    lines = Lines(4)
    lines.add('"""On a device of a stage: its loss and its pieces of the gradients of a step."""')
    lines.add(f"# forwards and backwards were as schedule.txt orders them ({how.schedule});")
    lines.add("# what each stage is, takes and gives stands in model.py")
    sums(how, lines)
    lines.add("return loss, gradients")
    head = Lines(0)
    head.add("def summed(step: StageStep, loss: Array, gradients: Arrays) -> tuple[Array, Arrays]:")
    return [*head.lines, *lines.lines]


def totals(how: How) -> list[str]:
    """The function of what stages are to know of one another before they update; none: nothing."""
    rows = _rows(how)
    if not rows:
        return []
    lines = Lines(4)
    lines.add('"""On a device of a stage: what all stages add up before any of them updates."""')
    for name, text, comment in rows:
        lines.add(f"{name} = {text}", comment, above=True)
    lines.add(f"return {', '.join(name for name, _, _ in rows)}{',' * (len(rows) == 1)}")
    gives = ", ".join(["Array"] * len(rows))
    return [
        f"def totals(step: StageStep, gradients: Arrays) -> tuple[{gives}]:",
        *lines.lines,
    ]


def _rows(how: How) -> list[tuple[str, str, str]]:
    """Names and values of what stages add up, with a comment."""
    rows: list[tuple[str, str, str]] = []
    if not how.staged:
        return rows
    if how.clip_norm is not None:
        one = "one psum where devices have parts" if how.mesh.device_count > 1 else ""
        rows.append(("squares", "squares_of(step.layout, gradients, step.again)", one))
    if how.scales:
        text = f"overflowed({overflowing(how)}).astype(jnp.float32)"
        rows.append(("overflows", text, "then the step is left out"))
    return rows


def from_others(how: How) -> str:
    """What `update` is given beside gradients."""
    rows = _rows(how)
    return f", totals: tuple[{', '.join(['Array'] * len(rows))}]" if rows else ""


def from_all(how: How, lines: Lines) -> None:
    """Adds what `update` makes of it."""
    names = [name for name, _, _ in _rows(how)]
    if names:
        lines.add(f"{', '.join(names)}{',' * (len(names) == 1)} = totals", "of all stages")
    if "squares" in names:
        lines.add("norm = jnp.sqrt(squares)")
    if "overflows" in names:
        lines.add("overflow = overflows > 0")


__all__ = ["from_all", "from_others", "summed", "sums", "totals"]
