# What bench_cpu.sh and bench_gpu.sh share; both source it. A part is a function part_NUMBER, and PARTS their number.

run() {  # a command, or in a dry run its text
  if [ -n "${DRY_RUN:-}" ]; then printf '%q ' "$@"; echo; else "$@"; fi
}

run_parts() {  # the script's numbers: all are checked before the first runs; none is all in a dry run, else the script's head
  local part number
  if [ $# -eq 0 ] && [ -z "${DRY_RUN:-}" ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
  fi
  for part in "${@:-$(seq 1 "$PARTS")}"; do
    for number in $part; do
      if ! declare -F "part_$number" > /dev/null; then
        echo "error: a part must be a number from 1 to $PARTS, but is $number" >&2
        exit 2
      fi
    done
  done
  for part in "${@:-$(seq 1 "$PARTS")}"; do
    for number in $part; do
      "part_$number"  # not in front of ||, which would keep `set -e` from seeing what fails in it
      [ $? -eq 0 ] || exit 1
    done
  done
}
