// The kernels of linear_cuda.h; see gdn_kernels.h for what a kernel is.
#pragma once

#include "chunk.h"
#include "feature_map.h"
#include "linear_cuda.h"

namespace graft::cuda {

// What lies at a chunk's border: S [features, value_dim], then z [features].
template <class T>
struct LinearBorder {
  GlobalRows<T> s, z;

  GRAFT_BOTH LinearBorder(const LinearShape& shape, T* borders, int64_t ordinal)
      : s(borders + ordinal * shape.state_size(), shape.value_dim, shape.features,
          shape.value_dim) {
    if (shape.normalise)
      z = {s.data + static_cast<int64_t>(shape.features) * shape.value_dim, 1, shape.features, 1};
  }
};

// Per chunk, from forward's or backward's scratch: phi_q and phi_k [64, features], for each token p
// and D_n dt; backward also the softmax before its floor (`maps`), 1 / norm and the gradient of
// norm, and the state's gradient at the chunk's end.
struct LinearKept {
  float *phi_q, *phi_k, *from_start, *weight_end;
  float *soft_q = nullptr, *soft_k = nullptr, *inverse_norm = nullptr, *d_norm = nullptr,
        *d_borders = nullptr;

  LinearKept(const LinearShape& s, float* scratch, bool backward) {
    const int64_t tokens = s.all_chunks() * kChunk;
    const auto take = [&](int64_t n) {
      float* const out = scratch;
      scratch += n;
      return out;
    };
    phi_q = take(tokens * s.features);
    phi_k = take(tokens * s.features);
    from_start = take(tokens);
    weight_end = take(tokens);
    if (!backward) return;
    if (s.maps) {
      soft_q = take(tokens * s.features);
      soft_k = take(tokens * s.features);
    }
    inverse_norm = take(tokens);
    d_norm = take(tokens);
    d_borders = take(s.all_chunks() * s.state_size());
  }
};

// ------------------------------------------------------------------ forward

// phi_q, phi_k and what the gates come to. Call: LinearForward or LinearBackward.
template <class Call>
struct LinearFeatures {
  LinearShape shape;
  Call io;
  LinearKept out;

  struct Places {
    Carver carve;
    GatePlaces gates{carve};
    StagingPlaces staging{carve};
    FeaturePlaces features{carve};
    GRAFT_BOTH Places() {}
  };
  Grid grid() const { return {shape.chunks(), shape.heads, shape.batch}; }
  int shared() const { return Places().carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places;
    const ChunkAt chunk(shape, block.x(), block.y(), block.z());
    const auto gates = gates_of(block, places.gates);
    load_gates(block, chunk.of(io.g, 1), chunk.of(io.dt, 1), chunk.n, gates);
    block.phase([&](int t) {
      if (t >= kChunk) return;
      chunk.kept(out.from_start, kChunk, 1).store(t, 0, gates.from_start(t));
      chunk.kept(out.weight_end, kChunk, 1).store(t, 0, gates.to_end(t) * gates.weight(t));
    });
    one(block, places, chunk, io.q, io.maps.weight_q, io.maps.bias_q, out.phi_q, out.soft_q);
    one(block, places, chunk, io.k, io.maps.weight_k, io.maps.bias_k, out.phi_k, out.soft_k);
  }

 private:
  template <class Block, class E>
  GRAFT_DEVICE void one(Block& block, const Places& places, const ChunkAt& chunk,
                        const Tensor<const E>& rows, const float* weight, const float* bias,
                        float* phi, float* soft) const {
    FeatureRows to{chunk.kept(phi, kChunk, shape.features), {}};
    if (soft != nullptr) to.soft = chunk.kept(soft, kChunk, shape.features);
    const auto u = chunk.of(rows, shape.head_dim);
    if (shape.maps) {
      const HeadMap map(weight, bias, chunk.head, shape.features / 2, shape.head_dim);
      features(block, places.staging, places.features, u, map, io.floor, to);
      return;
    }
    block.phase([&](int t) {
      for_row_shares(t, shape.features,
                     [&](int, int i, int c) { to.phi.store(i, c, u.load(i, c)); });
    });
  }
};

// A square of 64 features by 64 value columns of a head's state, chunk after chunk, in registers;
// blocks of the first value columns take z along. Forward: rows are phi_k, columns v, from the
// first chunk on. Backward: rows are phi_q, columns d_o, from the last.
template <class E>
struct LinearStates {
  LinearShape shape;
  bool backward;
  const float* rows;  // per chunk [64, features]
  Tensor<const E> columns;
  const float* total;  // p of each token
  // The weights of a token's contribution: to S, the product of two; to z. nullptr: 1.
  const float *weight, *second_weight, *z_weight;
  const float* state_in;
  float* state_out;
  float* borders;

