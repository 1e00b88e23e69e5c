"""The tree keeps its own rules: formatting, length of files, no stray characters."""
import concurrent.futures
import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOP = {"src", "include", "bindings", "tests", "meson.build", "meson_options.txt", "README.md",
       "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "pyproject.toml", "run"}
CODE = (".c", ".cpp", ".h", ".cu", ".cuh")
SOURCES = (*CODE, ".in", ".py", ".rs", ".jl", ".sh", ".txt")
LONGEST = 450  # lines of a file
# The header is the manual, too. Generated files and texts are as long as they need to be.
LONGER = {"include/flashattn.h", "LICENSE",
          *(f"tests/abi/{path.parent.name}/flashattn.h"
            for path in (ROOT / "tests" / "abi").glob("v*/flashattn.h"))}  # as they were released


def generated(path: pathlib.Path) -> bool:
    with open(path, encoding="utf-8") as file:
        return any(re.search(r"auto-generated|[Gg]enerated by|Written by bindings", line)
                   for line, _ in zip(file, range(8)))


def files():
    for top in sorted(TOP):
        path = ROOT / top
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in found:
            skipped = {"__pycache__", "target", ".pytest_cache", ".mypy_cache"} & set(file.parts)
            if file.is_file() and not skipped and file.suffix not in (".pyc", ".png", ".bin"):
                yield file


def name(path):
    return path.relative_to(ROOT).as_posix()


def test_top_level():
    """Only what is known. A build folder and dot files may lie beside it."""
    known = TOP | {"dist"}
    strangers = [p.name for p in ROOT.iterdir()
                 if p.name not in known and not p.name.startswith((".", "build"))]
    assert not strangers


@pytest.mark.parametrize("path", list(files()), ids=name)
def test_file(path):
    text = path.read_bytes().decode("utf-8")
    assert text == "" or text.endswith("\n") and not text.endswith("\n\n"), "one newline at the end"
    assert "\r" not in text, "a carriage return"
    assert "\t" not in text or path.suffix == ".go" or path.name == "rules", "a tab"  # gofmt, make
    lines = text.splitlines()
    if generated(path) or path.suffix in (".json", ".lock") or path.parent.name == "data":
        return
    trailing = [i for i, line in enumerate(lines, 1) if line != line.rstrip()]
    assert not trailing, f"white space at the end of lines {trailing}"
    if path.suffix == ".py":  # clang-format sees to the others
        wide = [i for i, line in enumerate(lines, 1) if len(line) > 100]
        assert not wide, f"lines {wide} are longer than 100 characters"
    assert name(path) in LONGER or len(lines) <= LONGEST, f"{len(lines)} lines"


def documents():
    return [path for path in files() if path.suffix == ".md"]


def prose(path):
    """A document without its programs."""
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)


@pytest.mark.parametrize("path", documents(), ids=name)
def test_links(path):
    """Links and pictures lead somewhere, headings included."""
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, heading = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or heading and heading not in anchors(target):
            missing.append(link)
    assert not missing


