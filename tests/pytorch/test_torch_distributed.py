"""Several processes give what one gives: on the CPU (gloo) context_parallel, tensors sharded over
batch and heads, DDP and FSDP; on two GPUs (NCCL) DDP, FSDP and context_parallel of bfloat16."""
import pathlib
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(),
                                reason="this torch has no torch.distributed")
RANKS = pathlib.Path(__file__).with_name("ranks.py")


@pytest.mark.usefixtures("needs_activate")
def test_two_processes_equal_one(tmp_path, device):
    """In one pair: most of the time goes into the imports."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    processes = [subprocess.Popen(
        [sys.executable, str(RANKS), str(rank), "2", str(tmp_path / "meeting"), device],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, said):
        assert process.returncode == 0, text
        assert text.count("equal to one process:") == (4 if device == "cpu" else 2)
