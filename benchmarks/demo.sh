#!/usr/bin/env bash
# There and back again: a few hundred MB in the old layout, migrated, verified, brought back, compared bit for bit.
# Every command is printed before it runs. KEEP=1 leaves the files under ./demo.
set -Eeuo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$root/demo"
work=$(mktemp -d "$root/demo/XXXXXX")
cd "$work"

command=setup
trap 'printf "\ndemo: FAILED at: %s\nthe files are left in %s\n" "$command" "$work" >&2' ERR

run() {
  command=$*
  printf '\n$ %s\n' "$command"
  "$@"
}

printf '%s\n' "# a Mixtral-like checkpoint in the layout of transformers 4: one tensor per expert"
run python ../../benchmarks/data.py old --preset "${PRESET:-demo}"

run migrate inspect old
run migrate plan old --to hf-mixtral@v5 -o plan.json
run migrate apply plan.json -o new
run migrate verify new --source old
run migrate downgrade new -o back --to hf-mixtral@v4
run migrate diff old back

printf '\n%s\n' "# and once more by a program that shares no code with migrate"
run python ../../benchmarks/compare.py old back

if [ "${KEEP:-}" ]; then
  printf '\ndemo: done; the files are in %s\n' "$work"
else
  cd "$root" && rm -rf "$work"
  rmdir "$root/demo" 2> /dev/null || true
  printf '\ndemo: done; the files are removed (KEEP=1 keeps them)\n'
fi
