#!/usr/bin/env bash
# All speed and memory goals on a CPU with two free cores; records go to a folder of the run in
# analysis/benchmarks/records/cpu/ (cpu.jsonl has those of three runs). `make tables` gives the median and range of all runs.
#
#   bash analysis/benchmarks/bench_cpu.sh 1          run one or more parts; without a number print this text
#   DRY_RUN=1 bash analysis/benchmarks/bench_cpu.sh  print the commands of a part, or of all
#
#   1 GPT against Hugging Face compiled    2 GPT with dropout against eager peers    3 BERT against Hugging Face compiled
#   4 two tensor ranks
#
# NANOGPT=path/to/model.py   nanoGPT's model file for two more peers in part 2 (not part of this repository)
#
# Run nothing else at the same time: other load hides most of the speed-up.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
RESULTS=${RESULTS:-analysis/benchmarks/records/cpu/$(date -u +%Y-%m-%d_%H%M)}
SIZES=(model.num_layers=6 model.hidden_size=512 model.num_attention_heads=8 model.max_position_embeddings=256
  micro_batch_size=8 precision=bf16 accelerator=cpu num_threads=2 rounds=6 steps_per_round=2)

. analysis/benchmarks/bench_parts.sh

bench() {  # name of the record, further keys
  local name=$1
  shift
  run "$PYTHON" analysis/benchmarks/bench.py "${SIZES[@]}" "$@" "record=$RESULTS/$name.json"
}

part_1() { bench bench_gpt_cpu model=gpt_tiny model.hidden_dropout=0 model.attention_dropout=0 'peers=[hf_compiled]'; }
part_2() {
  local dropout=(model=gpt_tiny model.hidden_dropout=0.1 model.attention_dropout=0.1)
  bench bench_gpt_dropout_cpu "${dropout[@]}" 'peers=[hf_eager]'
  if [ -n "${NANOGPT:-}" ]; then
    bench bench_nanogpt_cpu "${dropout[@]}" 'peers=[file_eager,file_compiled]' "file=$NANOGPT"
  else echo "against nanoGPT: not measured, NANOGPT=path/to/model.py is not set"; fi
}
part_3() { bench bench_bert_cpu model=bert_tiny model.hidden_dropout=0 model.attention_dropout=0 'peers=[hf_compiled]'; }
part_4() { run "$PYTHON" analysis/benchmarks/tensor_parallel_cost.py --record "$RESULTS/tensor_parallel_cost_cpu.json"; }
PARTS="1 2 3 4"

choose_parts "$@"
for part in "${CHOSEN[@]}"; do "part_$part"; done
