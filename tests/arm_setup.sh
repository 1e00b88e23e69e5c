#!/usr/bin/env bash
# Fetches a cross compiler for AArch64, an emulator, and a Python to run in it, for the suite arm.
#
# Packages of Debian 12 are unpacked into build/arm, and Python's from PyPI. Writes build/arm/cross.ini
# for Meson and the program build/arm/python. Exits with 77 and one sentence on stderr where that
# cannot be done.
set -euo pipefail

suite=bookworm
cross=-arm64-cross
tools=(qemu-user-static binutils-aarch64-linux-gnu {cpp,gcc,g++}-12-aarch64-linux-gnu
  lib{gcc,stdc++}-12-dev$cross libc6{,-dev}$cross linux-libc-dev$cross libgcc-s1$cross
  libstdc++6$cross)
# Python 3.11, and what its modules link.
guest=(python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6
  libexpat1 zlib1g libssl3 libffi8 libbz2-1.0 liblzma5 libuuid1 libsqlite3-0)

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
prefix=$root/build/arm
packages=$root/tests/requirements-base.txt

skip() {
  printf 'no AArch64: %s\n' "$1" >&2
  exit 77
}

source "$root/tests/debian_packages.sh"
recipe=$(cat "$0" "$root/tests/debian_packages.sh")
cmp -s "$packages" "$prefix/.packages" && cmp -s - "$prefix/.recipe" <<<"$recipe" && exit
begin_debian amd64,arm64 taskset
rm -rf "$prefix"
unpack_debian "$prefix/tools" "${tools[@]}"
unpack_debian "$prefix/guest" "${guest[@]/%/:arm64}"
# The linker's scripts name the libraries by where the packages would be installed.
libraries=$prefix/tools/usr/aarch64-linux-gnu/lib
sed -i 's,/usr/aarch64-linux-gnu/lib/,,g' "$libraries"/lib{c,m}.so

platforms=(--platform=manylinux2014_aarch64)
for version in 17 24 26 27 28; do
  platforms+=("--platform=manylinux_2_${version}_aarch64")
done
python -m pip install --quiet --retries 1 --disable-pip-version-check --target "$prefix/site" \
  "${platforms[@]}" --python-version 3.11 --implementation cp --only-binary=:all: -r "$packages" \
  >"$work/log" 2>&1 || skip "Python's packages for it could not be had"

emulator=$prefix/tools/usr/bin/qemu-aarch64-static
compiler=$prefix/tools/usr/bin/aarch64-linux-gnu
cat >"$prefix/cross.ini" <<FILE
[binaries]
c = '$compiler-gcc-12'
cpp = '$compiler-g++-12'
ar = '$compiler-ar'
strip = '$compiler-strip'
exe_wrapper = ['$emulator', '-L', '$prefix/guest']
[host_machine]
system = 'linux'
cpu_family = 'aarch64'
cpu = 'aarch64'
endian = 'little'
FILE
# One thread: what starts threads beside the emulator's own may wait for ever in it.
cat >"$prefix/python" <<FILE
#!/bin/sh
# QEMU_CPU, which the emulator reads: the processor; PROCESSOR: the one that it runs on.
export PYTHONPATH=$prefix/site\${PYTHONPATH:+:\$PYTHONPATH} OPENBLAS_NUM_THREADS=1
exec taskset -c "\${PROCESSOR:-0}" '$emulator' -L '$prefix/guest' \\
  '$prefix/guest/usr/bin/python3.11' "\$@"
FILE
chmod +x "$prefix/python"
# Whatever a package of this suite's lacks shows here.
printf 'int main(int count, char**) { return count - 1; }\n' >"$work/try.cpp"
"$compiler-g++-12" "$work/try.cpp" -o "$work/try" >"$work/log" 2>&1 &&
  "$emulator" -L "$prefix/guest" "$work/try" >>"$work/log" 2>&1 &&
  "$prefix/python" -c 'import cffi, numpy' >>"$work/log" 2>&1 ||
  skip "the packages of $suite do not run on this machine"
cp "$packages" "$prefix/.packages"
printf '%s\n' "$recipe" >"$prefix/.recipe"
