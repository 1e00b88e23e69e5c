#!/usr/bin/env bash
# The loader of musl, a C library that is not glibc, for tests/packaging/test_musl.py: prints its path.
# On Debian and its kin the package of Debian 12 is unpacked into build/musl. Exits with 77 and one
# sentence on stderr where that cannot be done.
set -euo pipefail

suite=bookworm
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
loader=$root/build/musl/lib/ld-musl-x86_64.so.1

skip() {
  printf 'no musl: %s\n' "$1" >&2
  exit 77
}

if [[ ! -x $loader ]]; then
  source "$root/tests/debian_packages.sh"
  begin_debian amd64
  unpack_debian "$root/build/musl" musl
fi
printf '%s\n' "$loader"
