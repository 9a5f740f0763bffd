#!/usr/bin/env bash
# Run the tests of `make test` in other surroundings, and print a table: with the instruction sets of other
# processors, with other numbers of threads, in reverse order, and in a folder with blanks and non-ASCII
# letters, by a user who cannot write the home folder. VENV names the environment.
set -uo pipefail
export OMP_WAIT_POLICY=passive # spinning threads make small models many times slower
cd "$(dirname "$0")/.."
environment="$(cd "${VENV:-.venv}" && pwd)"
words=(-m pytest --quiet --numprocesses 2 -m 'not slow' --override-ini addopts=--strict-markers)
table=()

try() { # name, command
  local name="$1" outcome="tests pass" start=$SECONDS
  shift
  echo "--- $name"
  "$@" || outcome="TESTS FAIL"
  table+=("$(printf '%-34s %s, %d s' "$name" "$outcome" $((SECONDS - start)))")
}

tests() { # variables of the environment, then --, then words of pytest
  local variables=()
  while [ "$1" != -- ]; do variables+=("$1") && shift; done
  env OMP_NUM_THREADS=1 "${variables[@]}" "$environment/bin/python" "${words[@]}" "${@:2}"
}

report() {
  printf '\n%s\n' "${table[@]}"
  ! printf '%s\n' "${table[@]}" | grep --quiet FAIL
}

for variable in ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS={1,2,4}; do
  try "$variable" tests "$variable" -- --dist loadfile
done

mapfile -t reverse < <(find tests -name 'test_*.py' | sort --reverse)
try "files in reverse order" tests -- --dist load "${reverse[@]}"

# --- another place and user ---

as_user() { # whoever runs this, or nobody in place of root
  if [ "$(id -u)" = 0 ]; then runuser --user nobody -- "$@"; else "$@"; fi
}

interpreter_of_user() { # one that this user may execute
  local version
  for version in "$environment/bin/python" /usr/bin/python3{.13,.12,.11,}; do
    as_user "$version" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo "$version" && return
  done
  return 1
}

elsewhere() {
  local place interpreter
  place="$(mktemp --directory)/Prüfung mit Leerzeichen"
  interpreter="$(interpreter_of_user)" || { echo "no Python 3.11 or newer that another user can run" && return 1; }
  mkdir --parents "$place/repository" "$place/home" && chmod 755 "$(dirname "$place")"
  git ls-files --cached --others --exclude-standard -z |
    while IFS= read -r -d '' file; do [ ! -e "$file" ] || printf '%s\0' "$file"; done |
    xargs --null cp --parents --target-directory="$place/repository"
  "$interpreter" -m venv --without-pip "$place/environment"
  # shellcheck disable=SC2086  # PIP_ARGS are words
  "$environment/bin/python" -m pip --python "$place/environment/bin/python" install --quiet \
    --constraint constraints/default.txt ${PIP_ARGS:-} --editable "$place/repository[test]"
  chmod 555 "$place/home"
  [ "$(id -u)" != 0 ] || chown --recursive nobody "$place/repository"
  (
    cd "$place/repository" && umask 077
    as_user env OMP_NUM_THREADS=1 HOME="$place/home" LANG=de_DE.UTF-8 \
      "$place/environment/bin/python" "${words[@]}" -p no:cacheprovider --dist loadfile
  )
  local code=$?
  chmod 755 "$place/home" && rm --recursive --force "$(dirname "$place")"
  return $code
}
try "blanks, umask 077, read-only home" elsewhere
report
