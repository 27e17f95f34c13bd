#!/usr/bin/env bash
# Everything a GPU is needed for, in calls of under ten minutes each:
#
#   benchmarks/gpu.sh 1             build, all device tests in parallel, what users run (benchmarks.smoke),
#                                   compute-sanitizer
#   benchmarks/gpu.sh 2             kernels, host time against device time and a profile
#   benchmarks/gpu.sh 3             training: gpt2-large and llama-lora; 4: gpt2, vit-b16; 5: llama-1b, resnet50; 6: rest
#   benchmarks/gpu.sh --plan [N]    prints the stages of call N (1) and runs nothing
#   benchmarks/gpu.sh --dry-run [N] without a GPU: runs what of it a CPU can, at small sizes
#   benchmarks/gpu.sh --prepare     without a GPU, but with nvcc and the versions of Python and torch that the machine
#                                   with the GPU has: builds the extensions into $CACHES
#
# On an H100 with 16 cores the build took 67 s, 10 s with caches, all device tests over 180 s with 14 workers, and the first
# private step of gpt2-large over 20 s (training allows 80 s for it). A lent machine gives one command ten minutes and all of them a quarter of an hour, its start of one to two minutes counted:
# that is call 1 (some five minutes), then call 3 (eight at most). Calls 2, 4, 5 and 6 need a loan each, but
# `STAGES="build host"` of call 2 takes two minutes. What can fail comes first.
#
# Settings: OUT (folder of the results; benchmarks/data), PYTHON (python3), FASTDP_COMMIT (of a tree without .git),
# SECONDS_IN_ALL (580), GRACE (15 s for a report at the end of a limit), DTYPE (bfloat16), STAGES (those to run), MODELS
# and CONTENDERS of training, with commas between them, TEST_WORKERS (14), CACHES (an archive of an earlier call or of
# --prepare; .gpu/caches.tar.gz), WHEELS (a folder; .gpu), FASTDP_CUDA=0 (goes without fastdp._CUDA, and says so).
#
# Nothing has to be installed on a machine with Python, torch, Triton, pytest, pytest-xdist, hypothesis, setuptools,
# pybind11 and nvcc (on the PATH or in /usr/local/cuda/bin), and no network is needed: extensions are built in place, and
# a link to kernels/ stands in for an installation where there is none. Where nvcc is and fastdp._CUDA cannot be built,
# nothing else runs. Opacus is installed from WHEELS if it lies there; else its rows say "not applicable".
#
# Whatever happens, what is there by then stays and can be used: rows are written one by one, output goes to gpu_log.txt
# as it comes, gpu_summary.txt says after each stage how all went, and caches.tar.gz (built extensions, compiled Triton
# kernels, the planner's times) is packed anew after each. OUT holds at most 8 files of under 16 MiB. A stage that fails
# or runs out of its time does not stop those that follow; the exit code is 1 then, 130 if the whole was stopped.
# benchmarks/README.md has the command of each call on a lent machine.
# shellcheck disable=SC2329  # functions called through bash -c and trap
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

mode=run
case "${1:-}" in
  --dry-run | --plan | --prepare) mode=${1#--} && shift ;;
esac
call=${1:-1}
case "$call" in
  1) stages="build info tests smoke sanitizer" models="gpt2-large" ;;
  2) stages="build warm kernels host" models="gpt2-large" ;;
  3) stages="build warm training" models="gpt2-large,llama-lora" ;;
  4) stages="build warm training" models="gpt2,vit-b16" ;;
  5) stages="build warm training" models="llama-1b,resnet50" ;;
  6) stages="build warm training" models="bert,gpt2-lora,roberta,bert-lora,convnext-t" ;;
  *) sed -n '4,12p' "$0" >&2 && exit 2 ;;
esac

python=${PYTHON:-python3}
total=${SECONDS_IN_ALL:-580}
stages=${STAGES:-$stages}
grace=${GRACE:-15}
dtype=${DTYPE:-bfloat16}
caches=${CACHES:-.gpu/caches.tar.gz}
wheels=${WHEELS:-.gpu}
IFS=, read -ra models <<<"${MODELS:-$models}"
IFS=, read -ra contenders <<<"${CONTENDERS:-fastdp,fastdp graphed,fastdp loop,fastdp layerwise,opacus hooks,opacus ghost}"
out=${OUT:-benchmarks/data} device=cuda small=()
case $mode in
  dry-run) out=${OUT:-$(mktemp -d)} device=cpu small=(--small) ;;
  prepare) out=$(dirname "$caches") stages="build" total=3600 ;;
esac
passed=passed
if [ "$device" = cuda ]; then
  PATH=/usr/local/cuda/bin:$PATH
  command -v nvcc >/dev/null || FASTDP_CUDA=0
  export PATH FASTDP_CUDA=${FASTDP_CUDA:-1}
  [ "$FASTDP_CUDA" = 1 ] || passed="passed without fastdp._CUDA"
