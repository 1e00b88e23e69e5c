"""spack repo add bindings/packaging/spack; spack install flashattn"""
from spack.package import *


class Flashattn(MesonPackage, CudaPackage):
    """FlashAttention, forward and backward, as a C library for CPUs and NVIDIA GPUs."""

    homepage = "https://libflashattn.example"
    git = "https://libflashattn.example/libflashattn.git"

    license("Apache-2.0", checked_by="libflashattn")

    version("main", branch="main")
    version("0.2.0", tag="v0.2.0")

    # cuda_arch: 80, 90 and the like; 90 stands for 90a, whose instructions the Hopper kernels use.
    variant("cpu_isas", default="avx2,avx512,avx512_bf16,avx512_amx,neon,sve,neon_bf16", multi=True,
            values=("none", "avx2", "avx512", "avx512_bf16", "avx512_amx", "neon", "sve",
                    "neon_bf16"),
            description="instruction sets to build for, beside the baseline")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("meson@1.3:", type="build")
    depends_on("cuda@12.4:", when="+cuda")

    def meson_args(self):
        isas = [isa for isa in self.spec.variants["cpu_isas"].value if isa != "none"]
        args = ["-Dpython=disabled", "-Dcpu_isas=" + ",".join(sorted(isas))]
        if not self.spec.satisfies("+cuda"):
            return args + ["-Dcuda=disabled"]
        args.append("-Dcuda=enabled")
        archs = [arch for arch in self.spec.variants["cuda_arch"].value if arch != "none"]
        if archs:
            named = archs + ["90a"] if "90" in archs else archs
            args.append("-Dgpu_archs=" + ",".join(named))
        return args
