#!/bin/sh
# The shared library ($1) exports the functions listed in symbols.txt ($2), the ones that the header
# ($3) declares, and nothing else. It starts no code of its own when it is loaded, but to remember its
# process, and needs no function that prints or ends the process. With $4 = cuda it holds NVIDIA's
# runtime, which does what it likes: only the rest is checked then. A program that links the archive
# ($5) exports no more either.
library=$1 wanted=$2 header=$3 build=$4 archive=$5
passed=0 failed=0 skipped=0

check() { # name, status
  if [ "$2" -eq 0 ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "failed: $1"
  fi
}

if ! command -v nm >/dev/null; then
  echo "0 passed, 0 failed, 1 skipped"
  exit 77
fi

# Absolute symbols are version names.
got=$(nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
  LC_ALL=C sort)
[ "$got" = "$(cat "$wanted")" ]
status=$?
check "exported symbols" $status
[ $status -eq 0 ] || echo "$got" | diff "$wanted" -

if command -v readelf >/dev/null; then
  got=$(readelf -sW "$archive" |
    awk '$5 == "GLOBAL" && $6 == "DEFAULT" && $7 != "UND" { print $8 }' | LC_ALL=C sort)
  [ "$got" = "$(cat "$wanted")" ]
  status=$?
  check "symbols of the archive" $status
  [ $status -eq 0 ] || echo "$got" | diff "$wanted" -
else
  skipped=$((skipped + 1))
fi

declared=$(sed -n 's/^FLASHATTN_API .*[ *]\(flashattn_[a-z_]*\)(.*/\1/p' "$header" | LC_ALL=C sort)
[ "$declared" = "$(cat "$wanted")" ]
status=$?
check "declared functions" $status
[ $status -eq 0 ] || echo "$declared" | diff "$wanted" -

# Static constructors of this library would show as its own _GLOBAL__sub_I functions.
constructors=$(nm "$library" 2>/dev/null | grep -c '_GLOBAL__sub_I')
[ "$constructors" -eq 0 ]
check "no static constructors" $?

# What prints, ends the process, or registers something to be run at its or a thread's end.
if [ "$build" = cuda ]; then
  skipped=$((skipped + 1))
else
  forbidden=$(nm -D --undefined-only "$library" | awk '{ sub(/@.*/, "", $2); print $2 }' |
    grep -Ex 'abort|_?_?exit|quick_exit|v?f?printf|f?puts|f?putc|putchar|fwrite|write|stdout|stderr|.*atexit.*|perror')
  [ -z "$forbidden" ]
  check "nothing that prints, exits or outlives a thread: $forbidden" $?
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
