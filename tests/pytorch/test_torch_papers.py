"""./run bench --preset papers: every part runs, and computes the same by each runner."""
import argparse
import csv
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))
import papers  # noqa: E402


def test_every_part(tmp_path, capsys):
    options = argparse.Namespace(device="cpu", rounds=1, threads=1, plot=None,
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
    rows = {line.split("|")[1].strip(): line for line in shown.splitlines() if line.count("|") == 4}
    assert float(rows["sdpa, sdpa again"].split("|")[3]) == 0  # a CPU adds in one order
    # SDPA's two kernels for a CPU, and this library beside each; the others do not run.
    assert {"sdpa flash, sdpa math", "sdpa flash, flashattn", "sdpa math, flashattn",
            "sdpa, flashattn"} <= set(rows)
    assert not any("cudnn" in name for name in rows)


def test_a_seed_draws_weights_and_text():
    shape = papers.Shape("tiny", "", 1, 32, 2, 48, 2, vocabulary=256, autocast=False)
    bench = papers.Bench("cpu", 1)
    first, again, other = (bench.curve(papers.sdpa, shape, 2, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.allclose(first, other, atol=1e-3)
    texts = [next(papers.batches(shape, 1, "cpu", seed)) for seed in (0, 1)]
    assert not torch.equal(*texts)


def test_autocast_of_a_step():
    """The training steps in bf16 are that."""
    for autocast in (False, True):
        seen = set()

        def attention(q, k, v, causal):
            seen.add(q.dtype)
            return papers.ours(q, k, v, causal)
        shape = papers.Shape("tiny", "", 1, 32, 2, 16, 2, vocabulary=256, autocast=autocast)
        papers.Step(shape, attention, "cpu")()
        assert seen == {torch.bfloat16 if autocast else torch.float32}
    assert {shape.autocast for shape in papers.SHAPES["cpu"]} == {True, False}


def test_the_runners_train_alike():
    """Losses of five steps are those of SDPA, and fall."""
    shape = papers.Shape("tiny", "", 2, 32, 2, 48, 2, vocabulary=256, autocast=False)
    curves = []
    for attention in papers.RUNNERS.values():
        step = papers.Step(shape, attention, "cpu")
        curves.append(torch.stack([step(ids) for ids in papers.batches(shape, 5, "cpu")]))
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
