"""./run bench --preset papers: every part runs, and computes the same by each runner."""
import argparse
import csv
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))
import losses  # noqa: E402
import papers  # noqa: E402
import traffic  # noqa: E402
from training import Shape, Step, batches  # noqa: E402


def test_every_part(tmp_path, capsys):
    options = argparse.Namespace(device="cpu", rounds=1, threads=1, plot=None, only="",
                                 csv=tmp_path / "papers.csv")
    assert papers.main(options, quick=True) == 0
    with options.csv.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    tables = [line["table"] for line in lines]
    assert [tables.count(name) for name in ("training", "tutorials", "densities",
                                              "losses, seed 0")] == [1, 4, 4, 2]
    assert all(float(line["flashattn_seconds"]) > 0 for line in lines
               if not line["table"].startswith("losses"))
    assert all(float(line["materialised_seconds"]) > 0 and float(line["sdpa_seconds"]) > 0
               for line in lines if line["table"] in ("training", "tutorials"))
    shown = capsys.readouterr().out
    assert "without any attention" in shown
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
            for line in shown.splitlines() if line.count("|") == 9}
    # A CPU adds in one order: runs of a kernel are equal.
    alone, beside, apart, spread = map(float, rows["seed 0"][2:6])
    assert alone == spread == 0 and beside == apart < 1e-4
    assert len(rows[f"seed 0, {losses.CONTROLLED}"]) == 7
    # SDPA's two kernels for a CPU; the others do not run.
    assert "at seed 0: flash 0, math " in shown and "cudnn" not in shown


def test_parts_of_the_preset(tmp_path, capsys):
    options = argparse.Namespace(device="cpu", rounds=1, threads=1, plot=None, only="densities",
                                 csv=tmp_path / "papers.csv")
    assert papers.main(options, quick=True) == 0
    with options.csv.open(newline="", encoding="utf-8") as file:
        assert {line["table"] for line in csv.DictReader(file)} == {"densities"}
    options.only = "densities loss"
    with pytest.raises(SystemExit, match="training, tutorials, densities, traffic, losses"):
        papers.main(options, quick=True)
    capsys.readouterr()


def test_comparison_of_loss_curves():
    """Groups of one distribution are not told apart; a shift as large as the spread is."""
    torch.manual_seed(0)
    chances = []
    for _ in range(40):
        theirs, ours = 3 + torch.randn(2, 6, 50).cumsum(-1)
        found = losses.compare(theirs, ours)
        assert found.apart < found.spread
        chances.append(found.chance)
    assert 0.3 < sum(chances) / len(chances) < 0.7 and min(chances) >= 2 / 924
    shifted = losses.compare(theirs, theirs + 1.5 * found.spread)
    assert shifted.apart > shifted.spread and shifted.chance == pytest.approx(2 / 924)
    # By hand: means 1 and 2. Of the 6 halves the two with 0.5 and 2.5, and the rest, are 0 apart.
    hand = losses.compare(torch.tensor([[0.5], [1.5]]), torch.tensor([[1.5], [2.5]]))
    assert tuple(hand) == pytest.approx((1.0, 1.0, 4 / 6))


def test_the_kernel_that_is_wrong_on_purpose():
    q, k, v = torch.randn(3, 1, 9, 2, 16)
    wrong = losses.scaled(papers.sdpa)(q, k, v, True)
    torch.testing.assert_close(wrong, papers.materialised(losses.CONTROL * q, k, v, True))
    assert not torch.allclose(wrong, papers.sdpa(q, k, v, True), atol=1e-4)