  struct Places {
    Carver carve;
    StagingPlaces staging{carve};
    Place weight = carve.row(kChunk), z_weight = carve.row(kChunk), z = carve.row(kChunk);
    GRAFT_BOTH Places() {}
  };
  Grid grid() const {
    return {blocks_of(shape.features, kChunk) * blocks_of(shape.value_dim, kChunk), shape.heads,
            shape.batch};
  }
  int shared() const { return Places().carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places;
    const int row_tiles = blocks_of(shape.features, kChunk);
    const int row = block.x() % row_tiles * kChunk, column = block.x() / row_tiles * kChunk;
    const bool has_z = shape.normalise && column == 0;
    const int64_t at =
        (static_cast<int64_t>(block.z()) * shape.heads + block.y()) * shape.state_size();
    const auto z = tile(block, places.z);
    typename Block::template PerThread<Sums<4>> x(block);
    GlobalRows<const float> in;
    if (state_in != nullptr)
      in = {state_in + at, shape.state_row(), shape.features, shape.state_row()};
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        const bool inside = in.data != nullptr && column + j < shape.value_dim;
        x[t].at[r][c] = inside ? in.load(row + i, column + j) : 0.0f;
      });
      if (has_z && t < kChunk)
        z.set(t, in.data == nullptr ? 0.0f : in.load(row + t, shape.value_dim));
    });
    for (int step = 0; step < shape.chunks(); ++step) {
      const int index = backward ? shape.chunks() - 1 - step : step;
      const ChunkAt chunk(shape, index, block.y(), block.z());
      const LinearBorder<float> border(shape, borders, chunk.ordinal);
      block.phase([&](int t) {
        store_sums(t, x[t], border.s, row, column);
        if (has_z && t < kChunk) border.z.store(row + t, 0, z(t));
      });
      advance(block, places, chunk, row, column, has_z, x);
    }
    if (state_out == nullptr) return;
    const GlobalRows<float> out(state_out + at, shape.state_row(), shape.features,
                                shape.state_row());
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        if (column + j < shape.value_dim) out.store(row + i, column + j, x[t].at[r][c]);
      });
      if (has_z && t < kChunk) out.store(row + t, shape.value_dim, z(t));
    });
  }

 private:
  template <class Block, class X>
  GRAFT_DEVICE void advance(Block& block, const Places& places, const ChunkAt& chunk, int row,
                            int column, bool has_z, X& x) const {
    const auto left = tile(block, places.staging.left_inner),
               right = tile(block, places.staging.right);
    const auto w = tile(block, places.weight), w_z = tile(block, places.z_weight),
               z = tile(block, places.z);
    const auto of_token = [&](const float* numbers, int t) {
      return numbers == nullptr ? 1.0f : chunk.kept(numbers, kChunk, 1).load(t, 0);
    };
    const auto from = chunk.kept(rows, kChunk, shape.features);
    const float end = of_token(total, chunk.n - 1);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int, int) { x[t].at[r][c] *= end; });
      if (t >= kChunk) return;
      w.set(t, of_token(weight, t) * of_token(second_weight, t));
      w_z.set(t, of_token(weight, t) * of_token(z_weight, t));
    });
    accumulate<Left::kByInner, 4>(block, by_inner(left, from, row),
                                  by_inner(right, chunk.of(columns, shape.value_dim), column,
                                           ByRow<typename Block::Memory>{w}),
                                  kChunk, x);
    block.phase([&](int t) {
      if (!has_z || t >= kChunk) return;
      float sum = end * z(t);
      GRAFT_UNROLL_LITTLE
      for (int j = 0; j < kChunk; ++j) sum += w_z(j) * from.load(j, row + t);
      z.set(t, sum);
    });
  }
};

template <class E>
struct LinearOutputs {
  LinearShape shape;
  LinearForward<E> io;
  LinearKept in;

