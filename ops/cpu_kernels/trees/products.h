// Products of a head's state with the vectors of all nodes of its tree, and how both are laid out for them.
//
// Operands of a head are copied to float32 rows whose length is filled up with zeros: to whole blocks of channels along
// the axis that products sum over, to whole panels along the other. A row of a result depends on its own row of the
// operands alone, so that what one node holds never reaches another here.
#pragma once

#include "../lanes.h"
#include "../tensor_view.h"

namespace hybrid_runtime {

constexpr int64_t kChannelVectors = 4;                  // of 16 floats
constexpr int64_t kChannels = 16 * kChannelVectors;     // of a block of channels
constexpr int64_t kPanelValues = 32;                    // two vectors
constexpr int kSecondLevel = 2;                         // of cache: into the first, less would fit
constexpr int64_t kProductRows = 6;                     // rows of a product are computed by so many, or twice as many

inline int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

inline Floats multiply_add(Floats x, Floats y, Floats z) { return Lanes<float>::multiply_add(x, y, z); }

inline void put_floats(Floats x, float* to) { std::memcpy(to, &x, sizeof(x)); }

// Memory for floats, cut off piece by piece; pieces begin on cache lines.
class Scratch {
 public:
  explicit Scratch(int64_t num_floats) : vectors_(num_floats / 16 + kMaxPieces), next_(0) {}
  float* take(int64_t num_floats) {
    float* piece = reinterpret_cast<float*>(vectors_.data() + next_);
    next_ += rounded_up(num_floats, 16) / 16;
    return piece;
  }

 private:
  static constexpr int64_t kMaxPieces = 16;
  std::vector<Floats> vectors_;
  int64_t next_;
};

// Copies the last axis at (row, node, head) of a `[B, T, H, X]`.
inline void read_node(const View& view, int64_t row, int64_t node, int64_t head, float* out) {
  with_narrow_float_type(view.dtype, view.name, [&](auto zero) {
    using T = decltype(zero);
    const T* from = view.at<T>(row, node, head);
    const int64_t size = view.sizes[3], stride = view.strides[3];
    if (stride == 1) {
#pragma omp simd
      for (int64_t n = 0; n < size; ++n) out[n] = load<float>(from[n]);
    } else {
      for (int64_t n = 0; n < size; ++n) out[n] = load<float>(from[n * stride]);
    }
  });
}

// The entry at (row, node, head) of a `[B, T, H]`.
inline float read_node_scalar(const View& view, int64_t row, int64_t node, int64_t head) {
  float value = 0;
  with_narrow_float_type(view.dtype, view.name,
                         [&](auto zero) { value = load<float>(*view.at<decltype(zero)>(row, node, head)); });
  return value;
}

// The reverse of `read_node`, to a tensor whose last axis is contiguous.
inline void write_node(const float* from, const View& view, int64_t row, int64_t node, int64_t head) {
  with_narrow_float_type(view.dtype, view.name, [&](auto zero) {
    using T = decltype(zero);
    T* to = view.at<T>(row, node, head);
#pragma omp simd
    for (int64_t n = 0; n < view.sizes[3]; ++n) to[n] = store<T>(from[n]);
  });
}

// Zeros for all nodes of a head of a padding row.
inline void write_zeros(const View& view, int64_t row, int64_t head) {
  const std::vector<float> zeros(view.sizes[3], 0.0f);
  for (int64_t node = 0; node < view.sizes[1]; ++node) write_node(zeros.data(), view, row, node, head);
}

// e^x of an exponent of a decay, which is not above 0; NaN if it is not finite.
inline float decay_of(float x) { return exp_nonpositive(x) + (x - x); }
inline Floats decay_of(Floats x) {
#ifdef __AVX512F__
  // As exp_nonpositive, which the compiler would make three times as many instructions of.
  const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  const __m512 high = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), clamped);
  const Floats r = (Floats)_mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), high);
  Floats p = broadcast(1.0f / 5040.0f);
  for (const float term : {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f}) {
    p = multiply_add(p, r, broadcast(term));
  }
  return (Floats)_mm512_scalef_ps((__m512)p, n) + (x - x);
#else
  Floats decays;
  for (int lane = 0; lane < 16; ++lane) decays[lane] = decay_of(x[lane]);
  return decays;
#endif
}

// The decays of a node and head, from their logarithms; a scalar one fills all channels. There is room for a multiple
// of 16.
inline void read_decays(const View& log_a_BTHK, int64_t row, int64_t node, int64_t head, int64_t num_channels,
                        float* a_K) {
  read_node(log_a_BTHK, row, node, head, a_K);
  const int64_t num_decays = log_a_BTHK.sizes[3];
  for (int64_t n = 0; n < num_decays; n += 16) put_floats(decay_of(load_floats(a_K + n)), a_K + n);
  std::fill(a_K + num_decays, a_K + rounded_up(num_decays, 16), 0.0f);
  if (num_decays == 1) std::fill_n(a_K, num_channels, a_K[0]);
}

template <class S>
inline Floats load_up_to_16(const S* from, int64_t count) {
  if (count >= 16) return load_floats(from);
  S some[16] = {};
  std::memcpy(some, from, std::max<int64_t>(0, count) * sizeof(S));
  return load_floats(some);
}

