#include "gdn_block.h"

#include <algorithm>
#include <cmath>

#include "gates.h"
#include "gdn_kernel.h"
#include "graft/tensor.hpp"
#include "lanes.h"
#include "projection.h"
#include "rows_pass.h"
#include "short_conv.h"

namespace graft::gdn {

using mixers::Arena;
using mixers::Projection;
using mixers::Tokens;

namespace {

constexpr double kL2Eps = 1e-6;  // inside the root, as in fla

struct Widths {
  int64_t key, value;  // of all heads

  explicit Widths(const BlockOptions& o) : key(o.heads * o.key_dim), value(o.heads * o.value_dim) {}
  int64_t of(std::size_t stream) const { return stream == 2 ? value : key; }
};

HeadShape head_shape(const BlockOptions& o, int64_t tokens) {
  return {tokens, o.key_dim, o.value_dim, std::max<int64_t>(1, std::min(o.chunk, tokens))};
}

// The heads of each sequence, in groups that one thread does at once.
struct HeadGroups {
  HeadShape shape;
  int64_t batch, heads, at_once, per_sequence;

  HeadGroups(const BlockOptions& o, int64_t batch_, int64_t tokens)
      : shape(head_shape(o, tokens)), batch(batch_), heads(o.heads) {
    at_once =
        heads_at_once(shape, heads, batch, static_cast<int>(mixers::lanes_for(batch * heads)));
    per_sequence = (heads + at_once - 1) / at_once;
  }
  int64_t count() const { return batch * per_sequence; }
  // Heads are numbered through all sequences.
  int64_t first(int64_t group) const {
    return group / per_sequence * heads + group % per_sequence * at_once;
  }
  int64_t size(int64_t group) const {
    return std::min(at_once, heads - group % per_sequence * at_once);
  }
};

bool has_features(const BlockOptions& o, std::size_t stream) {
  if (stream == 2) return o.silu_v;
  return (stream == 0 ? o.silu_q : o.silu_k) || o.qk_norm || o.rope.exists() || o.qk_l2norm;
}

int64_t frequencies(const BlockOptions& o) { return static_cast<int64_t>(o.rope.inv_freq.size()); }

// ------------------------------------------------------------------ memory

// What forward and backward both compute from the projections' outputs.
template <class T>
struct StreamSpace {
  T* x;  // where the host's is not what is needed
  std::array<T*, 3> conv,
      rows;  // after the short conv; after the features, on the way into the delta rule
  T *g, *beta;
  int64_t* positions;
  T *cos, *sin;
  T *row_scratch, *head_scratch;
  int64_t head_scratch_size;

  // in_place: the features may overwrite what they are made from.
  StreamSpace(const BlockOptions& o, int64_t batch, int64_t tokens, bool in_place, Arena& arena) {
    const Widths width(o);
    const int64_t n = batch * tokens;
    x = arena.take<T>(n * o.model_dim);
    for (std::size_t s = 0; s < 3; ++s) {
      conv[s] = arena.take<T>(o.short_conv > 0 ? n * width.of(s) : 0);
      rows[s] = arena.take<T>(!in_place && has_features(o, s) ? n * width.of(s) : 0);
    }
    g = arena.take<T>(n * o.heads);
    beta = arena.take<T>(n * o.heads);
    positions = arena.take<int64_t>(o.rope.exists() ? n : 0);
    cos = arena.take<T>(n * frequencies(o));
    sin = arena.take<T>(n * frequencies(o));
    row_scratch =
        arena.take<T>(mixers::row_scratch_size(n * o.heads, std::max(o.key_dim, o.value_dim)));
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    const HeadGroups groups(o, batch, tokens);
    head_scratch_size =
        (kernels().of<T>().scratch_size(groups.shape, groups.at_once) + kLine - 1) / kLine * kLine;
    head_scratch = arena.take<T>(head_scratch_size * mixers::lanes_for(groups.count()));
  }
};

template <class T>
Kept<T> take_activations(const BlockOptions& o, int64_t batch, int64_t tokens, bool for_backward,
                         Arena& arena) {
  Kept<T> kept{};
  for (std::size_t i = 0; i < kActivations; ++i) {
    const bool wanted = for_backward || (i != kErrors && i != kBorders);
    kept[i] = arena.take<T>(wanted ? activation_size(o, batch, tokens, i) : 0);
  }
  return kept;
}

template <class T>
struct ForwardSpace {
  Kept<T> own;  // unless they are kept
  StreamSpace<T> streams;
  T *pre, *y;

