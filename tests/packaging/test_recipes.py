"""The recipes of bindings/packaging, each with the tool that it is for, where there is one."""
import json
import os
import re
import shlex
import shutil
import sys
import types

import pytest
from consumer import (BASELINE, PACKAGING, ROOT, VERSION, checkout, compiler, example, need, needed,
                      read, run, unpacked)

JLL = ROOT / "bindings" / "julia" / "jll" / "build_tarballs.jl"
RECIPES = [ROOT / "meson.build", ROOT / "pyproject.toml", JLL,
           *(ROOT / "bindings" / "rust").glob("**/Cargo.toml"),
           *(path for path in PACKAGING.rglob("*") if path.is_file() and path.suffix != ".pyc")]


def test_one_address():
    """A tree that moves changes its address in every recipe."""
    pattern = r"https://(?!www\.debian\.org)[^/\s\"']+"
    found = {path: set(re.findall(pattern, read(path))) for path in RECIPES}
    (address,) = found[ROOT / "pyproject.toml"]
    assert {path: urls for path, urls in found.items() if urls - {address}} == {}
    naming = {path.name for path, urls in found.items() if urls}
    assert naming >= {"meson.build", "conanfile.py", "package.py", "control", "copyright",
                      "flashattn.wrap", "Cargo.toml", JLL.name}


def test_one_version():
    assert f'version = "{VERSION}"' in read(PACKAGING / "conan" / "conanfile.py")
    (spack,) = PACKAGING.rglob("package.py")
    assert f'version("{VERSION}", tag="v{VERSION}")' in read(spack)
    assert f'version = v"{VERSION}"' in read(JLL)
    assert f"revision = v{VERSION}" in read(PACKAGING / "flashattn.wrap")
    changelog = read(PACKAGING / "debian" / "changelog")
    assert changelog.startswith(f"libflashattn ({VERSION}-")


def test_wrap(tmp_path):
    """A Meson project that has the wrap and no more: the subproject comes by git, and is linked."""
    need("git")
    source = checkout(tmp_path / "source")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-C", source]
    run("git", "init", "-q", source)
    run(*git, "add", "-A")
    run(*git, "commit", "-q", "-m", "all")
    run(*git, "tag", f"v{VERSION}")
    project = tmp_path / "project"
    (project / "subprojects").mkdir(parents=True)
    example(project)
    (project / "meson.build").write_text(
        "project('stranger', 'c')\n"
        "executable('example', 'example.c', dependencies: dependency('flashattn'))\n", "utf-8")
    wrap = read(PACKAGING / "flashattn.wrap")
    wrap, count = re.subn(r"^url = .*$", f"url = file://{source}", wrap, flags=re.M)
    assert count == 1
    (project / "subprojects" / "flashattn.wrap").write_text(wrap, encoding="utf-8")
    options = [f"-Dflashattn:{option}"
               for option in ("python=disabled", "cuda=disabled", BASELINE[2:])]
    run("meson", "setup", tmp_path / "b", project, "--buildtype=release",
        "--force-fallback-for=flashattn", *options)
    targets = json.loads(run("meson", "introspect", "--targets", tmp_path / "b"))
    built = {target["name"] for target in targets if target["build_by_default"]}
    assert built == {"example", "flashattn"}
    run("ninja", "-C", tmp_path / "b", "example")
    assert "takes 38" in run(tmp_path / "b" / "example")
    assert "libflashattn.so.0" in needed(tmp_path / "b" / "example")


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "static"])
def test_conan(tmp_path, shared):
    """conan create: the sources are exported, built and packaged; a program finds it by CMake."""
    need("conan", "cmake")
    env = {"CONAN_HOME": str(tmp_path / "conan")}
    run("conan", "profile", "detect", env=env)
    # In a copy: Conan builds the program beside its recipe.
    recipe = checkout(tmp_path / "source") / "bindings" / "packaging" / "conan"
    run("conan", "create", recipe, "--no-remote", "-o", f"flashattn/*:shared={shared}",
        "-o", "flashattn/*:cpu_isas=none", env=env)
    listed = json.loads(run("conan", "list", f"flashattn/{VERSION}:*", "--format=json", env=env))
    (cache,) = listed.values()
    ((_, recipe),) = cache.items()
    ((_, revision),) = recipe["revisions"].items()
    ((package, _),) = revision["packages"].items()
    folder = run("conan", "cache", "path", f"flashattn/{VERSION}:{package}", env=env).strip()
    files = {os.path.relpath(os.path.join(top, name), folder)
             for top, _, names in os.walk(folder) for name in names}
    assert {"include/flashattn.h", "licenses/LICENSE"} <= files
    assert ("lib/libflashattn.so.0" in files) == shared == ("lib/libflashattn.a" not in files)


def debhelper():
    """Variables by which the machine's debhelper is found, or one from Debian's packages."""
    if shutil.which("dh"):
        return {}
    usr = unpacked("debhelper", "usr/bin/dh", "debhelper", "libdebhelper-perl", "dh-autoreconf",
                   "dh-strip-nondeterminism", "libfile-stripnondeterminism-perl",
                   "libarchive-zip-perl", "libsub-override-perl", "dwz", "po-debconf") / "usr"
    return {"PATH": f"{usr / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PERL5LIB": str(usr / "share" / "perl5"),
            "DH_DATAFILES": str(usr / "share" / "debhelper")}


