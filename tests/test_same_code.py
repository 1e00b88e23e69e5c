"""same_code.py finds what changed, and nothing else: in code of the host, in a canned listing of
kernels, and in kernels that nvcc compiles here."""
import pathlib
import shutil
import subprocess
import sys

import gpu_code
import pytest
import same_code

HOST = """
int table_%(name)s[] = {1, 2, %(constant)s};
int callee_%(name)s(int x) { return x * 77 + table_%(name)s[x]; }
int caller_%(name)s(int x) { return callee_%(name)s(x) - 3; }
"""
GPU = """
template <int kTimes> __global__ void kernel_%(name)s(float *x) {
  float held[64];
  for (int i = 0; i < 64; i++) held[i] = x[i * 64 + threadIdx.x];
  __syncthreads();
  for (int n = 0; n < kTimes; n++)
    for (int i = 0; i < 64; i++) held[i] = held[(i + 7) %% 64] * %(constant)sf + held[i];
  for (int i = 0; i < 64; i++) x[i * 64 + threadIdx.x] = held[i];
}
template __global__ void kernel_%(name)s<1>(float *);
template __global__ void kernel_%(name)s<3>(float *);
"""


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                          check=False)
    return done.returncode, done.stdout + done.stderr


def compare(*arguments):
    return run(sys.executable, pathlib.Path(same_code.__file__), *arguments)


def host(folder, name, constant):
    (folder / "src").mkdir(parents=True)
    source = folder / "source.c"
    source.write_text(HOST % dict(name=name, constant=constant))
    made = run("cc", "-O1", "-fno-inline", "-c", source, "-o", folder / "src" / "source.o")
    assert made == (0, "")
    return folder


def test_code_of_the_host(tmp_path):
    first, renamed, other = (host(tmp_path / folder, name, constant) for folder, name, constant in
                             (("a", "first", 5), ("b", "second", 5), ("c", "first", 6)))
    code, said = compare(first, renamed)
    assert code == 0 and "2 functions" in said and "0 without a partner" in said
    code, said = compare(first, other)
    assert code == 1 and "- callee_first" in said and "+ callee_first" in said


LISTING = """
Fatbin elf code:
================
arch = sm_80

\tcode for sm_80
\t\tFunction : %(name)s
\t.headerflags\t@"EF_CUDA_SM80"
        /*0000*/                   MOV R1, c[0x0][0x28] ;   /* 0x00000a0000017a02 */
                                                            /* 0x000fe40000000f00 */
        /*0010*/                   %(what)s R1, R0 ;        /* 0x0000000100007387 */
                                                            /* 0x000fe20000%(last)s */
        /*0020*/                   NOP ;                    /* 0x0000000000007918 */
                                                            /* 0x000fc00000000000 */
"""
RESOURCES = """
Fatbin elf code:
================
arch = sm_80
 Function %(name)s:
  REG:%(registers)s STACK:%(stack)s SHARED:0 LOCAL:0 CONSTANT[0]:360 TEXTURE:0
"""
PLAIN = dict(name="_Z6plainAv", what="MOV", last="100800", registers=24, stack=0)


def listed(tmp_path, monkeypatch, **changes):
    """The kernels that a cuobjdump tells of."""
    lines = dict(PLAIN, **changes)
    monkeypatch.setattr(gpu_code, "shown", lambda tool, option, path: iter(
        ((LISTING if option == "-sass" else RESOURCES) % lines).splitlines(True)))
    return gpu_code.kernels(tmp_path, "cuobjdump")


def test_a_listing(tmp_path, monkeypatch):
    plain = listed(tmp_path, monkeypatch)
    assert [(k.arch, k.name, k.instructions, k.registers, k.stack, k.local) for k in plain] == [
        ("sm_80", "_Z6plainAv", 2, 24, 0, 0)]
    assert gpu_code.compare(plain, listed(tmp_path, monkeypatch, name="_Z5otherv")) == (1, [])
    for changes, said in (
            (dict(last="100801"), "from instruction 1 on"),
            (dict(registers=32), "after 2 instructions, 32 registers, 0 bytes of stack, 0 accesses "
                                 "to it; the same instructions"),
            (dict(what="STL", stack=8, last="100802"), "8 bytes of stack, 1 accesses")):
        same, (line,) = gpu_code.compare(plain, listed(tmp_path, monkeypatch, **changes))
        assert same == 0 and "! sm_80 plainA()" in line and said in line
    changed = listed(tmp_path, monkeypatch, name="_Z5otherv", last="100801")
    same, lines = gpu_code.compare(plain + plain, plain + changed)
    assert same == 1 and [line[:12] for line in lines] == ["  - sm_80 pl", "  + sm_80 ot"]


@pytest.fixture(name="nvcc")
def _nvcc():
    nvcc = shutil.which("nvcc")
    if not nvcc or not pathlib.Path(nvcc).resolve().with_name("cuobjdump").exists():
        pytest.skip("no nvcc, or no cuobjdump beside it")
    return nvcc


def test_kernels(nvcc, tmp_path):
    def build(folder, name, constant, *options):
        made = tmp_path / folder / "src"
        made.mkdir(parents=True)
        (made / "kernel.cu").write_text(GPU % dict(name=name, constant=constant))
        code, said = run(nvcc, "-arch=sm_80", "-c", made / "kernel.cu", "-o", made / "kernel.o",
                         *options)
        assert code == 0, said
        return made.parent

    first = build("a", "first", 1.5)
    code, said = compare("--sass", first, build("b", "second", 1.5))
    assert code == 0 and "2 kernels are the same, 0 differ" in said, said
    other = build("c", "first", 1.5, "-maxrregcount=32")
    code, said = compare("--sass", first / "src" / "kernel.o", other / "src" / "kernel.o")
    assert code == 1 and "0 kernels are the same, 2 differ" in said
    assert said.count("! sm_80 void kernel_first<") == 2
    before, after = said.splitlines()[:2]
    assert "0 accesses to the stack" in before and "2 of them with" in after, said
    assert " 32 registers at most" in after
    code, said = compare("--sass", first, first, "--only", "nothing")
    assert code and "no GPU code" in said