  ForwardSpace(const BlockOptions& o, int64_t batch, int64_t tokens, bool keep, bool narrow,
               Arena& arena)
      : own(keep ? Kept<T>{} : take_activations<T>(o, batch, tokens, false, arena)),
        streams(o, batch, tokens, !keep || o.short_conv > 0, arena),
        pre(arena.take<T>(keep ? batch * tokens * Widths(o).value : 0)),
        y(arena.take<T>(narrow ? batch * tokens * o.model_dim : 0)) {}
};

template <class T>
struct BackwardSpace {
  Kept<T> own;  // unless they were kept
  StreamSpace<T> streams;
  T *dy, *d_head, *d_gate, *d_g, *d_beta, *dx;
  std::array<T*, 3> d_rows,
      d_conv;  // of the delta rule's inputs, then of the conv's output; of its input

  BackwardSpace(const BlockOptions& o, int64_t batch, int64_t tokens, bool kept, bool narrow,
                Arena& arena)
      : own(kept ? Kept<T>{} : take_activations<T>(o, batch, tokens, true, arena)),
        streams(o, batch, tokens, false, arena) {
    const Widths width(o);
    const int64_t n = batch * tokens;
    dy = arena.take<T>(n * o.model_dim);
    d_head = arena.take<T>(n * width.value);
    d_gate = arena.take<T>(o.output_gate ? n * width.value : 0);
    d_g = arena.take<T>(n * o.heads);
    d_beta = arena.take<T>(n * o.heads);
    dx = arena.take<T>(narrow ? n * o.model_dim : 0);
    for (std::size_t s = 0; s < 3; ++s) {
      d_rows[s] = arena.take<T>(n * width.of(s));
      d_conv[s] = arena.take<T>(o.short_conv > 0 ? n * width.of(s) : 0);
    }
  }
};

// ------------------------------------------------------------------ stages

template <class T>
Projection<T> stream_projection(const BlockOptions& o, const ParamTable<const T>& params,
                                std::size_t s) {
  return {o.model_dim, Widths(o).of(s), params[kQWeight + s], params[kQBias + s]};
}
template <class T>
Projection<T> decay_projection(const BlockOptions& o, const ParamTable<const T>& params) {
  return {o.model_dim, o.heads, params[kAWeight], nullptr};
}
template <class T>
Projection<T> write_projection(const BlockOptions& o, const ParamTable<const T>& params) {
  return {o.model_dim, o.heads, params[kBWeight], params[kBBias]};
}
template <class T>
Projection<T> gate_projection(const BlockOptions& o, const ParamTable<const T>& params) {
  return {o.model_dim, Widths(o).value, params[kGWeight], params[kGBias]};
}
template <class T>
Projection<T> output_projection(const BlockOptions& o, const ParamTable<const T>& params) {
  return {Widths(o).value, o.model_dim, params[kOWeight], params[kOBias]};
}

template <class T>
mixers::ShortConv<T> conv_of(const BlockOptions& o, const ParamTable<const T>& params,
                             std::size_t s) {
  return {Widths(o).of(s), o.short_conv, params[kQConv + s], params[kQConvBias + s]};
}

template <class T>
mixers::DeltaGates<T> gates_of(const BlockOptions& o, const ParamTable<const T>& params,
                               const Kept<T>& kept) {
  return {o.heads, params[kALog], params[kDtBias], kept[kDecay], kept[kWrite]};
}

template <class T>
kernels::GatedNormRows<T> gated_norm_of(const BlockOptions& o, const ParamTable<const T>& params,
                                        const Kept<T>& kept) {
  return {o.value_dim, params[kONorm], static_cast<T>(o.norm_eps),
          o.output_gate ? kept[kGate] : nullptr};
}

template <class T>
kernels::FeatureRows<T> features_of(const BlockOptions& o, const ParamTable<const T>& params,
                                    const StreamSpace<T>& space, std::size_t s) {
  kernels::FeatureRows<T> op;
  op.heads = o.heads;
  op.dim = s == 2 ? o.value_dim : o.key_dim;
  op.silu = s == 0 ? o.silu_q : s == 1 ? o.silu_k : o.silu_v;
  if (s == 2) return op;
  op.norm_weight = params[kQNorm + s];
  op.norm_eps = static_cast<T>(o.qk_norm_eps);
  op.l2norm = o.qk_l2norm;
  op.l2_eps = static_cast<T>(kL2Eps);
  if (!o.rope.exists()) return op;
  op.cos = space.cos;
  op.sin = space.sin;
  op.frequencies = frequencies(o);
  return op;
}

// What goes into the delta rule, and what the features of q, k, v were made from.
template <class T>
struct Streams {
  std::array<const T*, 3> before, rows;
};

template <class T>
void project_all(const BlockOptions& o, const BlockForward<T>& call, const T* x, bool with_gate,
                 const Kept<T>& kept) {
  const int64_t n = call.tokens.count();
  for (std::size_t s = 0; s < 3; ++s)
    project(stream_projection(o, call.params, s), n, x, kept[kQ + s]);
  project(decay_projection(o, call.params), n, x, kept[kDecay]);
  project(write_projection(o, call.params), n, x, kept[kWrite]);
  if (with_gate && o.output_gate) project(gate_projection(o, call.params), n, x, kept[kGate]);
}

// From the projections' outputs to the delta rule's inputs. in_place: the projections' outputs are
// not needed afterwards.
template <class T>
Streams<T> run_streams(const BlockOptions& o, const BlockForward<T>& call, bool in_place,
                       const Kept<T>& kept, const StreamSpace<T>& space,
                       const BlockState<T>& state_out, int64_t* next_out) {
  const Tokens& tokens = call.tokens;
  if (o.rope.exists()) {
    mixers::find_positions(tokens, call.next_in, space.positions, next_out);
    mixers::rotation_tables(o.rope, tokens.count(), space.positions, space.cos, space.sin);
  }
  Streams<T> streams;
  for (std::size_t s = 0; s < 3; ++s) {
    T* before = kept[kQ + s];
    if (o.short_conv > 0) {
      mixers::short_conv<T>(conv_of(o, call.params, s), tokens, before, call.state_in.tails[s],
                            space.conv[s], state_out.tails[s]);
      before = space.conv[s];
    }
    T* rows = in_place || !has_features(o, s) ? before : space.rows[s];
    if (has_features(o, s))
      mixers::features<T>(features_of(o, call.params, space, s), tokens.count() * o.heads, before,
                          rows, space.row_scratch);
    streams.before[s] = before;
    streams.rows[s] = rows;
  }
  mixers::delta_gates(gates_of(o, call.params, kept), tokens, space.g, space.beta);
  return streams;
}

// Head h of sequence b in a [B,T,H,dim] tensor; absent when there is nothing in it.
template <class T>
Rows<T> head_rows(T* data, const BlockOptions& o, const Tokens& tokens, int64_t unit, int64_t dim) {
  if (data == nullptr || tokens.length == 0) return {};
  return {data + (unit / o.heads * tokens.length * o.heads + unit % o.heads) * dim, o.heads * dim};
}

// The heads' part `unit` of a [B,H,size] tensor.
template <class T>
T* head_part(T* data, int64_t unit, int64_t size) {
  return data == nullptr ? nullptr : data + unit * size;
}

template <class T>
void run_delta_rule(const BlockOptions& o, const BlockForward<T>& call, const Streams<T>& streams,
                    bool keep, const Kept<T>& kept, const StreamSpace<T>& space, T* state_out) {
  const Tokens& tokens = call.tokens;
  const HeadGroups groups(o, tokens.batch, tokens.length);
  const int64_t state_size = o.key_dim * o.value_dim;
  const auto& kernel = kernels().of<T>();
  const auto head_of = [&](int64_t unit) {
    HeadForward<T> head;
    head.q = head_rows(streams.rows[0], o, tokens, unit, o.key_dim);
    head.k = head_rows(streams.rows[1], o, tokens, unit, o.key_dim);
    head.v = head_rows(streams.rows[2], o, tokens, unit, o.value_dim);
    head.g = head_rows<const T>(space.g, o, tokens, unit, 1);
    head.beta = head_rows<const T>(space.beta, o, tokens, unit, 1);
    head.scale = static_cast<T>(1 / std::sqrt(static_cast<double>(o.key_dim)));
    head.state_in = head_part(call.state_in.s, unit, state_size);
    head.o = head_rows(kept[kHead], o, tokens, unit, o.value_dim);
    head.state_out = head_part(state_out, unit, state_size);
    if (keep) {
      head.borders = head_part(kept[kBorders], unit, groups.shape.chunks() * state_size);
      head.err = head_rows(kept[kErrors], o, tokens, unit, o.value_dim);
    }
    return head;
  };
  const bool one_token = tokens.length == 1 && !keep;
  mixers::for_each_unit(groups.count(), 3 * tokens.length * state_size * groups.at_once,
                        [&](int64_t group, int64_t lane) {
                          T* scratch = space.head_scratch + lane * space.head_scratch_size;
                          const int64_t n = groups.size(group);
                          HeadForward<T> heads[kHeadsAtOnce];
                          for (int64_t i = 0; i < n; ++i) {
                            heads[i] = head_of(groups.first(group) + i);
                            if (one_token) kernel.step(groups.shape, heads[i], scratch);
                          }
                          if (!one_token) kernel.forward(groups.shape, heads, n, scratch);
                        });
}

// From the recurrence's output to what the output projection reads. `pre` may be kept[kHead].
template <class T>
const T* run_gated_norm(const BlockOptions& o, const BlockForward<T>& call, const Kept<T>& kept,
                        T* pre, T* row_scratch) {
  const int64_t n = call.tokens.count();
  if (o.output_norm || o.output_gate) {
    mixers::gated_norm<T>(gated_norm_of(o, call.params, kept), n * o.heads, kept[kHead], pre,
                          row_scratch);
  } else if (pre != kept[kHead]) {
    if (call.tokens.mask == nullptr) return kept[kHead];
    std::copy_n(kept[kHead], n * Widths(o).value, pre);
  }
  mixers::clear_pads(call.tokens, Widths(o).value, pre);
  return pre;
}

template <class T>
void store_tap(const BlockForward<T>& call, Tap tap, const T* values) {
  if (call.taps[tap] != nullptr) mixers::store_rows(call.tokens, values, *call.taps[tap]);
}

}  // namespace

int64_t activation_size(const BlockOptions& o, int64_t batch, int64_t tokens,
                        std::size_t activation) {
  const Widths width(o);
  const int64_t n = batch * tokens;
  switch (activation) {
    case kQ:
    case kK:
      return n * width.key;
    case kV:
    case kHead:
    case kErrors:
      return n * width.value;
    case kGate:
      return o.output_gate ? n * width.value : 0;
    case kBorders:
      return batch * o.heads * head_shape(o, tokens).chunks() * o.key_dim * o.value_dim;
    default:
      return n * o.heads;
  }
}

// ------------------------------------------------------------------ forward

template <class T>
uint64_t forward_workspace(const BlockOptions& o, int64_t batch, int64_t tokens, bool keep,
                           bool narrow) {
  Arena count;
  const ForwardSpace<T> space(o, batch, tokens, keep, narrow, count);
  return count.used();
}

template <class T>
void block_forward(const BlockOptions& o, const BlockForward<T>& call, void* workspace) {
  const Tokens& tokens = call.tokens;
  const bool narrow = !mixers::holds<T>(*call.x);
  Arena arena(workspace);
  const ForwardSpace<T> space(o, tokens.batch, tokens.length, call.keep, narrow, arena);
  const Kept<T>& kept = call.keep ? call.kept : space.own;
  const bool finish = call.keep || call.y != nullptr || call.taps[kPreOutput] != nullptr;

  const T* x = mixers::rows_of(*call.x, tokens, space.streams.x);
  project_all(o, call, x, finish, kept);
  const Streams<T> streams = run_streams(o, call, !call.keep || o.short_conv > 0, kept,
                                         space.streams, call.state_out, call.next_out);
  store_tap(call, kLogDecay, space.streams.g);
  store_tap(call, kWriteGate, space.streams.beta);
  run_delta_rule(o, call, streams, call.keep, kept, space.streams, call.state_out.s);
  store_tap(call, kHeadOutput, kept[kHead]);
  if (call.y == nullptr && call.taps[kPreOutput] == nullptr) return;

  const T* pre =
      run_gated_norm(o, call, kept, call.keep ? space.pre : kept[kHead], space.streams.row_scratch);
  store_tap(call, kPreOutput, pre);
  if (call.y == nullptr) return;
  T* y = narrow ? space.y : static_cast<T*>(sdk::data_address(*call.y));
  project(output_projection(o, call.params), tokens.count(), pre, y);
  mixers::store_rows(tokens, y, *call.y);
}

// ------------------------------------------------------------------ backward

namespace {

template <class T>
struct Backward {
  const BlockOptions& o;
  const BlockBackward<T>& call;
  const BackwardSpace<T>& space;
  const Kept<T>& kept;
  const T* x;
  const Tokens& tokens = call.forward.tokens;
  const ParamTable<const T>& params = call.forward.params;

