#!/bin/bash
# All that a machine with several GPUs is to tell, one step after the other, each within a time limit; a step that fails
# does not keep the others from running. What it prints is kept in benchmarks/results/everything_GPUSx/STEP.log.
#
#   benchmarks/everything.sh 4                   all steps, on 4 GPUs (make bench-all GPUS=4)
#   benchmarks/everything.sh 4 bench simulated   these alone, where time on the machine is short
#
# doctor     what the machine is
# tests      the tests that need GPUs, a rank a GPU up to GPUS ranks; pairs side by side on four ranks are among them
# bench      every shape of the set core, tuned, beside ring and direct, 1 to 3 compute streams, chunks
# fp8-row    the set core in float8, scales row-wise
# fp8-tensor the same, scales tensor-wise
# more       the other shapes
# simulated  what the simulator predicts for those plans, beside what was measured
# async      asynchronous collectives behind a GEMM
# layers     blocks of layers, forward and backward
# ship       adds what was tuned to streamoverlap/tuned, for later runs of everybody
#
# With fewer GPUs than ranks several share one: tests and bench then show that the code works, and nothing of speed, so
# the other steps are left out.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 2

gpus=${1:-2}
steps=("${@:2}")
all=(doctor tests bench fp8-row fp8-tensor more simulated async layers ship)
PY=${PY:-python3}
export PYTHONPATH=$PWD

if ! [[ $gpus =~ ^[0-9]+$ ]] || ((gpus < 2)); then
    echo "everything.sh: GPUS is '$gpus'; expected an integer of at least 2" >&2
    exit 2
fi
for step in "${steps[@]}"; do
    if [[ " ${all[*]} " != *" $step "* ]]; then
        echo "everything.sh: step '$step'; expected one of ${all[*]}" >&2
        exit 2
    fi
done
found=$("$PY" -c 'import torch; print(torch.cuda.device_count())') || exit 2
if ((found == 0)); then
    echo "everything.sh: torch finds no GPU; expected $gpus" >&2
    exit 2
fi

results=benchmarks/results
logs=$results/everything_${gpus}x
prefix=$results/bench_${gpus}x
export STREAMOVERLAP_CACHE=${STREAMOVERLAP_CACHE:-$PWD/$logs/tuned}
mkdir -p "$logs"

if ((found < gpus)); then
    echo "everything.sh: $found GPUs for $gpus ranks: correctness alone"
    export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1
    ((${#steps[@]})) || steps=("${all[@]}")
    kept=()
    for step in "${steps[@]}"; do
        [[ $step =~ ^(doctor|tests|bench)$ ]] && kept+=("$step")
    done
    steps=(${kept[@]+"${kept[@]}"})
    bench=(--set small --only M64 --rounds 1 --out "$logs/shared")
else
    ((${#steps[@]})) || steps=("${all[@]}")
    bench=(--set core --plans --save --out "$prefix")
fi
overlap=("$PY" benchmarks/overlap.py --ranks "$gpus")
torchrun=("$PY" -m torch.distributed.run --standalone --nproc-per-node "$gpus")

run() { # STEP SECONDS COMMAND...
    local step=$1 seconds=$2
    shift 2
    echo "=== $step: $* (at most $seconds s)"
    timeout --kill-after=30 "$seconds" "$@" 2>&1 | tee "$logs/$step.log"
    local status=$?
    if ((status == 0)); then
        outcomes+=("$step: done")
    else
        outcomes+=("$step: FAILED, exit status $status, see $logs/$step.log")
        failed=1
    fi
}

outcomes=() failed=0
for step in ${steps[@]+"${steps[@]}"}; do
    case $step in
        doctor) run doctor 300 "$PY" -m streamoverlap doctor ;;
        tests) run tests 3600 "$PY" -m pytest -m gpu ;;
        bench) run bench 3000 "${overlap[@]}" "${bench[@]}" ;;
        fp8-*) run "$step" 1800 "${overlap[@]}" --set core --scaling "${step#fp8-}" --save --out "$prefix" ;;
        more) run more 1800 "${overlap[@]}" --set more small --save --out "${prefix}_more" ;;
        simulated) run simulated 600 "$PY" benchmarks/simulated.py "$prefix.json" ;;
        async) run async 600 "${torchrun[@]}" benchmarks/async_overlap.py ;;
        layers) run layers 900 "${torchrun[@]}" benchmarks/layers.py --out "$results/layers_${gpus}x.json" ;;
        ship) run ship 60 "$PY" benchmarks/ship.py "$STREAMOVERLAP_CACHE" ;;
    esac
done
printf '%s\n' "=== outcomes" ${outcomes[@]+"${outcomes[@]}"}
exit $failed
