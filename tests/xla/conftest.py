"""Tests of flashattn.jax. The folder is not called jax: it would be taken for the package where
that is not installed."""
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
# Two devices on the CPU, for the tests of shardings.
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "")
                           + " --xla_force_host_platform_device_count=2").strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# JAX's own products on a GPU otherwise have the 10 bits of TF32.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")


@pytest.fixture
def on_cpu():
    """What only a CPU has, such as two devices without hardware, beside a GPU, too."""
    import jax  # reads the environment

    with jax.default_device(jax.devices("cpu")[0]):
        yield
