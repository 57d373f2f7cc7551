# Shared by bench_cpu.sh and h200.sh, which source it. A part is a function part_NAME; PARTS lists the names in order.

run() {  # run a command, or print it in a dry run
  if [ -n "${DRY_RUN:-}" ]; then printf '%q ' "$@"; echo; else "$@"; fi
}

choose_parts() {  # put the named parts into CHOSEN; a letter selects all parts that begin with it. All names are checked before the first part runs
  local name part known
  CHOSEN=()
  if [ $# -eq 0 ] && [ -z "${DRY_RUN:-}" ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    [ -z "${TABLE:-}" ] || sed -n '/^| part/,/^$/p' "$TABLE"
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