def test_debian(tmp_path):
    """dpkg-buildpackage: libflashattn0 and libflashattn-dev, whose files serve a program."""
    need("dpkg-buildpackage", "pkg-config")
    source = checkout(tmp_path / "source")
    shutil.copytree(PACKAGING / "debian", source / "debian")
    # -d: Meson comes from PyPI here.
    run("dpkg-buildpackage", "-b", "-d", "-us", "-uc", cwd=source,
        env={"MESON_OPTIONS": BASELINE, "DEB_BUILD_OPTIONS": "parallel=2", **debhelper()})
    root = tmp_path / "root"
    for package in ("libflashattn0", "libflashattn-dev"):
        (deb,) = tmp_path.glob(f"{package}_{VERSION}-*.deb")
        run("dpkg-deb", "-x", deb, root)
        control = run("dpkg-deb", "-f", deb)
        assert "Multi-Arch: same" in control
        assert re.search(r"^Depends: .*(libc6 \(>=|libflashattn0 \(=)", control, re.M)
    (lib,) = {path.parent for path in root.rglob("libflashattn.so.0")}
    assert lib.parent == root / "usr" / "lib"  # multiarch
    words = run("pkg-config", "--cflags", "--libs", "flashattn",
                env={"PKG_CONFIG_LIBDIR": str(lib / "pkgconfig"),
                     "PKG_CONFIG_SYSROOT_DIR": str(root)})
    run(*compiler(), "-o", tmp_path / "example", example(tmp_path), *shlex.split(words))
    assert "takes 38" in run(tmp_path / "example", env={"LD_LIBRARY_PATH": str(lib)})


def test_debian_symbols():
    """The list by which Debian knows what a program of this version needs."""
    listed = read(PACKAGING / "debian" / "libflashattn0.symbols").splitlines()[2:]
    ours = read(ROOT / "tests" / "abi" / "symbols.txt").split()
    assert [line.split("@")[0].strip() for line in listed] == ours


class Spec:
    """Of a Spack spec what package.py asks for."""

    def __init__(self, **variants):
        self.variants = {name: types.SimpleNamespace(value=value)
                         for name, value in variants.items()}

    def satisfies(self, text):
        return text == "+cuda" and self.variants["cuda"].value


def spack_package():
    """The recipe, run on a stand-in for Spack's package API, which no registry here has: its
    directives are recorded."""
    calls = []

    def directive(name):
        return lambda *words, **more: calls.append((name, words, more))

    api = {name: directive(name) for name in ("license", "version", "variant", "depends_on")}
    api.update(MesonPackage=type("MesonPackage", (), {}), CudaPackage=type("CudaPackage", (), {}))
    module = types.ModuleType("spack.package")
    vars(module).update(api, __all__=list(api))
    spack = types.ModuleType("spack")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "spack", spack)
        patch.setitem(sys.modules, "spack.package", module)
        (path,) = PACKAGING.rglob("package.py")
        names = {}
        exec(compile(read(path), path, "exec"), names)
    return names["Flashattn"], calls


@pytest.mark.parametrize("variants, options", [
    (dict(cuda=False, cpu_isas=("avx512", "avx2")),
     {"cuda": "disabled", "cpu_isas": "avx2,avx512"}),
    (dict(cuda=False, cpu_isas=("none",)), {"cuda": "disabled", "cpu_isas": ""}),
    (dict(cuda=True, cpu_isas=("avx2",), cuda_arch=("80", "90")),
     {"cuda": "enabled", "cpu_isas": "avx2", "gpu_archs": "80,90,90a"}),
])
def test_spack_options(variants, options):
    """Spack's variants become options that Meson knows, with values that it takes."""
    package, _ = spack_package()
    recipe = package()
    recipe.spec = Spec(**variants)
    words = dict(word[2:].split("=") for word in recipe.meson_args())
    assert words == {"python": "disabled", **options}
    known = read(ROOT / "meson_options.txt")
    assert all(f"option('{name}'" in known for name in words)


def test_spack_directives():
    _, calls = spack_package()
    (isas,) = [more for name, words, more in calls if name == "variant"]
    known = re.search(r"option\('cpu_isas'.*?choices: \[(.*?)\]",
                      read(ROOT / "meson_options.txt"))
    names = re.findall(r"'(\w+)'", known.group(1))
    assert list(isas["values"]) == ["none", *names] and isas["default"].split(",") == names
    wanted = re.search(r"meson_version: '>=([\d.]+?)(\.0)?'",
                       read(ROOT / "meson.build")).group(1)
    assert ("depends_on", (f"meson@{wanted}:",), {"type": "build"}) in calls
    (folder,) = PACKAGING.glob("*/repo.yaml")
    assert "namespace: libflashattn" in read(folder)


def test_spack(tmp_path):
    """Where there is a Spack it reads the recipe itself."""
    need("spack")
    env = {"SPACK_USER_CONFIG_PATH": str(tmp_path), "SPACK_DISABLE_LOCAL_CONFIG": "1"}
    run("spack", "repo", "add", PACKAGING / "spack", env=env)
    assert VERSION in run("spack", "info", "flashattn", env=env)
    run("spack", "spec", "flashattn@main", env=env)


def test_conan_recipe_knows_the_sources():
    """Every folder that Meson reads is exported: a subdir() that the recipe forgets fails there.
    Those of tests and of examples are read only where they are."""
    recipe = read(PACKAGING / "conan" / "conanfile.py")
    folders = re.findall(r"^\s*subdir\('([\w/]+)'\)", read(ROOT / "meson.build"), re.M)
    exported = re.findall(r'"([\w./]+?)/(?:\*|meson\.build|\*\.h)"', recipe)
    assert set(folders) - {"tests", "bindings/c"} <= set(exported)
