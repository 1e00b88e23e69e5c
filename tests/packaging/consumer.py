"""What the tests of packages share: a stranger's C program, and how commands are run."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "bindings" / "packaging"
# Packages are built for the baseline alone: other suites test the instruction sets.
BASELINE = "-Dcpu_isas=[]"


def read(path):
    return path.read_text(encoding="utf-8")


VERSION = re.search(r"version: '([\d.]+)'", read(ROOT / "meson.build")).group(1)


def run(*command, env=None, cwd=ROOT):
    """The environment is a stranger's: no library or package of this tree is named."""
    own = ("FLASHATTN_", "PYTHONPATH", "LD_LIBRARY_PATH", "PKG_CONFIG")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                            env={**clean, **(env or {})}, cwd=cwd, check=False,
                            stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-8000:]
    return result.stdout


def need(*tools):
    for tool in tools:
        if not shutil.which(tool):
            pytest.skip(f"no {tool}")


def unpacked(folder, file, *packages):
    """The folder of Debian's packages, which are unpacked below build/."""
    found = subprocess.run([ROOT / "tests" / "debian_unpacked.sh", folder, file, *packages],
                           capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if found.returncode == 77:
        pytest.skip(found.stderr.strip())
    assert found.returncode == 0, found.stderr
    return pathlib.Path(found.stdout.strip())


def example(folder):
    """README.md's program, as example.c: it prints 38 and ends with 0 where attention works."""
    marked = r"<!-- tests/abi/test_consumer\.py [^>]*-->\n```c\n(.*?)```\n"
    (program,) = re.findall(marked, read(ROOT / "README.md"), re.S)
    (folder / "example.c").write_text(program, encoding="utf-8")
    return folder / "example.c"


def compiler():
    return os.environ.get("CC", "cc").split()


def needed(path):
    """The shared libraries that a file names."""
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", path))


def checkout(folder):
    """The files of this checkout as git knows them, changed or not, in a folder of their own."""
    need("git")
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder
