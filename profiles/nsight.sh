#!/usr/bin/env bash
# Profiles a steady phase of serving with NVIDIA's tools; NSIGHT.md says what to look for.
#
#   profiles/nsight.sh systems [OPTIONS OF trace.py]     a timeline: OUT.nsys-rep, and tables of phases and kernels
#   profiles/nsight.sh compute KERNEL [OPTIONS]          all metrics of a kernel (a regular expression): OUT.ncu-rep
#
# Environment: PYTHON (python3), OUT (profiles/results/nsight), BATCH (rows of the decode that "compute" looks into, 8).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${OUT:-profiles/results/nsight}
usage="usage: $0 systems [OPTIONS] | compute KERNEL [OPTIONS]"
tool=${1:-}
shift || true

require() {
  command -v "$1" >/dev/null || { echo "$1 is not installed: $2" >&2; exit 3; }
}

case $tool in
  systems)
    require nsys "it comes with the CUDA toolkit, as Nsight Systems"
    # The range `steady` begins after the warm-up, with everything compiled and captured.
    export NSYS_NVTX_PROFILER_REGISTER_ONLY=0
    nsys profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node --sample=none --force-overwrite=true --output="$out" \
      --capture-range=nvtx --nvtx-capture=steady@hybrid_runtime --capture-range-end=stop \
      "$python" profiles/trace.py --no-profile --device cuda "$@"
    nsys stats --force-export=true --report nvtx_sum,nvtx_gpu_proj_sum,cuda_gpu_kern_sum,cuda_api_sum "$out.nsys-rep"
    ;;
  compute)
    require ncu "it comes with the CUDA toolkit, as Nsight Compute"
    [[ $# -gt 0 ]] || { echo "$usage" >&2; exit 2; }
    kernel=$1
    shift
    # Kernels of a captured step are launched as one graph: profile its nodes, not the graph as a whole.
    ncu --set full --graph-profiling node --kernel-name "regex:$kernel" --launch-count 3 --force-overwrite \
      --nvtx --nvtx-include "hybrid_runtime@run.decode.b${BATCH:-8}/" --export "$out" \
      "$python" profiles/trace.py --no-profile --device cuda "$@"
    ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac
