"""Left padding: starts_kv."""
import pytest

from .case import Case
from .data import make_data
from .harness import run
from .repro import verify


@pytest.mark.smoke
@pytest.mark.parametrize("features", [
    dict(causal=True), dict(window=(50, 20), dropout=0.2), dict(alibi="h", top_left=True)])
def test_left_padding_changes_no_bit(device, features):
    """The same keys, padded on the left instead of on the right: positions count from a sequence's
    start, and so do tiles."""
    right = Case(batch=2, seqlen_q=70, seqlen_kv=300, lens_kv=[130, 65], heads_q=2, dim_qk=64,
                 dtype="bf16", backward=True, determinism=2, **features)
    left = right.replace(lens_kv=[300, 193], starts_kv=[170, 128])
    data = make_data(right)
    assert run(left, device, data).bits() == run(right, device, data).bits()


@pytest.mark.smoke
def test_starts_at_the_ends(device):
    """No padding, nothing but padding, and one key."""
    common = dict(batch=3, seqlen_q=33, seqlen_kv=70, heads_q=2, dim_qk=16, sink=True, dsink=True,
                  backward=True)
    verify(Case(starts_kv=[0, 70, 69], **common), device)
    verify(Case(starts_kv=[0, 40, 39], lens_kv=[0, 40, 40], causal=True, **common), device)
    plain = Case(**common)
    assert run(plain.replace(starts_kv=[0, 0, 0]), device).bits() == run(plain, device).bits()
