"""Several processes on the CPU (gloo) give what one gives: context_parallel, and tensors sharded
over batch and heads."""
import pathlib
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(),
                                reason="this torch has no torch.distributed")
RANKS = pathlib.Path(__file__).with_name("ranks.py")


def test_two_processes_equal_one(tmp_path):
    """In one pair: most of the time goes into the imports."""
    processes = [subprocess.Popen(
        [sys.executable, str(RANKS), str(rank), "2", str(tmp_path / "meeting")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, said):
        assert process.returncode == 0, text
        assert text.count("equal to one process:") == 3
