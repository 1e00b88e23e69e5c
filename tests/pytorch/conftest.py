import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The package of this tree, and the reference in tests/numerics; FLASHATTN_LIBRARY names the library
# under test.
sys.path[:0] = [str(ROOT / "bindings" / "python"), str(ROOT / "tests")]

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402


def pytest_generate_tests(metafunc):
    """A test that takes device runs on the CPU, and on a GPU where there is one; with --device=cuda
    on the GPU alone, which must be there."""
    if "device" in metafunc.fixturenames:
        import flashattn
        reason = ("PyTorch has no GPU here" if not torch.cuda.is_available() else
                  "the library is built without CUDA"
                  if all(found.kind != "cuda" for found in flashattn.devices()) else None)
        if metafunc.config.getoption("--device") == "cuda":
            if reason:
                raise pytest.UsageError(f"--device=cuda: {reason}")
            metafunc.parametrize("device", ["cuda"])
        else:
            gpu = pytest.param("cuda", marks=pytest.mark.skip(reason=reason) if reason else ())
            metafunc.parametrize("device", ["cpu", gpu])


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


@pytest.fixture(name="needs_activate")
def _needs_activate():
    """For tests that activate in another process."""
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("this torch has no torch.library.get_kernel, which activate() needs")


@pytest.fixture(autouse=True)
def _activates(monkeypatch, request):
    """A test that activates is skipped where this torch lacks what that needs."""
    if not hasattr(torch.library, "get_kernel"):
        import flashattn.torch as fa
        monkeypatch.setattr(fa, "activate", lambda: request.getfixturevalue("needs_activate"))
