"""The randomised configurations: every feature is drawn, a run is repeatable by its number, and a
fault is found and made small."""
import re
import sys

import pytest
from hypothesis import settings
from hypothesis.database import InMemoryExampleDatabase

import run_all
from numerics import randomcases
from numerics.case import Case
from numerics.randomcases import SHARES, cases, try_share

FEATURES = ("cu_q", "cu_kv", "lens_q", "lens_kv", "starts_kv", "page_size", "causal", "window",
            "chunk", "top_left", "blocks", "scale", "softcap", "alibi", "bias", "bias_empty",
            "sink", "dropout", "rng_device", "dlse", "dbias", "dsink", "splits", "threads",
            "determinism", "backward")


@pytest.fixture
def seen(monkeypatch):
    """The cases of a run without a library."""
    drawn = []
    monkeypatch.setattr(randomcases, "verify", lambda case, device: drawn.append(case))
    # Nothing of these faults is kept for other runs.
    monkeypatch.setattr(randomcases, "SETTINGS", settings(
        randomcases.SETTINGS, database=InMemoryExampleDatabase()))
    return drawn


def draw(number, count, shares=range(SHARES)):
    for share in shares:
        try_share(share, cases(), count, number, None)


def test_every_feature_is_drawn(seen):
    draw(5, 240)
    assert len({case.replace(seed=0).to_json() for case in seen}) > 120
    default = Case()
    for name in FEATURES:
        assert sum(getattr(case, name) != getattr(default, name) for case in seen) > 2, name
    assert sum(min(case.seqlen_q, case.seqlen_kv) > 0 for case in seen) > 0.7 * len(seen)


def test_a_run_is_repeated_by_its_number(seen):
    runs = []
    for number in (5, 5, 6):
        draw(number, 40)
        runs.append([case.to_json() for case in seen])
        seen.clear()
    assert runs[0] == runs[1] != runs[2]


def test_half_of_a_run_is_that_of_every_run(seen):
    halves = []
    for number in (5, 6):
        for shares in (range(SHARES // 2), range(SHARES // 2, SHARES)):
            draw(number, 40, shares)
            halves.append({case.to_json() for case in seen})
            seen.clear()
    assert halves[0] == halves[2]
    both = halves[1] & halves[3]  # what Hypothesis always begins with
    assert len(both) < len(halves[1]) / 4


def test_every_run_of_the_suites_has_a_number_of_its_own(monkeypatch, tmp_path):
    numbers = []
    monkeypatch.setattr(run_all, "LOGS", tmp_path)
    monkeypatch.setenv("FLASHATTN_TEST_TRUTHS", "")
    monkeypatch.setattr(run_all, "run_suites", lambda run, table: numbers.append(run.seed))
    for arguments in ([], [], ["--random-seed=5"]):
        monkeypatch.setattr(sys, "argv", ["./run test", *arguments])
        run_all.main()
    assert numbers[0] != numbers[1] and numbers[2] == 5


def test_a_fault_is_found_made_small_and_kept(seen, monkeypatch):
    def wrong(case, device):
        seen.append(case)
        if case.softcap and case.heads_kv > 1:
            raise AssertionError("repeat: %s" % case.to_json())

    monkeypatch.setattr(randomcases, "verify", wrong)
    smallest = Case(softcap=0.7, heads_q=2, heads_kv=2)
    for number in (7, 8):
        seen.clear()
        with pytest.raises(AssertionError) as caught:
            try_share(SHARES - 1, cases(), 240, number, None)
        found = re.search(r"repeat: (.*)", str(caught.value)).group(1)
        assert Case.from_json(found) == smallest
    assert seen[0] == smallest  # what the run before has found
