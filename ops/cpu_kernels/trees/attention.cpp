// Registers attention over draft trees. Its schema stands in tree_schemas.py.
#include "tree_attention.h"

STABLE_TORCH_LIBRARY_IMPL(hybrid_runtime_cpu, CPU, library) {
  library.impl("tree_attention", TORCH_BOX(&hybrid_runtime::tree_attention));
}
