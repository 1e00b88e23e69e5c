"""The parts of ./run bench that no figure shows to be right."""
import argparse
import contextlib
import pathlib
import random
import sys
import types

import numpy as np
import pytest

import flashattn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "bench"))
import cases  # noqa: E402
import presets  # noqa: E402
import cpu  # noqa: E402
import data  # noqa: E402
import gpu  # noqa: E402
import memory  # noqa: E402
import ours  # noqa: E402
import paired  # noqa: E402
import state  # noqa: E402

DECODE = cases.Case("forward", "bf16", 1, 32, 8, seqlen_q=1, seqlen_kv=8192, dim=128)


class NoGraph:
    def replay(self):
        raise AssertionError("what could not be captured is replayed")


def test_records_of_a_latent_cache():
    case = cases.Case("forward", "bf16", 2, 4, 1, seqlen_q=1, seqlen_kv=70, dim=576, dim_v=512,
                      latent=True, dtype_kv="f8")
    assert case.least_bytes() == 2 * 70 * 656
    host = memory.Memory(flashattn.Device.CPU)
    arrays = data.draw(host, case)
    assert [arrays[name].strides()[2] for name in ("v", "descale_latent", "k")] == [656, 164, 328]
    prepared = ours.builds(None, host, 1)[0].prepare(case, arrays)
    prepared.work(0)
    assert prepared.kernel.startswith("cpu_forward_bf16_f8") and prepared.bytes == 2 * 70 * 656


def torch_that(captures):
    @contextlib.contextmanager
    def graph(_):
        yield
        if not captures:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    return types.SimpleNamespace(cuda=types.SimpleNamespace(
        CUDAGraph=NoGraph, graph=graph, synchronize=lambda: None))


def test_a_peer_that_cannot_be_captured_is_run_and_named(monkeypatch):
    calls = []
    monkeypatch.setattr(gpu, "torch", torch_that(captures=False))
    work, why = gpu.captured(lambda: calls.append(1))
    work()
    assert "eagerly" in why and why.endswith("operation not permitted") and len(calls) == 2
    monkeypatch.setattr(gpu, "torch", torch_that(captures=True))
    work, why = gpu.captured(lambda: calls.append(1))
    assert why == "" and work.__func__ is NoGraph.replay


def row(**changes):
    fields = dict(case=DECODE, seconds={"flashattn": 1e-5, "cudnn": 2e-5, "fa4": 3e-5},
                  sustained={}, table={}, kernel="k", error=None, bytes=1 << 20, workspace=0,
                  missing={}, remarks={"cudnn": "called eagerly"})
    return gpu.Row(**{**fields, **changes})


def bench_of(*peers):
    bench = gpu.Bench.__new__(gpu.Bench)
    bench.mine, bench.columns, bench.copy = ["flashattn"], ["flashattn", *peers], 1e12
    bench.options = argparse.Namespace(sustained=0.0)
    return bench


def test_the_row_says_who_is_handicapped(capsys):
    bench = bench_of("cudnn", "fa4")
    bench.show(row())
    said = capsys.readouterr().out.splitlines()
    cells = said[0][gpu.WIDTH:gpu.WIDTH + 30]
    assert cells[19] == "!" and cells[9] == cells[29] == " "
    assert said[1].strip() == "! cudnn: called eagerly"
    assert bench.record(row())["remarks"] == "cudnn: called eagerly"
    bench.show(row(remarks={}))
    assert "!" not in capsys.readouterr().out


def test_a_peer_without_kernels_that_split_says_so():
    peer = gpu.peers.FlashAttention4.__new__(gpu.peers.FlashAttention4)

    def forward(**options):
        assert not options, "SplitKV is for other GPUs"
        return "out"

    work, out = peer.split(forward)
    assert work is forward and out == "out"
    assert "without splits" in peer.remark and "SplitKV" in peer.remark


def test_remarks_reach_the_row(monkeypatch):
    class Peer:
        remark = "without splits"

        @staticmethod
        def prepare(case, arrays):
            del case, arrays
            return (lambda: None), (lambda out: [out])

    monkeypatch.setattr(gpu, "torch", torch_that(captures=False))
    bench = bench_of("slow")
    bench.ours, bench.peers = [], {"slow": Peer()}
    found = bench.works(DECODE, {})
    assert found["remarks"]["slow"].startswith("without splits; called eagerly")


