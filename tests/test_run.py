"""What ./run says before it has made anything."""
import pathlib
import re
import resource
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import run_all  # noqa: E402  pylint: disable=wrong-import-position
import suite_run  # noqa: E402  pylint: disable=wrong-import-position
SECONDS = 2.0
SAID = {"": "usage: ./run COMMAND", "demo": "usage: ./run COMMAND", "build": "--cuda",
        "test": "names the suites", "bench": "presets with --device cuda", "generate": "--check",
        "docs": "build/docs/html", "fuzz": "--seconds", "help": "usage: ./run COMMAND"}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The tree without what was built in it, and a Python without packages."""
    place = tmp_path_factory.mktemp("fresh") / "clone"
    place.mkdir()
    shutil.copy(ROOT / "run", place)
    for folder in ("tests", "bindings", "include"):
        shutil.copytree(ROOT / folder, place / folder,
                        ignore=shutil.ignore_patterns("__pycache__", "data", "target"))
    bare = place.parent / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    return place, bare


def seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("command", sorted(SAID))
def test_help_sets_nothing_up(clone, command):
    place, bare = clone
    start = seconds_of_children()
    done = subprocess.run([place / "run", *filter(None, [command]), "--help"], text=True,
                          env={"PATH": "/usr/bin:/bin", "PYTHON": str(bare)}, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and SAID[command] in done.stdout, done.stdout
    assert seconds_of_children() - start < SECONDS  # of processors: machines are busy
    assert not (place / "build").exists()


def test_help_of_the_bench_names_all_presets(clone):
    place, bare = clone
    source = (ROOT / "tests" / "bench" / "presets.py").read_text(encoding="utf-8")
    presets = re.findall(r'^    "([a-z0-9-]+)": [\[l]', source, re.M)
    assert len(presets) >= 14
    said = subprocess.run([place / "run", "bench", "--help"], capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin", "PYTHON": str(bare)}, check=True).stdout
    assert [name for name in presets if not re.search(rf"^  {name} .*rows", said, re.M)] == []


@pytest.mark.parametrize("status", [0, 77])
def test_what_is_installed_is_said(status, tmp_path, monkeypatch, capsys):
    """At once, and before the reason where it cannot be."""
    monkeypatch.setattr(suite_run, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a_setup.py").write_text(f"""import sys
print("setting up once: a", file=sys.stderr)
if {status}:
    print("no a: it is not here", file=sys.stderr)
print("where it is")
sys.exit({status})
""")
    if status:
        with pytest.raises(suite_run.Skip, match="^no a: it is not here$"):
            suite_run.Run.set_up("a_setup.py")
    else:
        assert suite_run.Run.set_up("a_setup.py") == ["where it is"]
    assert capsys.readouterr().out == "setting up once: a\n"


def test_the_end_of_a_run_names_what_failed(tmp_path, monkeypatch, capsys):
    """Of a long output often only the end is at hand."""
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "LOGS", tmp_path)
    run = suite_run.Run("cpu", 7)

    def fails():
        run.failed.append("a::test_b: no")
        return log(suite_run.Count(1, 1, 0))

    def stops():
        log(None)
        raise suite_run.Failed("the build failed")

    def log(count):
        run.log.write_text("said\n")
        return count

    table = {"fails": fails, "passes": lambda: log(suite_run.Count(5, 0, 0)), "stops": stops}
    assert run_all.run_suites(run, table) == 1
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "failed in fails: a::test_b: no", "failed in stops: the build failed",
        "drawn at random: --random-seed=7", "6 passed, 2 failed, 0 skipped"]
    assert run_all.run_suites(run, {"passes": table["passes"]}) == 0
    assert "failed in" not in capsys.readouterr().out
