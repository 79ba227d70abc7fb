"""Probes in a program as it stands: the text of a plan folder, edited or not.

An emitter that is asked for marks writes, above a statement, which results it makes:

    # makes [["block::up/gelu", "tp:S2"]]
    h = F.gelu(self.up(x))

Marks are comments, so that such a text is otherwise the plan's own, and its statements are found
again in the folder's program. `instrumented` puts a probe behind each of them there.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence

from autopar.emit.code_lines import code_lines, matcher

HEAD = "# makes "
RESHARDED = " resharded"
"""Behind the name of a result: the copy of it after its collectives, which is the same whole."""
_MARK = re.compile(rf"^ *{HEAD}.*\n", re.MULTILINE)
_TARGET = re.compile(r"([\w, ]+) = ")

Made = list[tuple[str, str]]
"""Key and sharding of each result of a statement."""


def mark(made: Sequence[tuple[str, object]]) -> str:
    """The comment above a statement that makes the results of these keys and shardings."""
    return HEAD + json.dumps([[key, str(sharding)] for key, sharding in made])


def unmarked(text: str) -> str:
    return _MARK.sub("", text)


def instrumented(program: str, marked: str, probe: str) -> str:
    """``program`` with ``probe``, a function as ``"module.name"``, behind marked statements.

    A statement counts as marked where ``marked`` has it too, or has another that assigns to the
    same variables in its place.
    """
    made = _made(program, marked)
    tree = ast.parse(program)
    _Probing(made).visit(tree)
    module, _, name = probe.rpartition(".")
    place = 1 + max(
        (i for i, s in enumerate(tree.body) if isinstance(s, ast.ImportFrom)), default=-1
    )
    tree.body.insert(place, ast.ImportFrom(module, [ast.alias(name, "probe")], 0))
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _made(program: str, marked: str) -> dict[int, Made]:
    """By line of ``program``, what the statement that starts there makes."""
    ours, base = code_lines(program), code_lines(marked)
    lines = marked.splitlines()
    at: dict[int, Made] = {}  # by place in ``base``
    for i, (number, _) in enumerate(base):
        above = lines[number - 2].lstrip() if number > 1 else ""
        if above.startswith(HEAD):
            at[i] = [(key, sharding) for key, sharding in json.loads(above[len(HEAD) :])]
    made: dict[int, Made] = {}
    for tag, i, i_end, j, j_end in matcher(base, ours).get_opcodes():
        if tag == "equal":
            made |= {ours[j + k - i][0]: at[k] for k in range(i, i_end) if k in at}
            continue
        changed = list(range(j, j_end))
        for k in (k for k in range(i, i_end) if k in at):
            same = [n for n in changed if _target(ours[n][1]) == _target(base[k][1])]
            if same:
                made[ours[same[0]][0]] = at[k]
                changed = [n for n in changed if n > same[0]]
    return made


def _target(line: str) -> str:
    """What a line assigns to, with its indent; that it returns."""
    text = line.lstrip()
    named = _TARGET.match(text)
    target = named[1] if named else "return" if text.startswith("return ") else text
    return line[: len(line) - len(text)] + target


class _Probing(ast.NodeTransformer):
    def __init__(self, made: dict[int, Made]) -> None:
        self._made = made

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | list[ast.stmt]:
        made = self._made.get(node.lineno, [])
        (target,) = node.targets if len(node.targets) == 1 else (None,)
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        if len(parts) != len(made):
            return node
        probes: list[ast.stmt] = [
            ast.Assign([ast.Name(part.id, ast.Store())], _call(one, ast.Name(part.id, ast.Load())))
            for part, one in zip(parts, made, strict=True)
            if isinstance(part, ast.Name) and part.id != "_"
        ]
        return [node, *probes]

    def visit_Return(self, node: ast.Return) -> ast.Return:
        made = self._made.get(node.lineno, [])
        if len(made) == 1 and node.value is not None and not isinstance(node.value, ast.Tuple):
            node.value = _call(made[0], node.value)
        return node


def _call(made: tuple[str, str], value: ast.expr) -> ast.Call:
    key, sharding = made
    arguments = [ast.Constant(key), value, ast.Constant(sharding)]
    return ast.Call(ast.Name("probe", ast.Load()), arguments, [])
