"""./run wheel: a wheel for every Python >= 3.9 and every Linux with glibc >= 2.28, and the sdist.

No container: the machine's compiler links against stubs of glibc 2.28, so that a symbol which that
version lacks is an error of the linker. The stubs come from Zig, whose package on PyPI lists the
symbols of every glibc. libstdc++ is linked statically, and its symbols stay inside the library.
auditwheel then checks the wheel and gives it its tag.

  dist/flashattn-V-py3-none-manylinux_2_28_ARCH.whl        CPU
  dist/flashattn-V+cuN-py3-none-manylinux_2_28_ARCH.whl    --cuda: with the GPU kernels, by nvcc N
  dist/flashattn-V.tar.gz                                  --sdist
"""
from __future__ import annotations

import argparse
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from typing import Dict, List, Optional

ROOT = pathlib.Path(__file__).resolve().parents[2]
GLIBC = (2, 28)
TAG = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"
LIBRARIES = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libld.so.2")
MAX_BYTES = 60_000_000
# Machine code, so that no driver compiles it, for the GPUs of the tests; and PTX for others.
GPU_ARCHS = "80,90,90a,120"


def run(*command: object, env: Optional[Dict[str, str]] = None, cwd: pathlib.Path = ROOT) -> None:
    words = [str(word) for word in command]
    print("$", shlex.join(words), flush=True)
    result = subprocess.run(words, cwd=cwd, env={**os.environ, **(env or {})}, check=False)
    if result.returncode:
        sys.exit(f"wheel: {words[0]} failed with status {result.returncode}")


