"""Starts, lengths and page numbers in device memory that make no sense: stale, or hostile. A CPU
refuses them and changes nothing; a GPU, which nobody asks to look first, computes something,
touches nothing but the arrays and the workspace, comes to an end, and goes on computing.
compute-sanitizer sees what is only read."""
import numpy as np
import pytest

from . import capi, latent
from .case import Case
from .harness import Call, run

REASON_LENGTHS = 32
LONG = np.iinfo(np.int32)
ROWS = [100, 7, 0, 131, 64]
OTHERS = [60, 130, 1, 129, 70]
VARLEN = Case(cu_q=ROWS, cu_kv=OTHERS, heads_q=4, heads_kv=2, dim_qk=64, dtype="bf16",
              backward=True)
CASES = {
    "plain": VARLEN,
    "ordered": VARLEN.replace(determinism=1, causal=True),
    "invariant": VARLEN.replace(determinism=2, dtype="f16", lens_q=[50, 7, 0, 130, 64]),
    "alike": VARLEN.replace(cu_kv=ROWS, causal=True, dim_qk=128, strides="padded"),
    "scores": VARLEN.replace(softcap=20.0, alibi="h", dropout=0.2, sink=True, dsink=True, dlse=True,
                             dtype="f16"),
    "bias": VARLEN.replace(bias="f32", dbias="hr", lens_kv=[60, 13, 0, 129, 1]),
    "f32": VARLEN.replace(dtype="f32", determinism=1),
    "dims": VARLEN.replace(dim_qk=192, dim_v=128, determinism=1),
    "lens": Case(batch=3, seqlen_q=100, seqlen_kv=140, lens_q=[100, 0, 33], lens_kv=[140, 9, 0],
                 heads_q=2, dim_qk=64, dtype="f16", causal=True, backward=True),
    "starts": Case(batch=3, seqlen_q=100, seqlen_kv=140, starts_kv=[3, 9, 70],
                   lens_kv=[140, 9, 130], heads_q=2, dim_qk=64, dtype="bf16", window=(50, 9),
                   backward=True),
    "packed starts": VARLEN.replace(starts_kv=[50, 130, 0, 3, 1], causal=True, dropout=0.2),
    "paged": Case(batch=3, seqlen_q=70, seqlen_kv=140, lens_kv=[140, 9, 77], page_size=16,
                  heads_q=4, heads_kv=2, dim_qk=64, dtype="f16"),
    "decoding": Case(batch=3, seqlen_q=1, seqlen_kv=700, lens_kv=[700, 9, 400], page_size=64,
                     heads_q=4, heads_kv=1, dim_qk=128, dtype="bf16", splits=5),
    "packed decoding": Case(cu_q=[1, 1, 1, 1], cu_kv=[500, 3, 0, 300], heads_q=8, heads_kv=2,
                            dim_qk=64, dtype="f16"),
    "tree": Case(batch=3, seqlen_q=9, seqlen_kv=140, lens_kv=[140, 9, 77], starts_kv=[3, 0, 70],
                 tree=9, heads_q=4, heads_kv=2, dim_qk=64, dtype="bf16"),
    "hidden pages": Case(batch=3, seqlen_q=2, seqlen_kv=140, lens_kv=[140, 9, 77], page_size=16,
                         hidden=0.4, heads_q=4, heads_kv=2, dim_qk=64, dtype="f16"),
    "blocks": VARLEN.replace(blocks=(16, 64), density=0.5, lens_kv=[60, 13, 0, 129, 1]),
    "blocks in order": VARLEN.replace(blocks=(64, 64), density=0.5, determinism=1),
    "latent": Case(batch=3, seqlen_q=2, seqlen_kv=300, lens_kv=[300, 9, 170], page_size=64,
                   heads_q=16, heads_kv=1, dim_qk=576, dim_v=512, dtype="bf16", causal=True),
    "packed latent": Case(cu_q=[1, 2, 0], cu_kv=[90, 7, 200], heads_q=16, heads_kv=1, dim_qk=576,
                          dim_v=512, dtype="bf16", splits=2),
    "latent cache": latent.BASE.replace(batch=3, seqlen_q=2, seqlen_kv=300, page_size=64,
                                        lens_kv=[300, 9, 170]),
    "sparse latent cache": latent.BASE.replace(batch=3, seqlen_kv=300, lens_kv=[300, 9, 170],
                                               page_size=1, hidden=0.4),
}
# What is read in device memory, and what a usual value of it is.
NAMES = ("cu_q", "cu_kv", "lens_q", "lens_kv", "starts_kv", "page_table")
# Those of the reports: stale, negative, beyond the end.
REPORTED = ([0, 300, 100000], [-5000, 300, 512], [0, 200000, 200100])


def spoil(rng, values, total):
    """The values, or as many of them, with some that make no sense."""
    bad = values.astype(np.int64).copy()
    kind = rng.integers(6)
    if kind == 0:
        bad = np.resize(REPORTED[rng.integers(len(REPORTED))], len(bad))
    elif kind == 1:
        rng.shuffle(bad)
    elif kind == 2:
        bad += rng.integers(-9, 10, len(bad))
    elif kind == 3:
        bad = rng.choice([LONG.min, -1, 0, 1, total, total + 1, LONG.max], len(bad))
    elif kind == 4:
        bad = rng.integers(0, total + 1, len(bad))
    else:
        bad[rng.integers(len(bad))] = rng.choice([LONG.min, LONG.max, -total, 100 * total, -1])
    return np.clip(bad, LONG.min, LONG.max).astype(np.int32)


class HostileCall(Call):
    """A call whose values in device memory are spoilt once everything else is in place."""

    def __init__(self, case, device, rng, plan=None):
        super().__init__(case, device, plan=plan)
        for name in NAMES:
            if name in self.buffers and (rng.integers(4) or name == "cu_q"):
                host = self.buffers[name].host
                host[:] = spoil(rng, host, max(int(host.max()), 1))

    def attempt(self, op, fields, names):
        """Runs one pass. Whether it was refused, as only a CPU may."""
        enqueue = self.stage(op, fields)
        try:
            self.device.launch(enqueue)
        except capi.Refused as refused:
            assert self.device.name == "cpu" and refused.reason == REASON_LENGTHS, str(refused)
            for buffer in set(self.buffers.values()):
                buffer.owned[:] = False
            self.collect([])
            return True
        for name in names:  # any of its elements: whose they are nobody knows
            self.buffers[name].owned[:] = True
        out = self.collect(names)
        for name in names:
            self.buffers[name].accept(out[name])
        return False


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.smoke)
                                  if name in ("ordered", "paged", "starts",
                                              "hidden pages") else name for name in CASES])
def test_hostile_values_touch_nothing_else(device, name):
    case = CASES[name]
    rng = np.random.default_rng(len(name))
    plan = capi.Plan(capi.descriptor(case, device))
    plain = run(case, device, plan=plan)
    refusals = 0
    for _ in range(8):
        call = HostileCall(case, device, rng, plan)
        fields = call.forward_fields()
        refusals += call.attempt(capi.FORWARD, fields, list(fields))
        if case.backward:
            call.o_field, call.lse_field = fields["o"], fields["lse"]
            fields, names = call.backward_fields()
            refusals += call.attempt(capi.BACKWARD, fields, names)
    assert refusals > 0 or device.name != "cpu"
    after = run(case, device, plan=plan)
    if case.determinism:
        assert after.bits() == plain.bits()
    else:
        np.testing.assert_array_equal(after.o[0], plain.o[0])
