#!/usr/bin/env bash
# Every figure that the project promises of GPUs, in parts of less than nine minutes: call single parts where a call is limited.
# The table of parts, with their minutes and what each decides, is in docs/reference/gpu_measurements.md.
#
#   bash analysis/benchmarks/h200.sh a1 a2           some parts; a letter is a whole list; without a name this text and the table
#   DRY_RUN=1 bash analysis/benchmarks/h200.sh a     the commands of a part, a list or all, without running them
#   REHEARSE=1 bash analysis/benchmarks/h200.sh a    the same commands on a CPU with tiny models; records in outputs/h200_rehearsal
#
# A measurement whose record is there is skipped; FORCE=1 repeats it. Each has a time limit of its own. One that fails
# says so in a line, the next one follows, and the exit code is 1. One that does not fit the card by the planner is left
# out. Beside each required value stands the forecast.
#
# PYTHON=python3             default: .venv/bin/python where there is one, else python3
# WHEELS=FOLDER              packages that a machine without network lacks (`make h200-wheels`), installed for this call
# OUT=FOLDER                 gets one archive of all records and logs of the call; unpack it at the root of the repository
# RESULTS=analysis/benchmarks/records   where records go
# CARD=h100                  how the records' names begin: the machine's GPU, which is checked; in a dry run h200
# PEAK=790                   TFLOP/s that shares are of: large bf16 products on an H200; d1 measures it again
# NANOGPT=path/to/model.py   nanoGPT's model file (d5; not part of this repository)
# SEED=1235                  another seed of list c
# A PYTHON with megatron-core is needed for d6 (pip install megatron-core), one with flash_attn_interface for a row of b2.

set -uo pipefail
cd "$(dirname "$0")/../.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
REHEARSE=${REHEARSE:-}
PEAK=${PEAK:-790}
SEED=${SEED:-1234}
LOGS=${LOGS:-outputs/h200${REHEARSE:+_rehearsal}}
RESULTS=${RESULTS:-$([ -n "$REHEARSE" ] && echo "$LOGS" || echo analysis/benchmarks/records)}
CARD=$([ -n "$REHEARSE" ] && echo rehearsal || echo "${CARD:-${DRY_RUN:+h200}}")
case $CARD in '' | rehearsal | h200 | h100 | a100 | v100) ;; *)
  echo "error: \`CARD\` must be one of h200, h100, a100, v100, but is $CARD" >&2
  exit 2
esac
PARTS="a1 a2 a3 a4 a5 a6 a7 a8 a9 b1 b2 c1 c2 c3 c4 d1 d2 d3 d4 d5 d6 d7 e1 e2 e3 e4 e5 e6"
TABLE=docs/reference/gpu_measurements.md

. analysis/benchmarks/bench_parts.sh
. analysis/benchmarks/h200_steps.sh

part_a1() { trace_of gpt_1.2b "$(sequences 32 16)"; trace_of bert_336m 128; }
part_a2() { trace_of gpt_2.5b 8 fp8; attention; }
part_a3() { products bf16 480 gpt_1.2b:32:bf16 bert_336m:128:bf16; }
part_a4() { products fp8 515 gpt_2.5b:8:fp8; }
part_a5() { share gpt_1.2b bf16 "$(sequences 32 16)" 512 0.65 260; share bert_336m bf16 128 1024 0.54 240; }
part_a6() {
  share gpt_2.5b fp8 8 512 0.68 255
  share gpt_2.5b bf16 8 512 0 255
  [ -n "${DRY_RUN:-}" ] || "$PYTHON" analysis/benchmarks/h200_rows.py ratio "gpt_2.5b, share in float8 over share in bf16" \
    "$RESULTS/${CARD}"_gpt_2.5b_{fp8,bf16}_batch_512.json ours/share_of_given_peak 1.2 || FAILED=1
}
part_a7() { loss_run fp8 1234; loss_run bf16 1234; }
part_a8() {
  loss_run bf16 1235
  loss_run bf16 1236
  [ -n "${DRY_RUN:-}" ] || "$PYTHON" analysis/benchmarks/h200_rows.py seeds "$RESULTS/${CARD}_2.5b_fp8_seed_1234.json" \
    "$RESULTS/${CARD}"_2.5b_bf16_seed_123{4,5,6}.json || FAILED=1
}
part_a9() { jobs_of_a_checkpoint; }