  struct Places {
    Carver carve;
    GatePlaces gates{carve};
    StagingPlaces staging{carve};
    FeaturePlaces rows{carve};
    GRAFT_BOTH Places() {}
  };
  Grid grid() const { return {shape.chunks(), shape.heads, shape.batch}; }
  int shared() const { return Places().carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places;
    const ChunkAt chunk(shape, block.x(), block.y(), block.z());
    const auto gates = gates_of(block, places.gates);
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const auto phi_q = chunk.kept(static_cast<const float*>(in.phi_q), kChunk, shape.features);
    const auto phi_k = chunk.kept(static_cast<const float*>(in.phi_k), kChunk, shape.features);
    load_gates(block, chunk.of(io.g, 1), chunk.of(io.dt, 1), chunk.n, gates);

    typename Block::template PerThread<Sums<4>> x(block);
    accumulate<Left::kByRow, 4>(block, by_row(left, phi_q), transposed(right, phi_k),
                                shape.features, x);
    const auto read = gates.decay;  // w_ij
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        read.set(i, j, gates.decay(i, j) * x[t].at[r][c] * gates.weight(j));
      });
    });
    const LinearBorder<const float> border(shape, io.borders, chunk.ordinal);
    if (shape.normalise) norms(block, places, chunk, phi_q, border);
    const auto norm = tile(block, places.rows.row);
    for (int first = 0; first < shape.value_dim; first += kChunk) {
      block.phase([&](int t) { x[t] = {}; });
      accumulate<Left::kByRow, 4>(
          block, by_row(left, phi_q, ByRow<typename Block::Memory>{gates.from_start}),
          by_inner(right, border.s, first), shape.features, x);
      accumulate<Left::kByRow, 4>(block, resident<Left::kByRow>(read),
                                  by_inner(right, chunk.of(io.v, shape.value_dim), first), kChunk,
                                  x);
      block.phase([&](int t) {
        if (shape.normalise)
          for_elements<4>(t, [&](int r, int c, int i, int) { x[t].at[r][c] /= norm(i); });
        store_sums(t, x[t], chunk.of(io.o, shape.value_dim), 0, first);
        if (io.o_kept.data != nullptr)
          store_sums(t, x[t], chunk.of(io.o_kept, shape.value_dim), 0, first);
      });
    }
  }

 private:
  // norm_i = p_i z . phi_q_i + sum_{j<=i} w_ij + eps
  template <class Block>
  GRAFT_DEVICE void norms(Block& block, const Places& places, const ChunkAt& chunk,
                          GlobalRows<const float> phi_q,
                          const LinearBorder<const float>& border) const {
    const auto gates = gates_of(block, places.gates);
    const auto norm = tile(block, places.rows.row);
    typename Block::template PerThread<RowParts> part(block);
    block.phase([&](int t) {
      for_row_shares(t, shape.features, [&](int r, int i, int f) {
        part[t].at[r] += gates.from_start(i) * phi_q.load(i, f) * border.z.load(f, 0);
      });
      for_row_shares(t, kChunk, [&](int r, int i, int j) { part[t].at[r] += gates.decay(i, j); });
    });
    sum_rows(block, part, tile(block, places.rows.room), norm);
    block.phase([&](int t) {
      if (t >= kChunk) return;
      norm.set(t, norm(t) + io.eps);
      chunk.kept(io.norm, kChunk, 1).store(t, 0, norm(t));
    });
  }
};

// ------------------------------------------------------------------ backward

// 1 / norm_i and d_norm_i = -(d_o_i . o_i) / norm_i; 1 and 0 without a normaliser.
template <class E>
struct LinearNormGradients {
  LinearShape shape;
  LinearBackward<E> io;
  LinearKept out;

  struct Places {
    Carver carve;
    FeaturePlaces rows{carve};
    GRAFT_BOTH Places() {}
  };
  Grid grid() const { return {shape.chunks(), shape.heads, shape.batch}; }
  int shared() const { return Places().carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places;
    const ChunkAt chunk(shape, block.x(), block.y(), block.z());
    const auto dot = tile(block, places.rows.row);
    const auto d_o = chunk.of(io.d_o, shape.value_dim);
    const auto o = chunk.of(io.o, shape.value_dim);
    typename Block::template PerThread<RowParts> part(block);
    block.phase([&](int t) {
      if (!shape.normalise) return;
      for_row_shares(t, shape.value_dim,
                     [&](int r, int i, int c) { part[t].at[r] += d_o.load(i, c) * o.load(i, c); });
    });
    sum_rows(block, part, tile(block, places.rows.room), dot);
    block.phase([&](int t) {
      if (t >= kChunk) return;
      float inverse = t < chunk.n ? 1 : 0;
      if (shape.normalise && t < chunk.n) inverse /= chunk.kept(io.norm, kChunk, 1).load(t, 0);
      chunk.kept(out.inverse_norm, kChunk, 1).store(t, 0, inverse);
      chunk.kept(out.d_norm, kChunk, 1).store(t, 0, -inverse * dot(t));
    });
  }
};

// With dn_i = d_o_i / norm_i: dv, dg, ddt, and the gradients of phi_q and phi_k in their place.
template <class E>
struct LinearGradients {
  LinearShape shape;
  LinearBackward<E> io;
  LinearKept in;