  mixers::ProjectionGradient<T> gradient(Param weight, T* bias) const {
    return {call.dparams[weight], bias, call.accumulate};
  }

  // From dy to the gradients of the recurrence's output and of the output gate.
  void output() const {
    const int64_t n = tokens.count();
    const T* dy = mixers::rows_of(*call.dy, tokens, space.dy);
    const Projection<T> projection = output_projection(o, params);
    if (call.dparams[kOWeight] != nullptr || call.dparams[kOBias] != nullptr) {
      // The gradient of the values is not there yet: its place serves for what the output
      // projection read.
      const T* pre =
          run_gated_norm(o, call.forward, kept, space.d_rows[2], space.streams.row_scratch);
      project_backward_params(projection, n, pre, dy, gradient(kOWeight, call.dparams[kOBias]));
    }
    project_backward_input(projection, n, dy, false, space.d_head);
    mixers::add_tensor(call.dtaps[kPreOutput], tokens, space.d_head);
    if (o.output_norm || o.output_gate) {
      mixers::gated_norm_backward<T>(gated_norm_of(o, params, kept), n * o.heads, kept[kHead],
                                     space.d_head, space.d_head, space.d_gate, call.accumulate,
                                     call.dparams[kONorm], space.streams.row_scratch);
    }
    mixers::add_tensor(call.dtaps[kHeadOutput], tokens, space.d_head);
  }

