# What bench_cpu.sh and h200.sh share; both source it. A part is a function part_NAME, and PARTS has the names in order.

run() {  # a command, or in a dry run its text
  if [ -n "${DRY_RUN:-}" ]; then printf '%q ' "$@"; echo; else "$@"; fi
}

choose_parts() {  # the script's names into CHOSEN; a letter is all parts that begin with it. All are checked before the first runs
  local name part known
  CHOSEN=()
  if [ $# -eq 0 ] && [ -z "${DRY_RUN:-}" ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
  fi
  for name in ${*:-$PARTS}; do
    known=
    for part in $PARTS; do
      if [ "$part" = "$name" ] || [[ $name == [a-z] && $part == "$name"* ]]; then CHOSEN+=("$part"); known=1; fi
    done
    if [ -z "$known" ]; then
      echo "error: a part must be one of $PARTS, but is $name" >&2
      exit 2
    fi
  done
}
