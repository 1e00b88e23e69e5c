"""A stranger's programs: an installed prefix, pkg-config, static linking, dlopen, and README.md."""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_README = (ROOT / "bindings" / "python" / "README.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "bindings" / "c" / "examples"
HEADER = (ROOT / "include" / "flashattn.h").read_text(encoding="utf-8")


def run(command, env=None):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                            env={**os.environ, **(env or {})}, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def programs(language, text=README):
    """A page's code blocks that say that they are tested."""
    return re.findall(rf"<!-- tests/abi/test_consumer\.py [^>]*-->\n```{language}\n(.*?)```\n",
                      text, re.S)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """meson install, below a folder of its own."""
    place = tmp_path_factory.mktemp("installed")
    run(["meson", "install", "-C", ROOT / "build" / "release", "--no-rebuild", "--quiet",
         "--destdir", place])
    (header,) = place.rglob("flashattn.h")
    return header.parents[1]


@pytest.fixture(scope="module")
def lib(prefix):
    (library,) = prefix.rglob("libflashattn.so")
    return library.parent


def header_program():
    """The example at the head of the header, as a program."""
    (body,) = re.findall(r"through the same calls\.\n \*\n(.*?) \*\n \* Conventions", HEADER, re.S)
    lines = [line.removeprefix(" *     ") for line in body.splitlines()]
    return "\n".join(["#include <flashattn.h>", "#include <stdio.h>", "#include <stdlib.h>",
                      "int main(void) {", *lines, 'puts("takes 38");', "return status;", "}", ""])


@pytest.fixture
def source(tmp_path):
    (program,) = programs("c")
    assert len(program.splitlines()) <= 45
    path = tmp_path / "example.c"
    path.write_text(program)
    return path


def flags(lib, *arguments, package="flashattn"):
    if not shutil.which("pkg-config"):
        pytest.skip("no pkg-config")
    # As installed, but found below the destination folder.
    prefix = str(lib.parent.parent if lib.parent.name == "lib" else lib.parent)
    out = run(["pkg-config", f"--define-variable=prefix={prefix}", *arguments, package],
              {"PKG_CONFIG_PATH": str(lib / "pkgconfig")})
    return shlex.split(out)


def compile_c(source, *arguments):
    program = source.with_suffix("")
    compiler = os.environ.get("CC", "cc").split()
    run([*compiler, "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o", program, source,
         *arguments])
    return program


def runtime(sanitizer):
    """The file of a sanitizer's run-time library; nothing where there is none."""
    path = run([*os.environ.get("CC", "cc").split(), f"-print-file-name=lib{sanitizer}.so"]).strip()
    return path if os.path.isabs(path) else ""


def test_files(prefix, lib):
    assert (lib / "libflashattn.so.0").is_symlink() and (lib / "libflashattn.a").is_file()
    assert not any(".egg" in p.name or p.suffix == ".cpp" for p in prefix.rglob("*"))


def test_shared(source, lib):
    program = compile_c(source, *flags(lib, "--cflags", "--libs"))
    assert "takes 38" in run([program], {"LD_LIBRARY_PATH": str(lib)})
    if shutil.which("readelf"):
        assert "libflashattn.so.0" in run(["readelf", "-d", program])


def test_header_example(tmp_path, lib):
    """It compiles without a warning, works, and frees what it allocates."""
    source = tmp_path / "example.c"
    source.write_text(header_program())
    words = flags(lib, "--cflags", "--libs")
    checked = ["-g", "-fsanitize=address"] if runtime("asan") else []
    program = compile_c(source, *checked, *words)
    assert run([program], {"LD_LIBRARY_PATH": str(lib)}) == "takes 38\n"


@pytest.mark.parametrize("path", sorted([*(ROOT / "tests").glob("*/*.c"), *EXAMPLES.glob("*.c")]),
                         ids=lambda p: p.name)
def test_programs_without_a_warning(path):
    """Examples, and the tests' own, from which users copy as well; one is of version 0.1."""
    old = path.name == "old_client.c"
    include = path.parent / "v0.1" if old else ROOT / "include"
    run([*os.environ.get("CC", "cc").split(), "-std=gnu11", "-fsyntax-only", "-Wall", "-Wextra",
         "-Wshadow", "-Wno-unknown-pragmas", "-Werror", "-I", include, path])


def test_examples(tmp_path, lib):
    """bindings/c/README.md says how they are compiled: as C99, without a warning. They run."""
    text = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (commands,) = programs("sh", text)
    commands = commands.replace("$(pkg-config --cflags --libs flashattn)",
                                " ".join(flags(lib, "--cflags", "--libs")))
    strict = "cc -O3 -std=c99 -Wall -Wextra -Wshadow -Wpedantic -Werror "
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    out = run(["sh", "-ec", f"cd {tmp_path}/examples\n" + commands.replace("cc -O3 ", strict)],
              {"LD_LIBRARY_PATH": str(lib)})
    assert "32 of 32 tokens are those" in out and "cascade differs from float64" in out


def test_static(source, lib):
    """With what README says, beside the shared library: the archive is linked, and it alone."""
    assert "flashattn-static: libflashattn.a" in README
    program = compile_c(source, *flags(lib, "--cflags", "--libs", package="flashattn-static"))
    assert "takes 38" in run([program])
    assert "libflashattn" not in run(["ldd", program])


def test_every_instruction_set(source, lib):
    program = compile_c(source, *flags(lib, "--cflags", "--libs"))
    for isa in ("baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"):
        assert "takes 38" in run([program], {"LD_LIBRARY_PATH": str(lib), "FLASHATTN_CPU_ISA": isa})


def test_python_programs(lib):
    (short,) = programs("python")
    assert len(short.splitlines()) == 5
    package_program, ctypes_program = programs("python", PYTHON_README)
    for program in (short, package_program):
        run([sys.executable, "-c", program + "assert dq.shape == q.shape\n"])
    out = run([sys.executable, "-c", ctypes_program], {"LD_LIBRARY_PATH": str(lib)})
    assert out.startswith("libflashattn ")


def test_loaded_and_unloaded(lib):
    """dlopen, use, dlclose, again: nothing is left that runs into freed code."""
    program = """
import ctypes, _ctypes, sys
for _ in range(3):
    library = ctypes.CDLL(sys.argv[1])
    assert library.flashattn_version() >= 100
    _ctypes.dlclose(library._handle)
"""
    run([sys.executable, "-c", program, lib / "libflashattn.so.0"])


def test_matrix():
    """The support matrix of bindings/python/README.md is what the library answers."""
    text = re.search(r"<!-- matrix begins -->\n(.*?)<!-- matrix ends -->", PYTHON_README,
                     re.S).group(1)
    assert text.strip() == run([sys.executable, "-m", "flashattn", "--markdown"]).strip(), \
        "python -m flashattn --markdown"


def test_readme_is_short():
    words = re.sub(r"```.*?```|<!--.*?-->|^\|.*?$", "", README, flags=re.S | re.M).split()
    assert len(README.splitlines()) < 150 and len(words) < 1000  # four minutes


def test_a_build_is_the_product(tmp_path):
    """What Meson builds unless it is asked for tests."""
    run(["meson", "setup", "-Dpython=disabled", "-Dcuda=disabled", tmp_path / "b", ROOT])
    targets = json.loads(run(["meson", "introspect", "--targets", tmp_path / "b"]))
    built = [target for target in targets if target["build_by_default"]]
    assert {target["name"] for target in built} == {"flashattn"}
    assert not any("/tests/" in target["defined_in"] for target in targets)


@pytest.mark.skipif(shutil.which("nvcc") is not None, reason="there is an nvcc")
@pytest.mark.parametrize("option, word", [("cuda=enabled", "nvcc"),
                                          ("cpu_isas=avx512_bf16", "without avx512")])
def test_refused_options(tmp_path, option, word):
    result = subprocess.run(["meson", "setup", f"-D{option}", tmp_path / "b", ROOT],
                            capture_output=True, text=True, check=False)
    assert result.returncode != 0 and word in result.stdout