  struct Places {
    Carver carve;
    GatePlaces gates{carve};
    Place read = carve.matrix(kChunk, kChunk), d_read = carve.matrix(kChunk, kChunk);
    // Of each token: 1 / norm, p / norm, d_norm, p d_norm, D_n dt.
    Place inverse = carve.row(kChunk), decayed = carve.row(kChunk), d_norm = carve.row(kChunk),
          d_norm_decayed = carve.row(kChunk), weight_end = carve.row(kChunk);
    Place from_state = carve.row(kChunk), to_state = carve.row(kChunk), across = carve.row(1);
    StagingPlaces staging{carve};
    GRAFT_BOTH Places() {}
  };
  Grid grid() const { return {shape.chunks(), shape.heads, shape.batch}; }
  int shared() const { return Places().carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places;
    const ChunkAt chunk(shape, block.x(), block.y(), block.z());
    const auto gates = gates_of(block, places.gates);
    load_gates(block, chunk.of(io.g, 1), chunk.of(io.dt, 1), chunk.n, gates);
    load_norms(block, places, chunk);
    score_gradients(block, places, chunk);
    across_chunk(block, places, chunk);
    // What the rows of queries and of keys owe to the decays; a thread's share.
    typename Block::template PerThread<RowParts> from_state(block), to_state(block);
    for (int first = 0; first < shape.value_dim; first += kChunk)
      value_gradients(block, places, chunk, first, to_state);
    for (int first = 0; first < shape.features; first += kChunk)
      feature_gradients(block, places, chunk, first, from_state, to_state);
    const auto room = tile(block, places.staging.left);
    sum_rows(block, from_state, room, tile(block, places.from_state));
    sum_rows(block, to_state, room, tile(block, places.to_state));
    const GateGradient<typename Block::Memory> gradient{
        tile(block, places.from_state), tile(block, places.to_state), tile(block, places.across),
        gates.decay, gates.weight};
    gate_gradient(block, chunk.n, gradient, chunk.of(io.dg, 1), chunk.of(io.ddt, 1));
  }

 private:
  template <class Block>
  GRAFT_DEVICE void load_norms(Block& block, const Places& places, const ChunkAt& chunk) const {
    const auto gates = gates_of(block, places.gates);
    block.phase([&](int t) {
      if (t >= kChunk) return;
      const float inverse = chunk.kept(in.inverse_norm, kChunk, 1).load(t, 0);
      const float d_norm = chunk.kept(in.d_norm, kChunk, 1).load(t, 0);
      tile(block, places.inverse).set(t, inverse);
      tile(block, places.decayed).set(t, gates.from_start(t) * inverse);
      tile(block, places.d_norm).set(t, d_norm);
      tile(block, places.d_norm_decayed).set(t, gates.from_start(t) * d_norm);
      tile(block, places.weight_end).set(t, gates.to_end(t) * gates.weight(t));
    });
  }