def anchors(path):
    """Of a document's headings, as forges make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("path", [p for p in documents() if p.name != "CHANGELOG.md"], ids=name)
def test_paths(path):
    """Paths and names of files in backticks exist, from the root or from the document's folder.
    The changelog also names what is gone."""
    quoted = re.findall(r"`([^`\s]+)`", prose(path))
    paths = [p for p in quoted if re.fullmatch(r"\.?[\w.*-]+(/[\w.*-]+)+/?|[\w*]+(\.\w+)+", p)]
    names = [p for p in paths if "/" not in p and p.endswith(SOURCES)]
    paths = [p for p in paths if "/" in p and not p.startswith(("build/", "./run"))]
    paths += re.findall(r"^((?:src|include|bindings|tests)/\S*) ", path.read_text("utf-8"), re.M)
    tree = [file.name for file in files()]
    missing = [p for p in paths if not any(list(top.glob(p)) for top in (ROOT, path.parent))]
    missing += [n for n in names if not any(fnmatch.fnmatchcase(file, n) for file in tree)]
    assert not missing
    assert len(set(paths)) > 30 or name(path) != "src/README.md"


def test_names_in_the_map():
    """The identifiers in src/README.md occur in the source; one beside a file, in that file."""
    text = prose(ROOT / "src" / "README.md")
    pattern = r"`(\w+)(?:\(\))?`"
    source = {file: file.read_text(encoding="utf-8") for file in files() if file.suffix != ".md"
              and {"src", "tests", "include"} & set(file.relative_to(ROOT).parts)
              and file.parent.name not in ("data", "corpus")}
    words = set(re.findall(r"\w+", "\n".join(source.values())))
    known = re.findall(pattern, text)
    assert len(set(known)) > 20
    assert [identifier for identifier in known if identifier not in words] == []
    beside = re.findall(pattern + r"(?:\s+in\s+|\s+\()`([\w./]+\.\w+)`", text)
    assert len(beside) > 8
    assert [pair for pair in beside
            if not re.search(rf"\b{pair[0]}\b", source.get(ROOT / pair[1], ""))] == []


def test_clang_format():
    tool = shutil.which("clang-format")
    if not tool:
        pytest.skip("no clang-format")
    sources = [p for p in files() if p.suffix in CODE and not generated(p)
               and name(p) not in LONGER - {"include/flashattn.h"}]
    result = subprocess.run([tool, "--dry-run", "-Werror", *map(str, sources)], cwd=ROOT,
                            capture_output=True, text=True, check=False)
    wrong = sorted(set(re.findall(r"^(\S.*?):\d+:\d+: error", result.stderr, re.M)))
    assert result.returncode == 0, "clang-format -i " + " ".join(wrong)


@pytest.mark.timeout(1500)  # minutes of one core, and those may be busy
def test_clang_tidy(tmp_path):
    """The host code, which needs no special flags."""
    tool = shutil.which("clang-tidy")
    commands = ROOT / "build" / "release" / "compile_commands.json"
    if not tool or not commands.exists():
        pytest.skip("no clang-tidy, or no build")
    sources = [p for p in files() if p.suffix == ".cpp" and p.parent.name in ("api", "core")]
    # Once a source: the library of a later version, a test's, is made of the same ones.
    own = [command for command in json.loads(commands.read_text("utf-8"))
           if command["output"].startswith("src/")]
    (tmp_path / "compile_commands.json").write_text(json.dumps(own), "utf-8")

    def check(path: pathlib.Path) -> str:
        result = subprocess.run([tool, "-p", str(tmp_path), "--quiet", str(path)], cwd=ROOT,
                                capture_output=True, text=True, check=False)
        return result.stdout if result.returncode else ""

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as processes:
        wrong = list(filter(None, processes.map(check, sources)))
    assert not wrong, "\n".join(wrong)


def test_direction():
    """Includes point from api to backends to core. Kernels and what they share have no host code
    but pure scheduling."""
    barred = {"src/core": r"api/|cpu/|cuda/|cuda_runtime", "src/cpu": r"api/|cuda/|cuda_runtime",
              "src/cuda": r"api/|cpu/", "src/cuda/ptx": r"cuda/(host|device|kernels)/",
              "src/cuda/device": r"cuda/(host|kernels)/",
              "src/cuda/kernels": r"cuda/host/(?!schedule/)",
              "src/cuda/host/schedule": r"cuda/(?!host/schedule/)|cuda_runtime"}
    wrong = []
    for folder, pattern in barred.items():
        sources = [p for p in (ROOT / folder).rglob("*") if p.suffix in CODE]
        assert len(sources) > 3, folder
        for path in sources:
            for included in re.findall(r'^#include ["<](.*)[">]', path.read_text("utf-8"), re.M):
                if re.match(pattern, included):
                    wrong.append(f"{name(path)} includes {included}")
    assert not wrong


def test_version():
    """The header is where the version stands; the build files repeat it."""
    header = (ROOT / "include" / "flashattn.h").read_text()
    version = ".".join(re.search(rf"VERSION_{part} (\d+)", header).group(1)
                       for part in ("MAJOR", "MINOR", "PATCH"))
    assert f"version: '{version}'" in (ROOT / "meson.build").read_text()
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()


def test_package_is_complete():
    """Meson lists the files of the Python package by name."""
    listed = (ROOT / "bindings" / "python" / "meson.build").read_text()
    package = ROOT / "bindings" / "python"
    files = [path.relative_to(package).as_posix() for path in (package / "flashattn").rglob("*")
             if path.is_file() and "__pycache__" not in path.parts]
    missing = [name for name in files if f"'{name}'" not in listed]
    assert "flashattn/torch/__init__.py" in files and not missing