  void delta_rule(const Streams<T>& streams) const {
    const HeadGroups groups(o, tokens.batch, tokens.length);
    const int64_t state_size = o.key_dim * o.value_dim;
    const auto& kernel = kernels().of<T>();
    const auto head_of = [&](int64_t unit) {
      HeadBackward<T> head;
      head.q = head_rows(streams.rows[0], o, tokens, unit, o.key_dim);
      head.k = head_rows(streams.rows[1], o, tokens, unit, o.key_dim);
      head.g = head_rows<const T>(space.streams.g, o, tokens, unit, 1);
      head.beta = head_rows<const T>(space.streams.beta, o, tokens, unit, 1);
      head.scale = static_cast<T>(1 / std::sqrt(static_cast<double>(o.key_dim)));
      head.zero_state_in = call.forward.state_in.s == nullptr;
      head.borders = head_part<const T>(kept[kBorders], unit, groups.shape.chunks() * state_size);
      head.err = head_rows<const T>(kept[kErrors], o, tokens, unit, o.value_dim);
      head.d_o = head_rows<const T>(space.d_head, o, tokens, unit, o.value_dim);
      head.d_state_out = head_part(call.d_state_out.s, unit, state_size);
      head.dq = head_rows(space.d_rows[0], o, tokens, unit, o.key_dim);
      head.dk = head_rows(space.d_rows[1], o, tokens, unit, o.key_dim);
      head.dv = head_rows(space.d_rows[2], o, tokens, unit, o.value_dim);
      head.dg = head_rows(space.d_g, o, tokens, unit, 1);
      head.dbeta = head_rows(space.d_beta, o, tokens, unit, 1);
      head.d_state_in = head_part(call.d_state_in.s, unit, state_size);
      return head;
    };
    mixers::for_each_unit(
        groups.count(), 9 * tokens.length * state_size * groups.at_once,
        [&](int64_t group, int64_t lane) {
          const int64_t n = groups.size(group);
          HeadBackward<T> heads[kHeadsAtOnce];
          for (int64_t i = 0; i < n; ++i) heads[i] = head_of(groups.first(group) + i);
          kernel.backward(groups.shape, heads, n,
                          space.streams.head_scratch + lane * space.streams.head_scratch_size);
        });
  }