  // With G_ij = dn_i . v_j + d_norm_i, the gradient of w_ij: read = D phi_q.phi_k, d_read = G D dt,
  // and in the place of D the X_ij / dt_j = G_ij read_ij of GateGradient.
  template <class Block>
  GRAFT_DEVICE void score_gradients(Block& block, const Places& places,
                                    const ChunkAt& chunk) const {
    const auto gates = gates_of(block, places.gates);
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const auto read = tile(block, places.read), d_read = tile(block, places.d_read);
    const auto d_norm = tile(block, places.d_norm);
    typename Block::template PerThread<Sums<4>> x(block), y(block);
    accumulate<Left::kByRow, 4>(block, by_row(left, chunk.kept(in.phi_q, kChunk, shape.features)),
                                transposed(right, chunk.kept(in.phi_k, kChunk, shape.features)),
                                shape.features, x);
    accumulate<Left::kByRow, 4>(block,
                                by_row(left, chunk.of(io.d_o, shape.value_dim),
                                       ByRow<typename Block::Memory>{tile(block, places.inverse)}),
                                transposed(right, chunk.of(io.v, shape.value_dim)), shape.value_dim,
                                y);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        const float decay = gates.decay(i, j), g = y[t].at[r][c] + d_norm(i);
        read.set(i, j, decay * x[t].at[r][c]);
        d_read.set(i, j, decay * g * gates.weight(j));
        gates.decay.set(i, j, decay * x[t].at[r][c] * g);
      });
    });
  }

  // p_n (<S, dS> + z . dz): S and z lie side by side at the borders.
  template <class Block>
  GRAFT_DEVICE void across_chunk(Block& block, const Places& places, const ChunkAt& chunk) const {
    typename Block::template PerThread<float> part(block);
    const float* const s = io.borders + chunk.ordinal * shape.state_size();
    const float* const d = in.d_borders + chunk.ordinal * shape.state_size();
    const auto from_start = gates_of(block, places.gates).from_start;
    block.phase([&](int t) {
      float sum = 0;
      for (int64_t at = t; at < shape.state_size(); at += kThreads) sum += s[at] * d[at];
      part[t] = from_start(chunk.n - 1) * sum;
    });
    sum_all(block, part, tile(block, Place{places.staging.left.at, 0}), tile(block, places.across));
  }

  // dv_j = dt_j (D_nj dS^T phi_k_j + sum_{i>=j} read_ij dn_i); to_state gets D_nj phi_k_j . dS v_j.
  template <class Block, class Parts>
  GRAFT_DEVICE void value_gradients(Block& block, const Places& places, const ChunkAt& chunk,
                                    int first, Parts& to_state) const {
    const auto gates = gates_of(block, places.gates);
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const auto v = chunk.of(io.v, shape.value_dim);
    using Factor = ByRow<typename Block::Memory>;
    const LinearBorder<const float> d_border(shape, in.d_borders, chunk.ordinal);
    typename Block::template PerThread<Sums<4>> x(block);
    accumulate<Left::kByRow, 4>(
        block, by_row(left, chunk.kept(in.phi_k, kChunk, shape.features), Factor{gates.to_end}),
        by_inner(right, d_border.s, first), shape.features, x);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        to_state[t].at[r] += x[t].at[r][c] * v.load(i, first + j);
      });
    });
    accumulate<Left::kByInner, 4>(block, resident<Left::kByInner>(tile(block, places.read)),
                                  by_inner(right, chunk.of(io.d_o, shape.value_dim), first,
                                           Factor{tile(block, places.inverse)}),
                                  kChunk, x);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int) { x[t].at[r][c] *= gates.weight(i); });
      store_sums(t, x[t], chunk.of(io.dv, shape.value_dim), 0, first);
    });
  }

  // d_phi_q_i = p_i (S dn_i + d_norm_i z) + sum_{j<=i} d_read_ij phi_k_j
  // d_phi_k_j = D_nj dt_j (dS v_j + dz) + sum_{i>=j} d_read_ij phi_q_i
  template <class Block, class Parts>
  GRAFT_DEVICE void feature_gradients(Block& block, const Places& places, const ChunkAt& chunk,
                                      int first, Parts& from_state, Parts& to_state) const {
    const auto gates = gates_of(block, places.gates);
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const auto d_read = tile(block, places.d_read);
    const auto phi_q = chunk.kept(in.phi_q, kChunk, shape.features),
               phi_k = chunk.kept(in.phi_k, kChunk, shape.features);
    const LinearBorder<const float> border(shape, io.borders, chunk.ordinal),
        d_border(shape, in.d_borders, chunk.ordinal);
    const auto weight_end = tile(block, places.weight_end);
    using Factor = ByRow<typename Block::Memory>;
    typename Block::template PerThread<Sums<4>> queries(block), keys(block);
    accumulate<Left::kByRow, 4>(
        block, by_row(left, chunk.of(io.d_o, shape.value_dim), Factor{tile(block, places.decayed)}),
        transposed(right, border.s, first), shape.value_dim, queries);
    accumulate<Left::kByRow, 4>(block,
                                by_row(left, chunk.of(io.v, shape.value_dim), Factor{weight_end}),
                                transposed(right, d_border.s, first), shape.value_dim, keys);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        if (shape.normalise) {
          const float dz = d_border.z.load(first + j, 0);
          queries[t].at[r][c] +=
              tile(block, places.d_norm_decayed)(i) * border.z.load(first + j, 0);
          keys[t].at[r][c] += weight_end(i) * dz;
          to_state[t].at[r] += gates.to_end(i) * phi_k.load(i, first + j) * dz;
        }
        from_state[t].at[r] += queries[t].at[r][c] * phi_q.load(i, first + j);
      });
    });
    accumulate<Left::kByRow, 4>(block, resident<Left::kByRow>(d_read),
                                by_inner(right, phi_k, first), kChunk, queries);
    accumulate<Left::kByInner, 4>(block, resident<Left::kByInner>(d_read),
                                  by_inner(right, phi_q, first), kChunk, keys);
    block.phase([&](int t) {
      store_sums(t, queries[t], phi_q, 0, first);
      store_sums(t, keys[t], phi_k, 0, first);
    });
  }
};

// From the gradients of the features to those of q and k; those of the logits stay in the first
// half of the features' places.
template <class E>
struct LinearRowGradients {
  LinearShape shape;
  LinearBackward<E> io;
  LinearKept in;

  struct Places {
    Carver carve;
    StagingPlaces staging{carve};
    FeaturePlaces rows{carve};
    GRAFT_BOTH Places() {}
  };
  Grid grid() const { return {shape.chunks(), shape.heads, shape.batch}; }
  int shared() const { return Places().carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places;
    const ChunkAt chunk(shape, block.x(), block.y(), block.z());
    one(block, places, chunk, in.phi_q, in.soft_q, io.maps.weight_q,
        chunk.of(io.dq, shape.head_dim));
    one(block, places, chunk, in.phi_k, in.soft_k, io.maps.weight_k,
        chunk.of(io.dk, shape.head_dim));
  }

