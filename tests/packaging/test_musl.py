"""A machine without glibc: the library, built for musl and loaded by musl's loader."""
import importlib.util
import shlex
import sys

import pytest
from consumer import BASELINE, ROOT, VERSION, example, needed, run, unpacked

LOADER = "lib/ld-musl-x86_64.so.1"
FOLDER = ROOT / "build" / "musl-test"


def compiler(language):
    """Zig's, whose package on PyPI has musl."""
    return [sys.executable, "-m", "ziglang", language, "-target", "x86_64-linux-musl"]


@pytest.mark.timeout(1200)  # two minutes where nothing else runs
def test_loads_where_musl_is_the_c_library(tmp_path):
    if not importlib.util.find_spec("ziglang"):
        pytest.skip("no ziglang from PyPI, which ./run wheel needs")
    loader = unpacked("musl", LOADER, "musl") / LOADER
    env = {"CC": shlex.join(compiler("cc")), "CXX": shlex.join(compiler("c++")),
           "ZIG_GLOBAL_CACHE_DIR": str(FOLDER / "zig")}
    if not (FOLDER / "build.ninja").exists():
        run("meson", "setup", FOLDER, "-Dcuda=disabled", "-Dpython=disabled", BASELINE, env=env)
    run("ninja", "-C", FOLDER, f"src/libflashattn.so.{VERSION}", env=env)
    library = FOLDER / "src" / "libflashattn.so.0"
    assert needed(library) == ["libc.so"]
    program = tmp_path / "example"
    # -O2: without it Zig links a sanitizer, which wants a newer musl.
    run(*compiler("cc"), "-O2", "-dynamic", "-I", ROOT / "include", "-o", program,
        example(tmp_path), library, env=env)
    assert "libflashattn.so.0" in needed(program)
    assert "takes 38" in run(loader, "--library-path", library.parent, program)
