#!/bin/sh
# Runs a program of another runtime:  run.sh node|go FOLDER LIBRARY HEADER DATA
# Packages and caches go to FOLDER, in versions that are pinned here. Skipped, with a sentence,
# where the runtime or its registry is missing.
set -eu
whole() { (cd "$(dirname "$1")" && printf '%s/%s' "$(pwd)" "$(basename "$1")"); }
mkdir -p "$2"
runtime=$1 folder=$(whole "$2")/$1 library=$(whole "$3") header=$(whole "$4") data=$(whole "$5")
here=$(dirname "$(whole "$0")")

skip() {
  echo "0 passed, 0 failed, 1 skipped: $1"
  exit 77
}

mkdir -p "$folder"
case $runtime in
  node)
    command -v node >/dev/null && command -v npm >/dev/null ||
      skip "Node or npm is not installed (Debian, Ubuntu: apt-get install nodejs npm)"
    cp "$here"/node/* "$folder"
    cmp -s "$folder/package-lock.json" "$folder/node_modules/.made-from" || {
      (cd "$folder" && npm ci --no-audit --no-fund --ignore-scripts >npm.log 2>&1) ||
        skip "the npm registry does not give koffi: $(grep -i -m 1 'npm err' "$folder/npm.log")"
      cp "$folder/package-lock.json" "$folder/node_modules/.made-from"
    }
    exec node "$folder/causal.js" "$library" "$header" "$data"
    ;;
  go)
    command -v go >/dev/null || skip "Go is not installed (Debian, Ubuntu: apt-get install golang)"
    export GOPATH="$folder/path" GOCACHE="$folder/cache" GOFLAGS=-modcacherw CGO_ENABLED=0
    export GOTOOLCHAIN=local
    cd "$here/go"
    go mod download >"$folder/download.log" 2>&1 ||
      skip "the Go module proxy does not give purego: $(tail -n 1 "$folder/download.log")"
    go build -o "$folder/causal" .
    exec "$folder/causal" "$library" "$data"
    ;;
esac