// Rows of `dim` elements as panels of 32 rows: `[rows / 32, dim, 32]`, both sizes rounded up and filled with zeros.
// Sixteen rows are fetched from memory while those before them are transposed: `row_of` names as many behind the last.
template <class S, class RowOf>
inline void pack_rows(const RowOf& row_of, int64_t num_rows, int64_t dim, int64_t padded_dim, float* panels) {
  for (int64_t first = 0; first < rounded_up(num_rows, kPanelValues); first += 16) {
    float* panel = panels + first / kPanelValues * kPanelValues * padded_dim + first % kPanelValues;
    for (int64_t n = 0; n < padded_dim; n += 16) {
      Floats tile[16] = {};
      for (int64_t row = 0; row < std::min<int64_t>(16, num_rows - first); ++row) {
        __builtin_prefetch(row_of(first + row + 16) + n, 0, kSecondLevel);
        if (n < dim) tile[row] = load_up_to_16<S>(row_of(first + row) + n, dim - n);
      }
      transpose(tile);
      for (int64_t column = 0; column < 16; ++column) put_floats(tile[column], panel + (n + column) * kPanelValues);
    }
  }
}

// A state `[V, K]`. What is fetched at its end is the next head's.
template <class S>
inline void pack_state(const S* state_VK, int64_t value_dim, int64_t key_dim, int64_t padded_keys, float* panels) {
  pack_rows<S>([=](int64_t value) { return state_VK + value * key_dim; }, value_dim, key_dim, padded_keys, panels);
}

// Every loop over rows has to be unrolled, or the sums are no registers.
template <int64_t ROWS, bool ADDS>
inline void multiply_panel(const float* x_RK, const float* panel, int64_t padded_keys, float* out_RV, int64_t stride) {
  Floats sums[ROWS][2] = {};
  if constexpr (ADDS) {
#pragma GCC unroll 12
    for (int64_t row = 0; row < ROWS; ++row) {
      for (int part = 0; part < 2; ++part) sums[row][part] = load_floats(out_RV + row * stride + 16 * part);
    }
  }
  for (int64_t key = 0; key < padded_keys; ++key) {
    const Floats first = load_floats(panel + key * kPanelValues), second = load_floats(panel + key * kPanelValues + 16);
#pragma GCC unroll 12
    for (int64_t row = 0; row < ROWS; ++row) {
      const Floats x = broadcast(x_RK[row * padded_keys + key]);
      sums[row][0] = multiply_add(x, first, sums[row][0]);
      sums[row][1] = multiply_add(x, second, sums[row][1]);
    }
  }
#pragma GCC unroll 12
  for (int64_t row = 0; row < ROWS; ++row) {
    for (int part = 0; part < 2; ++part) put_floats(sums[row][part], out_RV + row * stride + 16 * part);
  }
}

// out_RV := x_RK Sᵀ, or that added to it, with S in panels; the number of rows is a multiple of `kProductRows`.
template <bool ADDS = false>
inline void multiply_panels(const float* x_RK, const float* panels, int64_t num_rows, int64_t padded_keys,
                            int64_t padded_values, float* out_RV) {
  for (int64_t value = 0; value < padded_values; value += kPanelValues) {
    const float* panel = panels + value * padded_keys;
    int64_t row = 0;
    for (; row + 2 * kProductRows <= num_rows; row += 2 * kProductRows) {
      multiply_panel<2 * kProductRows, ADDS>(x_RK + row * padded_keys, panel, padded_keys,
                                             out_RV + row * padded_values + value, padded_values);
    }
    if (row < num_rows) {
      multiply_panel<kProductRows, ADDS>(x_RK + row * padded_keys, panel, padded_keys,
                                         out_RV + row * padded_values + value, padded_values);
    }
  }
}

// For each of N pairs of sums and weights: sum_V += Σ_n weight[n] y[nodes[n]]_V over the nodes of a way.
template <int N>
inline void add_weighted(float* const (&sums_V)[N], const float* const (&weights)[N], const int32_t* nodes,
                         int64_t count, const float* y_TV, int64_t padded_values) {
  for (int64_t value = 0; value < padded_values; value += kPanelValues) {
    Floats sums[N][2];
    for (int m = 0; m < N; ++m) {
      for (int part = 0; part < 2; ++part) sums[m][part] = load_floats(sums_V[m] + value + 16 * part);
    }
    for (int64_t n = 0; n < count; ++n) {
      const float* y_V = y_TV + nodes[n] * padded_values + value;
      const Floats first = load_floats(y_V), second = load_floats(y_V + 16);
      for (int m = 0; m < N; ++m) {
        const Floats weight = broadcast(weights[m][n]);
        sums[m][0] = multiply_add(weight, first, sums[m][0]);
        sums[m][1] = multiply_add(weight, second, sums[m][1]);
      }
    }
    for (int m = 0; m < N; ++m) {
      for (int part = 0; part < 2; ++part) put_floats(sums[m][part], sums_V[m] + value + 16 * part);
    }
  }
}

}  // namespace hybrid_runtime
