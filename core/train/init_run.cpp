#include "core/train/init_run.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <exception>
#include <set>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

// graft_named_tensor for a tensor of the host, with the DLTensor it points to.
struct NamedTensor {
  NamedTensor(std::string name_in, std::string role_in, std::string axes_in, const char* domain,
              std::int32_t heads, std::int32_t head_dim, at::Tensor tensor)
      : name(std::move(name_in)),
        role(std::move(role_in)),
        axes(std::move(axes_in)),
        borrowed(std::move(tensor)) {
    c.struct_size = sizeof c;
    c.name = name.c_str();
    c.role = role.c_str();
    c.axes = axes.c_str();
    c.domain = domain == nullptr ? "" : domain;
    c.heads = heads;
    c.head_dim = head_dim;
    c.tensor = borrowed.get();
  }
  NamedTensor(const NamedTensor&) = delete;
  NamedTensor& operator=(const NamedTensor&) = delete;

  std::string name, role, axes;
  BorrowedTensor borrowed;
  graft_named_tensor c{};
};

// A list of them as the ABI wants it; a deque, so that growing moves nothing.
struct NamedTensors {
  std::deque<NamedTensor> owned;
  std::vector<const graft_named_tensor*> pointers;
  template <typename... Args>
  void add(Args&&... args) {
    owned.emplace_back(std::forward<Args>(args)...);
    pointers.push_back(&owned.back().c);
  }
  void clear() {
    pointers.clear();
    owned.clear();
  }
};

// The host's side of graft_init_args: batches, rewinding, probing.
class CalibrationFeed {
 public:
  CalibrationFeed(const Initializer& initializer, TokenMixer& mixer, const LayerSignals& signals)
      : initializer_(initializer), mixer_(mixer), signals_(signals) {
    if (signals.block_input.defined()) sequences_ = signals.block_input.size(0);
  }

  std::uint32_t batches() const {
    return static_cast<std::uint32_t>((sequences_ + kSequencesInABatch - 1) / kSequencesInABatch);
  }

  void install(graft_init_args& args) {
    args.ctx = this;
    args.n_batches = batches();
    args.next_batch = [](void* ctx, const graft_named_tensor* const** out, std::uint32_t* n,
                         graft_error* error) {
      return guarded(ctx, "next_batch", error,
                     [&](CalibrationFeed& feed) { return feed.next(out, n, error); });
    };
    args.rewind = [](void* ctx, graft_error* error) {
      return guarded(ctx, "rewind", error, [&](CalibrationFeed& feed) { return feed.rewind(); });
    };
    args.probe = [](void* ctx, std::uint32_t n, const char* const* taps, const DLTensor** out,
                    graft_error* error) {
      return guarded(ctx, "probe", error,
                     [&](CalibrationFeed& feed) { return feed.probe(n, taps, out, error); });
    };
  }

  // A failure of the host inside a callback, which the plugin could only pass on as text.
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  template <typename Work>
  static graft_status guarded(void* ctx, const char* where, graft_error* error, Work&& work) {
    auto& feed = *static_cast<CalibrationFeed*>(ctx);
    try {
      return work(feed);
    } catch (const std::exception& e) {
      feed.failure_ = std::current_exception();
      return say(error, GRAFT_INTERNAL, where, e.what());
    }
  }

  static graft_status say(graft_error* error, graft_status code, const char* where,
                          const std::string& message) {
    if (error != nullptr) {
      error->code = code;
      std::snprintf(error->where, sizeof error->where, "%s", where);
      std::snprintf(error->message, sizeof error->message, "%s", message.c_str());
    }
    return code;
  }

  void offer(const char* name, const char* axes, const at::Tensor& all) {
    std::int64_t limit = 0;
    if (!all.defined() || !wants_signal(initializer_, name, &limit)) return;
    const std::int64_t available = limit == 0 ? all.size(0) : std::min(limit, all.size(0));
    if (first_ >= available) return;
    // A signal covers the whole batch or is left out: the initializer pairs signals row by row.
    if (first_ + count_ > all.size(0)) return;
    batch_.add(name, "", axes, nullptr, 0, 0, aligned(all.narrow(0, first_, count_)));
  }

