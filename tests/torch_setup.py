"""PyTorch for the CPU, for the tests of bindings/python/flashattn/torch.

    python tests/torch_setup.py     prints a Python that imports it, and folders with a version of
                                    Transformers each; makes build/venv-torch once

PyPI's PyTorch for Linux is linked against 2.5 GB of NVIDIA's libraries, which it loads when it is
imported and never calls on a CPU. This downloads PyTorch itself (0.5 GB) and the two of those
libraries that do answer, and writes stand-ins for the rest, whose functions trap. Exits with 77 and
a sentence on stderr where that cannot be done.
"""
import collections
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from typing import Dict, List, NoReturn, Set, Tuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
VENV = ROOT / "build" / "venv-torch"
LISTS = [ROOT / "tests" / f"requirements-{name}.txt" for name in (
    "torch", "torch-deps", "transformers5", "transformers4")]
# Versions of Transformers, each in a folder of its own, to be named in PYTHONPATH.
TRANSFORMERS = [VENV / path.stem.partition("-")[2] for path in LISTS[2:]]
STAMP = VENV / ".installed"
PREFIXES = ("cublas", "cudnn", "cufft", "cufile", "cusolver", "cusparse", "nccl", "nvrtc",
            "nvshmem")


def skip(why: str) -> NoReturn:
    print(f"no PyTorch: {why}", file=sys.stderr)
    sys.exit(77)


def run(*command: object) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                            stdin=subprocess.DEVNULL, check=False)
    if result.returncode:
        text = (result.stderr or result.stdout).strip()
        skip(f"{command[0]} failed: {text[-300:]}")
    return result.stdout


def undefined(libraries: List[pathlib.Path]) -> Dict[str, Dict[str, Set[str]]]:
    """By library of NVIDIA's: by version node, "" for none, the symbols that PyTorch wants."""
    wanted: Dict[str, Dict[str, Set[str]]] = {}
    owner: Dict[str, str] = {}
    without_version: Set[str] = set()
    symbols: List[Tuple[str, str]] = []
    for path in libraries:
        text = run("objdump", "-p", path)
        for name in re.findall(r"NEEDED\s+(lib\S+)", text):
            if name[3:].lower().startswith(PREFIXES):
                wanted.setdefault(name, collections.defaultdict(set))
        for name, block in re.findall(r"required from (\S+?):\n((?:\s+0x.*\n)+)", text):
            owner.update(dict.fromkeys(re.findall(r"(\S+)$", block, re.M), name))
        symbols += re.findall(r" U ([A-Za-z]\w*)(?:@(\S+))?",
                              run("nm", "-D", "--undefined-only", path))
    for symbol, version in symbols:
        if owner.get(version) in wanted:
            wanted[owner[version]][version].add(symbol)
        elif not version and symbol.lower().lstrip("p").startswith(PREFIXES):
            without_version.add(symbol)
    if wanted:  # any library will do
        wanted[min(wanted)][""] |= without_version
    return wanted


def write_stand_ins(folder: pathlib.Path) -> None:
    """Beside PyTorch's own libraries, where its loader looks first."""
    compiler = shutil.which("cc") or shutil.which("gcc") or skip("no C compiler")
    source, script = folder / "stand_in.c", folder / "stand_in.map"
    for name, nodes in undefined(sorted(folder.glob("*.so"))).items():
        every = sorted(set().union(*nodes.values()))
        source.write_text("".join(f"void {s}(void) {{ __builtin_trap(); }}\n" for s in every))
        script.write_text("".join(
            f"{version} {{ global: {' '.join(s + ';' for s in sorted(found))} }};\n"
            for version, found in nodes.items() if version))
        options = [f"-Wl,--version-script={script}"] if script.stat().st_size else []
        run(compiler, "-w", "-shared", "-fPIC", source, "-o", folder / name,
            f"-Wl,-soname,{name}", *options)
    source.unlink()
    script.unlink()


def main() -> None:
    python = VENV / "bin" / "python"
    identity = "\n".join([str(ROOT), sys.version, *(path.read_text() for path in LISTS)])
    if not STAMP.exists() or STAMP.read_text() != identity:
        if sys.version_info < (3, 11):
            skip("the version that the tests are pinned to needs Python 3.11")
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            skip("the recipe is for Linux on x86-64 only")
        for tool in ("objdump", "nm"):
            if not shutil.which(tool):
                skip(f"no {tool}: install binutils")
        print("setting up once: PyTorch for the CPU (0.5 GB), and Transformers", file=sys.stderr)
        shutil.rmtree(VENV, ignore_errors=True)
        run(sys.executable, "-m", "venv", VENV)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--retries", "1"]
        run(*pip, "--no-deps", "-r", LISTS[0])
        run(*pip, "-r", LISTS[1], "-r", ROOT / "tests" / "requirements-base.txt")
        for path, folder in zip(LISTS[2:], TRANSFORMERS):
            run(*pip, "--no-deps", "--no-compile", "--target", folder, "-r", path)
        write_stand_ins(next(VENV.glob("lib/python*/site-packages/torch/lib")))
        run(python, "-c", "import torch")
        STAMP.write_text(identity)
    print(python, *TRANSFORMERS, sep="\n")


if __name__ == "__main__":
    main()