 private:
  template <class Block>
  GRAFT_DEVICE void one(Block& block, const Places& places, const ChunkAt& chunk, float* d_phi,
                        const float* soft, const float* weight, GlobalRows<E> out) const {
    const auto d = chunk.kept(d_phi, kChunk, shape.features);
    if (!shape.maps) {
      block.phase([&](int t) {
        for_row_shares(t, shape.features,
                       [&](int, int i, int c) { out.store(i, c, d.load(i, c)); });
      });
      return;
    }
    const int n = shape.features / 2;
    softmax_gradient(block, places.rows, chunk.n, n, io.floor,
                     chunk.kept(soft, kChunk, shape.features), d);
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const HeadMap map(weight, nullptr, chunk.head, n, shape.head_dim);
    const GlobalRows<float> d_logits(d.data, d.stride, kChunk, n);
    typename Block::template PerThread<Sums<4>> x(block);
    for (int first = 0; first < shape.head_dim; first += kChunk) {
      block.phase([&](int t) { x[t] = {}; });
      accumulate<Left::kByRow, 4>(block, by_row(left, d_logits), by_inner(right, map.weight, first),
                                  n, x);
      block.phase([&](int t) { store_sums(t, x[t], out, 0, first); });
    }
  }
};

// A square of 64 by 64 of a head's d_weight, and with the first columns its d_bias, over all chunks
// of all sequences: grid z is 0 for queries, 1 for keys. One block after all chunks, so that sums
// do not depend on chance.
template <class E>
struct LinearWeightGradients {
  LinearShape shape;
  LinearBackward<E> io;
  LinearKept in;

  struct Places {
    Carver carve;
    StagingPlaces staging{carve};
    GRAFT_BOTH Places() {}
  };
  Grid grid() const {
    return {blocks_of(shape.features / 2, kChunk) * blocks_of(shape.head_dim, kChunk), shape.heads,
            2};
  }
  int shared() const { return Places().carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places;
    const bool queries = block.z() == 0;
    const int n = shape.features / 2, row_tiles = blocks_of(n, kChunk), head = block.y();
    const int row = block.x() % row_tiles * kChunk, column = block.x() / row_tiles * kChunk;
    const auto left = tile(block, places.staging.left_inner),
               right = tile(block, places.staging.right);
    typename Block::template PerThread<Sums<4>> x(block);
    typename Block::template PerThread<float> bias(block);
    for (int batch = 0; batch < shape.batch; ++batch) {
      for (int index = 0; index < shape.chunks(); ++index) {
        const ChunkAt chunk(shape, index, head, batch);
        const auto d = chunk.kept(queries ? in.phi_q : in.phi_k, kChunk, shape.features);
        const GlobalRows<float> d_logits(d.data, d.stride, kChunk, n);
        const auto u = chunk.of(queries ? io.q : io.k, shape.head_dim);
        accumulate<Left::kByInner, 4>(block, by_inner(left, d_logits, row),
                                      by_inner(right, u, column), kChunk, x);
        block.phase([&](int t) {
          if (t >= kChunk || column != 0) return;
          for (int i = 0; i < kChunk; ++i) bias[t] += d_logits.load(i, row + t);
        });
      }
    }
    float* const d_weight = queries ? io.d_weight_q : io.d_weight_k;
    float* const d_bias = queries ? io.d_bias_q : io.d_bias_k;
    block.phase([&](int t) {
      if (d_weight != nullptr) {
        const GlobalRows<float> out(d_weight + static_cast<int64_t>(head) * n * shape.head_dim,
                                    shape.head_dim, n, shape.head_dim);
        for_elements<4>(t, [&](int r, int c, int i, int j) {
          out.store(row + i, column + j, out.load(row + i, column + j) + x[t].at[r][c]);
        });
      }
      if (d_bias != nullptr && column == 0 && t < kChunk && row + t < n)
        d_bias[static_cast<int64_t>(head) * n + row + t] += bias[t];
    });
  }
};

// ------------------------------------------------------------------ step

// What steps keep of each head: phi_q and phi_k of each token, its norm, and z.
struct LinearStepKept {
  float *phi, *norm, *z;

  LinearStepKept(const LinearShape& s, float* scratch)
      : phi(scratch),
        norm(phi + s.all_heads() * s.tokens * 2 * s.features),
        z(norm + s.all_heads() * s.tokens) {}
};

// The features and norms of all tokens of a head. z goes along here, where one block sees all of
// it, and not with the state's columns, which other blocks write.
template <class E>
struct LinearStepFeatures {
  LinearShape shape;
  LinearStep<E> io;
  LinearStepKept out;

