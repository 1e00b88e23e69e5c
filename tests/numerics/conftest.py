import os

import pytest

from . import capi, engines
from .device import open_device


# Threads that wait must not spin: tests use more of them than there are cores. Read when the
# library is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"],
                     help="where the library computes")
    parser.addoption("--graphs", action="store_true",
                     help="on a GPU: every call is captured in a graph, which is then replayed")
    parser.addoption("--random", type=int, default=240, metavar="N",
                     help="how many randomised configurations of each kind")
    parser.addoption("--random-seed", type=int, default=0, metavar="SEED",
                     help="the first of their seeds")


def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: fast subset, for sanitizer builds")
    engines.on_gpu = config.getoption("--device") == "cuda"


def pytest_generate_tests(metafunc):
    if "random_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--random-seed")
        count = metafunc.config.getoption("--random")
        metafunc.parametrize("random_seed", range(first, first + count))


@pytest.fixture(scope="session")
def device(request):
    if "FLASHATTN_LIBRARY" not in os.environ:
        pytest.skip("FLASHATTN_LIBRARY does not name the library")
    opened = open_device(request.config.getoption("--device"))
    if request.config.getoption("--graphs") and opened.name != "cpu":
        return opened.captured()
    return opened


def pytest_collection_modifyitems(config, items):
    """On a CPU the tests that only a GPU can run are one that is skipped."""
    if config.getoption("--device") != "cpu":
        return
    gpu = [item for item in items if item.path.name.startswith("test_gpu_")]
    if gpu:
        gpu[0].add_marker(pytest.mark.skip(
            reason="%d tests of graphs, streams, threads and sizes need --device cuda" % len(gpu)))
        left = set(gpu[1:])
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=gpu[1:])


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """What a GPU's families do not compute is skipped there, in the library's own words."""
    try:
        return (yield)
    except capi.Refused as refused:
        on_gpu = pyfuncitem.config.getoption("--device") != "cpu"
        if not on_gpu or refused.status != capi.UNSUPPORTED:
            raise
        sentence = str(refused)
    pytest.skip(sentence)
