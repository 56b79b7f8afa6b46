// Registers the kernels of recurrent states and of convolutions over draft trees. Schemas stand in tree_schemas.py.
#include "conv_tree.h"
#include "delta_tree.h"
#include "folds.h"
#include "mamba2_tree.h"
#include "node_states.h"

STABLE_TORCH_LIBRARY_IMPL(hybrid_runtime_cpu, CPU, library) {
  library.impl("mamba2_tree", TORCH_BOX(&hybrid_runtime::mamba2_tree));
  library.impl("mamba2_fold", TORCH_BOX(&hybrid_runtime::mamba2_fold));
  library.impl("mamba2_tree_states", TORCH_BOX(&hybrid_runtime::mamba2_tree_states));
  library.impl("delta_tree", TORCH_BOX(&hybrid_runtime::delta_tree));
  library.impl("delta_fold", TORCH_BOX(&hybrid_runtime::delta_fold));
  library.impl("delta_tree_states", TORCH_BOX(&hybrid_runtime::delta_tree_states));
  library.impl("conv_tree", TORCH_BOX(&hybrid_runtime::conv_tree));
  library.impl("conv_fold", TORCH_BOX(&hybrid_runtime::conv_fold));
}