fi
log=$out/gpu_log.txt
# Triton's index holds absolute paths: the same folder in every call
work=${GPU_WORK:-/tmp/fastdp-gpu}
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$work/triton XDG_CACHE_HOME=$work/cache
unset TRITON_INTERPRET
rows=() # stage|result|seconds
failed=0
running=

# ---------------------------------------------------------------------- what is kept

# summary: how all stages went so far, written anew after each
summary() {
  local row name result spent
  {
    printf 'call %s: %s s so far, results in %s\n' "$call" "$SECONDS" "$out"
    for row in "${rows[@]}"; do
      IFS='|' read -r name result spent <<<"$row"
      printf '%-10s %-44s %4s s\n' "$name" "$result" "$spent"
    done
    if [ -n "$running" ]; then printf '%-10s %s\n' "$running" "running, or stopped with all"; fi
  } >"$out/gpu_summary.txt"
}

sources() { # a name for what extensions are built of
  find csrc setup.py -type f 2>/dev/null | LC_ALL=C sort | xargs cat | sha256sum | cut -c1-16
}

# pack: the caches as one archive, without what Triton only writes for readers; none rather than one that is too large
pack() {
  local built
  built=$work/built/$(sources)
  mkdir -p "$built" "$work/triton" "$work/cache"
  cp -p fastdp/_C*.so "$built/" 2>/dev/null
  tar -C "$work" --exclude '*.ttir' --exclude '*.ttgir' --exclude '*.llir' --exclude '*.source' -czf "$work/new.tar.gz" \
    built triton cache 2>/dev/null
  if [ "$(stat -c %s "$work/new.tar.gz")" -lt 16000000 ]; then
    mv "$work/new.tar.gz" "$out/caches.tar.gz"
  else
    echo "caches.tar.gz would be too large to come back" >>"$log"
  fi
}

