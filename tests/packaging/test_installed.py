"""An installed tree, moved to another place, as CMake and pkg-config find it."""
import shlex

import pytest
from consumer import PACKAGING, ROOT, VERSION, compiler, example, need, needed, run

CMAKE = """
cmake_minimum_required(VERSION 3.15)
project(stranger C)
find_package(flashattn {version} CONFIG REQUIRED {components})
add_executable(example example.c)
target_link_libraries(example PRIVATE {target})
"""


MINOR = VERSION.rpartition(".")[0]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    place = tmp_path_factory.mktemp("installed")
    run("meson", "install", "-C", ROOT / "build" / "release", "--no-rebuild", "--quiet",
        "--destdir", place / "first")
    (header,) = place.rglob("flashattn.h")
    return header.parents[1].rename(place / "elsewhere")


@pytest.fixture(scope="module")
def lib(prefix):
    (library,) = prefix.rglob("libflashattn.so")
    return library.parent


def configure(folder, prefix, version=MINOR, target="flashattn::flashattn", components="",
              modules=""):
    example(folder)
    (folder / "CMakeLists.txt").write_text(
        CMAKE.format(version=version, target=target, components=components), encoding="utf-8")
    run("cmake", "-S", folder, "-B", folder / "b", f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DCMAKE_MODULE_PATH={modules}", "-DCMAKE_BUILD_TYPE=Release")


@pytest.mark.parametrize("target", ["flashattn::flashattn", "flashattn::static"])
def test_cmake(tmp_path, prefix, target):
    """A project in C alone; both targets from one package."""
    need("cmake")
    configure(tmp_path, prefix, VERSION, target, "COMPONENTS shared static")
    run("cmake", "--build", tmp_path / "b")
    program = tmp_path / "b" / "example"
    assert "takes 38" in run(program)
    assert ("libflashattn.so.0" in needed(program)) == (target != "flashattn::static")


@pytest.mark.parametrize("how, words", [
    (dict(version="0.1"), f"version: {VERSION}"), (dict(version="1"), f"version: {VERSION}"),
    (dict(version=f"{MINOR}.99"), f"version: {VERSION}"),
    (dict(components="COMPONENTS cuda"), "there are shared, static"),
])
def test_cmake_refuses(tmp_path, prefix, how, words):
    """Other minor versions, newer ones and unknown components, with what there is."""
    need("cmake")
    with pytest.raises(AssertionError, match=words):
        configure(tmp_path, prefix, **how)


def test_cmake_without_the_archive(tmp_path, prefix, lib):
    """A distribution may ship the archive apart: the shared target stands alone."""
    need("cmake")
    archive = (lib / "libflashattn.a").rename(lib / "put.aside")
    try:
        configure(tmp_path, prefix)
        (tmp_path / "b" / "CMakeCache.txt").unlink()
        with pytest.raises(AssertionError, match="no component static"):
            configure(tmp_path, prefix, components="COMPONENTS static")
    finally:
        archive.rename(lib / "libflashattn.a")


def test_cmake_with_gpu_kernels(tmp_path, prefix, lib):
    """The archive of such a build needs the toolkit's static runtime: found by CMake, or missed."""
    need("cmake")
    config = lib / "cmake" / "flashattn" / "flashattn-config.cmake"
    text = config.read_text(encoding="utf-8")
    if "  if(TRUE)\n" not in text:
        assert text.count("  if(FALSE)\n") == 1
        config.write_text(text.replace("  if(FALSE)\n", "  if(TRUE)\n"), encoding="utf-8")
    try:
        # Stand-ins for CMake's own module, which looks for the toolkit of this machine.
        target = ("add_library(CUDA::cudart_static INTERFACE IMPORTED)\n"
                  "set_target_properties(CUDA::cudart_static PROPERTIES\n"
                  "  INTERFACE_COMPILE_DEFINITIONS SEEN)")
        for name, body in {"without": "", "with": target}.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "FindCUDAToolkit.cmake").write_text(body + "\n", encoding="utf-8")
        how = dict(target="flashattn::static", components="COMPONENTS static")
        with pytest.raises(AssertionError, match="install the CUDA"):
            configure(tmp_path / "without", prefix, modules=tmp_path / "without", **how)
        configure(tmp_path / "with", prefix, modules=tmp_path / "with", **how)
        assert "-DSEEN" in run("cmake", "--build", tmp_path / "with" / "b", "--verbose")
    finally:
        config.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("path", sorted(PACKAGING.rglob("*.c")), ids=lambda path: path.name)
def test_programs_without_a_warning(path):
    run(*compiler(), "-std=c99", "-fsyntax-only", "-Wall", "-Wextra", "-pedantic", "-Werror", "-I",
        ROOT / "include", path)


def pkg_config(lib, prefix, *words):
    need("pkg-config")
    return run("pkg-config", f"--define-variable=prefix={prefix}", *words,
               env={"PKG_CONFIG_PATH": str(lib / "pkgconfig")}).strip()


@pytest.mark.parametrize("package, flags, static", [
    ("flashattn", [], False), ("flashattn-static", [], True),
    # A program without any shared library. Its linker takes archives, and wants what they need.
    ("flashattn", ["-static"], True),
])
def test_pkg_config(tmp_path, prefix, lib, package, flags, static):
    words = shlex.split(pkg_config(lib, prefix, "--cflags", "--libs",
                                   *(["--static"] if flags else []), package))
    program = tmp_path / "example"
    run(*compiler(), "-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-o", program,
        example(tmp_path), *flags, *words)
    assert "takes 38" in run(program, env={} if static else {"LD_LIBRARY_PATH": str(lib)})
    assert ("libflashattn.so.0" in needed(program)) == (not static)


def test_pkg_config_says_where_it_is_from(prefix, lib):
    for package in ("flashattn", "flashattn-static"):
        text = (lib / "pkgconfig" / f"{package}.pc").read_text(encoding="utf-8")
        assert "\nURL: https://" in text and f"\nVersion: {VERSION}" in text
        assert str(ROOT) not in text


def test_loads_without_driver_toolkit_or_openmp(lib):
    """Loading takes the C and C++ run-time libraries alone; a driver is looked for later."""
    allowed = ("libc.so", "libm.so", "libstdc++.so", "libgcc_s.so", "libpthread.so", "libdl.so",
               "librt.so", "ld-linux")
    strangers = [name for name in needed(lib / "libflashattn.so") if not name.startswith(allowed)]
    assert not strangers