part_b1() {
  gpu_tests gpu_tests_attention 110 -k backend_of_model_attention
  without_dropout flash gpt_1.2b "$(sequences 32 16)" 0 190
  without_dropout cudnn gpt_1.2b "$(sequences 32 16)" 0 190
}
part_b2() {
  if [ -n "${DRY_RUN:-}$REHEARSE" ] || "$PYTHON" -c 'import flash_attn_interface' 2> /dev/null; then
    without_dropout flash3 gpt_1.2b "$(sequences 32 16)" 0 190
  else echo "gpt_1.2b with FlashAttention-3: not measured, $PYTHON has no flash_attn_interface"; fi
  without_dropout cudnn gpt_2.5b 8 0.704 300  # 556 TFLOP/s, the highest that was published of H100 (marin-community/marin 6979)
}

part_c1() { true_width bert_336m pre; }
part_c2() { true_width bert_336m post; }
part_c3() { true_width bert_752m pre ${REHEARSE:+model.num_layers=3}; }
part_c4() { true_width bert_752m post ${REHEARSE:+model.num_layers=3}; }

part_d1() { machine; gpu_tests gpu_tests 420; }
part_d2() { share bert_3.9b bf16 16 1024 0.66 480 $(sequences '' model.recompute=full); }
part_d3() { share gpt_355m bf16 32 512 0.52 240; share gpt_355m bf16 32 512 0.52 240 cuda_graphs=true; }
part_d4() { against hf_compiled 1.2; }
part_d5() {
  if [ -n "${NANOGPT:-}" ]; then against file_compiled 1.15 "file=$NANOGPT"
  else echo "gpt_355m against nanoGPT: not measured, NANOGPT=path/to/model.py is not given"; fi
}
part_d6() {
  if [ -n "${DRY_RUN:-}" ] || "$PYTHON" -c 'import megatron.core' 2> /dev/null; then against megatron_core 1.3
  else echo "gpt_355m against megatron-core: not measured, $PYTHON has no megatron-core"; fi
}
part_d7() {
  local name=${CARD}_gpt_8.3b_20_steps
  LIMIT=520 train "$name" model=gpt_8.3b optimizer.moments=bf16 micro_batch_size=2 global_batch_size=8 \
    trainer.max_steps=20 schedule.warmup_steps=2 &&
    show "gpt_8.3b, fall of the loss over 20 steps (nats)" "$name" train/loss_fall 0.01
}

part_e1() {  # batch 8, as in the paper; full recomputation too
  weak gpt_1.2b 1 250
  weak gpt_2.5b 2 250
}
part_e2() { weak gpt_4.2b 4 510; }
part_e3() {
  weak gpt_8.3b 8 480
  [ -n "${DRY_RUN:-}" ] || "$PYTHON" analysis/benchmarks/h200_rows.py scaling "$RESULTS/${CARD}_figure_5.json" \
    "$RESULTS/${CARD}"_weak_gpt_{1.2b,2.5b,4.2b,8.3b}.json || FAILED=1
}
part_e4() { measured_layouts; }
part_e5() {
  timed gpt_1.2b_dp_8 250 model=gpt_1.2b micro_batch_size=8 global_batch_size=512 parallel.dp_size=8
  timed gpt_1.2b_dp_8_zero1 250 model=gpt_1.2b micro_batch_size=8 global_batch_size=512 parallel.dp_size=8 parallel.zero1=true
}
part_e6() { timed gpt_8.3b_pp_2 510 model=gpt_8.3b micro_batch_size=4 global_batch_size=64 parallel.tp_size=4 parallel.pp_size=2; }

choose_parts "$@"
[ -n "${DRY_RUN:-}" ] || prepare
for part in "${CHOSEN[@]}"; do
  started=$SECONDS
  "part_$part"
  [ -n "${DRY_RUN:-}" ] || echo "== $part: $((SECONDS - started)) s, $SECONDS s since the start"
done
[ -n "${DRY_RUN:-}$REHEARSE" ] || [ ! -f "analysis/benchmarks/records/${CARD}_forecast_2.json" ] || \
  "$PYTHON" analysis/benchmarks/forecast.py compare --card "$CARD" --results "$RESULTS"
exit "$FAILED"