def test_a_gpu_asked_of_a_build_for_cpus():
    """The message names the command."""
    if "without CUDA" not in flashattn.build_info():
        pytest.skip("this build has kernels for GPUs")
    with pytest.raises(SystemExit, match="./run bench --device cuda makes a build for GPUs"):
        gpu.main([DECODE], argparse.Namespace())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_presets(device):
    """Each row repeats from its own JSON; an unknown preset is answered with those there are."""
    table, usual = presets.TABLES[device]
    assert set(usual) <= set(table)
    for case in (case for rows in table.values() for case in rows):
        assert cases.Case.from_json(case.to_json()) == case
    with pytest.raises(SystemExit, match=", ".join(table)):
        presets.chosen(device, ["nonsense"])


def test_starts_of_packed_sequences():
    case = cases.Case(batch=3, seqlen_q=40, uneven=True)
    starts = case.starts()
    assert starts[0][0] == 0 and starts[0][-1] == 120 and len(starts[0]) == 4
    assert [b - a for a, b in zip(starts[0], starts[0][1:])] == case.lengths()
    assert starts[0] == starts[1]


@pytest.mark.parametrize("fields", [dict(), dict(uneven=True), dict(heads_kv=2, dim=32)])
@pytest.mark.parametrize("nats", [12.0, 100.0])
def test_a_first_token_has_its_score(fields, nats):
    """Every query scores the first key of its sequence so many nats, and the others around 0."""
    case = cases.Case(**{**dict(dtype="bf16", batch=3, heads=4, seqlen_q=40, dim=64), **fields},
                      first_token=nats)
    host = memory.Memory(flashattn.Device.CPU)
    arrays = data.draw(host, case)
    q, k = (numbers_of(host, arrays[name]) for name in "qk")
    if case.uneven:
        rows, keys = case.starts()
        parts = [(q[0, rows[b]:rows[b + 1]], k[0, keys[b]:keys[b + 1]]) for b in range(case.batch)]
    else:
        parts = list(zip(q, k))
    for queries, own in parts:
        own = np.repeat(own, case.heads // case.kv_heads, 1)
        scores = np.einsum("ihd,jhd->hij", queries, own) * case.dim ** -0.5
        assert np.abs(scores[..., 0] / nats - 1).max() < 2 ** -8
        assert np.abs(scores[..., 1:]).max() < 8 and np.abs(scores[..., 1:].mean()) < 0.5


def numbers_of(host, array):
    """A copy of an array's numbers, in fp32."""
    found = np.empty(array.bytes, np.uint8)
    host.driver.copy(found.ctypes.data, array.address, array.bytes)
    return found.view(memory.NUMPY[array.dtype]).reshape(array.shape).astype(np.float32)


@pytest.mark.parametrize("fields", [dict(page_size=16), dict(dtype="f8"),
                                    dict(op="merge", parts=2)])
def test_a_first_token_is_refused_where_it_is_not_drawn(fields):
    with pytest.raises(ValueError, match="first_token: not with"):
        cases.Case(**fields, first_token=12.0)


def test_a_first_token_is_measured_beside_normal_data(monkeypatch):
    """Other numbers through the same build, by the runner that the rows name."""
    case = cases.Case(heads=2, seqlen_q=32, dim=16, causal=True, first_token=40.0)
    host = memory.Memory(flashattn.Device.CPU)
    drawn = []
    monkeypatch.setattr(cpu, "draw", lambda of, its: drawn.append(its) or data.draw(of, its))
    found = cpu.works(case, ours.builds(None, host), with_torch=False)
    assert list(found) == ["flashattn", data.NORMAL]
    assert [each.first_token for each in drawn] == [40.0, 0.0]
    for work in found.values():
        work()
    assert list(cpu.works(data.on_normal_data(case), ours.builds(None, host), False)) == [
        "flashattn"]
    bench = bench_of()
    bench.ours, bench.peers, bench.memory = ours.builds(None, host), {}, host
    assert list(bench.works(case, data.draw(host, case))["ready"]) == ["flashattn", data.NORMAL]


class Recorder:
    """Stands for a library of 0.1: keeps what its functions are called with."""

    def __init__(self):
        self.calls = {}
        self.kernel = ours.Before.frozen().new("char[]", b"old")

    def __getattr__(self, name):
        def call(*arguments):
            self.calls[name] = arguments
            if name == "flashattn_plan_info":
                arguments[3].kernel = self.kernel
            return 0
        return call


@pytest.mark.parametrize("fields", [dict(op="backward", alibi=True), dict(block_density=0.5),
                                    dict(seqlen_q=1, seqlen_kv=512, uneven=True, page_size=16),
                                    dict(op="merge", parts=3)])
def test_a_library_of_0_1_is_called_by_its_own_header(fields):
    """The structures of 0.1 hold what those of this version do, each number where it was then."""
    case = cases.Case(**{**dict(batch=2, heads=4, seqlen_q=40, seqlen_kv=64, dim=16), **fields})
    host = memory.Memory(flashattn.Device.CPU)
    arrays = {name: host.normal(shape, "f32") for name, shape in case.shapes().items()}
    old = ours.Before("old", Recorder(), host, 1)
    prepared = old.prepare(case, arrays)
    prepared.work(0)
    calls, at = old.lib.calls, {name: array.address for name, array in arrays.items()}
    desc = calls["flashattn_plan_create"][0]
    assert desc.struct_size == old.ffi.sizeof("flashattn_desc") and desc.heads_q == 4
    assert len(calls["flashattn_plan_create"]) == 2
    if case.parts:
        args = calls["flashattn_merge"][1]
        assert (args.shape.batch, args.shape.seqlen_q, args.part_dtype) == (2, case.seqlen_q, 1)
        assert args.struct_size == 136  # 112 in this version
        return
    assert prepared.kernel == "old"
    args = calls["flashattn_" + case.op][1]
    assert (args.shape.batch, args.shape.seqlen_kv) == (2, case.keys if not case.uneven else
                                                        max(case.key_lengths()))
    assert old.ffi.cast("uintptr_t", args.inputs.q.data) == at["q"]
    assert args.inputs.q.stride_head == 16
    if case.alibi:
        assert args.inputs.alibi_slopes[0] == 2.0 ** -2 and args.inputs.alibi_stride_batch == 0
        assert old.ffi.cast("uintptr_t", args.dout.data) == at["dout"]
        assert args.dk.stride_seq == 64
    if case.block_density < 1:
        assert {args.inputs.block_mask[n] for n in range(1)} <= {0, 1}
        assert args.inputs.block_mask_stride_row == 0
    if case.page_size:
        assert args.inputs.page_table_stride == 0 and args.inputs.pages == sum(
            n // 16 for n in case.key_lengths())
        assert args.inputs.lens_kv[0] == case.key_lengths()[0]


def test_a_baseline_of_an_unknown_version_is_refused(tmp_path, monkeypatch):
    class Future:
        @staticmethod
        def flashattn_version():
            return 900

    monkeypatch.setattr(ours.ctypes, "CDLL", lambda path: Future)
    with pytest.raises(SystemExit, match=r"has version 0.9, .* this version or of 0.1"):
        ours.builds([str(tmp_path / "libflashattn.so")], memory.Memory(flashattn.Device.CPU))


def test_ratios_are_of_rounds():
    """A machine that slows down changes the times and not the ratios."""
    ours_, theirs = [1.0, 2.0, 4.0, 8.0, 16.0], [1.5, 3.0, 6.0, 12.0, 24.0]
    assert paired.ratio(ours_, theirs) == (1.5, 1.5, 1.5)
    with pytest.raises(ValueError, match="5 rounds beside 4"):
        paired.ratio(ours_, theirs[:4])


def test_the_interval_holds_the_median_in_95_of_100_runs():
    rng = random.Random(3)
    for rounds in (6, 9, 20, 51):
        held = 0
        for _ in range(1000):
            found = paired.ratio([1.0] * rounds, [rng.gauss(1, 0.1) for _ in range(rounds)])
            assert found.low <= found.median <= found.high
            held += found.low <= 1 <= found.high
        assert 935 <= held, (rounds, held)
    few = paired.ratio([1.0] * 5, [1.0, 5.0, 2.0, 4.0, 3.0])
    assert few == (3.0, 1.0, 5.0)  # too few rounds for 95 %: all of them


@pytest.mark.parametrize("said, held_back", [
    ("", False), ("1980 MHz, 100.00 W, 0x0000000000000001", False),
    ("1500 MHz, 700.00 W, 0x0000000000000004", False),
    ("1200 MHz, 500.00 W, 0x0000000000000020", True), ("[N/A]", False)])
def test_a_clock_that_is_held_back(said, held_back):
    assert state.throttled(said) == held_back
