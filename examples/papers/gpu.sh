#!/usr/bin/env bash
# The papers' experiments in full, in as many calls as they need:
#
#   examples/papers/gpu.sh DATA KEPT [MINUTES]   run, on a GPU if there is one, for so long (9) at most; the next call
#                                                goes on with what this one kept
#   examples/papers/gpu.sh --plan DATA KEPT      print the commands
#
# DATA: the folder of data (README.md here). KEPT: a folder of checkpoints, which the next call needs, and of rows
# (KEPT/rows), each written when its run ends. python examples/papers/report.py writes docs/papers.md from the rows in
# benchmarks/data, where these belong.
#
# The ViT grid is not among them: it keeps its features by itself (vit_grid.py --cache FILE).
#
# Settings: DEVICE (cuda where there is one), PYTHON (python3), ONLY (names of experiments, with commas between) and
# ARCHIVE (a file .tar.gz: KEPT is taken from it where there is no such folder, and packed into it at the end, to travel
# from one lent machine to the next).
#
# The exit code is 0 if all that was begun ended well or is kept, 1 if a command failed; others run all the same.
set -uo pipefail

plan=no
if [[ ${1:-} == --plan ]]; then plan=yes && shift; fi
if [[ $# -lt 2 || $# -gt 3 ]]; then
  sed -n '4,6p' "$0" >&2
  exit 2
fi
data=$(realpath -m "$1") kept=$(realpath -m "$2") minutes=${3:-9}
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3} archive=${ARCHIVE:-}
if [[ $plan == no && ! -d $kept && -n $archive && -f $archive ]]; then
  mkdir -p "$kept" && tar -xzf "$archive" -C "$kept" || exit 2
fi
device=${DEVICE:-}
if [[ -z $device && $plan == no ]]; then
  device=$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")') || exit 2
fi

# name, script, options; the cheapest and the most telling first
experiments=(
  "mnist-loss|dp_loss|--tasks mnist --seeds 5 --ablation --looks"
  "fashion-loss|dp_loss|--tasks fashion --seeds 5 --ablation --looks"
  "mnist|mnist_cnn|--full"
  "cifar10-loss|dp_loss|--tasks cifar10 --seeds 5 --ablation --looks"
  "cifar10|cifar10_cnn|--full"
  "wine|wine|--full"
  "housing|housing|--full"
  "snli|snli|--full"
  "errors-loss|dp_loss|--tasks mnist fashion cifar10 --full"
  "scatter-loss|dp_loss|--tasks scatter-mnist scatter-fashion scatter-cifar10 --seeds 5" # needs kymatio
)
for value in 0 2 4 6 8 10; do # the loss paper's Table 7
  experiments+=("threshold-$value-loss|dp_loss|--tasks fashion --losses dploss --seeds 5 --threshold $value")
done
for value in 1 11 51 101 151 200; do
  experiments+=("beta-$value-loss|dp_loss|--tasks fashion --losses dploss --seeds 5 --beta $value")
done

begun=$SECONDS failed=0 child=
if ! allowed=$(awk -v m="$minutes" 'BEGIN { if (m !~ /^[0-9]*\.?[0-9]+$/ || m <= 0) exit 1; printf "%d", 60 * m }'); then
  echo "MINUTES must be a positive number, not $minutes" >&2
  exit 2
fi
left() { echo $((allowed - SECONDS + begun)); }
stop() { # ended from outside: so is the experiment, which goes on from its last checkpoint
  [[ -n $child ]] && kill -TERM "$child" 2>/dev/null && wait "$child"
  exit 143
}
trap stop TERM INT HUP
if [[ $plan == no ]]; then
  mkdir -p "$kept"
  exec 9>"$kept/.lock" # the experiments hold it, too, should this script be killed
  if command -v flock >/dev/null && ! flock -n 9; then
    echo "another call works on $kept: wait for its end" >&2
    exit 2
  fi
fi

for line in "${experiments[@]}"; do
  IFS='|' read -r name script options <<<"$line"
  if [[ -n ${ONLY:-} && ,$ONLY, != *,$name,* ]]; then continue; fi
  read -ra more <<<"$options"
  words=("$python" "examples/papers/$script.py" --data "$data" --device "${device:-cuda}"
    --checkpoints "$kept/checkpoints/$script" --out "$kept/rows/papers_$script.csv" "${more[@]}")
  if [[ $plan == yes ]]; then
    echo "${words[*]}"
    continue
  fi
  seconds=$(left)
  if ((seconds < 20)); then
    echo "the time is over before $name: the same call goes on"
    break
  fi
  mkdir -p "$kept/rows" "$kept/checkpoints"
  echo "== $name ($seconds s left): ${words[*]}"
  timeout --signal=TERM "$seconds" "${words[@]}" &
  child=$!
  wait "$child"
  code=$? child=
  if ((code == 124)); then
    echo "$name was ended by the clock: it goes on from its last checkpoint"
  elif ((code != 0)); then
    echo "$name failed with exit code $code" >&2
    failed=1
  fi
done
if [[ $plan == no && -n $archive ]]; then
  tar -czf "$archive.new" -C "$kept" --exclude=./.lock . && mv "$archive.new" "$archive" || failed=1
fi
exit $failed