  graft_status next(const graft_named_tensor* const** out, std::uint32_t* n, graft_error* error) {
    first_ = started_ ? first_ + count_ : 0;
    started_ = true;
    count_ = std::min(kSequencesInABatch, sequences_ - first_);
    batch_.clear();
    if (count_ <= 0) {
      count_ = 0;
      first_ = sequences_;
      return say(error, GRAFT_NOT_FOUND, "next_batch", "the pass is over; rewind() starts another");
    }
    offer(GRAFT_SIGNAL_BLOCK_INPUT, "batch,tokens,model", signals_.block_input);
    offer(GRAFT_SIGNAL_BLOCK_OUTPUT, "batch,tokens,model", signals_.block_output);
    offer(GRAFT_SIGNAL_RESIDUAL, "batch,tokens,model", signals_.residual);
    offer(GRAFT_SIGNAL_HEAD_CONTEXT, "batch,tokens,heads,value", signals_.head_context);
    std::int64_t limit = 0;
    if (signals_.attention_probs &&
        wants_signal(initializer_, GRAFT_SIGNAL_ATTENTION_PROBS, &limit) &&
        (limit == 0 || first_ < limit))
      batch_.add(GRAFT_SIGNAL_ATTENTION_PROBS, "", "batch,heads,query,key", nullptr, 0, 0,
                 signals_.attention_probs(first_, count_));
    *out = batch_.pointers.data();
    *n = static_cast<std::uint32_t>(batch_.pointers.size());
    return GRAFT_OK;
  }

  graft_status rewind() {
    started_ = false;
    first_ = count_ = 0;
    batch_.clear();
    probes_.clear();
    return GRAFT_OK;
  }

  graft_status probe(std::uint32_t n, const char* const* names, const DLTensor** out,
                     graft_error* error) {
    if (count_ == 0)
      return say(error, GRAFT_FAILED_PRECONDITION, "probe",
                 "there is no current batch; call next_batch() first");
    at::NoGradGuard no_grad;
    const std::vector<std::string> known = mixer_.tap_names();
    std::vector<std::string> taps;
    for (std::uint32_t i = 0; i < n; ++i) {
      const std::string name = names[i];
      if (name == "y") continue;
      // The initializer's to handle: it may do without.
      if (std::find(known.begin(), known.end(), name) == known.end())
        return say(error, GRAFT_NOT_FOUND, "probe",
                   "mixer '" + mixer_.plugin().label() + "' has no tap '" + name + "'" +
                       did_you_mean(name, known));
      taps.push_back(name);
    }
    const at::Tensor x = signals_.block_input.narrow(0, first_, count_);
    const MixerOutput output =
        taps.size() < n ? mixer_.forward(x, {}, {}, taps) : MixerOutput{{}, mixer_.taps(x, taps)};
    probes_.clear();
    std::size_t tap = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
      probes_.emplace_back(std::string(names[i]) == "y" ? output.y : output.taps[tap++]);
      out[i] = probes_.back().get();
    }
    return GRAFT_OK;
  }

  const Initializer& initializer_;
  TokenMixer& mixer_;
  const LayerSignals& signals_;
  std::int64_t sequences_ = 0, first_ = 0, count_ = 0;
  bool started_ = false;
  NamedTensors batch_;
  std::deque<BorrowedTensor> probes_;
  std::exception_ptr failure_;
};

NamedTensors teacher_parameters(const Backbone& teacher, std::int64_t layer) {
  NamedTensors list;
  for (const RoleTensor& parameter : teacher.layer_roles(layer))
    list.add(parameter.layout.name, parameter.layout.role, parameter.layout.axes, nullptr,
             parameter.layout.heads, parameter.layout.head_dim, aligned(parameter.tensor));
  return list;
}

NamedTensors mixer_parameters(const TokenMixer& mixer) {
  NamedTensors list;
  for (const MixerParameter& parameter : mixer.parameters())
    list.add(parameter.name, parameter.role,
             parameter.spec->axes == nullptr ? "" : parameter.spec->axes, parameter.spec->domain,
             parameter.spec->heads, parameter.spec->head_dim, parameter.tensor);
  return list;
}

