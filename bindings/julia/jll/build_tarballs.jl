# libflashattn_jll, by BinaryBuilder: julia build_tarballs.jl --verbose. For Yggdrasil the folder is
# L/libflashattn. The CPU library; it finds the instruction set when it runs.
using BinaryBuilder, Pkg

name = "libflashattn"
version = v"0.2.0"

# A GitSource names a commit: that of the tag v0.2.0. Without a default, so that none is wrong.
sources = [
    GitSource("https://libflashattn.example/libflashattn.git", ENV["FLASHATTN_COMMIT"]),
]

# Meson 1.3 or newer; GCC 12 is the first here that knows every instruction set.
script = raw"""
cd ${WORKSPACE}/srcdir/libflashattn
meson setup build --cross-file="${MESON_TARGET_TOOLCHAIN}" --buildtype=release \
    -Dcuda=disabled -Dpython=disabled
meson compile -C build -j ${nproc}
meson install -C build
rm -f ${libdir}/libflashattn.a
install_license LICENSE
"""

platforms = expand_cxxstring_abis([Platform("x86_64", "linux"; libc = "glibc")])

products = [LibraryProduct("libflashattn", :libflashattn)]

# libstdc++ and libgcc_s.
dependencies = [Dependency("CompilerSupportLibraries_jll")]

build_tarballs(ARGS, name, version, sources, script, platforms, products, dependencies;
               julia_compat = "1.6", preferred_gcc_version = v"12", lock_microarchitecture = false)
