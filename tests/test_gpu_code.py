"""What ptxas makes of the kernels, where a measure says that it matters."""
from __future__ import annotations

import pathlib

import gpu_code
import pytest
from suite_run import BUILD

OBJECTS = BUILD / "cuda-test" / "src" / "cuda"


# An H100 runs this kernel 2 % slower where ptxas waits after a quarter of the 64 exponentials.
@pytest.mark.parametrize("kernel, least", [("sm90_fwd_16_128_128_2_128_plain", 48)])
def test_exponentials_overlap_pv(kernel: str, least: int) -> None:
    path: pathlib.Path = OBJECTS / f"{kernel}.o"
    if not path.exists():
        pytest.skip("no GPU kernels are built: ./run test --cuda cuda builds them")
    counts = gpu_code.exps_before_pv(path, gpu_code.cuobjdump())
    assert len(counts) == 2, counts  # f16 and bf16
    assert all(count >= least for count in counts.values()), counts