  // Back through features and short conv; gives the gradient of the projection's output.
  const T* stream(std::size_t s, const T* before) const {
    T* d = space.d_rows[s];
    if (has_features(o, s)) {
      T* d_norm = s == 2 ? nullptr : call.dparams[kQNorm + s];
      mixers::features_backward<T>(features_of(o, params, space.streams, s),
                                   tokens.count() * o.heads, before, d, d, call.accumulate, d_norm,
                                   space.streams.row_scratch);
    }
    if (o.short_conv == 0) return d;
    mixers::short_conv_backward<T>(
        conv_of(o, params, s), tokens, kept[kQ + s], call.forward.state_in.tails[s],
        {d, call.d_state_out.tails[s], space.d_conv[s], call.d_state_in.tails[s],
         call.dparams[kQConv + s], call.dparams[kQConvBias + s], call.accumulate});
    return space.d_conv[s];
  }

  void gates() const {
    mixers::add_tensor(call.dtaps[kLogDecay], tokens, space.d_g);
    mixers::add_tensor(call.dtaps[kWriteGate], tokens, space.d_beta);
    mixers::delta_gates_backward<T>(gates_of(o, params, kept), tokens,
                                    {space.d_g, space.d_beta, space.d_g, space.d_beta,
                                     call.dparams[kALog], call.dparams[kDtBias], call.accumulate});
  }

