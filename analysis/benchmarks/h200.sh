#!/usr/bin/env bash
# Every figure that the project promises of GPUs, in parts of less than nine minutes: call single parts where a call is limited.
#
#   bash analysis/benchmarks/h200.sh a1 a2           some parts; a letter is a whole list; without a name this text
#   DRY_RUN=1 bash analysis/benchmarks/h200.sh a     the commands of a part, a list or all, without running them
#   REHEARSE=1 bash analysis/benchmarks/h200.sh a    the same commands on a CPU with tiny models; records in outputs/h200_rehearsal
#
# In order of value: one H200 or H100: a, d, b, c; eight of them: `make check-gpus`, then e.
#
#   a, about 25 minutes: first correctness, then what the rest is judged by
#     a1 the machine, its bf16 peak and bandwidth; pytest -m gpu    a2 a trace of gpt_1.2b; attention backends
#     a3 gpt_1.2b    a4 bert_336m    a5 bert_3.9b
#   b
#     b1 gpt_355m    b2 against Hugging Face    b3 against nanoGPT    b4 against megatron-core
#     b5 gpt_8.3b trains    b6 float8's speed    b7-b10 float8's loss: 200 steps in fp8, and in bf16 with three seeds
#   c, about 25 minutes: Figure 7 at its true widths, 2,000 steps of 16,384 tokens in each run
#     c1 bert_336m, pre-norm    c2 bert_336m, post-norm    c3 bert_752m, pre-norm    c4 bert_752m, post-norm
#     A run that its time limit stops saves a checkpoint; the same part again continues it.
#   d
#     d1 a save in the background, then finetuning, zero-shot evaluation and text from it, each equal to a CPU's
#     d2 gpt_1.2b by src/train.py: the step beside a3's, its optimizer alone    d3 float8 alone and bf16 alone
#   e, eight GPUs of one node
#     e1-e3 Table 1's weak scaling, 1, 2, 4 and 8 GPUs, and Figure 5 from it    e4 the four best layouts of gpt_8.3b
#     e5 gpt_1.2b on 8 data ranks, without and with ZeRO-1    e6 gpt_8.3b in two stages
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
# PEAK=790                   TFLOP/s that shares are of: large bf16 products on an H200; a1 measures it again
# NANOGPT=path/to/model.py   nanoGPT's model file (b3; not part of this repository)
# SEED=1235                  another seed of list c
# A PYTHON with megatron-core is needed for b4 (pip install megatron-core).

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
PARTS="a1 a2 a3 a4 a5 b1 b2 b3 b4 b5 b6 b7 b8 b9 b10 c1 c2 c3 c4 d1 d2 d3 e1 e2 e3 e4 e5 e6"

. analysis/benchmarks/bench_parts.sh
. analysis/benchmarks/h200_steps.sh

part_a1() { machine; gpu_tests; }
part_a2() { trace_of gpt_1.2b 16; attention; }
part_a3() { share gpt_1.2b "$(sequences 32 24)" 0.60 480; }
part_a4() { share bert_336m 128 0.50 240; share bert_336m 128 0.50 240 cuda_graphs=true; }
part_a5() { share bert_3.9b 24 0.60 480 $(sequences '' model.recompute=full); }

part_b1() { share gpt_355m 32 0.52 240; share gpt_355m 32 0.52 240 cuda_graphs=true; }
part_b2() { against hf_compiled 1.2; }
part_b3() {
  if [ -n "${NANOGPT:-}" ]; then against file_compiled 1.15 "file=$NANOGPT"
  else echo "gpt_355m against nanoGPT: not measured, NANOGPT=path/to/model.py is not given"; fi
}
part_b4() {
  if [ -n "${DRY_RUN:-}" ] || "$PYTHON" -c 'import megatron.core' 2> /dev/null; then against megatron_core 1.3
  else echo "gpt_355m against megatron-core: not measured, $PYTHON has no megatron-core"; fi
}
part_b5() {
  local name=${CARD}_gpt_8.3b_20_steps
  train "$name" model=gpt_8.3b optimizer.moments=bf16 micro_batch_size=2 global_batch_size=8 \
    trainer.max_steps=20 schedule.warmup_steps=2 &&
    show "gpt_8.3b, fall of the loss over 20 steps (nats)" "$name" train/loss_fall 0.01
}
part_b6() { float8_speed; }
part_b7() { loss_run fp8 1234; }
part_b8() { loss_run bf16 1234; }
part_b9() { loss_run bf16 1235; }
part_b10() {
  loss_run bf16 1236
  [ -n "${DRY_RUN:-}" ] || "$PYTHON" analysis/benchmarks/h200_rows.py seeds "$RESULTS/${CARD}_2.5b_fp8_seed_1234.json" \
    "$RESULTS/${CARD}"_2.5b_bf16_seed_123{4,5,6}.json
}

part_c1() { true_width bert_336m pre; }
part_c2() { true_width bert_336m post; }
part_c3() { true_width bert_752m pre ${REHEARSE:+model.num_layers=3}; }
part_c4() { true_width bert_752m post ${REHEARSE:+model.num_layers=3}; }

part_d1() { jobs_of_a_checkpoint; }
part_d2() {
  timed gpt_1.2b_train 510 model=gpt_1.2b "micro_batch_size=$(sequences 32 24)" "global_batch_size=$(sequences 32 24)"
}
part_d3() {
  share_alone fp8
  share_alone bf16
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
  timed gpt_1.2b_dp_8 250 model=gpt_1.2b micro_batch_size=8 global_batch_size=64 parallel.dp_size=8
  timed gpt_1.2b_dp_8_zero1 250 model=gpt_1.2b micro_batch_size=8 global_batch_size=64 parallel.dp_size=8 parallel.zero1=true
}
part_e6() { timed gpt_8.3b_pp_2 510 model=gpt_8.3b micro_batch_size=4 global_batch_size=64 parallel.tp_size=4 parallel.pp_size=2; }

choose_parts "$@"
[ -n "${DRY_RUN:-}" ] || prepare
for part in "${CHOSEN[@]}"; do
  started=$SECONDS
  "part_$part"
  [ -n "${DRY_RUN:-}" ] || echo "== $part: $((SECONDS - started)) s, $SECONDS s since the start"
done
[ -n "${DRY_RUN:-}$REHEARSE" ] || [ ! -f "analysis/benchmarks/records/${CARD}_forecast.json" ] || \
  "$PYTHON" analysis/benchmarks/forecast.py compare --card "$CARD" --results "$RESULTS"
exit "$FAILED"
