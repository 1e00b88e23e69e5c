#!/usr/bin/env bash
# A private Julia 1.5.3, for the tests of bindings/julia where no julia is on PATH.
#
# Prints the path of a julia program. On Debian and its kin the packages of Debian 11 are unpacked
# into build/julia, from the mirror that the machine's own apt uses; nothing is installed. Exits
# with 77 and one sentence on stderr where that cannot be done.
set -euo pipefail

suite=bullseye
packages=(julia julia-common libjulia1 libllvm9 libffi7 libgit2-1.1 libhttp-parser2.9 libmbedcrypto3
  libmbedtls12 libmbedx509-0 libopenlibm3 libdsfmt-19937-1 libutf8proc2 libunwind8 libpcre2-8-0
  libgmp10 libmpfr6 libssh2-1 libcurl3-gnutls libgfortran5 libquadmath0)

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
prefix=$root/build/julia
program=$prefix/julia

skip() {
  printf 'no Julia: %s\n' "$1" >&2
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
for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || skip "none on PATH, and no $tool to fetch one with"
done
[[ $(dpkg --print-architecture) == amd64 ]] || skip "none on PATH, and the recipe is for amd64 only"

# Debian's own archive as this machine reaches it; on other distributions there is none.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(SITE) $(ORIGIN)' 'Created-By: Packages' |
  awk '/Debian$/ && $1 !~ /security/ { print $1; exit }')
[[ -n $mirror ]] || skip "none on PATH, and apt knows no Debian mirror"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists,cache/archives,debs}/partial
printf 'deb %s %s main\n' "$mirror" "$suite" >"$work/sources.list"
options=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-
  -o Dir::Etc::preferencesparts=- -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache"
  -o "APT::Sandbox::User=$(id -un)" -o Acquire::Retries=2)
apt-get "${options[@]}" update >"$work/log" 2>&1 && ! grep -q '^[EW]: Failed' "$work/log" ||
  skip "none on PATH, and $suite could not be read from apt's mirror"
(cd "$work/debs" && apt-get "${options[@]}" download "${packages[@]/%//$suite}") \
  >"$work/log" 2>&1 || skip "none on PATH, and the mirror no longer has all packages of $suite"

rm -rf "$prefix" "$prefix.new"
mkdir -p "$prefix.new"
for deb in "$work"/debs/*.deb; do
  dpkg-deb -x "$deb" "$prefix.new"
done
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
