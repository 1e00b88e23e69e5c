#!/usr/bin/env bash
# A clang with libFuzzer and sanitizers, for ./run fuzz and the suite fuzz.
#
# Prints the folder of the programs clang and clang++: the machine's own, or Debian 12's, whose packages
# are unpacked into build/clang. Exits with 77 and one sentence on stderr where that cannot be done.
set -euo pipefail

suite=bookworm
# The list has the libraries that libLLVM links. C++ headers and the linker are the machine's GCC's.
packages=(clang-14 libclang-cpp14 libclang-common-14-dev libclang-rt-14-dev libllvm14 libz3-4 libedit2
  libbsd0 libmd0 libxml2 libicu72 liblzma5 libtinfo6 libffi8 zlib1g)

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
prefix=$root/build/clang

skip() {
  printf 'no libFuzzer: no clang that has it, and %s\n' "$1" >&2
  exit 77
}

# Whether clang++ of a folder makes a program of libFuzzer's.
works() {
  printf '#include <vector>\nextern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long n) %s' \
    '{ return std::vector<int>(n % 8).size() > 8; }' |
    "$1/clang++" -std=c++17 -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null 2>/dev/null
}

if command -v clang >/dev/null && command -v clang++ >/dev/null; then
  own=$(dirname "$(command -v clang++)")
  if [[ -x $own/clang ]] && works "$own"; then
    printf '%s\n' "$own"
    exit
  fi
fi
if [[ ! -x $prefix/clang++ ]] || ! works "$prefix"; then
  source "$root/tests/debian_packages.sh"
  begin_debian amd64
  rm -rf "$prefix"
  unpack_debian "$prefix" "${packages[@]}"
  for program in clang clang++; do
    cat >"$prefix/$program" <<'WRAPPER'
#!/bin/sh
here=$(cd -- "$(dirname -- "$0")" && pwd -P)
LD_LIBRARY_PATH=$here/usr/lib/x86_64-linux-gnu:$here/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
  exec "$here/usr/lib/llvm-14/bin/$(basename -- "$0")" "$@"
WRAPPER
    chmod +x "$prefix/$program"
  done
  works "$prefix" || skip "the packages of $suite make no fuzzer on this machine"
fi
printf '%s\n' "$prefix"
