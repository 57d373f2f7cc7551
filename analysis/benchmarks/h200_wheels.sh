#!/usr/bin/env bash
# The packages that lists a and c of h200.sh need and a machine with PyTorch, Lightning, transformers and pytest lacks.
#
#   bash analysis/benchmarks/h200_wheels.sh FOLDER
#
# They are pure Python, so wheels that are built here run there. With everything else that travels (the tracked files)
# they must stay below 64 MiB.

set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -eq 1 ] || { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 2; }
FOLDER=$1
PYTHON=${PYTHON:-.venv/bin/python}
PACKAGES=("hydra-core>=1.3.2,<1.4" "omegaconf>=2.3,<2.4" "antlr4-python3-runtime==4.9.*" "nvidia-ml-py>=13")
LIMIT_MIB=64

rm -rf "$FOLDER"
# antlr4 4.9 has no wheel on the index, so `pip wheel` and not `pip download`: it makes one.
"$PYTHON" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$FOLDER" "${PACKAGES[@]}"
for wheel in "$FOLDER"/*.whl; do
  case $wheel in
    *-none-any.whl) ;;
    *) echo "error: $wheel must be pure Python, but is built for this machine" >&2; exit 2 ;;
  esac
done
kib=$(( $(du -sk "$FOLDER" | cut -f1) + $(git ls-files -z | du -ck --files0-from=- | tail -n 1 | cut -f1) ))
echo "$(ls "$FOLDER" | wc -l) wheels; with the tracked files $((kib / 1024)) of $LIMIT_MIB MiB"
[ "$kib" -le $((LIMIT_MIB * 1024)) ] || { echo "error: too much to travel" >&2; exit 2; }
