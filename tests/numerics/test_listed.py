"""Every listed case, and the randomised ones, against the reference."""
import pytest

from .cases import LISTED
from .randomcases import FOUND, SHARES, cases, for_tensor_cores, try_share
from .repro import verify


def listed():
    for theme, cases in LISTED.items():
        for n, case in enumerate(cases):
            small = case.seqlen_q * case.seqlen_kv * case.heads_q <= 20000
            smoke = small and n % 5 == 0
            yield pytest.param(case, id="%s-%d" % (theme, n),
                               marks=[pytest.mark.smoke] if smoke else [])


@pytest.mark.parametrize("case", list(listed()))
def test_listed(case, device):
    verify(case, device)


@pytest.mark.parametrize("share", range(SHARES))
def test_random(share, randomised, device):
    strategy = cases() if device.name == "cpu" else cases().map(for_tensor_cores)
    try_share(share, strategy, *randomised, device, FOUND)
