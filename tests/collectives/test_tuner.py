"""Tuner files read back, and what NCCL does not have is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.collectives.algorithm import KINDS, AlgorithmError
from autopar.collectives.tuner import (
    ALGORITHMS,
    PROTOCOLS,
    Rule,
    environment,
    from_text,
    to_text,
)

RULES = st.builds(
    lambda kind, least, more, algorithm, protocol, nodes: Rule(
        kind, least, least + more, algorithm, protocol, nodes, 8 * nodes if nodes > 0 else -1
    ),
    st.sampled_from(KINDS),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.sampled_from(ALGORITHMS),
    st.sampled_from(PROTOCOLS),
    st.sampled_from([-1, 1, 4]),
)


@given(st.lists(RULES, max_size=4))
def test_files_read_back(rules: list[Rule]) -> None:
    assert from_text("# first fits\n\n" + to_text(rules)) == tuple(rules)


def test_a_line_is_that_of_the_page() -> None:
    rule = Rule("all_reduce", 0, 65536, "tree", "ll", 4, 32)
    assert str(rule) == "allreduce,0,65536,tree,ll,-1,4,32"
    assert environment("t.conf")["NCCL_TUNER_CONFIG_FILE"] == "t.conf"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("allreduce,0,1,ring,ll", "write 8 fields"),
        ("allreduce,0,many,ring,ll,-1,-1,-1", "write 8 fields"),
        ("allsum,0,1,ring,ll,-1,-1,-1", "no collective 'allsum' of NCCL"),
        ("allreduce,0,1,star,ll,-1,-1,-1", "no algorithm 'star' of NCCL"),
        ("allreduce,0,1,ring,fast,-1,-1,-1", "no protocol 'fast' of NCCL"),
        ("allreduce,2,1,ring,ll,-1,-1,-1", "give the fewer first"),
        ("allreduce,0,1,ring,ll,4,-1,-1", "has 4 channels"),
    ],
)
def test_what_nccl_does_not_have_is_refused(line: str, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        from_text(line)
