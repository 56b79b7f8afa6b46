// Registers the kernels that multiply rows with panels: the linear layer with packed weights (its schema stands in
// packed.py) and the attention of a prefill.
#include "packed_linear.h"
#include "prefill_attention.h"

namespace hybrid_runtime {

// x [..., I], packed [panels, pairs, 32, 2] (see packed.py), bias [O], all bfloat16; returns [..., O].
Tensor packed_linear(const Tensor& x, const Tensor& packed, int64_t num_outputs, const std::optional<Tensor>& bias) {
  const View w = view_of(packed, "packed", {kAny, kAny, kPanelOutputs, 2});
  require_dtype(w, ScalarType::BFloat16, "bfloat16");
  require_inner_contiguous(w, 4, 0);
  require(num_outputs >= 0 && w.sizes[0] == (num_outputs + kPanelOutputs - 1) / kPanelOutputs, "packed has ",
          w.sizes[0], " panels, which does not fit ", num_outputs, " outputs");
  require(x.is_cpu(), "x must be a CPU tensor");
  require(x.scalar_type() == ScalarType::BFloat16, "x must be of dtype bfloat16");
  require(x.dim() >= 1, "x must have an axis");
  const int64_t num_inputs = x.size(x.dim() - 1);
  require((num_inputs + 1) / 2 == w.sizes[1], "the last axis of x has size ", num_inputs, ", which does not fit the ",
          w.sizes[1], " pairs of packed");
  require(num_inputs <= 1 || x.stride(x.dim() - 1) == 1, "x must be contiguous on its last axis");
  Tensor bias_O;
  if (bias) {
    require_dtype(view_of(*bias, "bias_O", {num_outputs}), ScalarType::BFloat16, "bfloat16");
    bias_O = torch::stable::contiguous(*bias);
  }

  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = num_outputs;
  Tensor y = torch::stable::new_empty(x, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()));
  int64_t num_rows = 1;
  for (int64_t axis = 0; axis + 1 < x.dim(); ++axis) num_rows *= x.size(axis);
  if (num_rows == 0 || num_outputs == 0) return y;
  const bool evenly_strided = x.dim() <= 2;
  const Tensor rows = evenly_strided ? x : torch::stable::contiguous(x);
  run_packed_linear({static_cast<const BFloat*>(rows.data_ptr()), x.dim() == 2 ? x.stride(0) : num_inputs, w.data,
                     bias ? static_cast<const BFloat*>(bias_O.data_ptr()) : nullptr,
                     static_cast<BFloat*>(y.data_ptr()), num_rows, num_inputs, w.sizes[1], num_outputs});
  return y;
}

}  // namespace hybrid_runtime

STABLE_TORCH_LIBRARY_IMPL(hybrid_runtime_cpu, CPU, library) {
  library.impl("packed_linear", TORCH_BOX(&hybrid_runtime::packed_linear));
  library.impl("prefill_attention", TORCH_BOX(&hybrid_runtime::prefill_attention));
}
