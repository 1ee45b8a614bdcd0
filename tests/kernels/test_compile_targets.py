"""Every Triton kernel, in every shipped configuration, compiles for every supported card and fits its shared memory. No card is needed.

In a process of its own: triton decides when it is imported whether its kernels are compiled or interpreted, and other tests interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton, which torch brings on Linux")

from rimuru_kernels.compile_check import MAX_SHARED_BYTES, TARGETS, ops_with_cases

PROGRAM = """
import json, os, sys
from rimuru_kernels.compile_check import compile_op
if __name__ == "__main__":
    share = int(sys.argv[2]), int(sys.argv[3])
    json.dump([tuple(row) for row in compile_op(sys.argv[1], processes=min(4, os.cpu_count() or 1), share=share)], sys.stdout)
"""


# An op of many cases takes minutes, more than one test may.
SHARES = {"fused_moe": 4}


@pytest.mark.parametrize(
    ("op", "share", "of"), [(op, share, SHARES.get(op, 1)) for op in ops_with_cases() for share in range(SHARES.get(op, 1))]
)
def test_compiles_and_fits(op: str, share: int, of: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, op, str(share), str(of)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    assert {target for _, target, _, _ in rows} == set(TARGETS)
    bad = [row for row in rows if row[3] is not None or not 0 <= row[2] <= MAX_SHARED_BYTES]
    assert not bad, bad


def test_fused_moe_takes_part() -> None:
    assert "fused_moe" in ops_with_cases()
