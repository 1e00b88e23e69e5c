"""./run bench --preset context-parallel: every row, by two processes on the CPU."""
import argparse
import csv
import pathlib
import re
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(),
                                reason="this torch has no torch.distributed")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))
import context_parallel as bench  # noqa: E402


@pytest.mark.usefixtures("needs_activate")
def test_every_row(tmp_path, capsys):
    options = argparse.Namespace(device="cpu", rounds=1, csv=tmp_path / "rows.csv")
    assert bench.main(options, quick=True) == 0
    with options.csv.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    found = [(line["case"], int(line["gpus"])) for line in lines
             if line["runner"] == "flashattn"]
    assert found == [("compared", 2), ("causal, 64", 1), ("causal, 64", 2), ("packed", 1),
                     ("packed", 2), ("causal, 256", 2), ("causal, 256", 1)]
    assert "torch has none" in [line["note"] for line in lines]
    for line in lines:
        if line["runner"] == "flashattn" and line["case"] != "compared":
            assert float(line["forward_rate"]) > 0 and float(line["backward_rate"]) > 0, line
    told = re.findall(r"(\w+) (\S+) \((\S+)\)", lines[0]["note"])
    assert [name for name, *_ in told] == ["o", "dq", "dk", "dv"]
    assert all(float(apart) < 1e-5 and 0 < float(naive) < 1e-5 for _, apart, naive in told)
    assert capsys.readouterr().out.count("| packed |") == 3


def test_a_row_that_fails_does_not_end_the_run():
    """3 heads on 2: refused in every row."""
    given = bench.setup("cpu", 1, 1, quick=True)._replace(heads=3)
    notes = [line["note"] for line in bench.rows(given)]
    assert len(notes) == 3 and all("Error: " in note for note in notes), notes


def test_without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="needs GPUs, two or more to compare"):
        bench.main(argparse.Namespace(device="cuda", rounds=1, csv=None))


def test_the_formula():
    """Blocks of rows give what autograd gives, in float64."""
    q, dout = torch.randn(2, 3, 37, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 37, 8, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    hidden = torch.ones(37, 37, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / 8 ** 0.5).masked_fill(hidden, -torch.inf)
    o = scores.softmax(-1) @ v
    wants = [o.detach(), *torch.autograd.grad(o, leaves, dout)]
    got = bench.formula(*[x.detach() for x in leaves], dout, torch.float64, block=16)
    for a, b in zip(got, wants):
        torch.testing.assert_close(a, b)
