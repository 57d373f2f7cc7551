#!/usr/bin/env bash
# Every figure that the project promises of one H200, in parts of a few minutes; records go to analysis/results/.
#
#   bash analysis/bench_gpu.sh 1          one part, or several; without a number this text
#   DRY_RUN=1 bash analysis/bench_gpu.sh  the commands of a part, or of all, without running them
#
#   1 gpt_355m, gpt_1.2b    2 bert_336m, bert_3.9b    3 against Hugging Face    4 against nanoGPT    5 against megatron-core
#   6 gpt_8.3b trains    7 float8's speed    8-11 float8's loss: 200 steps in fp8, and in bf16 with three seeds
#
# NANOGPT=path/to/model.py   nanoGPT's model file (part 4; not part of this repository)
# PYTHON=.venv/bin/python    with megatron-core installed (part 5: pip install megatron-core)
#
# Where a peer is missing the row says so and the next one follows.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
RESULTS=${RESULTS:-analysis/results}
PEAK=790  # TFLOP/s, measured on an H200 with large bf16 products; shares are of it

. analysis/bench_parts.sh

show() {  # title, record, metric, least value that is required
  [ -n "${DRY_RUN:-}" ] || "$PYTHON" analysis/bench_gpu_rows.py row "$1" "$2" "$3" "$4"
}

share() {  # model, sequences, least share of the peak, further keys, the first of which goes into the record's name
  local model=$1 least=$3 record=$RESULTS/h200_$1${4:+_${4%%=*}}.json
  if run "$PYTHON" analysis/bench.py "model=$model" precision=bf16 'peers=[]' "micro_batch_size=$2" "peak_tflops_per_s=$PEAK" \
    accelerator=gpu steps_per_round=5 rounds=4 warm_up_steps=5 "record=$record" "${@:4}"
  then show "$model${4:+ $4}, share of $PEAK TFLOP/s" "$record" ours/share_of_given_peak "$least"
  else echo "$model${4:+ $4}: not measured, see above"; fi
}

against() {  # peer, least ratio of times, further keys
  local peer=$1 least=$2 record=$RESULTS/h200_against_$1.json
  shift 2
  if run "$PYTHON" analysis/bench.py model=gpt_355m precision=bf16 "peers=[$peer]" micro_batch_size=16 \
    "peak_tflops_per_s=$PEAK" accelerator=gpu steps_per_round=5 rounds=4 warm_up_steps=5 "record=$record" "$@"
  then show "gpt_355m against $peer" "$record" "$peer/ratio_paired" "$least"
  else echo "gpt_355m against $peer: not measured, see above"; fi
}

train() {  # name of the run and its record, further keys; on the documentation that ships with Python
  local name=$1 folder=outputs/bench_gpu/$1
  shift
  run rm -rf "$folder"  # of a start that was cut short
  run "$PYTHON" src/train.py data=embedded tokenizer=trained "name=$name" "hydra.run.dir=$folder" trainer.accelerator=gpu \
    trainer.progress_bar=false trainer.validate_every_steps=0 trainer.num_validation_samples=8 checkpoint.save_every_steps=0 \
    checkpoint.save_last=false logger.log_every_steps=1 logger.tensorboard=false "$@" || return 1
  [ -n "${DRY_RUN:-}" ] || "$PYTHON" analysis/bench_gpu_rows.py keep "$folder" "$RESULTS/$name.json"
}

loss_run() {  # precision, seed: 200 steps of the 2.5 B model
  train "h200_2.5b_$1_seed_$2" model=gpt_2.5b "precision=$1" "seed=$2" micro_batch_size=8 global_batch_size=8 \
    trainer.max_steps=200 schedule.warmup_steps=20 || echo "gpt_2.5b in $1, seed $2: not measured, see above"
}

part_1() { share gpt_355m 32 0.52; share gpt_355m 32 0.52 cuda_graphs=true; share gpt_1.2b 16 0.60; }
part_2() { share bert_336m 128 0.50; share bert_336m 128 0.50 cuda_graphs=true; share bert_3.9b 16 0.60; }
part_3() { against hf_compiled 1.2; }
part_4() {
  if [ -n "${NANOGPT:-}" ]; then against file_compiled 1.15 "file=$NANOGPT"
  else echo "gpt_355m against nanoGPT: not measured, NANOGPT=path/to/model.py is not given"; fi
}
part_5() { against megatron_core 1.3; }
part_6() {
  local name=h200_gpt_8.3b_20_steps
  if train $name model=gpt_8.3b optimizer.moments=bf16 micro_batch_size=2 global_batch_size=8 \
    trainer.max_steps=20 schedule.warmup_steps=2
  then show "gpt_8.3b, fall of the loss over 20 steps (nats)" "$RESULTS/$name.json" train/loss_fall 0.01
  else echo "gpt_8.3b: not measured, see above"; fi
}
part_7() {
  local record=$RESULTS/h200_fp8.json
  if run "$PYTHON" analysis/bench.py model=gpt_2.5b precision=fp8 'peers=[ours_bf16]' micro_batch_size=8 \
    "peak_tflops_per_s=$PEAK" accelerator=gpu steps_per_round=5 rounds=4 warm_up_steps=5 "record=$record"
  then show "gpt_2.5b, fp8 against bf16" "$record" ours_bf16/ratio_paired 1.2
  else echo "gpt_2.5b, fp8 against bf16: not measured, see above"; fi
}
part_8() { loss_run fp8 1234; }
part_9() { loss_run bf16 1234; }
part_10() { loss_run bf16 1235; }
part_11() {
  loss_run bf16 1236
  [ -n "${DRY_RUN:-}" ] || "$PYTHON" analysis/bench_gpu_rows.py seeds "$RESULTS/h200_2.5b_fp8_seed_1234.json" \
    "$RESULTS"/h200_2.5b_bf16_seed_123{4,5,6}.json
}
PARTS=11

run_parts "$@"
