// Tensors as the kernels see them, and the checks that every call passes before a kernel runs.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "numbers.h"

namespace hybrid_runtime {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws what reaches Python as a ValueError.
template <class... Parts>
inline void require(bool holds, const Parts&... parts) {
  if (__builtin_expect(!holds, 0)) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::invalid_argument(message.str());
  }
}

constexpr int64_t kAny = -1;
constexpr int kMaxRank = 4;

// Address, dtype, sizes and strides (in elements) of a CPU tensor that somebody else keeps alive.
struct View {
  const char* name = nullptr;
  char* data = nullptr;
  ScalarType dtype = ScalarType::Float;
  std::array<int64_t, kMaxRank> sizes{};
  std::array<int64_t, kMaxRank> strides{};

  template <class T>
  T* at(int64_t i = 0, int64_t j = 0, int64_t k = 0) const {
    return reinterpret_cast<T*>(data) + i * strides[0] + j * strides[1] + k * strides[2];
  }
};

// `shape` holds the size of every axis, or kAny.
inline View view_of(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  require(tensor.is_cpu(), name, " must be a CPU tensor");
  require(tensor.dim() == static_cast<int64_t>(shape.size()), name, " must have ", shape.size(), " axes, not ",
          tensor.dim());
  View view;
  view.name = name;
  view.data = static_cast<char*>(tensor.data_ptr());
  view.dtype = tensor.scalar_type();
  int axis = 0;
  for (int64_t expected : shape) {
    int64_t size = tensor.size(axis);
    require(expected == kAny || expected == size, name, " must have size ", expected, " on axis ", axis, ", not ",
            size);
    view.sizes[axis] = size;
    view.strides[axis] = tensor.stride(axis);
    ++axis;
  }
  return view;
}

inline void require_dtype(const View& view, ScalarType dtype, const char* dtype_name) {
  require(view.dtype == dtype, view.name, " must be of dtype ", dtype_name);
}

inline void require_inner_contiguous(const View& view, int rank, int num_leading) {
  int64_t expected = 1;
  for (int axis = rank - 1; axis >= num_leading; --axis) {
    require(view.sizes[axis] <= 1 || view.strides[axis] == expected, view.name, " must be contiguous behind its first ",
            num_leading, " axes");
    expected *= view.sizes[axis];
  }
}

inline void require_groups(const View& view, int64_t num_groups, int64_t num_heads) {
  require(num_groups > 0 && num_heads % num_groups == 0, view.name, " has ", num_groups, " groups for ", num_heads,
          " heads");
}

// The slots [B] of a pool of `num_slots`.
inline std::vector<int64_t> checked_slots(const Tensor& slots, int64_t num_slots) {
  const View slots_B = view_of(slots, "slots_B", {kAny});
  require_dtype(slots_B, ScalarType::Long, "int64");
  std::vector<int64_t> checked(slots_B.sizes[0]);
  for (size_t row = 0; row < checked.size(); ++row) {
    checked[row] = *slots_B.at<int64_t>(row);
    require(0 <= checked[row] && checked[row] < num_slots, "slots_B[", row, "] is ", checked[row],
            ", which is no slot of a pool of ", num_slots);
  }
  return checked;
}

// Calls `function` with a value of the element type of `dtype`: float, BFloat or double.
template <class F>
inline void with_float_type(ScalarType dtype, const char* name, const F& function) {
  if (dtype == ScalarType::Float) {
    function(float{});
  } else if (dtype == ScalarType::BFloat16) {
    function(BFloat{});
  } else if (dtype == ScalarType::Double) {
    function(double{});
  } else {
    require(false, name, " must be of dtype float32, bfloat16 or float64");
  }
}

// As `with_float_type`, without double.
template <class F>
inline void with_narrow_float_type(ScalarType dtype, const char* name, const F& function) {
  if (dtype == ScalarType::Float) {
    function(float{});
  } else {
    require(dtype == ScalarType::BFloat16, name, " must be of dtype float32 or bfloat16");
    function(BFloat{});
  }
}

// Copies the last axis at (i, j) of a tensor of `rank` axes, of any float dtype and stride, to `out`.
template <class C>
inline void read_last_axis(const View& view, int rank, int64_t i, int64_t j, C* out) {
  with_float_type(view.dtype, view.name, [&](auto zero) {
    using T = decltype(zero);
    const T* from = rank == 3 ? view.at<T>(i, j) : rank == 2 ? view.at<T>(i) : view.at<T>();
    const int64_t size = view.sizes[rank - 1], stride = view.strides[rank - 1];
    if (stride == 1) {
#pragma omp simd
      for (int64_t n = 0; n < size; ++n) out[n] = load<C>(from[n]);
    } else {
      for (int64_t n = 0; n < size; ++n) out[n] = load<C>(from[n * stride]);
    }
  });
}

// The reverse, to a tensor whose last axis is contiguous.
template <class C>
inline void write_last_axis(const C* from, const View& view, int rank, int64_t i, int64_t j) {
  with_float_type(view.dtype, view.name, [&](auto zero) {
    using T = decltype(zero);
    T* to = rank == 3 ? view.at<T>(i, j) : rank == 2 ? view.at<T>(i) : view.at<T>();
    const int64_t size = view.sizes[rank - 1];
#pragma omp simd
    for (int64_t n = 0; n < size; ++n) to[n] = store<T>(from[n]);
  });
}

template <class C>
inline C read_scalar(const View& view, int64_t i, int64_t j = 0) {
  C value{};
  with_float_type(view.dtype, view.name, [&](auto zero) { value = load<C>(*view.at<decltype(zero)>(i, j)); });
  return value;
}

// How many units of `bytes_per_unit` a thread must have before a second thread pays.
inline int64_t grain_for(int64_t bytes_per_unit) {
  return std::max<int64_t>(1, (64 << 10) / std::max<int64_t>(1, bytes_per_unit));
}

}  // namespace hybrid_runtime
