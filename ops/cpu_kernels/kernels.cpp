// Registers the kernels for CPU tensors. Their schemas stand in schemas.py.
#include "attention.h"
#include "linear.h"
#include "state_update.h"

STABLE_TORCH_LIBRARY_IMPL(hybrid_runtime, CPU, library) {
  library.impl("linear", TORCH_BOX(&hybrid_runtime::linear));
  library.impl("mamba2_step", TORCH_BOX(&hybrid_runtime::mamba2_step));
  library.impl("delta_step", TORCH_BOX(&hybrid_runtime::delta_step));
  library.impl("decode_attention", TORCH_BOX(&hybrid_runtime::decode_attention));
}