void require_source_roles(const Initializer& initializer, const TokenMixer& source) {
  std::set<std::string> roles;
  for (const MixerParameter& parameter : source.parameters()) roles.insert(parameter.role);
  for (const graft_role_need& need : initializer.needs()) {
    constexpr std::uint32_t kWanted = GRAFT_NEED_TEACHER | GRAFT_NEED_REQUIRED;
    if ((need.flags & kWanted) != kWanted || roles.contains(need.role)) continue;
    std::string have;
    for (const std::string& role : roles) have += (have.empty() ? "" : ", ") + role;
    fail(ErrorKind::plugin, "initializer '" + initializer.label() + "' needs role " + need.role +
                                "; its source, mixer '" + source.plugin().label() +
                                "', has: " + have);
  }
}

// One layer, from whatever `from` holds.
InitReport run_layer(const Initializer& initializer, const NamedTensors& from,
                     const LayerInfo& info, TokenMixer& mixer, const LayerSignals& signals,
                     std::uint64_t seed) {
  at::NoGradGuard no_grad;
  const auto start = Clock::now();
  const graft_layer_info c_info = info.c_info();
  const NamedTensors to = mixer_parameters(mixer);
  std::vector<std::uint8_t> written(to.pointers.size(), 0);
  CalibrationFeed feed(initializer, mixer, signals);

  graft_init_args args{};
  args.struct_size = sizeof args;
  args.n_teacher = static_cast<std::uint32_t>(from.pointers.size());
  args.n_student = static_cast<std::uint32_t>(to.pointers.size());
  args.layer = &c_info;
  args.teacher = from.pointers.data();
  args.student = to.pointers.data();
  args.student_written = written.data();
  args.mixer = mixer.plugin().get();
  feed.install(args);

  graft_exec exec{};
  exec.struct_size = sizeof exec;
  exec.device_type = kDLCPU;
  exec.flags = GRAFT_X_DETERMINISTIC;
  exec.seed = seed;
  exec.offset = static_cast<std::uint64_t>(c_info.layer) << 32;
  try {
    initializer.run(exec, args);
  } catch (const Error& e) {
    feed.rethrow();
    if (e.kind() == ErrorKind::interrupted)
      fail(ErrorKind::interrupted, "interrupted in layer " + std::to_string(c_info.layer));
    throw Error(e.kind(), "layer " + std::to_string(c_info.layer) + ": " + e.what());
  }

  InitReport report;
  for (std::size_t i = 0; i < written.size(); ++i)
    (written[i] != 0 ? report.written : report.left).push_back(mixer.parameters()[i].name);
  report.seconds = seconds_since(start);
  return report;
}

}  // namespace

void check_calibration(const Initializer& initializer) {
  const std::set<std::string> known = {GRAFT_SIGNAL_BLOCK_INPUT, GRAFT_SIGNAL_BLOCK_OUTPUT,
                                       GRAFT_SIGNAL_HEAD_CONTEXT, GRAFT_SIGNAL_ATTENTION_PROBS,
                                       GRAFT_SIGNAL_RESIDUAL};
  for (const graft_calibration_need& need : initializer.calibration()) {
    if ((need.flags & GRAFT_NEED_REQUIRED) == 0 || known.contains(need.name)) continue;
    std::string have;
    for (const std::string& name : known) have += (have.empty() ? "" : ", ") + name;
    fail(ErrorKind::plugin, "initializer '" + initializer.label() +
                                "' needs the calibration signal " + need.name +
                                ", which this graft does not have; it has " + have);
  }
}

bool wants_signal(const Initializer& initializer, const std::string& name,
                  std::int64_t* max_sequences) {
  for (const graft_calibration_need& need : initializer.calibration()) {
    if (name != need.name) continue;
    if (max_sequences != nullptr) *max_sequences = need.max_sequences;
    return true;
  }
  return false;
}

bool wants_calibration(const Initializer& initializer) {
  return !initializer.calibration().empty();
}

InitReport run_initializer(const Initializer& initializer, const Backbone& teacher,
                           std::int64_t layer, TokenMixer& mixer, const LayerSignals& signals,
                           std::uint64_t seed) {
  return run_layer(initializer, teacher_parameters(teacher, layer), teacher.layer_info(layer),
                   mixer, signals, seed);
}

InitReport run_initializer(const Initializer& initializer, const TokenMixer& source,
                           const LayerInfo& layer, TokenMixer& mixer, const LayerSignals& signals,
                           std::uint64_t seed) {
  require_source_roles(initializer, source);
  return run_layer(initializer, mixer_parameters(source), layer, mixer, signals, seed);
}

}  // namespace graft
