"""The text of a rule: how it is read, and how its names are changed."""

from __future__ import annotations

import re
from dataclasses import replace

from autopar.rules.notation import CHOICES, Rule, RuleError

_NAME = r"[^\W\d]\w*"
FACTOR = re.compile(rf"({_NAME})(?:=(\d+))?([+!~]*)")
_TOKEN = re.compile(rf"\(|\)|\.\.\.[+!~]*|1\b|{_NAME}(?:=\d+)?[+!~]*")


def told_apart(rule: Rule) -> Rule:
    """``rule`` with other names for factors that are called as one of `CHOICES`."""
    names = set(re.findall(_NAME, rule.text))
    other: dict[str, str] = {}
    for name in sorted(names.intersection(CHOICES)):
        free = name + "_"
        while free in names:
            free += "_"
        other[name] = free
    if not other:
        return rule

    def of(name: str) -> str:
        return other.get(name, name)

    return replace(
        rule,
        text=re.sub(_NAME, lambda match: of(match[0]), rule.text),
        keeps=tuple(replace(k, dims=tuple(map(of, k.dims))) for k in rule.keeps),
        workspace=tuple(replace(w, dims=tuple(map(of, w.dims))) for w in rule.workspace),
        workspace_back=tuple(replace(w, dims=tuple(map(of, w.dims))) for w in rule.workspace_back),
        streams=tuple(replace(s, dims=tuple(map(of, s.dims))) for s in rule.streams),
        streams_back=tuple(replace(s, dims=tuple(map(of, s.dims))) for s in rule.streams_back),
        chunked=rule.chunked and replace(rule.chunked, factor=of(rule.chunked.factor)),
        implementations=tuple(
            replace(
                each,
                factor=of(each.factor),
                also=tuple(map(of, each.also)),
                moves=tuple(replace(m, dims=tuple(map(of, m.dims))) for m in each.moves),
            )
            for each in rule.implementations
        ),
        flop_terms=tuple((each, tuple(map(of, points))) for each, points in rule.flop_terms),
        again=tuple((each, tuple(map(of, points))) for each, points in rule.again),
        routed=rule.routed and replace(rule.routed, factor=of(rule.routed.factor)),
    )


def parse_term(text: str) -> list[tuple[str, ...]]:
    """``"b (h d+) ..."`` as ``[("b",), ("h", "d+"), ("...",)]``, marks kept; ``1`` is ``()``."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s+", "", text):
        raise RuleError(
            f"cannot read {text.strip()!r} in a rule. Factors are names with marks + ! ~, "
            "groups stand in ( ), e.g. 'b s (h d) -> b s h d'"
        )
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in tokens:
        if token == "(":
            if group is not None:
                raise RuleError(f"a ( inside a group in {text.strip()!r}")
            group = []
        elif token == ")":
            if group is None:
                raise RuleError(f"unbalanced ) in {text.strip()!r}")
            dims.append(tuple(group))
            group = None
        elif group is not None:
            if token == "1" or token.startswith("..."):
                raise RuleError(f"a group in {text.strip()!r} holds {token!r}: only factors may")
            group.append(token)
        else:
            dims.append(() if token == "1" else (token,))
    if group is not None:
        raise RuleError(f"unbalanced ( in {text.strip()!r}")
    if sum(d[0].startswith("...") for d in dims if len(d) == 1) > 1:
        raise RuleError(f"two ... in one term: {text.strip()!r}")
    return dims


def parse_rule(text: str) -> tuple[list[list[tuple[str, ...]]], list[list[tuple[str, ...]]]]:
    """The operand and result terms of a rule; an empty left side is one scalar operand or none."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no ->, as in 'b s d, d -> b s d'")
    return [parse_term(p) for p in left.split(",")], [parse_term(p) for p in right.split(",")]
