"""Writes wgmma.cuh: wgmma.py OUTPUT. The text of an asm statement must be a literal, so no template
can build one for every width."""
import sys

WIDTHS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)
TYPES = {"__nv_bfloat16": "bf16", "__half": "f16"}
E4M3_WIDTHS = (64, 128)  # for the others no kernel asks

HEAD = """\
// Warpgroup matrix multiply-accumulate of Hopper (PTX ISA, "wgmma.mma_async"). Written by wgmma.py.
//
// d (64 x 2 * length) += a b in fp32; if `accumulate` is 0, d is overwritten. Warp w of four
// holds rows 16 w .. 16 w + 15; with g = lane / 4 and c = lane % 4, d[4 n + 2 r + e] is element
// (16 w + g + 8 r, 8 n + 2 c + e). Descriptors come from SmemDescriptor. kTransposeA, kTransposeB:
// the operand's rows run along k, not across it; not possible with E4M3, of which an instruction
// takes 32 elements along k and adds products with some 14 bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/fp8.cuh"

namespace flashattn::cuda::ptx {
"""


def statement(width: int, kind: str, registers: bool) -> str:
    n = width // 2
    sums = ", ".join(f"%{i}" for i in range(n))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    head = f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} {{{sums}}}"
    if registers:
        a = "{" + ", ".join(f"%{n + i}" for i in range(4)) + "}"
        return (f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{n + 5}, 0; {head}, {a}, %{n + 4}, '
                f'p, 1, 1, %{n + 6};}}"\n      : {outputs}\n      : "r"(a[0]), "r"(a[1]), '
                f'"r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposeB));')
    return (f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{n + 2}, 0; {head}, %{n}, %{n + 1}, '
            f'p, 1, 1, %{n + 3}, %{n + 4};}}"\n      : {outputs}\n      : "l"(a), "l"(b), '
            f'"r"(accumulate), "n"(kTransposeA), "n"(kTransposeB));')


def e4m3_statement(width: int, registers: bool) -> str:
    n = width // 2
    sums = ", ".join(f"%{i}" for i in range(n))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    head = f"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e4m3 {{{sums}}}"
    if registers:
        a = "{" + ", ".join(f"%{n + i}" for i in range(4)) + "}"
        return (f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{n + 5}, 0; {head}, {a}, %{n + 4}, '
                f'p, 1, 1;}}"\n      : {outputs}\n      : "r"(a[0]), "r"(a[1]), '
                f'"r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));')
    return (f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{n + 2}, 0; {head}, %{n}, %{n + 1}, '
            f'p, 1, 1;}}"\n      : {outputs}\n      : "l"(a), "l"(b), "r"(accumulate));')


def function(width: int, registers: bool) -> str:
    parameters = "int kTransposeB" if registers else "int kTransposeA, int kTransposeB"
    a = "const uint32_t* a" if registers else "uint64_t a"
    branches = []
    for name, kind in TYPES.items():
        branches.append(f"if constexpr (std::is_same<T, {name}>::value) {{\n    "
                        f"{statement(width, kind, registers)}\n  }}")
    if width in E4M3_WIDTHS:
        branches.append(f"if constexpr (std::is_same<T, E4m3>::value) {{\n    "
                        f"{e4m3_statement(width, registers)}\n  }}")
    return (f"template <class T, {parameters}>\n__device__ __forceinline__ void "
            f"{'wgmma_rs' if registers else 'wgmma_ss'}(float (&d)[{width // 2}], {a}, uint64_t b, "
            f"int accumulate) {{\n  {' else '.join(branches)}\n}}\n")


def main() -> None:
    functions = [function(width, registers) for width in WIDTHS for registers in (False, True)]
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        out.write(HEAD + "\n" + "\n".join(functions) + "\n}  // namespace flashattn::cuda::ptx\n")


if __name__ == "__main__":
    main()
