import os
import secrets

import pytest

from . import accuracy, capi, engines, support
from .device import open_device


ACCURACY = accuracy.committed()


def pytest_addoption(parser):
    parser.addoption("--graphs", action="store_true",
                     help="on a GPU: every call is captured in a graph, which is then replayed")
    parser.addoption("--random", type=int, metavar="N",
                     help="draws of randomised configurations of each kind, of which a third are "
                          "alike: 300, on the emulator 120; 0: none")
    parser.addoption("--random-seed", type=int, metavar="SEED",
                     help="draws the configurations of an earlier run, which printed it; half are "
                          "the same in every run")


def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: fast subset, for sanitizer builds")
    engines.on_gpu = config.getoption("--device") == "cuda"
    if hasattr(config, "workerinput"):
        config.option.random_seed = config.workerinput["random_seed"]
    elif config.option.random_seed is None:
        config.option.random_seed = secrets.randbelow(1 << 32)
    if config.option.random is None:
        config.option.random = 120 if "FLASHATTN_EMULATOR_DEVICE" in os.environ else 300
    if "FLASHATTN_LIBRARY" in os.environ and engines.on_gpu:
        try:
            capi.need_gpu()
        except RuntimeError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """A worker's tests are those of the others."""
    node.workerinput["random_seed"] = node.config.option.random_seed


@pytest.fixture
def randomised(request):
    """How many randomised configurations, and the number that decides which."""
    count, number = (request.config.getoption(name) for name in ("--random", "--random-seed"))
    if not count:
        pytest.skip("no randomised configurations were asked for")
    return count, number


@pytest.fixture(autouse=True)
def held_accuracy(request):
    """The part of their limits that errors may take in the listed cases. Of those that are new
    every time, and of special numbers, none is known."""
    accuracy.allowed = None
    if request.node.path.name != "test_listed.py" or request.node.originalname != "test_listed":
        return
    name = accuracy.backend(request.getfixturevalue("device").kind)
    accuracy.allowed = ACCURACY.get(name, {})
    request.config.backend = name


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """What a worker found."""
    del error
    found = getattr(node, "workeroutput", {})
    node.config.backend = found.get("backend") or getattr(node.config, "backend", None)
    for key, value in found.get("worst", {}).items():
        accuracy.worst[key] = max(accuracy.worst.get(key, 0.0), value)


def pytest_sessionfinish(session):
    name = getattr(session.config, "backend", None)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput.update(backend=name, worst=accuracy.worst)
    elif name and accuracy.worst:
        accuracy.log(name, accuracy.worst)


def pytest_terminal_summary(terminalreporter):
    option = terminalreporter.config.option
    terminalreporter.write_line(
        "the randomised configurations: --random=%d --random-seed=%d" % (
            option.random, option.random_seed))


@pytest.fixture(scope="session")
def device(request):
    if "FLASHATTN_LIBRARY" not in os.environ:
        pytest.skip("FLASHATTN_LIBRARY does not name the library")
    opened = open_device(request.config.getoption("--device"))
    if request.config.getoption("--graphs") and opened.name != "cpu":
        return opened.captured()
    return opened


def has_dtype(item, dtype):
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return getattr(case, "dtype", "") == dtype


def deselect(config, items, unwanted):
    left = set(unwanted)
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=unwanted)


def pytest_collection_modifyitems(config, items):
    """On a CPU the tests that only a GPU can run are one that is skipped. The library that looks
    for races has no kernels of f16."""
    if config.getoption("--device") != "cpu":
        if os.environ.get("FLASHATTN_EMULATOR_RACES") == "1":
            deselect(config, items, [item for item in items if has_dtype(item, "f16")])
        return
    gpu = [item for item in items if item.path.name.startswith("test_gpu_")]
    if gpu:
        gpu[0].add_marker(pytest.mark.skip(
            reason="%d tests of graphs, streams, threads and sizes need --device cuda" % len(gpu)))
        deselect(config, items, gpu[1:])


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """What tests/data/support.txt says that this backend does not compute is skipped, in the
    library's own words. Any other refusal is a failure."""
    del pyfuncitem
    try:
        return (yield)
    except capi.Refused as refused:
        if not support.may_be_skipped(refused):
            raise
        message = str(refused)
    pytest.skip(message)
