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
    assert [tables.count(name) for name in ("training", "tutorials", "densities", "losses")] == [
        1, 4, 4, 2]
    assert all(float(line["flashattn_seconds"]) > 0 for line in lines if line["table"] != "losses")
    assert all(float(line["materialised_seconds"]) > 0 and float(line["sdpa_seconds"]) > 0
               for line in lines if line["table"] in ("training", "tutorials"))
    assert "Largest and mean difference of flashattn from SDPA" in capsys.readouterr().out


def test_the_runners_train_alike():
    """Losses of five steps are those of SDPA, and fall."""
    shape = papers.Shape("tiny", "", 2, 32, 2, 48, 2, vocabulary=256)
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
