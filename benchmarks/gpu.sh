#!/usr/bin/env bash
# Everything a GPU is needed for, in one call of under ten minutes:
#
#   benchmarks/gpu.sh            build, device tests, compute-sanitizer, benchmarks of kernels, planner and training
#   benchmarks/gpu.sh --dry-run  without a GPU: prints the plan and runs what of it a CPU can, at small sizes
#   benchmarks/gpu.sh --plan     prints the plan only
#
# Settings: PYTHON (python3), OUT (folder of the results; benchmarks/data), FASTDP_COMMIT (of a tree without .git),
# SECONDS_IN_ALL (580), DTYPE (bfloat16), STAGES (those to run, of: build info tests sanitizer kernels planner training);
# MODELS and CONTENDERS of the training benchmark, with commas between them. All of the suite take several calls:
# STAGES="build training" MODELS=gpt2-large,llama-1b,gpt2-lora benchmarks/gpu.sh, and so on; rows are kept as they come.
#
# On a lent machine that gets a copy of the tree, with Python, torch, Triton, pytest, hypothesis, setuptools, pybind11
# and nvcc on it and no network, nothing has to be installed or carried; the command is, with the commit filled in,
#
#   FASTDP_COMMIT=<git rev-parse --short HEAD> bash benchmarks/gpu.sh
#
# with a limit of 600 s. fastdp runs from the tree: extensions are built in place, and where `fastdp.kernels` cannot be
# imported a link to kernels/ stands in for the installation and is removed at the end. Where Opacus is not installed its
# rows say "not applicable". Results: training_cuda.csv, kernels_cuda.csv, planner_cuda.csv, gpu_log.txt (all output) and
# gpu_summary.txt. A stage that fails or runs out of its time does not stop those that follow; the exit code is 1 then.
# shellcheck disable=SC2329  # functions called through bash -c and trap
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

mode=run
case "${1:-}" in
  "") ;;
  --dry-run) mode=dry ;;
  --plan) mode=plan ;;
  *) sed -n '2,7p' "$0" >&2; exit 2 ;;
esac

python=${PYTHON:-python3}
total=${SECONDS_IN_ALL:-580}
stages=${STAGES:-build info tests sanitizer kernels planner training}
dtype=${DTYPE:-bfloat16}
IFS=, read -ra models <<<"${MODELS:-gpt2,vit-b16,llama-lora,resnet50,bert}"
IFS=, read -ra contenders <<<"${CONTENDERS:-fastdp,fastdp layerwise,opacus hooks,opacus ghost}"
export PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
case $mode in
  run) out=${OUT:-benchmarks/data} device=cuda log=$out/gpu_log.txt && mkdir -p "$out" ;;
  dry) out=${OUT:-$(mktemp -d)} device=cpu log=$out/gpu_log.txt && mkdir -p "$out" ;;
  plan) out=${OUT:-benchmarks/data} device=cuda log=/dev/null ;;
esac
rows=()   # stage|result|seconds
failed=0

have_gpu() { "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }

# stage NAME LIMIT COMMAND...: run within the limit and what is left of the whole, and go on whatever comes of it
stage() {
  local name=$1 limit=$2 left=$((total - SECONDS)) begin=$SECONDS code result
  shift 2
  case " $stages " in *" ${name%% *} "*) ;; *) return ;; esac
  if [ "$left" -lt "$limit" ]; then limit=$left; fi
  printf '\n=== %s (at most %s s): %s\n' "$name" "$limit" "$*" | tee -a "$log"
  if [ "$mode" = plan ]; then return; fi
  if [ "$limit" -lt 5 ]; then rows+=("$name|no time left|0"); failed=1; return; fi
  timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$log"
  code=${PIPESTATUS[0]}
  case $code in
    0) result=passed ;;
    124 | 137) result="out of time"; failed=1 ;;
    *) result="FAILED ($code)"; failed=1 ;;
  esac
  rows+=("$name|$result|$((SECONDS - begin))")
}

# skip NAME WHY
skip() {
  case " $stages " in *" $1 "*) ;; *) return ;; esac
  printf '\n=== %s: left out, %s\n' "$1" "$2" | tee -a "$log"
  rows+=("$1|left out, $2|0")
}

