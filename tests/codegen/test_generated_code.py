"""Inductor's code for GPUs: where row kernels store results, and how it reads rows."""

from __future__ import annotations

import json
import re

import pytest
from cli_helpers import run_python

pytest.importorskip("triton")
# The first test generates the code of all cases, which takes half a minute.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def codes() -> dict[str, list[list[str]]]:
    """Return the statements of the forward and the backward of each case."""
    done = run_python("tests/generated_code.py", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        case: [[line.strip() for line in code.splitlines()] for code in halves]
        for case, halves in json.loads(done.stdout.splitlines()[-1]).items()
    }


def launches_of_rows(statements: list[str]) -> list[tuple[int, list[str]]]:
    """Return the place of each launch of a row kernel, and the tensors among its arguments."""
    found = enumerate(statements)
    return [
        (i, re.findall(r"\b(?:buf\d+|mm|primals_\d+)\b", x))
        for i, x in found
        if re.match(r"rows_\w+\.run\(", x)
    ]


def test_gradients_overwrite_saved_logits(codes):
    """Inductor does not hold the graph input `mm` for longer than other tensors."""
    forward, backward = codes["head"]
    ((_, read),) = launches_of_rows(forward)
    assert len(set(read)) == len(read) == 3
    ((launch, used),) = launches_of_rows(backward)
    *_, logits, gradient = used
    assert logits == gradient
    assert backward.index(f"{gradient} = (mm)") < backward.index("del mm") < launch
    last = max(i for i, x in enumerate(backward) if re.search(rf"\({gradient}\b.*out=", x))
    assert f"del {gradient}" in backward[last : last + 2]


def test_gradients_overwrite_the_logits_of_chunks(codes):
    forward, _ = codes["head in chunks"]
    launches = launches_of_rows(forward)
    assert len(launches) == 4
    for _, (*_, logits, gradient, _) in launches:
        assert logits == gradient
    live: set[str] = set()
    for statement in forward:
        if found := re.match(r"(buf\d+) = empty_strided_cuda\(\(64, 4096\)", statement):
            live.add(found[1])
        elif found := re.match(r"(buf\d+) = (buf\d+); del \2 ", statement):
            live = {found[1] if name == found[2] else name for name in live}
        elif found := re.match(r"del (buf\d+)$", statement):
            live.discard(found[1])
        assert len(live) <= 1


def test_residual_sums_overwrite_a_result_that_nothing_else_reads(codes):
    def overwrites(case: str) -> bool:
        launches = launches_of_rows(codes[case][0])
        return any(len(set(used)) < len(used) for _, used in launches)

    assert overwrites("residual sum")
    assert not overwrites("shared residual sum")


def test_norms_read_a_row_once(codes):
    held, looped = (
        sum(x.startswith("def triton_red") for x in codes[case][0])
        for case in ("norms", "norms in loops")
    )
    assert (held, looped) == (0, 1)
