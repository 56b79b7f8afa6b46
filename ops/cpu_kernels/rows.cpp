// Registers the kernels of linear layers, convolutions, state updates and draws. Schemas stand in schemas.py.
#include "conv.h"
#include "draw.h"
#include "linear.h"
#include "state_update.h"

STABLE_TORCH_LIBRARY_IMPL(hybrid_runtime_cpu, CPU, library) {
  library.impl("linear", TORCH_BOX(&hybrid_runtime::linear));
  library.impl("mamba2_step", TORCH_BOX(&hybrid_runtime::mamba2_step));
  library.impl("delta_step", TORCH_BOX(&hybrid_runtime::delta_step));
  library.impl("conv_step", TORCH_BOX(&hybrid_runtime::conv_step));
  library.impl("causal_conv", TORCH_BOX(&hybrid_runtime::causal_conv));
  library.impl("draw_tokens", TORCH_BOX(&hybrid_runtime::draw_tokens));
}
