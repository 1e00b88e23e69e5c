"""Runs one case again:  python -m tests.numerics.repro '<json of the case>' [cpu|cuda]"""
import sys

from . import capi, support
from .case import Case
from .data import make_data
from .device import open_device
from .harness import Call, Result, run
from .tolerance import check


def command(case, device):
    return "python -m tests.numerics.repro '%s' %s" % (case.to_json(), device.name)


def verify(case, device):
    """Runs and judges a case; a failure carries the command that repeats it."""
    data = make_data(case)
    try:
        result = run(case, device, data)
        check(case, data, result)
        return result
    except capi.Refused as refused:
        if support.may_be_skipped(refused):
            raise
        raise AssertionError("%s\nrepeat: %s" % (refused, command(case, device))) from None
    except AssertionError as failure:
        raise AssertionError("%s\nrepeat: %s" % (failure, command(case, device))) from None


def verify_replays(case, device, nodes):
    """Replays of a graph of so many kernels find in the workspace what the last one left there, and
    give the bits of a call that finds NaN."""
    call = Call(case, device)
    fields = call.forward_fields()
    graph = device.driver.capture(call.stage(capi.FORWARD, fields))
    assert graph.nodes == nodes
    expected = run(case, device)
    check(case, call.data, expected)
    for _ in range(4):
        graph.launch()
        device.driver.wait_stream(0)
        out = call.collect(list(fields))
        found = Result(call.take("o", out["o"]), [out["lse"][at] for at in call.lse_index()])
        assert found.bits() == expected.bits()


if __name__ == "__main__":
    verify(Case.from_json(sys.argv[1]), open_device(sys.argv[2] if len(sys.argv) > 2 else "cpu"))
    print("passed")
