"""The Rust crates whose tensors lie on a GPU, on the emulator of tests/emulator: the crate cudarc,
and candle with its feature cuda, compiled by NVIDIA's compiler, with candle's few own kernels that
the tests call on the host.

Where `./run test --cuda` has not built the emulator's libraries nothing runs. On a machine
with a GPU and CUDA's libraries but no Rust, the program that test_candle leaves at
build/rust-candle-gpu/candle-gpu runs, too, with a library that has GPU kernels and CUDA's own:

    export LD_LIBRARY_PATH=build/cuda/src
    LD_PRELOAD="libcuda.so.1 libcublas.so.13 libcurand.so.10" candle-gpu --test-threads 1
"""
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from crates import BRIDGES, LIBRARY, ROOT, RUST, fetched, passed, succeed

EMULATOR = ROOT / "build" / "cuda-test" / "tests" / "emulator"
OUT = ROOT / "build" / "rust-candle-gpu"
# candle links these libraries; the tests hardly call them.
LINKED = ("cuda", "cublas", "cublasLt", "curand", "nvrtc", "cudart")
NVIDIAS = re.compile(r"(cu[A-Z]|cublas|curand|nvrtc|cuda|__cuda)\w+")

if not (EMULATOR / "libcuda.so.1").is_file():
    pytest.skip("no emulated GPU for the Rust crates cudarc and candle: ./run test --cuda "
                "cuda makes one", allow_module_level=True)


def need(crate):
    if missing := fetched(RUST / crate):
        pytest.skip(f"{crate} cannot be fetched: {missing}")


def emulated(**more):
    paths = os.pathsep.join([str(EMULATOR), os.environ.get("LD_LIBRARY_PATH", "")])
    return {"LD_LIBRARY_PATH": paths, "FLASHATTN_EMULATOR_DEVICE": "90", **more}


def test_cudarc():
    need("cudarc")
    said = succeed("test", "--locked", "--test", "attention", "--", "--show-output",
                   folder=RUST / "cudarc", target=BRIDGES, **emulated())
    assert passed(said) >= 8 and "skipped:" not in said, said[-4000:]


def toolkit():
    """Variables by which the build scripts of candle find CUDA's compiler and headers."""
    path = os.pathsep.join(filter(None, (os.environ["PATH"], os.environ.get("NVCC_FOLDER"))))
    nvcc = shutil.which("nvcc", path=path)
    if not nvcc:
        pytest.skip("no nvcc: the feature cuda of the crate candle is not compiled")
    root = pathlib.Path(nvcc).resolve().parents[1]
    return {"PATH": path, "CUDA_PATH": str(root), "CUDA_HOME": str(root), "CUDA_COMPUTE_CAP": "90"}


def undefined(program):
    said = subprocess.run(["nm", "-D", "--undefined-only", program], capture_output=True, text=True,
                          check=True).stdout
    return [name for name in said.split() if NVIDIAS.fullmatch(name)]


def stand_ins(program, folder):
    """Libraries to be loaded before a program: the emulator's driver, candle's kernels, and of all
    else that the program wants of CUDA a function that does nothing."""
    compiler = shutil.which("c++")
    kernels, nothing = folder / "kernels.so", folder / "nothing.so"
    include = pathlib.Path(toolkit()["CUDA_PATH"]) / "include"
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", "-isystem", include, "-o", kernels,
                    ROOT / "tests" / "emulator" / "candle_kernels.cpp"], check=True)
    source = folder / "nothing.cpp"
    source.write_text('extern "C" {\n' + "".join(
        f"long {name}() {{ return 0; }}\n" for name in undefined(program)) + "}\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", nothing, source], check=True)
    return " ".join(map(str, (EMULATOR / "libcuda.so.1", kernels, nothing)))


def test_candle(tmp_path):
    need("candle")
    variables = toolkit()
    for name in LINKED:  # the functions are found when the program starts
        (tmp_path / f"lib{name}.so").write_text("INPUT()\n")
    said = succeed("rustc", "--locked", "--features", "cuda", "--test", "cuda",
                   "--message-format=json", "--", "-L", str(tmp_path), "-C",
                   "relro-level=partial", "-C", "strip=symbols", "-C",
                   "link-arg=-Wl,--unresolved-symbols=ignore-all", folder=RUST / "candle",
                   target=BRIDGES, **variables)
    (built,) = re.findall(r'"executable":"([^"]*)"', said)
    OUT.mkdir(exist_ok=True)
    program = shutil.copy(built, OUT / "candle-gpu")
    done = subprocess.run([program, "--show-output", "--test-threads", "1"], text=True,
                          env={**os.environ, **emulated(LD_PRELOAD=stand_ins(program, tmp_path))},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = done.stdout
    assert done.returncode == 0 and passed(said) >= 7 and "skipped:" not in said, said[-4000:]
    print(f"Rust: {passed(said)} tests of candle's tensors on a GPU, {LIBRARY.name} emulated")
