# The measurements of h200.sh, which sources it; the parts and their sizes are there.

FAILED=0
SITE=
NAMES=()  # of this call's measurements: the files that an archive gets
ACCELERATOR=gpu
TINY=()       # what a rehearsal changes in a comparison, and in a run of training
TINY_RUN=()
TINY_LAYOUT=()
if [ -n "$REHEARSE" ]; then
  ACCELERATOR=cpu
  SIZES=(model.num_layers=2 model.hidden_size=64 model.num_attention_heads=4 model.vocab_size=1000
    model.max_position_embeddings=32 micro_batch_size=2)
  TINY=("${SIZES[@]}" compiles=false cuda_graphs=false model.attention=auto global_batch_size=4
    accelerator=cpu num_threads=1 steps_per_round=1 rounds=1 warm_up_steps=1)
  TINY_RUN=("${SIZES[@]}" data.seq_length=32 global_batch_size=2 model.vocab_size=null trainer.accelerator=cpu
    trainer.max_steps=3 trainer.num_threads=1 schedule.warmup_steps=1)
fi

prepare() {  # packages on the path, folders, and every import that the parts need: a missing one ends the call at once
  export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
  mkdir -p "$RESULTS" "$LOGS" ${OUT:+"$OUT"} || exit 2
  SITE=$(mktemp -d) || exit 2
  trap 'rm -rf "$SITE"' EXIT
  if [ -n "${WHEELS:-}" ]; then
    # --no-deps: the machine's own torch stays
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
      --root-user-action=ignore --target "$SITE" "$WHEELS"/*.whl || { echo "error: the wheels in $WHEELS cannot be installed" >&2; exit 2; }
    export PYTHONPATH=$PYTHONPATH:$SITE
  fi
  "$PYTHON" analysis/benchmarks/h200_rows.py imports || exit 2
  [ -z "$REHEARSE" ] || return 0
  read -r CARD GIB < <("$PYTHON" analysis/benchmarks/h200_rows.py card "$CARD")
  [ -n "$CARD" ] || exit 2
}

sequences() {  # on a card of 141 GB, and on a smaller one
  case $CARD in h200 | rehearsal) echo "$1" ;; *) echo "$2" ;; esac
}

# GRACE: seconds between the signals TERM and KILL. RESULT: an exit code that is a result and no failure.
step() {  # name of the record and the log, limit in seconds, command; false where there is no record in the end
  local name=$1 limit=$2 started=$SECONDS code reason
  shift 2
  if [ -n "${DRY_RUN:-}" ]; then run timeout --foreground --kill-after="${GRACE:-10}" "$limit" "$@"; return; fi
  NAMES+=("$name")
  if has "$name"; then
    echo "$name: the record is there already; FORCE=1 repeats it"
    return
  fi
  if [ -z "$REHEARSE" ]; then
    reason=$("$PYTHON" analysis/benchmarks/forecast.py fits --card "$CARD" --gib "$GIB" "$@") || { fail "$name" "no plan"; return 1; }
    [ -z "$reason" ] || { echo "$name: left out, $reason"; return 1; }
  fi
  rm -f "$RESULTS/$name.json"
  # Into a file and not through a pipe: compile workers that outlive a killed process would hold a pipe open.
  # In the foreground: the signal TERM to the compile workers too would leave the process waiting for them.
  timeout --foreground --kill-after="${GRACE:-10}" "$limit" "$@" > "$LOGS/$name.log" 2>&1
  code=$?
  tail -n "${TAIL:-12}" "$LOGS/$name.log"
  if [ $code -ne 0 ] && [ $code -ne "${RESULT:-0}" ]; then fail "$name" "exit code $code$([ $code -ne 124 ] || echo ", stopped after $limit s")"; return 1; fi
  echo "$name: $((SECONDS - started)) s"
}

has() { [ -z "${FORCE:-}" ] && [ -f "$RESULTS/$1.json" ]; }

fail() {
  FAILED=1
  echo "$1: not measured, $2; see $LOGS/$1.log"
  pack
}

show() {  # title, name of the record, metric, least value that is required
  [ -n "${DRY_RUN:-}" ] || { "$PYTHON" analysis/benchmarks/h200_rows.py row "$1" "$RESULTS/$2.json" "$3" "$4"; pack; }
}

pack() {  # after every measurement, so that a call that is cut short leaves what it has
  [ -n "${OUT:-}" ] || return 0
  local stage name file
  stage=$(mktemp -d -p "$SITE") && mkdir -p "$stage/analysis/benchmarks/records" "$stage/outputs/h200" || return
  for name in "${NAMES[@]}"; do
    [ ! -f "$RESULTS/$name.json" ] || cp "$RESULTS/$name.json" "$stage/analysis/benchmarks/records"
    for file in "$LOGS/$name".{log,xml,trace.json.gz}; do
      [ ! -f "$file" ] || [ "$(stat -c %s "$file")" -gt 12582912 ] || cp "$file" "$stage/outputs/h200"
    done
    # Of a run that was cut short, the losses so far.
    file=$LOGS/$name/metrics.csv
    [ ! -f "$file" ] || { mkdir -p "$stage/outputs/h200/$name" && cp "$file" "$stage/outputs/h200/$name"; }
  done
  tar -czf "$SITE/archive" -C "$stage" . && mv "$SITE/archive" "$OUT/${CARD}_$(IFS=_; echo "${CHOSEN[*]}").tar.gz"
  rm -rf "$stage"
}

machine() {
  local name=${CARD}_machine sizes=(8192x8192x8192 16384x16384x8192 16384x6144x1536 8192x10240x2560) gib=4
  [ -z "$REHEARSE" ] || { sizes=(64x64x64 32x16x48); gib=0.01; }
  TAIL=30 step "$name" 90 "$PYTHON" analysis/benchmarks/gpu/gpu_facts.py --product "${sizes[@]}" --copy-gib "$gib" --accelerator "$ACCELERATOR" \
    --record "$RESULTS/$name.json" && show "large bf16 products" "$name" gemm/peak "$PEAK"
}

gpu_tests() {  # name of the record, limit in seconds, further words; eight at a time: most of their time is compilation on the host
  local name=${CARD}_$1 limit=$2 xml=$LOGS/${CARD}_$1.xml
  shift 2
  step "$name" "$limit" "$PYTHON" -m pytest -m gpu -n "$([ -n "$REHEARSE" ] && echo 0 || echo 8)" -p no:cacheprovider -v -rs \
    --junitxml="$xml" "$@" tests/training/test_gpu.py || return
  [ -n "${DRY_RUN:-}" ] || has "$name" && return
  "$PYTHON" analysis/benchmarks/h200_rows.py tests "$xml" "$RESULTS/$name.json" ${REHEARSE:+--may-skip} || fail "$name" "the tests show nothing"
  pack
}

compare() {  # name of the record, limit in seconds, keys
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$PYTHON" analysis/benchmarks/bench.py "peak_tflops_per_s=$PEAK" accelerator=gpu \
    steps_per_round=1 rounds=3 warm_up_steps=1 "$@" "record=$RESULTS/$name.json" "${TINY[@]}"
}

share() {  # model, precision, sequences per micro-batch and per step, least share of the peak, limit in seconds, further keys, the first of which goes into the name
  local model=$1 precision=$2 sequences=$3 batch=$4 least=$5 limit=$6 name=${CARD}_$1_$2_batch_$4${7:+_${7%%=*}}
  shift 6
  compare "$name" "$limit" "model=$model" "precision=$precision" 'peers=[]' "micro_batch_size=$sequences" "global_batch_size=$batch" "$@" &&
    show "$model, $precision${1:+ $1}, share of $PEAK TFLOP/s" "$name" ours/share_of_given_peak "$least"
}

without_dropout() {  # attention, model, sequences, least share of the peak, limit in seconds
  local attention=$1 name=${CARD}_$2_without_dropout_$1
  shift
  compare "$name" "$4" "model=$1" precision=bf16 'peers=[]' "micro_batch_size=$2" global_batch_size=512 model.hidden_dropout=0 \
    model.attention_dropout=0 "model.attention=$attention" &&
    show "$1 without dropout, $attention, share of $PEAK TFLOP/s" "$name" ours/share_of_given_peak "$3"
}

trace_of() {  # model, sequences, precision; two micro-batches per step; a rehearsal compiles too, for the number of graphs
  local name=${CARD}_trace_$1
  TAIL=45 step "$name" "$([ "${3:-bf16}" = fp8 ] && echo 300 || echo 250)" "$PYTHON" analysis/benchmarks/bench.py trace=true "model=$1" \
    "precision=${3:-bf16}" 'peers=[]' "micro_batch_size=$2" "global_batch_size=$((2 * $2))" accelerator=gpu steps_per_round=3 \
    warm_up_steps=3 "record=$LOGS/$name.json" "${TINY[@]}" ${REHEARSE:+compiles=true} || return
  [ -z "${DRY_RUN:-}" ] || return 0
  # The Chrome trace is written beside the record and is no result: it stays with the logs.
  [ "$LOGS" -ef "$RESULTS" ] || [ ! -f "$LOGS/$name.json" ] || mv "$LOGS/$name.json" "$RESULTS"
  pack
}

products() {  # what, limit in seconds, steps as model:sequences:precision
  local name=${CARD}_products_$1 limit=$2 steps=("${@:3}") seconds=10
  [ -z "$REHEARSE" ] || { steps=(gpt_tiny:1:"$1"); seconds=0.01; }
  TAIL=60 step "$name" "$limit" "$PYTHON" analysis/benchmarks/gpu/products.py --step "${steps[@]}" --seconds "$seconds" \
    --accelerator "$ACCELERATOR" --record "$RESULTS/$name.json" && pack_after
}

attention() {  # head sizes 64, 96 and 128, the last one with the work of gpt_1.2b
  local name=${CARD}_attention_backends backends=(flash efficient cudnn flash3)
  local shapes=(bert_336m:128:16:512:64 gpt_1.2b:32:16:1024:96 gpt_head_128:32:12:1024:128 gpt_8.3b_tp_8:8:4:1024:96)
  [ -z "$REHEARSE" ] || { shapes=(gpt_1.2b:2:2:16:8 bert_336m:2:3:16:8); backends=(math); }
  TAIL=60 step "$name" 180 "$PYTHON" analysis/benchmarks/gpu/attention_backends.py --shape "${shapes[@]}" --backends "${backends[@]}" \
    --accelerator "$ACCELERATOR" --record "$RESULTS/$name.json" && pack_after
}

pack_after() { [ -n "${DRY_RUN:-}" ] || pack; }

against() {  # peer, least ratio of times, further keys
  local peer=$1 least=$2 name=${CARD}_against_$1
  shift 2
  compare "$name" 520 model=gpt_355m precision=bf16 "peers=[$peer]" micro_batch_size=16 global_batch_size=512 "$@" &&
    show "gpt_355m against $peer" "$name" "$peer/ratio_paired" "$least"
}

train() {  # name of the run and its record, further keys; on the documentation that ships with Python
  local name=$1 folder=$LOGS/$1
  shift
  has "$name" || run rm -rf "$folder"  # of a start that was cut short
  step "$name" "$LIMIT" "$PYTHON" src/train.py data=embedded tokenizer=trained "name=$name" "hydra.run.dir=$folder" \
    trainer.accelerator=gpu parallel.dp_size=1 trainer.progress_bar=false trainer.validate_every_steps=0 trainer.num_validation_samples=8 \
    checkpoint.save_every_steps=0 checkpoint.save_last=false logger.log_every_steps=1 logger.tensorboard=false "$@" \
    "${TINY_RUN[@]}" "${TINY_LAYOUT[@]}" || return 1
  [ -n "${DRY_RUN:-}" ] || has "$name" && return
  "$PYTHON" analysis/benchmarks/h200_rows.py keep "$folder" "$RESULTS/$name.json" || { fail "$name" "no record"; return 1; }
  pack
}

loss_run() {  # precision, seed: 200 steps of the 2.5 B model
  # In float8 more is compiled, two minutes of it on a new machine.
  LIMIT=$([ "$1" = fp8 ] && echo 290 || echo 220) train "${CARD}_2.5b_$1_seed_$2" model=gpt_2.5b "precision=$1" "seed=$2" micro_batch_size=8 global_batch_size=8 \
    trainer.max_steps=200 schedule.warmup_steps=20
}

true_width() {  # model, norm order, further keys: a run of Figure 7
  local name=${CARD}_fig7_$1_$2_seed_$SEED diverged=3
  local folder=$LOGS/$name
  [ -z "${FORCE:-}" ] || run rm -rf "$folder"
  GRACE=40 RESULT=$diverged step "$name" 490 "$PYTHON" src/train.py experiment=fig7_h200 "model=$1" "model.norm_order=$2" \
    "seed=$SEED" "name=$name" "hydra.run.dir=$folder" resume=auto trainer.accelerator=gpu \
    "${TINY_RUN[@]}" ${REHEARSE:+trainer.max_steps=50 trainer.num_validation_samples=8} "${@:3}" || return 1
  [ -n "${DRY_RUN:-}" ] || has "$name" && return
  "$PYTHON" analysis/norm_order/true_widths.py keep "$folder" "$RESULTS/$name.json" || { fail "$name" "no record"; return 1; }
  rm -rf "$folder/checkpoints"  # of the larger model up to 18 GB
  pack
}

timed() {  # name, limit in seconds, further keys of src/train.py: 30 steps, of which the last 15 count
  local name=${CARD}_$1 limit=$2
  shift 2
  TINY_LAYOUT=()  # a rehearsal has one axis, of two ranks
  if [ -n "$REHEARSE" ]; then
    case "$*" in
      *pp_size*) TINY_LAYOUT=(parallel.tp_size=1 parallel.pp_size=2) ;;
      *dp_size*) TINY_LAYOUT=(parallel.dp_size=2 micro_batch_size=1) ;;
      *tp_size=[248]*) TINY_LAYOUT=(parallel.tp_size=2) ;;
    esac
  fi
  LIMIT=$limit train "$name" "$@" trainer.max_steps=30 schedule.warmup_steps=2 || return 0
  [ -n "${DRY_RUN:-}" ] || "$PYTHON" analysis/benchmarks/h200_rows.py times "$RESULTS/$name.json"
}

weak() {  # model, GPUs, limit: Table 1's weak scaling, 8 sequences with full recomputation
  timed "weak_$1" "$3" "model=$1" micro_batch_size=8 global_batch_size=8 model.recompute=full "parallel.tp_size=$2"
}

jobs_of_a_checkpoint() {
  local name=${CARD}_jobs
  step "$name" 500 "$PYTHON" analysis/benchmarks/gpu/jobs.py --folder "$LOGS/$name" --accelerator "$ACCELERATOR" \
    --record "$RESULTS/$name.json" && pack_after
}

measured_layouts() {  # the planner's four best, each trained for ten steps
  local name=${CARD}_layouts_gpt_8.3b
  local keys=(model=gpt_8.3b "cluster=$(case $CARD in a100) echo dgx_a100 ;; v100) echo dgx2h_v100 ;; *) echo "$CARD" ;; esac)" num_devices=8 measure=4 micro_batch_size=4 global_batch_size=64)
  [ -z "$REHEARSE" ] || keys=(model=gpt_tiny cluster=cpu measure=2 trainer.max_steps=10)
  TAIL=20 step "$name" 510 "$PYTHON" src/plan.py "${keys[@]}" "record=$RESULTS/$name.json" && pack_after
}
