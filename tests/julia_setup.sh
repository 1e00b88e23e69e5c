#!/usr/bin/env bash
# A private Julia 1.5.3, for the tests of bindings/julia where no julia is on PATH.
#
# Prints the path of a julia program. On Debian and its kin the packages of Debian 11, the last that has
# Julia, are unpacked into build/julia. Exits with 77 and one sentence on stderr where that cannot be
# done.
set -euo pipefail

suite=bullseye
packages=(julia julia-common libjulia1 libllvm9 libffi7 libgit2-1.1 libhttp-parser2.9 libmbedcrypto3
  libmbedtls12 libmbedx509-0 libopenlibm3 libdsfmt-19937-1 libutf8proc2 libunwind8 libpcre2-8-0
  libgmp10 libmpfr6 libssh2-1 libcurl3-gnutls libgfortran5 libquadmath0)

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
prefix=$root/build/julia
program=$prefix/julia

skip() {
  printf 'no Julia: none on PATH, and %s\n' "$1" >&2
  exit 77
}

if command -v julia >/dev/null; then
  command -v julia
  exit
fi
if [[ -x $program ]] && "$program" -e '' 2>/dev/null; then
  printf '%s\n' "$program"
  exit
fi
source "$root/tests/debian_packages.sh"
begin_debian amd64
rm -rf "$prefix" "$prefix.new"
unpack_debian "$prefix.new" "${packages[@]/%//$suite}"
rm -rf "$prefix.new"/usr/share/{doc,man,lintian,julia/test}
cat >"$prefix.new/julia" <<'WRAPPER'
#!/bin/sh
here=$(cd -- "$(dirname -- "$0")" && pwd -P)
libraries=$here/usr/lib/x86_64-linux-gnu
LD_LIBRARY_PATH=$libraries:$libraries/julia${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
  exec "$here/usr/bin/julia" "$@"
WRAPPER
chmod +x "$prefix.new/julia"
mv "$prefix.new" "$prefix"
"$program" -e '' 2>/dev/null || skip "the packages of $suite do not run on this machine"
printf '%s\n' "$program"
