"""What src/cuda/compile.py finds in an assembler's listing."""
import importlib.util
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("compile", ROOT / "src" / "cuda" / "compile.py")
compile_py = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(compile_py)

PRODUCT = "HGMMA.64x128x16.F32.BF16 R88, R184, gdesc[UR16].tnspB, R88"
# Two groups: of registers 184 to 191, and of 200 to 203.
UNDER_WAY = [PRODUCT, PRODUCT.replace("R184", "R188") + ", gsb0",
             PRODUCT.replace("R184", "R200") + ", gsb0"]


def listing(*instructions):
    lines = [f"        /*{16 * n:04x}*/                   {text} ;     /* 0x0000000000007918 */"
             for n, text in enumerate(instructions)]
    return "\n".join(["\t\tFunction : kernel", *lines])


@pytest.mark.parametrize("writer", [
    "@!P2 LDSM.16.MT88.4 R184, [R9]", "LDS.64 R190, [R9]", "MOV R191, R2", "FADD R203, R2, R3",
    "LDG.E.128 R200, [R2.64]", "IMAD.WIDE R202, R2, R3, R4", "@P0 IADD3 R185, R2, R3, RZ"])
def test_operands_that_are_overwritten(writer):
    assert len(compile_py.overwritten(listing(*UNDER_WAY, writer))) == 1
    late = listing(*UNDER_WAY, "WARPGROUP.DEPBAR.LE gsb0, 0x0", writer)
    assert not compile_py.overwritten(late)


@pytest.mark.parametrize("reader", [
    "STS.128 [R184], R188", "F2FP.BF16.F32.PACK_AB R20, R185, R184",
    "ISETP.NE.AND P0, PT, R184, RZ, PT", "STG.E desc[UR4][R2.64], R184", "R2UR UR4, R184",
    "LDG.E.128 R180, [R2.64]", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24"])
def test_operands_that_are_read(reader):
    assert not compile_py.overwritten(listing(*UNDER_WAY, reader))


def test_operands_of_e4m3():
    product = "QGMMA.64x64x32.F32.E4M3.E4M3 R24, R100, gdesc[UR16], R24, gsb0"
    writer = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R103, R25, R24, RZ"
    assert len(compile_py.overwritten(listing(product, writer))) == 1
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    assert not compile_py.overwritten(listing(product, wait, writer))


def test_groups_end_in_their_order():
    waited = [*UNDER_WAY, "WARPGROUP.DEPBAR.LE gsb0, 0x1"]
    assert not compile_py.overwritten(listing(*waited, "MOV R184, R2"))
    assert compile_py.overwritten(listing(*waited, "MOV R200, R2")) == ["0040: MOV R200, R2"]
    assert compile_py.overwritten(listing(*UNDER_WAY, "WARPGROUP.DEPBAR.LE gsb0, 0x3",
                                          "MOV R184, R2"))
    assert not compile_py.overwritten(listing(*UNDER_WAY) + "\n" + listing("MOV R184, R2"))


def test_a_loop_is_gone_round():
    loop = ["MOV R184, R2", PRODUCT + ", gsb0", "@P0 BRA 0x0"]
    assert compile_py.overwritten(listing(*loop)) == ["0000: MOV R184, R2"]
    loop.insert(2, "WARPGROUP.DEPBAR.LE gsb0, 0x0")
    assert not compile_py.overwritten(listing(*loop))
    # Without an end of what is under way.
    assert not compile_py.overwritten(listing(PRODUCT + ", gsb0", "BRA 0x0"))


def test_a_branch_goes_round_what_it_skips():
    skipped = [*UNDER_WAY, "BRA 0x50", "MOV R184, R2", "EXIT"]
    assert not compile_py.overwritten(listing(*skipped))
    skipped[3] = "@!UP0 BRA 0x50"
    assert compile_py.overwritten(listing(*skipped)) == ["0040: MOV R184, R2"]
    meets = ["BSSY B0, 0x70", *UNDER_WAY, "BSYNC B0", "MOV R184, R2", "EXIT", "MOV R200, R2"]
    assert compile_py.overwritten(listing(*meets)) == ["0070: MOV R200, R2"]
    # An address that the listing does not have.
    assert not compile_py.overwritten(listing(*UNDER_WAY, "BRA 0xf0", "MOV R184, R2"))


def test_what_is_reached_by_a_register_is_looked_at():
    far = [*UNDER_WAY, "BRXU UR4 -0x6d0", "MOV R184, R2", *UNDER_WAY, "MOV R188, R2", "EXIT"]
    assert compile_py.overwritten(listing(*far)) == ["0080: MOV R188, R2"]


def test_objects_are_read():
    """Those of the Hopper kernels, where nvcc's folder has what reads them."""
    nvcc = shutil.which("nvcc")
    if not nvcc or not pathlib.Path(nvcc).resolve().with_name("cuobjdump").exists():
        pytest.skip("no nvcc, or no cuobjdump beside it")
    objects = sorted((ROOT / "build" / "cuda-test" / "src" / "cuda").glob("sm90_*.o"))
    assert objects
    assert " HGMMA." in compile_py.disassembled(nvcc, str(objects[0]))


def test_without_cuobjdump_no_hopper_kernel_compiles(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\nfor last; do :; done\n: > "$last"\n')
    nvcc.chmod(0o755)
    for arch, code in (("sm_90a", 1), ("sm_80", 0)):
        done = subprocess.run(
            [sys.executable, str(ROOT / "src" / "cuda" / "compile.py"), str(nvcc),
             f"-gencode=arch=compute_90a,code={arch}", "-o", str(tmp_path / "kernel.o")],
            capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert ("install cuobjdump beside nvcc" in done.stderr) == bool(code)


@pytest.mark.parametrize("good, asked", [("90", "90"), ("80", "90 80"), ("120", "90 80 120"),
                                         ("none", "90 80 120")])
def test_the_ptx_for_later_gpus(tmp_path, good, asked):
    """It is that of the first architecture from which no kernel spills."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"""#!/bin/sh
        from=$(printf '%s\\n' "$@" | sed -n 's/.*compute_\\([0-9]*\\),code=sm_120/\\1/p')
        printf '%s ' $from >>{tmp_path}/asked
        echo "Compiling entry function 'f' for 'sm_120'"
        [ $from = {good} ] || echo '    8 bytes stack frame, 4 bytes spill stores'
        """)
    nvcc.chmod(0o755)
    done = subprocess.run(
        [sys.executable, SPEC.origin, str(nvcc), "-gencode=arch=compute_90,code=sm_90",
         "-gencode=arch=compute_90,code=sm_120", "-o", str(tmp_path / "o")], capture_output=True,
        text=True, check=False)
    assert (tmp_path / "asked").read_text().split() == asked.split()
    assert done.returncode == (good == "none")
    assert ("f (sm_120) spills registers" in done.stderr) == (good == "none")
