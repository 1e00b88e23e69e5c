# Sourced by tests/*_setup.sh: packages of a Debian suite, from the mirror that the machine's own apt
# uses, are unpacked; nothing is installed. The caller has skip(), which prints a sentence and exits,
# and $suite.

# begin_debian ARCHITECTURES [TOOL...]: reads the suite's lists, for architectures with commas between.
# Makes the folder $work, which goes at the end.
begin_debian() {
  local architectures=$1 tool mirror
  shift
  for tool in apt-get dpkg-deb "$@"; do
    command -v "$tool" >/dev/null || skip "no $tool to fetch one with"
  done
  [[ $(dpkg --print-architecture) == amd64 ]] || skip "the recipe is for amd64 only"
  # Debian's own archive as this machine reaches it; on other distributions there is none.
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(SITE) $(ORIGIN)' 'Created-By: Packages' |
    awk '/Debian$/ && $1 !~ /security/ { print $1; exit }')
  [[ -n $mirror ]] || skip "apt knows no Debian mirror"

  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir -p "$work"/{lists,cache/archives}/partial
  printf 'deb [arch=%s] %s %s main\n' "$architectures" "$mirror" "$suite" >"$work/sources.list"
  : >"$work/status"
  debian_options=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-
    -o Dir::Etc::preferencesparts=- -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache"
    -o "Dir::State::Status=$work/status" -o "APT::Architectures=$architectures"
    -o "APT::Sandbox::User=$(id -un)" -o Acquire::Retries=2)
  apt-get "${debian_options[@]}" update >"$work/log" 2>&1 &&
    ! grep -q '^[EW]: Failed' "$work/log" || skip "$suite could not be read from apt's mirror"
}

# unpack_debian FOLDER PACKAGE...: into FOLDER, which is made.
unpack_debian() {
  local folder=$1 deb
  shift
  mkdir -p "$folder" "$work/debs/partial"
  rm -f "$work"/debs/*.deb
  (cd "$work/debs" && apt-get "${debian_options[@]}" download "$@") >"$work/log" 2>&1 ||
    skip "the mirror no longer has all packages of $suite"
  for deb in "$work"/debs/*.deb; do
    dpkg-deb -x "$deb" "$folder"
  done
}