# Extensions in place. An older setuptools refuses the licence line of pyproject.toml: then from links without that file.
build() {
  "$python" setup.py -q build_ext --inplace && return
  local tree
  tree=$(mktemp -d) || return
  ln -s "$PWD/setup.py" "$PWD/csrc" "$PWD/fastdp" "$tree/"
  (cd "$tree" && "$python" setup.py -q build_ext --inplace)
}

built() { # the extensions that must be there now
  "$python" -c 'import fastdp._C; print("fastdp._C loads")' || return
  if [ "$device" = cpu ] || ! command -v nvcc >/dev/null || [ ! -e csrc/bind_cuda.cpp ]; then return 0; fi
  "$python" -c 'import fastdp._CUDA; print("fastdp._CUDA loads")'
}

linked=
tidy() { if [ -n "$linked" ]; then rm -f fastdp/kernels; fi; }
trap tidy EXIT
link_kernels() {
  if ! "$python" -c 'import fastdp.kernels' 2>/dev/null && [ ! -e fastdp/kernels ]; then
    ln -s ../kernels fastdp/kernels && linked=yes
  fi
}

if [ "$mode" = run ] && ! have_gpu; then
  echo "benchmarks/gpu.sh: torch sees no GPU here; --dry-run runs what a CPU can" >&2
  exit 2
fi
: >"$log"
if [ "$mode" != plan ]; then link_kernels; fi
export -f build built
export python device

stage build 120 bash -c 'build && built'
stage info 20 "$python" -m fastdp info

tests=()
for file in tests/ops/test_device.py tests/ops/test_cuda_device.py tests/engine/test_engine_device.py; do
  if [ -e "$file" ]; then tests+=("$file"); fi
done
if [ ${#tests[@]} -gt 0 ]; then
  stage tests 110 "$python" -m pytest -p no:cacheprovider -q --durations=5 "${tests[@]}"
else
  skip tests "no device tests in this tree"
fi

if [ "$mode" != plan ] && ! command -v compute-sanitizer >/dev/null; then
  skip sanitizer "no compute-sanitizer here"
elif [ ! -e tests/ops/test_cuda_device.py ]; then
  skip sanitizer "no tests of the CUDA code in this tree"
else # every allocation of torch its own, so that a step beyond one is seen
  stage sanitizer 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --report-api-errors no --error-exitcode 99 \
    "$python" -m pytest -p no:cacheprovider -q tests/ops/test_cuda_device.py -k sanitizer
fi

if [ "$device" = cuda ]; then
  stage kernels 100 "$python" -m benchmarks.kernels --device cuda --dtype "$dtype" --out "$out/kernels_cuda.csv"
  stage planner 60 "$python" -m benchmarks.planner --device cuda --dtype "$dtype" --seconds 40 \
    --out "$out/planner_cuda.csv"
  stage training 400 "$python" -m benchmarks.training --suite gpu --dtype "$dtype" --models "${models[@]}" \
    --contenders "${contenders[@]}" --time-limit 20 --out "$out"
else
  stage kernels 60 "$python" -m benchmarks.kernels --dtype "$dtype" --rounds 1 --only embedding \
    --out "$out/kernels_cpu.csv"
  stage planner 60 "$python" -m benchmarks.planner --dtype "$dtype" --rounds 1 --seconds 5 --out "$out/planner_cpu.csv"
  stage training 120 "$python" -m benchmarks.training --suite gpu --device cpu --dtype "$dtype" --rounds 2 --small \
    --models gpt2 llama-lora --contenders fastdp "fastdp layerwise" --out "$out"
fi

if [ "$mode" = plan ]; then exit 0; fi
{
  printf '\n=== summary: %s s in all, results in %s\n' "$SECONDS" "$out"
  for row in "${rows[@]}"; do
    IFS='|' read -r name result spent <<<"$row"
    printf '%-10s %-44s %4s s\n' "$name" "$result" "$spent"
  done
} | tee -a "$log" | tee "$out/gpu_summary.txt"
exit "$failed"