  struct Places {
    Carver carve;
    Place logits, room = carve.row(kThreads), one = carve.row(1);
    GRAFT_BOTH explicit Places(int n) : logits(carve.row(n)) {}
  };
  Grid grid() const { return {1, shape.heads, shape.batch}; }
  int shared() const { return Places(shape.features / 2).carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const int64_t head = static_cast<int64_t>(block.z()) * shape.heads + block.y();
    const int f = shape.features;
    float* const z = out.z + head * f;
    block.phase([&](int t) {
      for (int c = t; c < f; c += kThreads) {
        const bool has = shape.normalise && io.state_in != nullptr;
        z[c] = has ? io.state_in[head * shape.state_size() +
                                 static_cast<int64_t>(c) * shape.state_row() + shape.value_dim]
                   : 0.0f;
      }
    });
    for (int64_t token = 0; token < shape.tokens; ++token) {
      float* const phi_q = out.phi + (head * shape.tokens + token) * 2 * f;
      const auto row = [&](const Tensor<const E>& x) {
        return x.rows(block.z(), block.y(), token, 1, shape.head_dim);
      };
      one(block, row(io.q), io.maps.weight_q, io.maps.bias_q, phi_q);
      one(block, row(io.k), io.maps.weight_k, io.maps.bias_k, phi_q + f);
      if (shape.normalise) norm(block, token, phi_q, z, out.norm + head * shape.tokens + token);
    }
  }

 private:
  template <class Block>
  GRAFT_DEVICE void one(Block& block, GlobalRows<const E> u, const float* weight, const float* bias,
                        float* phi) const {
    const int n = shape.features / 2;
    const Places places(n);
    const auto logits = tile(block, places.logits), room = tile(block, places.room),
               result = tile(block, places.one);
    if (!shape.maps) {
      block.phase([&](int t) {
        for (int c = t; c < shape.features; c += kThreads) phi[c] = u.load(0, c);
      });
      return;
    }
    const HeadMap map(weight, bias, block.y(), n, shape.head_dim);
    typename Block::template PerThread<float> part(block);
    for (int first = 0; first < n; first += kThreads / kLanes) {  // 16 threads to a logit
      block.phase([&](int t) {
        float sum = 0;
        for (int c = t % kLanes; c < shape.head_dim; c += kLanes)
          sum += map.weight.load(first + t / kLanes, c) * u.load(0, c);
        room.set(t, sum);
      });
      block.phase([&](int t) {
        if (t >= kThreads / kLanes || first + t >= n) return;
        float sum = map.bias.data == nullptr ? 0.0f : map.bias.load(0, first + t);
        for (int c = 0; c < kLanes; ++c) sum += room(t * kLanes + c);
        logits.set(first + t, sum);
      });
    }
    block.phase([&](int t) {
      part[t] = 0;
      for (int c = t; c < n; c += kThreads) part[t] = fmaxf(part[t], fabsf(logits(c)));
    });
    largest_of_all(block, part, room, result);
    block.phase([&](int t) {
      const float most = result(0);
      part[t] = 0;
      for (int c = t; c < n; c += kThreads) {
        phi[c] = expf(logits(c) - most);
        phi[n + c] = expf(-logits(c) - most);
        part[t] += phi[c] + phi[n + c];
      }
    });
    sum_all(block, part, room, result);
    block.phase([&](int t) {
      for (int c = t; c < n; c += kThreads) {
        phi[c] = fmaxf(phi[c] / result(0), io.floor);
        phi[n + c] = fmaxf(phi[n + c] / result(0), io.floor);
      }
    });
  }

  // z = e z + dt phi_k; norm = z . phi_q + eps
  template <class Block>
  GRAFT_DEVICE void norm(Block& block, int64_t token, const float* phi_q, float* z,
                         float* to) const {
    const Places places(shape.features / 2);
    const auto room = tile(block, places.room), result = tile(block, places.one);
    const float e =
        io.g.data == nullptr ? 1.0f : expf(io.g.rows(block.z(), block.y(), token, 1, 1).load(0, 0));
    const float dt =
        io.dt.data == nullptr ? 1.0f : io.dt.rows(block.z(), block.y(), token, 1, 1).load(0, 0);
    typename Block::template PerThread<float> part(block);
    block.phase([&](int t) {
      for (int c = t; c < shape.features; c += kThreads) {
        z[c] = e * z[c] + dt * phi_q[shape.features + c];
        part[t] += z[c] * phi_q[c];
      }
    });
    sum_all(block, part, room, result);
    block.phase([&](int t) {
      if (t == 0) *to = result(0) + io.eps;
    });
  }
};

// 32 columns of a head's state, z among them as the column of ones: 8 threads to a column, each
// every eighth feature.
template <class E>
struct LinearStepTokens {
  LinearShape shape;
  LinearStep<E> io;
  LinearStepKept in;
  static constexpr int kWidth = 32, kParts = kThreads / kWidth;

