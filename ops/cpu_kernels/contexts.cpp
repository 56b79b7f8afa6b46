// Registers the kernels that walk along a context or a sequence. Schemas stand in schemas.py.
#include "attention.h"
#include "mamba2_prefill.h"

STABLE_TORCH_LIBRARY_IMPL(hybrid_runtime_cpu, CPU, library) {
  library.impl("decode_attention", TORCH_BOX(&hybrid_runtime::decode_attention));
  library.impl("mamba2_prefill", TORCH_BOX(&hybrid_runtime::mamba2_prefill));
}
