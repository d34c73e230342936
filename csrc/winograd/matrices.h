// The one-dimensional Winograd / Cook-Toom transforms of F(m,3), for scalars or any vector type with + - and * float.
//
//   Y = A^T [ (G g) . (B^T d) ],  d: m+2 inputs, g: 3 taps, Y: m outputs; applied to rows and columns in two
//   dimensions.
//   dg = G^T [ (A dY) . (B^T d) ] is its gradient with respect to g: the transposed transforms, where there are any.
//
// F(2,3): points 0, 1, -1, inf.   F(4,3): points 0, +-sqrt(2)/2, +-sqrt(2), inf: the choice of points that keeps the
// matrices' norms, and with them the rounding error, smallest (docs/concepts/numerics.md derives both).
#pragma once

#include "device/numeric.h"

namespace fastconv::winograd {

template <int m>
struct Transform;

template <>
struct Transform<2> {
  static constexpr int alpha = 4;
  // Largest absolute row sum of B^T: |V| <= gain^2 * max|d| in two dimensions.
  static constexpr float input_gain = 2.0f;

  template <typename Value>
  FASTCONV_HOST_DEVICE static void input(const Value (&d)[4], Value (&v)[4]) {
    v[0] = d[0] - d[2];
    v[1] = d[1] + d[2];
    v[2] = d[2] - d[1];
    v[3] = d[3] - d[1];
  }
  template <typename Value>
  FASTCONV_HOST_DEVICE static void filter(const Value (&g)[3], Value (&u)[4]) {
    const Value even = (g[0] + g[2]) * 0.5f, odd = g[1] * 0.5f;
    u[0] = g[0];
    u[1] = even + odd;
    u[2] = even - odd;
    u[3] = g[2];
  }
  template <typename Value>
  FASTCONV_HOST_DEVICE static void output(const Value (&m)[4], Value (&y)[2]) {
    y[0] = m[0] + m[1] + m[2];
    y[1] = m[1] - m[2] + m[3];
  }
};

template <>
struct Transform<4> {
  static constexpr int alpha = 6;
  static constexpr float input_gain = 5.1213204f;   // 2 + 1 + sqrt(2) + sqrt(2)/2
  static constexpr float a = 0.70710678118654752f;  // sqrt(2)/2
  static constexpr float b = 1.41421356237309505f;  // sqrt(2)

  template <typename Value>
  FASTCONV_HOST_DEVICE static void input(const Value (&d)[6], Value (&v)[6]) {
    const Value even_a = d[4] - d[2] * 2.0f, odd_a = d[3] * a - d[1] * b;
    const Value even_b = d[4] - d[2] * 0.5f, odd_b = d[3] * b - d[1] * a;
    v[0] = d[0] - d[2] * 2.5f + d[4];
    v[1] = even_a + odd_a;
    v[2] = even_a - odd_a;
    v[3] = even_b + odd_b;
    v[4] = even_b - odd_b;
    v[5] = d[1] - d[3] * 2.5f + d[5];
  }
  template <typename Value>
  FASTCONV_HOST_DEVICE static void filter(const Value (&g)[3], Value (&u)[6]) {
    const Value even_a = (g[0] + g[2] * 0.5f) * (-2.0f / 3.0f), odd_a = g[1] * (-2.0f / 3.0f * a);
    const Value even_b = (g[0] + g[2] * 2.0f) * (1.0f / 6.0f), odd_b = g[1] * (1.0f / 6.0f * b);
    u[0] = g[0];
    u[1] = even_a + odd_a;
    u[2] = even_a - odd_a;
    u[3] = even_b + odd_b;
    u[4] = even_b - odd_b;
    u[5] = g[2];
  }
  template <typename Value>
  FASTCONV_HOST_DEVICE static void output(const Value (&m)[6], Value (&y)[4]) {
    const Value even_a = m[1] + m[2], odd_a = m[1] - m[2];
    const Value even_b = m[3] + m[4], odd_b = m[3] - m[4];
    y[0] = m[0] + even_a + even_b;
    y[1] = odd_a * a + odd_b * b;
    y[2] = even_a * 0.5f + even_b * 2.0f;
    y[3] = odd_a * (a * 0.5f) + odd_b * (b * 2.0f) + m[5];
  }
  // A dY, and G^T of its products with the input.
  static constexpr float output_gain = 7.2426407f;  // largest absolute row sum of A: 3 + 3 sqrt(2)
  template <typename Value>
  FASTCONV_HOST_DEVICE static void output_transposed(const Value (&y)[4], Value (&m)[6]) {
    const Value even_a = y[0] + y[2] * 0.5f, odd_a = y[1] * a + y[3] * (a * 0.5f);
    const Value even_b = y[0] + y[2] * 2.0f, odd_b = y[1] * b + y[3] * (b * 2.0f);
    m[0] = y[0];
    m[1] = even_a + odd_a;
    m[2] = even_a - odd_a;
    m[3] = even_b + odd_b;
    m[4] = even_b - odd_b;
    m[5] = y[3];
  }
  template <typename Value>
  FASTCONV_HOST_DEVICE static void filter_transposed(const Value (&u)[6], Value (&g)[3]) {
    const Value even_a = u[1] + u[2], odd_a = u[1] - u[2];
    const Value even_b = u[3] + u[4], odd_b = u[3] - u[4];
    g[0] = u[0] - even_a * (2.0f / 3.0f) + even_b * (1.0f / 6.0f);
    g[1] = odd_b * (1.0f / 6.0f * b) - odd_a * (2.0f / 3.0f * a);
    g[2] = (even_b - even_a) * (1.0f / 3.0f) + u[5];
  }
};

// G g G^T.
template <int m>
FASTCONV_HOST_DEVICE void transform_filter(const float (&g)[3][3], float (&u)[m + 2][m + 2]) {
  constexpr int alpha = m + 2;
  float half[alpha][3];
#pragma unroll
  for (int s = 0; s < 3; ++s) {
    const float column[3] = {g[0][s], g[1][s], g[2][s]};
    float result[alpha];
    Transform<m>::filter(column, result);
#pragma unroll
    for (int i = 0; i < alpha; ++i) half[i][s] = result[i];
  }
#pragma unroll
  for (int i = 0; i < alpha; ++i) Transform<m>::filter(half[i], u[i]);
}

}  // namespace fastconv::winograd