  struct Places {
    Carver carve;
    Place q, k, read = carve.matrix(kParts, kWidth);
    GRAFT_BOTH explicit Places(int features) : q(carve.row(features)), k(carve.row(features)) {}
  };
  Grid grid() const { return {blocks_of(shape.state_row(), kWidth), shape.heads, shape.batch}; }
  int shared() const { return Places(shape.features).carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const int64_t head = static_cast<int64_t>(block.z()) * shape.heads + block.y();
    const int first = block.x() * kWidth;
    const float* in_state =
        io.state_in == nullptr ? nullptr : io.state_in + head * shape.state_size();
    float* const out = io.state_out + head * shape.state_size();
    for (int64_t token = 0; token < shape.tokens; ++token, in_state = out)
      step(block, token, head, in_state, out);
    if (shape.tokens > 0) return;
    block.phase([&](int t) {
      for (int at = t; at < shape.features * kWidth; at += kThreads) {
        const int c = first + at % kWidth;
        const int64_t place = static_cast<int64_t>(at / kWidth) * shape.state_row() + c;
        if (c < shape.state_row()) out[place] = in_state == nullptr ? 0.0f : in_state[place];
      }
    });
  }

 private:
  template <class Block>
  GRAFT_DEVICE void step(Block& block, int64_t token, int64_t head, const float* state,
                         float* out) const {
    const Places places(shape.features);
    const int first = block.x() * kWidth, f = shape.features, columns = shape.state_row();
    const auto q = tile(block, places.q), k = tile(block, places.k),
               read = tile(block, places.read);
    const auto row = [&](const auto& x, int width) {
      return x.rows(block.z(), block.y(), token, 1, width);
    };
    const float* const phi = in.phi + (head * shape.tokens + token) * 2 * f;
    const float e = io.g.data == nullptr ? 1.0f : expf(row(io.g, 1).load(0, 0));
    const float dt = io.dt.data == nullptr ? 1.0f : row(io.dt, 1).load(0, 0);
    block.phase([&](int t) {
      for (int c = t; c < f; c += kThreads) {
        q.set(c, phi[c]);
        k.set(c, dt * phi[f + c]);
      }
    });
    block.phase([&](int t) {
      const int c = first + t % kWidth;
      const float v = c < shape.value_dim ? row(io.v, shape.value_dim).load(0, c) : 1.0f;
      float sum = 0;
      for (int i = t / kWidth; c < columns && i < f; i += kParts) {
        const int64_t at = static_cast<int64_t>(i) * columns + c;
        const float s = (state == nullptr ? 0.0f : e * state[at]) + k(i) * v;
        out[at] = s;
        sum += q(i) * s;
      }
      read.set(t / kWidth, t % kWidth, sum);
    });
    block.phase([&](int t) {
      if (t >= kWidth) return;
      float sum = 0;
      for (int p = 0; p < kParts; ++p) sum += read(p, t);
      const float norm = shape.normalise ? in.norm[head * shape.tokens + token] : 1.0f;
      row(io.o, shape.value_dim).store(0, first + t, sum / norm);
    });
  }
};

// ------------------------------------------------------------------ in order

template <class E, class Launch>
void linear_forward_steps(const LinearShape& shape, const LinearForward<E>& io, Launch&& launch) {
  const LinearKept kept(shape, io.scratch, false);
  launch(LinearFeatures<LinearForward<E>>{shape, io, kept});
  launch(LinearStates<E>{shape, false, kept.phi_k, io.v, kept.from_start, kept.weight_end, nullptr,
                         nullptr, io.state_in, io.state_out, io.borders});
  launch(LinearOutputs<E>{shape, io, kept});
}

template <class E, class Launch>
void linear_backward_steps(const LinearShape& shape, const LinearBackward<E>& io, Launch&& launch) {
  const LinearKept kept(shape, io.scratch, true);
  launch(LinearFeatures<LinearBackward<E>>{shape, io, kept});
  launch(LinearNormGradients<E>{shape, io, kept});
  launch(LinearStates<E>{shape, true, kept.phi_q, io.d_o, kept.from_start, kept.from_start,
                         kept.inverse_norm, kept.d_norm, io.d_state_out, io.d_state_in,
                         kept.d_borders});
  launch(LinearGradients<E>{shape, io, kept});
  launch(LinearRowGradients<E>{shape, io, kept});
  if (shape.maps) launch(LinearWeightGradients<E>{shape, io, kept});
}

template <class E, class Launch>
void linear_step_steps(const LinearShape& shape, const LinearStep<E>& io, Launch&& launch) {
  const LinearStepKept kept(shape, io.scratch);
  launch(LinearStepFeatures<E>{shape, io, kept});
  launch(LinearStepTokens<E>{shape, io, kept});
}

}  // namespace graft::cuda