def stubs(folder: pathlib.Path) -> pathlib.Path:
    """A folder for the linker: glibc 2.28 without code, and libstdc++.a."""
    if (folder / "libstdc++.a").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        cache = pathlib.Path(name)
        (cache / "empty.c").write_text("int empty;\n", encoding="utf-8")
        # Zig makes the stubs because it links something against them, and keeps them in its cache.
        run(sys.executable, "-m", "ziglang", "build-lib", "-dynamic", "-lc", "-fno-compiler-rt",
            "-fno-ubsan-rt", "-target", f"{platform.machine()}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}",
            "empty.c", cwd=cache,
            env={"ZIG_GLOBAL_CACHE_DIR": name, "ZIG_LOCAL_CACHE_DIR": name})
        for library in LIBRARIES:
            (found,) = cache.rglob(library)
            shutil.copy(found, folder)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    run(*compiler, "-O2", "-fPIC", "-c", ROOT / "bindings" / "packaging" / "glibc_2_28.c",
        "-o", folder / "glibc_2_28.o")
    # libc_nonshared.a is glibc's, too: atexit of a shared library. The last file that is made says
    # that the folder is complete.
    for library in ("libc_nonshared.a", "libstdc++.a"):
        path = subprocess.run([*shlex.split(os.environ.get("CXX", "c++")),
                               f"-print-file-name={library}"],
                              capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(path):
            sys.exit(f"wheel: the C++ compiler has no {library}: install it (Fedora: glibc-devel, "
                     "libstdc++-static)")
        (folder / library).symlink_to(path)
    return folder


def link_args(folder: pathlib.Path) -> List[str]:
    """Instead of the compiler's own libraries: files, because -L would come after Meson's. All are
    needed, since what comes after them on the command line may want them (libcudart_static.a).
    --gc-sections leaves out the parts of libstdc++.a that nothing here calls and that want a newer
    glibc."""
    archives = [str(folder / name) for name in ("libstdc++.a", "libc_nonshared.a")]
    stubs_of_glibc = [str(folder / name) for name in LIBRARIES]
    return [str(folder / "glibc_2_28.o"), "-Wl,--gc-sections", "-nodefaultlibs", *archives,
            "-Wl,--push-state,--no-as-needed", *stubs_of_glibc, "-Wl,--pop-state", "-lgcc_s",
            "-lgcc"]


def cuda_label() -> str:
    """cu13: the toolkit decides which drivers can run the kernels."""
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.", text)
    if not release:
        sys.exit("wheel: nvcc --version names no release")
    return "cu" + release.group(1)


def labelled(wheel: pathlib.Path, label: str) -> pathlib.Path:
    """The wheel as version V+LABEL, so that pip and people can tell two builds of V apart."""
    with tempfile.TemporaryDirectory() as name:
        run(sys.executable, "-m", "wheel", "unpack", "--dest", name, wheel)
        (tree,) = pathlib.Path(name).iterdir()
        (info,) = tree.glob("*.dist-info")
        metadata = info / "METADATA"
        text = metadata.read_text(encoding="utf-8")
        metadata.write_text(re.sub(r"^(Version: .*)$", rf"\1+{label}", text, count=1, flags=re.M),
                            encoding="utf-8")
        info.rename(info.with_name(info.name.replace(".dist-info", f"+{label}.dist-info")))
        run(sys.executable, "-m", "wheel", "pack", "--dest-dir", wheel.parent, tree)
    wheel.unlink()
    (result,) = wheel.parent.glob(f"*+{label}-*.whl")
    return result


def checked_size(wheel: pathlib.Path) -> int:
    size = wheel.stat().st_size
    if size > MAX_BYTES:
        sys.exit(f"wheel: {wheel.name} has {size / 1e6:.1f} MB and may have {MAX_BYTES / 1e6:g}: "
                 "leave out rows of src/cuda/kernels/*/table.txt, or architectures")
    return size


def main() -> None:
    parser = argparse.ArgumentParser(prog="./run wheel", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="with the GPU kernels")
    parser.add_argument("--sdist", action="store_true", help="the source distribution, too")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("-D", dest="options", action="append", default=[], metavar="OPTION=VALUE",
                        help=f"of Meson; --cuda has gpu_archs={GPU_ARCHS}")
    parser.add_argument("--build-dir", type=pathlib.Path, metavar="FOLDER",
                        help="where it compiles; what has not changed is kept")
    parser.add_argument("--dry-run", action="store_true",
                        help="configure, print what would be compiled, and stop")
    arguments = parser.parse_args()
    if platform.libc_ver()[0] != "glibc":
        sys.exit("wheel: a manylinux wheel is linked on a machine with glibc")

    work = ROOT / "build" / ("wheel-cuda" if arguments.cuda else "wheel")
    words = link_args(stubs(ROOT / "build" / "glibc-2.28"))
    values = {"cuda": "enabled" if arguments.cuda else "disabled", "gpu_archs": GPU_ARCHS,
              "wheel_link_args": str(words), **dict(o.split("=", 1) for o in arguments.options)}
    options = [f"-D{name}={value}" for name, value in values.items()]
    if arguments.dry_run:
        shutil.rmtree(work / "dry-run", ignore_errors=True)
        run("meson", "setup", work / "dry-run", "-Dwheel=true", "-Dpython=enabled", *options)
        run("ninja", "-C", work / "dry-run", "-n", "-v")
        return

    out = arguments.out.resolve()
    if arguments.sdist:
        run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", out, ROOT)
    raw = work / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", raw,
        f"--config-setting=build-dir={arguments.build_dir or work / 'objects'}",
        *(f"--config-setting=setup-args={option}" for option in options), ROOT)
    (built,) = raw.glob("*.whl")
    # The package holds no extension module: cffi opens the library by its C ABI in every Python.
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--python-tag=py3", "--abi-tag=none",
        built)
    (built,) = raw.glob("*.whl")
    # Nothing is to be grafted: the driver is the machine's, and all else is inside.
    checked = raw / "checked"
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", TAG, "--only-plat",
        "--exclude", "libcuda.so.1", "--wheel-dir", checked, built)
    (wheel,) = checked.glob(f"*-py3-none-{TAG}.whl")
    if arguments.cuda:
        wheel = labelled(wheel, cuda_label())
    size = checked_size(wheel)
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(wheel, out)
    print(f"{out / wheel.name}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
