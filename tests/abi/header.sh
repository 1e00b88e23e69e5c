#!/bin/sh
# The header ($1) alone, as every C and C++ dialect and both compilers see it, warnings as errors,
# without padding; and the generated layout checks ($2).
header=$1 layout=$2
include=$(dirname "$header")
passed=0 failed=0 skipped=0
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
printf '#include "flashattn.h"\nint main(void) { return (int)sizeof(flashattn_desc) == 0; }\n' \
  >"$folder/alone.c"
cp "$folder/alone.c" "$folder/alone.cpp"

knows() { # compiler, dialect, language
  echo | "$1" "-std=$2" -x "$3" -fsyntax-only - >/dev/null 2>&1
}

compile() { # compiler, dialect, language, source
  if ! knows "$1" "$2" "$3"; then
    skipped=$((skipped + 1))
  elif "$1" "-std=$2" -x "$3" -pedantic -Wall -Wextra -Wpadded -Wconversion -Wundef -Werror \
    $5 -I "$include" -fsyntax-only "$4"; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "failed: $1 -std=$2 $4"
  fi
}

for pair in gcc:g++ clang:clang++; do
  cc=${pair%:*} cxx=${pair#*:}
  for dialect in c99 c11 c17 c2x gnu11; do
    compile "$cc" $dialect c "$folder/alone.c" "-Wstrict-prototypes -Wc++-compat"
  done
  for dialect in c++98 c++03 c++11 c++14 c++17 c++20 c++23; do
    # C++98 has no long long; int64_t of 32-bit machines needs it, in the system's own header.
    compile "$cxx" $dialect c++ "$folder/alone.cpp" "-Wno-long-long"
  done
  compile "$cc" c99 c "$layout" "-Wno-unused-local-typedefs"
done

# FLASHATTN_API on Windows: dllimport for programs, dllexport for the library, else nothing.
api() { # options, what it must hold; nothing: no attribute
  found=$(${CC:-cc} -E -P $1 -I "$include" "$folder/alone.c" |
    sed -n '/flashattn_plan_destroy/ s/^ *//p')
  case $found in
    "${2}void flashattn_plan_destroy("*) passed=$((passed + 1)) ;;
    *)
      failed=$((failed + 1))
      echo "failed: FLASHATTN_API with '$1': $found"
      ;;
  esac
}
api "-D_WIN32" "__declspec(dllimport) "
api "-D_WIN32 -DFLASHATTN_BUILD" "__declspec(dllexport) "
api "-D_WIN32 -DFLASHATTN_STATIC"
api "-DFLASHATTN_STATIC"
api "" '__attribute__((visibility("default"))) '

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
