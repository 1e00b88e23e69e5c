"""./run bench --preset serving: every row on the CPU, and that its runners compute the same."""
import argparse
import csv
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))
import serving as bench  # noqa: E402


def test_every_row(tmp_path, capsys):
    options = argparse.Namespace(device="cpu", rounds=1, csv=tmp_path / "rows.csv")
    assert bench.main(options) == 0
    with options.csv.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    sections = [line["section"] for line in lines]
    assert {name: sections.count(name) for name in sections} == {
        "decode": 12, "spec": 18, "append": 6, "prefix": 1}
    for line in lines:
        assert float(line["ours_seconds"]) > 0, line
        assert (float(line["bytes"]) > 0) == bool(line["copy_seconds"]), line
    told = capsys.readouterr().out
    assert "fp8" not in told and told.count("two calls") == told.count("each its own") == 1


@pytest.mark.parametrize("name", ["mixed", "prefix"])
def test_runners_compute_the_same(name):
    torch.manual_seed(0)
    rows = bench.Rows("cpu", 32)
    rows.dtype = torch.float32
    row = rows.mixed(2, 512, 5, 8192) if name == "mixed" else rows.prefix(8, 4096, 256)
    results = []
    for work in row.works.values():
        row.result.fill_(float("nan"))
        work(0)
        results.append(row.result.clone())
    assert len(results) == 2
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        bench.main(argparse.Namespace(device="cuda", rounds=1, csv=None))
