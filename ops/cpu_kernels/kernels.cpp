// Registers the kernels for CPU tensors. Their schemas stand in schemas.py.
#include "attention.h"
#include "conv.h"
#include "linear.h"
#include "mamba2_prefill.h"
#include "state_update.h"

STABLE_TORCH_LIBRARY_IMPL(hybrid_runtime, CPU, library) {
  library.impl("linear", TORCH_BOX(&hybrid_runtime::linear));
  library.impl("mamba2_step", TORCH_BOX(&hybrid_runtime::mamba2_step));
  library.impl("mamba2_prefill", TORCH_BOX(&hybrid_runtime::mamba2_prefill));
  library.impl("delta_step", TORCH_BOX(&hybrid_runtime::delta_step));
  library.impl("conv_step", TORCH_BOX(&hybrid_runtime::conv_step));
  library.impl("causal_conv", TORCH_BOX(&hybrid_runtime::causal_conv));
  library.impl("decode_attention", TORCH_BOX(&hybrid_runtime::decode_attention));
}