  // From the gradient of a projection's output to those of its parameters and, summed over the
  // projections, of x.
  void project_back(const Projection<T>& p, const T* d, Param weight, T* d_bias, bool first,
                    T* dx) const {
    project_backward_params(p, tokens.count(), x, d, gradient(weight, d_bias));
    project_backward_input(p, tokens.count(), d, !first, dx);
  }

  void inputs(const Streams<T>& streams) const {
    T* dx = call.dx == nullptr    ? nullptr
            : space.dx != nullptr ? space.dx
                                  : static_cast<T*>(sdk::data_address(*call.dx));
    for (std::size_t s = 0; s < 3; ++s) {
      project_back(stream_projection(o, params, s), stream(s, streams.before[s]),
                   static_cast<Param>(kQWeight + s), call.dparams[kQBias + s], s == 0, dx);
    }
    gates();
    project_back(decay_projection(o, params), space.d_g, kAWeight, nullptr, false, dx);
    project_back(write_projection(o, params), space.d_beta, kBWeight, call.dparams[kBBias], false,
                 dx);
    if (o.output_gate)
      project_back(gate_projection(o, params), space.d_gate, kGWeight, call.dparams[kGBias], false,
                   dx);
    if (call.dx != nullptr) mixers::store_rows(tokens, static_cast<const T*>(dx), *call.dx);
  }
};

}  // namespace

template <class T>
uint64_t backward_workspace(const BlockOptions& o, int64_t batch, int64_t tokens, bool kept,
                            bool narrow) {
  Arena count;
  const BackwardSpace<T> space(o, batch, tokens, kept, narrow, count);
  return count.used();
}

template <class T>
void block_backward(const BlockOptions& o, const BlockBackward<T>& call, void* workspace) {
  const BlockForward<T>& forward = call.forward;
  const Tokens& tokens = forward.tokens;
  Arena arena(workspace);
  const BackwardSpace<T> space(o, tokens.batch, tokens.length, forward.keep,
                               !mixers::holds<T>(*forward.x), arena);
  const Kept<T>& kept = forward.keep ? forward.kept : space.own;
  const T* x = mixers::rows_of(*forward.x, tokens, space.streams.x);
  if (!forward.keep) project_all(o, forward, x, true, kept);
  const Streams<T> streams = run_streams<T>(o, forward, false, kept, space.streams, {}, nullptr);
  if (!forward.keep) run_delta_rule<T>(o, forward, streams, true, kept, space.streams, nullptr);
  const Backward<T> back{o, call, space, kept, x};
  back.output();
  back.delta_rule(streams);
  back.inputs(streams);
}

#define GRAFT_FOR_TYPE(T)                                                                     \
  template uint64_t forward_workspace<T>(const BlockOptions&, int64_t, int64_t, bool, bool);  \
  template uint64_t backward_workspace<T>(const BlockOptions&, int64_t, int64_t, bool, bool); \
  template void block_forward<T>(const BlockOptions&, const BlockForward<T>&, void*);         \
  template void block_backward<T>(const BlockOptions&, const BlockBackward<T>&, void*);
GRAFT_FOR_TYPE(float)
GRAFT_FOR_TYPE(double)
#undef GRAFT_FOR_TYPE

}  // namespace graft::gdn