# unpack: what an earlier call left, the extensions only if they are of these sources
unpack() {
  mkdir -p "$work"
  if [ -s "$caches" ]; then tar -C "$work" -xzf "$caches" && cp -p "$work/built/$(sources)"/*.so fastdp/ 2>/dev/null; fi
  return 0
}

# install: the wheels that were carried, Opacus's for one, if it is not here
install() {
  compgen -G "$wheels/*.whl" >/dev/null && ! "$python" -c 'import opacus' 2>/dev/null || return 0
  "$python" -m pip install -q --no-index --no-deps --target "$work/site" "$wheels"/*.whl >>"$log" 2>&1 || return
  export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
}

# shorten: no file is too large to come back; of a long one its end is worth more
shorten() {
  local file
  for file in "$out"/*.txt; do
    if [ "$(stat -c %s "$file")" -gt 15000000 ]; then
      tail -c 8000000 "$file" >"$work/short" && cp "$work/short" "$file"
    fi
  done
}

linked=
finish() {
  trap - EXIT
  if [ "$mode" = plan ]; then exit "$failed"; fi
  summary
  pack
  shorten
  if [ -n "$linked" ]; then rm -f fastdp/kernels; fi
  cat "$out/gpu_summary.txt"
  exit "$failed"
}

# stopped: what is running is told to end, and given as long as a report takes
stopped() {
  trap '' INT TERM
  if [ -n "$child" ]; then
    kill -INT "$child" 2>/dev/null
    for _ in $(seq $((2 * grace))); do kill -0 "$child" 2>/dev/null && sleep 0.5; done
    kill -KILL -- "-$child" 2>/dev/null
  fi
  if [ -n "$running" ]; then rows+=("$running|stopped from outside|$((SECONDS - begin))") running=; fi
  failed=130
  finish
}

# ---------------------------------------------------------------------- stages

child='' begin=0

# wanted NAME: whether this call has the stage
wanted() { case " $stages " in *" $1 "*) ;; *) return 1 ;; esac; }

# stage NAME LIMIT COMMAND...: run within the limit and what is left of the whole; SIGINT first, so that it can report
stage() {
  local name=$1 limit=$2 left=$((total - SECONDS)) code result
  shift 2
  wanted "${name%% *}" || return 0
  if [ "$left" -lt "$limit" ]; then limit=$left; fi
  printf '\n=== %s (at most %s s): %s\n' "$name" "$limit" "$*"
  if [ "$mode" = plan ]; then return; fi
  printf '\n=== %s (at most %s s): %s\n' "$name" "$limit" "$*" >>"$log"
  if [ "$limit" -lt 3 ]; then rows+=("$name|no time left|0") failed=1 && summary && return; fi
  begin=$SECONDS running=$name
  summary
  set -m # else what runs in the background would ignore SIGINT
  timeout -s INT -k "$grace" "$limit" "$@" >>"$log" 2>&1 &
  child=$!
  set +m
  wait "$child"
  code=$?
  child='' running=''
  case $code in
    0) result=$passed ;;
    124 | 137) result="out of time" failed=1 ;;
    *) result="FAILED ($code)" failed=1 ;;
  esac
  rows+=("$name|$result|$((SECONDS - begin))")
  tail -n 25 "$log"
  summary
  pack
}

# skip NAME WHY
skip() {
  wanted "$1" || return 0
  printf '\n=== %s: left out, %s\n' "$1" "$2"
  if [ "$mode" != plan ]; then rows+=("$1|left out, $2|0") && summary; fi
}

# Extensions in place. An older setuptools refuses the licence line of pyproject.toml: then from links without that file.
build() {
  built 2>/dev/null && return
  "$python" setup.py -q build_ext --inplace || build_from_links || return
  built
}

build_from_links() {
  local tree
  tree=$(mktemp -d) || return
  ln -s "$PWD/setup.py" "$PWD/csrc" "$PWD/fastdp" "$tree/"
  (cd "$tree" && "$python" setup.py -q build_ext --inplace)
}

built() { # the extensions that must be there
  "$python" -c 'import fastdp._C; print("fastdp._C loads")' || return
  if [ "$device" = cpu ] || [ "$FASTDP_CUDA" = 0 ]; then return 0; fi
  "$python" -c 'import fastdp._CUDA; print("fastdp._CUDA loads")'
}

if [ "$mode" != plan ]; then
  if [ "$mode" = run ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "benchmarks/gpu.sh: torch sees no GPU here; --dry-run runs what a CPU can" >&2
    exit 2
  fi
  mkdir -p "$out" "$work" && : >"$log"
  trap finish EXIT
  trap stopped INT TERM
  if ! "$python" -c 'import fastdp.kernels' 2>/dev/null && [ ! -e fastdp/kernels ]; then
    ln -s ../kernels fastdp/kernels && linked=yes
  fi
  unpack
  install || failed=1
fi
export -f build build_from_links built
export python device

stage build "$([ "$mode" = prepare ] && echo 1800 || echo 120)" bash -c build
if [ "$mode" != plan ] && ! built >>"$log" 2>&1; then
  echo "fastdp._C or fastdp._CUDA is not there (FASTDP_CUDA=0 runs without the latter): nothing else is run" | tee -a "$log"
  failed=1
  finish
fi
if [ "$mode" = prepare ]; then finish; fi
stage info 20 "$python" -m fastdp info

# ---------------------------------------------------------------------- 1: is it right?

shopt -s nullglob
tests=(tests/{ops,engine,graphs,optim}/test_{[d]evice,device_*,*_device}.py)
shopt -u nullglob
# -v: a line for each test as it ends, should not even the report survive
stage tests 250 "$python" -m pytest -p no:cacheprovider -n "${TEST_WORKERS:-14}" -v --durations=10 \
  --junitxml "$out/tests.xml" "${tests[@]}"
stage smoke 90 "$python" -m benchmarks.smoke --device "$device" --out "$out/smoke_$device.csv"

if [ "$mode" != plan ] && ! command -v compute-sanitizer >/dev/null; then
  skip sanitizer "no compute-sanitizer here"
else # every allocation of torch its own, so that a step beyond one is seen
  stage sanitizer 150 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --report-api-errors no --error-exitcode 99 \
    --log-file "$out/sanitizer.txt" "$python" -m pytest -p no:cacheprovider -v tests/ops/test_*device.py -k sanitizer
fi

# ---------------------------------------------------------------------- 2: how fast is each kernel, and what waits?

common=(--device "$device" --dtype "$dtype")
# some 80 Triton kernels, compiled before anything has a limit of seconds
stage warm 120 "$python" -m benchmarks.device warm "${common[@]}" "${small[@]}" --models "${models[@]}"

if [ "$device" = cuda ]; then
  stage kernels 110 "$python" -m benchmarks.kernels "${common[@]}" --out "$out/kernels_cuda.csv"
else
  stage kernels 60 "$python" -m benchmarks.kernels "${common[@]}" --rounds 1 --only embedding \
    --out "$out/kernels_cpu.csv"
fi
stage host 90 "$python" -m benchmarks.device host "${common[@]}" "${small[@]}" --models "${models[0]}" \
  --out "$out/host_$device.csv" --profile "$out/profile.txt"

# ---------------------------------------------------------------------- 3 and on: how fast is training?

if [ "$device" = cuda ]; then
  stage training 450 "$python" -m benchmarks.training --suite gpu --dtype "$dtype" --models "${models[@]}" \
    --contenders "${contenders[@]}" --time-limit 20 --patience 4 --memory-here --out "$out"
else
  stage training 120 "$python" -m benchmarks.training --suite gpu --device cpu --dtype "$dtype" --rounds 2 --small \
    --models "${models[@]}" --contenders fastdp "fastdp layerwise" --out "$out"
fi

finish