def test_a_seed_draws_weights_and_text():
    shape = Shape("tiny", "", 1, 32, 2, 48, 2, vocabulary=256, autocast=False)
    first, again, other = (losses.curve(papers.sdpa, shape, 2, "cpu", seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.allclose(first, other, atol=1e-3)
    texts = [next(batches(shape, 1, "cpu", seed)) for seed in (0, 1)]
    assert not torch.equal(*texts)


def test_autocast_of_a_step():
    """The training steps in bf16 are that."""
    for autocast in (False, True):
        seen = set()

        def attention(q, k, v, causal):
            seen.add(q.dtype)
            return papers.ours(q, k, v, causal)
        shape = Shape("tiny", "", 1, 32, 2, 16, 2, vocabulary=256, autocast=autocast)
        Step(shape, attention, "cpu")()
        assert seen == {torch.bfloat16 if autocast else torch.float32}
    assert {shape.autocast for shape in papers.SHAPES["cpu"]} == {True, False}


def test_the_runners_train_alike():
    """Losses of five steps are those of SDPA, and fall."""
    shape = Shape("tiny", "", 2, 32, 2, 48, 2, vocabulary=256, autocast=False)
    curves = []
    for attention in papers.RUNNERS.values():
        step = Step(shape, attention, "cpu")
        curves.append(torch.stack([step(ids) for ids in batches(shape, 5, "cpu")]))
    assert curves[0][-1] < curves[0][0]
    for curve in curves[1:]:
        torch.testing.assert_close(curve, curves[0], atol=1e-4, rtol=1e-4)


def test_runners_agree():
    q, k, v = torch.randn(3, 2, 33, 4, 16)
    for causal in (False, True):
        want = papers.materialised(q, k, v, causal)
        for attention in (papers.sdpa, papers.ours):
            torch.testing.assert_close(attention(q, k, v, causal), want, atol=1e-5, rtol=1e-4)


def test_a_runner_leaves_a_row_when_memory_ends(capsys):
    """In a timed round, or before: the others are measured, and the next row has it again."""
    def makers(fails_at):
        calls = []

        def work():
            calls.append(1)
            if len(calls) == fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return {"materialised": lambda: work, "flashattn": lambda: lambda: None}
    bench = papers.Bench("cpu", 3)
    for fails_at in (1, 4, 99):
        bench.row("training", f"fails at {fails_at}", "", makers(fails_at))
    assert [line["materialised_seconds"] is None for line in bench.lines] == [True, True, False]
    assert all(line["flashattn_seconds"] is not None for line in bench.lines)
    shown = capsys.readouterr().out.splitlines()
    assert ["out of memory" in line for line in shown] == [True, True, False]


# Runs what it is given, on the CPU, and says what ncu --csv --page raw says of a GPU's kernels.
NCU = """
import subprocess, sys
program = sys.argv[sys.argv.index("base") + 1:]
program[program.index("--device") + 1] = "cpu"
subprocess.run(program, check=True)
print("==PROF== Connected to process 1\\nwithout the memory: call 5")
print('"ID","Kernel Name","dram__bytes.sum"\\n"","","byte"')
for call in range(6):
    for kernel in ("gemm<a, b>", "softmax", "at::spin_kernel(long)"):
        print(f'"0","{kernel}","{call + 1},000"')
"""


def ncu(monkeypatch, folder, text):
    program = folder / "ncu"
    program.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_bytes_of_memory(monkeypatch, tmp_path, capsys):
    """As ncu says them, call by call; without it, or its permission, the table says so."""
    ncu(monkeypatch, tmp_path, NCU)
    found = traffic.measure("cuda", list(papers.RUNNERS), [(64, 512)])
    assert list(found.values()) == [2000, 4000, 6000, 8000, 10000, 0]
    assert list(found)[:2] == [(64, 512, "materialised", "forward"),
                               (64, 512, "materialised", "backward")]
    monkeypatch.setattr(traffic, "measure", lambda *_: found)
    bench = papers.Bench("cuda", 1)
    bench.traffic()
    forward, backward = bench.lines
    assert forward["row"] == "forward, N 64, d 512" and forward["tokens_over_dim"] == 0.125
    assert [forward[f"{name}_bytes"] for name in papers.RUNNERS] == [2000, 6000, 10000]
    assert forward["least_bytes"] == 4 * 32768 * 2048 * 2 and not backward["flashattn_bytes"]
    rows = capsys.readouterr().out.splitlines()
    assert rows[-2].endswith("| 0.2 x |") and "out of memory" in rows[-1]
    monkeypatch.undo()
    for text, words in (("print('==ERROR== ERR_NVGPUCTRPERM - no permission'); exit(1)",
                         "status 1: ==ERROR== ERR_NVGPUCTRPERM"),
                        ("print('none')", "did not say dram__bytes.sum in bytes: none"),
                        (NCU.replace("subprocess.run(", "dict(run=").replace("(6)", "(5)"),
                         "saw 5 calls, and there are 6")):
        ncu(monkeypatch, tmp_path, text)
        with pytest.raises(RuntimeError, match=words):
            traffic.measure("cuda", list(papers.RUNNERS), [(64, 512)])
    monkeypatch.setattr(traffic, "program", lambda: "")
    bench = papers.Bench("cuda", 1)
    bench.traffic()
    assert [line["claim"] for line in bench.lines] == [
        "no ncu: neither on PATH nor where CUDA and Nsight Compute put it"]
    assert "not measured: no ncu" in capsys.readouterr().out
