#!/usr/bin/env bash
# debian_unpacked.sh FOLDER FILE PACKAGE...: packages of Debian 12, for tests that need them where they
# are not installed. Unpacks them into build/FOLDER, unless FILE is there already, and prints that
# folder's path. Exits with 77 and one sentence on stderr where that cannot be done.
set -euo pipefail

suite=bookworm
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
folder=$root/build/$1 file=$2
shift 2

skip() {
  printf 'no %s: %s\n' "$(basename "$file")" "$1" >&2
  exit 77
}

if [[ ! -e $folder/$file ]]; then
  source "$root/tests/debian_packages.sh"
  begin_debian amd64
  unpack_debian "$folder" "$@"
fi
printf '%s\n' "$folder"
