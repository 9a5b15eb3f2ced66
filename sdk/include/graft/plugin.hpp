// A plugin in C++20, without LibTorch: derive from Mixer, Initializer or Objective, describe the
// class, and name it in GRAFT_DEFINE_PLUGIN. What the C side asks for (struct sizes, pointer
// lifetimes, no exception across the boundary, version negotiation) is done here.
//
//   class Identity final : public graft::sdk::Mixer {
//    public:
//     Identity(const graft::sdk::LayerInfo&, const graft::sdk::Config&) {}
//     static graft::sdk::Description describe() {
//       return {.id = "org.example.identity", .alias = "identity", .name = "Identity",
//               .version = "1.0.0", .license = "Apache-2.0"};
//     }
//     void param_specs(graft::sdk::ParamSpecs&) override {}
//     void plan(const graft_plan_in&, graft::sdk::Plan&) override {}
//     void forward(const graft_exec&, const graft_mixer_forward& call) override { ... }
//   };
//   GRAFT_DEFINE_PLUGIN((graft::sdk::LibraryInfo{.id = "org.example.identity-pack", ...}),
//                       graft::sdk::mixer<Identity>())
//
// Errors are thrown as graft::sdk::Status; any other exception reaches the host as GRAFT_INTERNAL
// with its text. Structs handed to the methods are complete: fields that an older host does not
// know are 0.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "graft/description.hpp"
#include "graft/host.hpp"
#include "graft/status.hpp"
#include "graft/tensor.hpp"

// CMake's graft_add_plugin() gives what must match between host and plugin when both link LibTorch.
#ifndef GRAFT_BUILD_TAGS
#define GRAFT_BUILD_TAGS ""
#endif

namespace graft::sdk {

namespace detail {
template <class Interface>
struct Handle;

constexpr uint32_t bit_if(bool set, uint32_t bit) noexcept { return set ? bit : 0u; }
}  // namespace detail

// ---------------------------------------------------------------- mixer

// A mixer's parameters as plain numbers: float32, contiguous, on the CPU, by name.
class NaturalParams {
 public:
  NaturalParams(const ParamSpecs& specs, DLTensor* const* params, uint8_t* written)
      : specs_(specs), params_(params), written_(written) {}

  std::span<const float> read(std::string_view name) const {
    const std::size_t i = index(name);
    return data<const float>(require(params_[i], name), name);
  }
  // Marks the parameter as written.
  std::span<float> write(std::string_view name) {
    const std::size_t i = index(name);
    const auto values = data<float>(require(params_[i], name), name);
    if (written_ != nullptr) written_[i] = 1;
    return values;
  }

 private:
  std::size_t index(std::string_view name) const {
    const auto found = specs_.find(name);
    if (!found) throw Status(GRAFT_INTERNAL, cat("param:", name), "is not one of this mixer's");
    return *found;
  }

  const ParamSpecs& specs_;
  DLTensor* const* params_;
  uint8_t* written_;
};

// A token mixer for one layer: x [B,T,model] -> y [B,T,model]. The constructor takes
// (const LayerInfo&, const Config&) and is complete when it returns; `static Description
// describe()` tells what the class is. One thread at a time calls into an instance.
class Mixer {
 public:
  virtual ~Mixer() = default;
  Mixer() = default;
  Mixer(const Mixer&) = delete;
  Mixer& operator=(const Mixer&) = delete;

  // Called once, right after construction.
  virtual void param_specs(ParamSpecs& specs) = 0;
  // The only place that decides on sizes; the calls after it allocate nothing of their own.
  virtual void plan(const graft_plan_in& in, Plan& out) = 0;
  virtual void forward(const graft_exec& exec, const graft_mixer_forward& call) = 0;
  // Needed for GRAFT_CAP_BACKWARD. call.fwd is complete too.
  virtual void backward(const graft_exec&, const graft_mixer_backward&) { missing("backward"); }
  // Needed for GRAFT_CAP_STEP: T == 1, and state_out may be state_in.
  virtual void step(const graft_exec&, const graft_mixer_forward&) { missing("step"); }

  // graft.mixer-domain/1: make GRAFT_NATURAL_* `what` equal values[h] for every head and token.
  // Calls the base for what it does not have.
  virtual void set_natural(std::string_view what, std::span<const double> /*values*/,
                           NaturalParams& /*params*/) {
    throw Status(GRAFT_UNIMPLEMENTED, cat("natural:", what), "this mixer has no such quantity");
  }
  // graft.mixer-migrate/1: fill `params` (already at their defaults) from those of an older schema.
  virtual void migrate(uint32_t old_schema,
                       const std::map<std::string, const DLTensor*>& /*old_params*/,
                       std::span<DLTensor* const> /*params*/) {
    throw Status(GRAFT_UNIMPLEMENTED, cat("param_schema:", old_schema),
                 "this mixer cannot read parameters of that schema");
  }
  // Extensions of the author's own; NULL for an id it does not know. [any]
  virtual const void* extension(std::string_view /*id*/) noexcept { return nullptr; }

  // The object behind a handle that this library created.
  static Mixer& from(graft_mixer* handle);

  const ParamSpecs& specs() const noexcept { return specs_; }

 private:
  [[noreturn]] static void missing(const char* call) {
    throw Status(GRAFT_UNIMPLEMENTED, call, "this mixer does not have it");
  }

  friend struct detail::Handle<Mixer>;
  ParamSpecs specs_;
};

// ---------------------------------------------------------------- initializer

// The roles an initializer asks for; the host checks them before it loads a weight.
class RoleNeeds {
 public:
  void teacher(std::string role, bool required = true) {
    add(std::move(role), GRAFT_NEED_TEACHER, required);
  }
  void student(std::string role, bool required = true) { add(std::move(role), 0, required); }
  std::span<const graft_role_need> c() {
    for (std::size_t i = 0; i < roles_.size(); ++i) needs_[i].role = roles_[i].c_str();
    return needs_;
  }

 private:
  void add(std::string role, uint32_t side, bool required) {
    roles_.push_back(std::move(role));
    needs_.push_back({nullptr, side | detail::bit_if(required, GRAFT_NEED_REQUIRED), 0});
  }
  std::deque<std::string> roles_;
  std::vector<graft_role_need> needs_;
};

// The calibration signals it asks for (GRAFT_SIGNAL_*); the host computes no other.
class CalibrationNeeds {
 public:
  // max_sequences: of how many sequences it wants the signal, 0 = all; those come first.
  void add(std::string signal, bool required = true, uint32_t max_sequences = 0) {
    names_.push_back(std::move(signal));
    needs_.push_back({nullptr, detail::bit_if(required, GRAFT_NEED_REQUIRED), max_sequences});
  }
  std::span<const graft_calibration_need> c() {
    for (std::size_t i = 0; i < names_.size(); ++i) needs_[i].name = names_[i].c_str();
    return needs_;
  }

 private:
  std::deque<std::string> names_;
  std::vector<graft_calibration_need> needs_;
};

// A parameter or a calibration signal; lives as long as the host says (see InitArgs).
class NamedTensor {
 public:
  NamedTensor() = default;
  explicit NamedTensor(const graft_named_tensor* given) : c_(detail::widened(given)) {}

  std::string_view name() const noexcept { return view(c_.name); }
  std::string_view role() const noexcept { return view(c_.role); }
  std::string_view axes() const noexcept { return view(c_.axes); }
  std::string_view domain() const noexcept { return view(c_.domain); }
  int32_t heads() const noexcept { return c_.heads; }  // 0 = no heads axis
  int32_t head_dim() const noexcept { return c_.head_dim; }
  DLTensor& tensor() const { return require(c_.tensor, name()); }
  std::span<const int64_t> shape() const { return shape_of(tensor()); }
  // The numbers of a float32 tensor on the CPU.
  std::span<const float> values() const { return data<const float>(tensor(), name()); }

 protected:
  static std::string_view view(const char* text) noexcept { return text == nullptr ? "" : text; }
  graft_named_tensor c_{};
};

// A parameter of the mixer that is being filled.
class StudentParam : public NamedTensor {
 public:
  StudentParam() = default;
  StudentParam(const graft_named_tensor* given, uint8_t* written)
      : NamedTensor(given), written_(written) {}

  // The numbers to write into; marks the parameter as set by this initializer.
  std::span<float> write() const {
    const auto numbers = data<float>(tensor(), name());
    mark_written();
    return numbers;
  }
  void mark_written() const noexcept {
    if (written_ != nullptr) *written_ = 1;
  }
  bool written() const noexcept { return written_ != nullptr && *written_ != 0; }

 private:
  uint8_t* written_ = nullptr;
};

// The signals of one calibration batch; gone with the next one.
class Batch {
 public:
  explicit Batch(std::vector<NamedTensor> signals) : signals_(std::move(signals)) {}

  // NULL when this batch does not have it.
  const NamedTensor* find(std::string_view name) const noexcept {
    for (const auto& signal : signals_) {
      if (signal.name() == name) return &signal;
    }
    return nullptr;
  }
  const NamedTensor& at(std::string_view name) const {
    if (const auto* const signal = find(name)) return *signal;
    std::string have;
    for (const auto& signal : signals_) have += cat(have.empty() ? "" : ", ", signal.name());
    throw Status(
        GRAFT_NOT_FOUND, cat("signal:", name),
        cat("is not in this calibration batch, which has: ", have.empty() ? "none" : have));
  }
  std::span<const NamedTensor> signals() const noexcept { return signals_; }

 private:
  std::vector<NamedTensor> signals_;
};

// One layer to initialize: the teacher's parameters, the student's, and the calibration text.
class InitArgs {
 public:
  explicit InitArgs(const graft_init_args* given) : c_(detail::widened(given)), layer_(c_.layer) {
    for (uint32_t i = 0; i < c_.n_teacher; ++i) teacher_.emplace_back(c_.teacher[i]);
    for (uint32_t i = 0; i < c_.n_student; ++i) {
      student_.emplace_back(c_.student[i],
                            c_.student_written == nullptr ? nullptr : c_.student_written + i);
    }
  }

  const LayerInfo& layer() const noexcept { return layer_; }
  std::span<const NamedTensor> teacher() const noexcept { return teacher_; }
  std::span<const StudentParam> student() const noexcept { return student_; }  // param_specs order

  const NamedTensor* find_teacher(std::string_view role) const noexcept {
    return find(teacher_, role);
  }
  const StudentParam* find_student(std::string_view role) const noexcept {
    return find(student_, role);
  }
  // Throw NOT_FOUND with the roles there are.
  const NamedTensor& teacher(std::string_view role) const { return at(teacher_, role, "teacher"); }
  const StudentParam& student(std::string_view role) const { return at(student_, role, "student"); }

  // ---- calibration
  uint32_t n_batches() const noexcept {
    return c_.n_batches;
  }  // of one pass; 0 = no calibration text
  bool has_calibration() const noexcept { return c_.next_batch != nullptr && c_.n_batches > 0; }

  // The next batch of this pass, or nothing at its end.
  std::optional<Batch> next_batch() {
    if (c_.next_batch == nullptr) return std::nullopt;
    const graft_named_tensor* const* signals = nullptr;
    uint32_t n = 0;
    graft_error error = empty_error();
    const graft_status status = c_.next_batch(c_.ctx, &signals, &n, &error);
    if (status == GRAFT_NOT_FOUND) return std::nullopt;
    check(status, error, "next_batch");
    return Batch({signals, signals + n});
  }
  // Starts another pass.
  void rewind() {
    if (c_.rewind == nullptr) {
      throw Status(GRAFT_FAILED_PRECONDITION, "rewind", "the host gave no calibration text");
    }
    graft_error error = empty_error();
    check(c_.rewind(c_.ctx, &error), error, "rewind");
  }
  // One whole pass from the first batch on: body(const Batch&). Ends with CANCELLED when the user
  // wants to stop.
  template <class Body>
  void for_each_batch(Body&& body) {
    if (!has_calibration()) return;
    rewind();
    while (const auto batch = next_batch()) {
      if (should_stop()) throw cancelled();
      body(*batch);
    }
  }

  // The target mixer with its parameters as they stand, run on the current batch: taps by name, or
  // "y". They live until the next probe(), next_batch() or rewind().
  std::vector<const DLTensor*> probe(const std::vector<std::string>& taps) {
    if (c_.probe == nullptr) {
      throw Status(GRAFT_FAILED_PRECONDITION, "probe",
                   "this host cannot run the target mixer here");
    }
    std::vector<const char*> names;
    for (const auto& tap : taps) names.push_back(tap.c_str());
    std::vector<const DLTensor*> out(taps.size());
    graft_error error = empty_error();
    check(c_.probe(c_.ctx, static_cast<uint32_t>(names.size()), names.data(), out.data(), &error),
          error, "probe");
    return out;
  }
  const DLTensor& probe(const std::string& tap) {
    const DLTensor* const tensor = probe(std::vector<std::string>{tap}).front();
    return require(tensor, tap);
  }

  // Sets GRAFT_NATURAL_* `what` of the target mixer to values[h] per head and marks what it wrote.
  // False: the mixer has no such quantity; say so in the log.
  bool set_natural(const std::string& what, std::span<const double> values) {
    if (c_.mixer == nullptr) return false;
    const auto table = detail::widened(c_.mixer->v);
    if (table.get_extension == nullptr) return false;
    const auto domain = detail::widened(static_cast<const graft_mixer_domain*>(
        table.get_extension(c_.mixer, GRAFT_EXT_MIXER_DOMAIN)));
    if (domain.set == nullptr) return false;
    std::vector<DLTensor*> params;
    for (const auto& param : student_) params.push_back(&param.tensor());
    graft_error error = empty_error();
    const graft_status status =
        domain.set(c_.mixer, what.c_str(), static_cast<uint32_t>(values.size()), values.data(),
                   params.data(), c_.student_written, &error);
    if (status == GRAFT_UNIMPLEMENTED) return false;
    check(status, error, cat("setting '", what, "' of the mixer"));
    return true;
  }

  const graft_init_args& c() const noexcept { return c_; }

 private:
  template <class Tensor>
  static const Tensor* find(const std::vector<Tensor>& all, std::string_view role) noexcept {
    for (const auto& tensor : all) {
      if (tensor.role() == role) return &tensor;
    }
    return nullptr;
  }
  template <class Tensor>
  static const Tensor& at(const std::vector<Tensor>& all, std::string_view role, const char* side) {
    if (const auto* const tensor = find(all, role)) return *tensor;
    std::string have;
    for (const auto& tensor : all) have += cat(have.empty() ? "" : ", ", tensor.role());
    throw Status(GRAFT_NOT_FOUND, cat("role:", role),
                 cat("the ", side,
                     " has no parameter of this role; it has: ", have.empty() ? "none" : have));
  }

  graft_init_args c_;
  LayerInfo layer_;
  std::vector<NamedTensor> teacher_;
  std::vector<StudentParam> student_;
};

// Fills a mixer's parameters from the teacher's. The constructor takes (const Config&). Each layer
// has its own instance, and several may run at once.
class Initializer {
 public:
  virtual ~Initializer() = default;
  Initializer() = default;
  Initializer(const Initializer&) = delete;
  Initializer& operator=(const Initializer&) = delete;

  // Both are called once, right after construction.
  virtual void needs(RoleNeeds& needs) = 0;
  virtual void calibration(CalibrationNeeds& /*needs*/) {}
  virtual void run(const graft_exec& exec, InitArgs& args) = 0;
  virtual const void* extension(std::string_view /*id*/) noexcept { return nullptr; }

 private:
  friend struct detail::Handle<Initializer>;
  RoleNeeds needs_;
  CalibrationNeeds calibration_;
};

// ---------------------------------------------------------------- objective

// The signals an objective reads (GRAFT_SIGNAL_*), in the order in which run() gets them.
class SignalNeeds {
 public:
  void add(std::string signal, bool want_grad = false, bool optional = false) {
    names_.push_back(std::move(signal));
    needs_.push_back({nullptr,
                      detail::bit_if(want_grad, GRAFT_NEED_GRAD) |
                          detail::bit_if(!optional, GRAFT_NEED_REQUIRED),
                      0});
  }
  std::span<const graft_signal_need> c() {
    for (std::size_t i = 0; i < names_.size(); ++i) needs_[i].name = names_[i].c_str();
    return needs_;
  }

 private:
  std::deque<std::string> names_;
  std::vector<graft_signal_need> needs_;
};

class ObjectiveArgs {
 public:
  ObjectiveArgs(const graft_objective_args* given, std::span<const graft_signal_need> needs)
      : c_(detail::widened(given)), needs_(needs) {
    if (c_.n_signals != needs_.size()) {
      throw Status(GRAFT_INVALID_ARGUMENT, "signals",
                   cat("expected ", needs_.size(), " signals, got ", c_.n_signals));
    }
  }

  // Signal i of needs(); throws when it is missing.
  const DLTensor& signal(std::size_t i) const { return require(c_.signals[i], needs_[i].name); }
  // NULL for an optional signal that is not there.
  const DLTensor* find_signal(std::size_t i) const noexcept { return c_.signals[i]; }
  // Where to write dLoss/dsignal times grad_scale(); NULL = not wanted.
  DLTensor* grad(std::size_t i) const noexcept {
    return c_.grads == nullptr ? nullptr : c_.grads[i];
  }
  DLTensor& loss() const { return require(c_.loss, "loss"); }
  double grad_scale() const noexcept { return c_.grad_scale; }
  // A figure for the host's log; a scalar tensor on the device, so that nothing waits for it.
  void metric(const char* name, const DLTensor& scalar) const noexcept {
    if (c_.metric != nullptr) c_.metric(c_.metric_ctx, name, &scalar);
  }
  const graft_objective_args& c() const noexcept { return c_; }

 private:
  graft_objective_args c_;
  std::span<const graft_signal_need> needs_;
};

// A loss and its gradients. The constructor takes (const Config&).
class Objective {
 public:
  virtual ~Objective() = default;
  Objective() = default;
  Objective(const Objective&) = delete;
  Objective& operator=(const Objective&) = delete;

  // Called once, right after construction.
  virtual void needs(SignalNeeds& needs) = 0;
  // Bytes of workspace that run() wants for these shapes; the tensors' data is not to be read.
  virtual uint64_t workspace(const ObjectiveArgs& /*args*/) { return 0; }
  virtual void run(const graft_exec& exec, const ObjectiveArgs& args) = 0;
  virtual const void* extension(std::string_view /*id*/) noexcept { return nullptr; }

 private:
  friend struct detail::Handle<Objective>;
  SignalNeeds needs_;
};

// ---------------------------------------------------------------- below the surface

namespace detail {

inline std::string_view id_view(const char* id) noexcept { return id == nullptr ? "" : id; }

// The C object of an instance: the handle the host holds, its table, and the author's object.
template <>
struct Handle<Mixer> {
  graft_mixer c{};
  graft_mixer_vtbl table{};
  std::unique_ptr<Mixer> object;
  std::vector<const graft_param_spec*> specs;
  Plan plan;
  const Description& description;  // the library's: outlives every instance

  Handle(std::unique_ptr<Mixer> mixer, const Description& described)
      : object(std::move(mixer)), description(described) {
    object->param_specs(object->specs_);
    specs = object->specs_.c();
    table.struct_size = sizeof table;
    table.param_schema = description.param_schema;
    table.destroy = [](graft_mixer* m) noexcept { delete &from(m); };
    table.param_specs = &param_specs;
    table.plan = &make_plan;
    table.forward = &forward;
    if ((description.caps & GRAFT_CAP_BACKWARD) != 0) table.backward = &backward;
    if ((description.caps & GRAFT_CAP_STEP) != 0) table.step = &step;
    table.get_extension = &get_extension;
    c = graft_mixer{&table, this};
  }

  static Handle& from(graft_mixer* m) noexcept { return *static_cast<Handle*>(m->self); }

  static graft_status param_specs(graft_mixer* m, const graft_param_spec* const** out, uint32_t* n,
                                  graft_error*) noexcept {
    const auto& specs = from(m).specs;
    *out = specs.data();
    *n = static_cast<uint32_t>(specs.size());
    return GRAFT_OK;
  }

  static graft_status make_plan(graft_mixer* m, const graft_plan_in* in, graft_plan_out* out,
                                graft_error* error) noexcept {
    return guarded(error, [&] {
      auto& self = from(m);
      const graft_plan_in asked = widened(in);
      self.check_plan(asked);
      self.plan = Plan{};
      self.object->plan(asked, self.plan);
      const auto saved = self.plan.saved.c();
      const auto state = self.plan.state.c();
      const auto taps = self.plan.taps.c();
      write_narrowed(
          graft_plan_out{sizeof(graft_plan_out), static_cast<uint32_t>(saved.size()),
                         static_cast<uint32_t>(state.size()), static_cast<uint32_t>(taps.size()),
                         self.plan.workspace_forward, self.plan.workspace_backward,
                         self.plan.workspace_step, saved.data(), state.data(), taps.data()},
          out);
    });
  }

  // What every mixer refuses: a type or device that it did not declare, sizes below zero.
  void check_plan(const graft_plan_in& asked) const {
    std::string declared;
    bool known = false;
    for (const DLDataType dtype : description.dtypes) {
      declared += cat(declared.empty() ? "" : ", ", dtype_name(dtype));
      known = known || same_dtype(dtype, asked.dtype);
    }
    if (!known) {
      throw Status(GRAFT_UNIMPLEMENTED, "plan.dtype",
                   cat("expected one of ", declared, ", got ", dtype_name(asked.dtype)));
    }
    known = false;
    for (const DLDeviceType device : description.devices) known |= device == asked.device_type;
    if (!known) {
      throw Status(GRAFT_UNIMPLEMENTED, "plan.device_type",
                   cat("this mixer does not run on device type ", asked.device_type));
    }
    if (asked.batch < 0 || asked.tokens < 0) {
      throw Status(GRAFT_INVALID_ARGUMENT, asked.batch < 0 ? "plan.batch" : "plan.tokens",
                   cat("expected 0 or more, got ", asked.batch, " x ", asked.tokens));
    }
  }

  static void check_count(std::string_view what, std::size_t planned, uint32_t got) {
    if (got == planned) return;
    throw Status(GRAFT_INVALID_ARGUMENT, cat("n_", what),
                 cat("expected ", planned, " as planned, got ", got));
  }

  static graft_mixer_forward checked(const graft_mixer_forward* given, const Handle& self) {
    const auto call = widened(given);
    if (call.n_params != self.specs.size()) {
      throw Status(GRAFT_INVALID_ARGUMENT, "params",
                   cat("expected ", self.specs.size(), " parameters, got ", call.n_params));
    }
    // The plan for this call was made right before it.
    self.check_count("state", self.plan.state.size(), call.n_state);
    self.check_count("saved", self.plan.saved.size(), call.n_saved);
    self.check_count("taps", self.plan.taps.size(), call.n_taps);
    return call;
  }

  static graft_status forward(graft_mixer* m, const graft_exec* exec,
                              const graft_mixer_forward* call, graft_error* error) noexcept {
    return guarded(error, [&] {
      const auto full = checked(call, from(m));
      const auto around = widened(exec);
      const bool may_lack_y = (from(m).description.caps & GRAFT_CAP_TAPS_ONLY) != 0 &&
                              (around.flags & GRAFT_X_TRAINING) == 0;
      if (full.y == nullptr && !may_lack_y) require(full.y, "y");
      from(m).object->forward(around, full);
    });
  }

  static graft_status backward(graft_mixer* m, const graft_exec* exec,
                               const graft_mixer_backward* given, graft_error* error) noexcept {
    return guarded(error, [&] {
      auto call = widened(given);
      const auto fwd = checked(call.fwd, from(m));
      call.fwd = &fwd;
      from(m).object->backward(widened(exec), call);
    });
  }

  static graft_status step(graft_mixer* m, const graft_exec* exec, const graft_mixer_forward* call,
                           graft_error* error) noexcept {
    return guarded(error, [&] { from(m).object->step(widened(exec), checked(call, from(m))); });
  }

  static graft_status set_natural(graft_mixer* m, const char* what, uint32_t n,
                                  const double* values, DLTensor* const* params, uint8_t* written,
                                  graft_error* error) noexcept {
    return guarded(error, [&] {
      auto& mixer = *from(m).object;
      NaturalParams view(mixer.specs(), params, written);
      mixer.set_natural(id_view(what), {values, n}, view);
    });
  }

  static graft_status migrate(graft_mixer* m, uint32_t old_schema, uint32_t n,
                              const char* const* names, const DLTensor* const* old_params,
                              DLTensor* const* params, graft_error* error) noexcept {
    return guarded(error, [&] {
      auto& self = from(m);
      std::map<std::string, const DLTensor*> old;
      for (uint32_t i = 0; i < n; ++i) old.emplace(names[i], old_params[i]);
      self.object->migrate(old_schema, old, {params, self.specs.size()});
    });
  }

  static const void* get_extension(graft_mixer* m, const char* id) noexcept {
    static constexpr graft_mixer_domain domain{sizeof(graft_mixer_domain), 0, &set_natural};
    static constexpr graft_mixer_migrate migration{sizeof(graft_mixer_migrate), 0, &migrate};
    const auto name = id_view(id);
    if (name == GRAFT_EXT_MIXER_DOMAIN) return &domain;
    if (name == GRAFT_EXT_MIXER_MIGRATE) return &migration;
    return from(m).object->extension(name);
  }
};

template <>
struct Handle<Initializer> {
  graft_initializer c{};
  graft_initializer_vtbl table{};
  std::unique_ptr<Initializer> object;

  Handle(std::unique_ptr<Initializer> initializer, const Description&)
      : object(std::move(initializer)) {
    object->needs(object->needs_);
    object->calibration(object->calibration_);
    const auto needs = object->needs_.c();
    const auto calibration = object->calibration_.c();
    table.struct_size = sizeof table;
    table.n_needs = static_cast<uint32_t>(needs.size());
    table.needs = needs.data();
    table.n_calibration = static_cast<uint32_t>(calibration.size());
    table.calibration = calibration.data();
    table.destroy = [](graft_initializer* i) noexcept { delete &from(i); };
    table.run = &run;
    table.get_extension = [](graft_initializer* i, const char* id) noexcept -> const void* {
      return from(i).object->extension(id_view(id));
    };
    c = graft_initializer{&table, this};
  }

  static Handle& from(graft_initializer* i) noexcept { return *static_cast<Handle*>(i->self); }

  static graft_status run(graft_initializer* i, const graft_exec* exec,
                          const graft_init_args* given, graft_error* error) noexcept {
    return guarded(error, [&] {
      InitArgs args(given);
      from(i).object->run(widened(exec), args);
    });
  }
};

template <>
struct Handle<Objective> {
  graft_objective c{};
  graft_objective_vtbl table{};
  std::unique_ptr<Objective> object;
  std::span<const graft_signal_need> needs;

  Handle(std::unique_ptr<Objective> objective, const Description&) : object(std::move(objective)) {
    object->needs(object->needs_);
    needs = object->needs_.c();
    table.struct_size = sizeof table;
    table.n_needs = static_cast<uint32_t>(needs.size());
    table.needs = needs.data();
    table.destroy = [](graft_objective* o) noexcept { delete &from(o); };
    table.workspace = &workspace;
    table.run = &run;
    table.get_extension = [](graft_objective* o, const char* id) noexcept -> const void* {
      return from(o).object->extension(id_view(id));
    };
    c = graft_objective{&table, this};
  }

  static Handle& from(graft_objective* o) noexcept { return *static_cast<Handle*>(o->self); }

  static graft_status workspace(graft_objective* o, const graft_objective_args* given,
                                uint64_t* bytes, graft_error* error) noexcept {
    return guarded(
        error, [&] { *bytes = from(o).object->workspace(ObjectiveArgs(given, from(o).needs)); });
  }

  static graft_status run(graft_objective* o, const graft_exec* exec,
                          const graft_objective_args* given, graft_error* error) noexcept {
    return guarded(
        error, [&] { from(o).object->run(widened(exec), ObjectiveArgs(given, from(o).needs)); });
  }
};

// The descriptions and constructors of one kind of component in this library.
template <class Interface, class... Arguments>
class Components {
 public:
  using Make = std::function<std::unique_ptr<Interface>(const Arguments&...)>;

  void add(Description description, Make make) {
    auto& entry = entries_.emplace_back(std::move(description), std::move(make));
    descs_.push_back(&entry.description.c());
  }
  uint32_t count() const noexcept { return static_cast<uint32_t>(descs_.size()); }
  const graft_desc* const* descs() const noexcept { return descs_.data(); }

  Handle<Interface>* create(const char* id, const Arguments&... arguments) const {
    for (const auto& entry : entries_) {
      const auto& description = entry.description.get();
      if (description.id == id_view(id)) {
        return new Handle<Interface>(entry.make(arguments...), description);
      }
    }
    throw Status(GRAFT_NOT_FOUND, "id", cat("this library has no component '", id_view(id), "'"));
  }

 private:
  struct Entry {
    Entry(Description d, Make m) : description(std::move(d)), make(std::move(m)) {}
    OwnedDescription description;
    Make make;
  };
  std::deque<Entry> entries_;
  std::vector<const graft_desc*> descs_;
};

struct MixerComponent {
  Description description;
  Components<Mixer, LayerInfo, Config>::Make make;
};
struct InitializerComponent {
  Description description;
  Components<Initializer, Config>::Make make;
};
struct ObjectiveComponent {
  Description description;
  Components<Objective, Config>::Make make;
};

// All of a library; made at the first negotiation and never destroyed, since the host keeps
// pointers into it until the process ends.
class Library {
 public:
  template <class... Parts>
  explicit Library(LibraryInfo info, Parts&&... parts) : info_(std::move(info)) {
    (add(std::forward<Parts>(parts)), ...);
    mixer_factory_ = {sizeof mixer_factory_, mixers_.count(), mixers_.descs(), &create_mixer};
    initializer_factory_ = {sizeof initializer_factory_, initializers_.count(),
                            initializers_.descs(), &create_initializer};
    objective_factory_ = {sizeof objective_factory_, objectives_.count(), objectives_.descs(),
                          &create_objective};
    plugin_ = {sizeof plugin_,
               0,
               info_.id.c_str(),
               info_.vendor.c_str(),
               info_.url.c_str(),
               info_.version.c_str(),
               info_.license.c_str(),
               GRAFT_BUILD_TAGS,
               &init,
               &deinit,
               &get_extension};
  }

  const graft_plugin& c() const noexcept { return plugin_; }

  __attribute__((visibility("hidden"))) static inline const Library* instance = nullptr;

 private:
  void add(MixerComponent part) { mixers_.add(std::move(part.description), std::move(part.make)); }
  void add(InitializerComponent part) {
    initializers_.add(std::move(part.description), std::move(part.make));
  }
  void add(ObjectiveComponent part) {
    objectives_.add(std::move(part.description), std::move(part.make));
  }

  static std::mutex& count_mutex() noexcept {
    static std::mutex mutex;
    return mutex;
  }
  __attribute__((visibility("hidden"))) static inline int init_count_ = 0;

  static graft_status init(const graft_host* host, const char*, graft_error* error) noexcept {
    if (host == nullptr) {
      return fill_error(error, GRAFT_INVALID_ARGUMENT, "host", "init() was given no host");
    }
    const std::lock_guard<std::mutex> lock(count_mutex());
    if (init_count_++ == 0) current_host.store(host);
    return GRAFT_OK;
  }
  static void deinit() noexcept {
    const std::lock_guard<std::mutex> lock(count_mutex());
    if (init_count_ > 0 && --init_count_ == 0) current_host.store(nullptr);
  }
  static const void* get_extension(const char* id) noexcept {
    const auto name = id_view(id);
    if (name == GRAFT_EXT_MIXER_FACTORY && instance->mixers_.count() > 0) {
      return &instance->mixer_factory_;
    }
    if (name == GRAFT_EXT_INITIALIZER_FACTORY && instance->initializers_.count() > 0) {
      return &instance->initializer_factory_;
    }
    if (name == GRAFT_EXT_OBJECTIVE_FACTORY && instance->objectives_.count() > 0) {
      return &instance->objective_factory_;
    }
    return nullptr;
  }

  static graft_status create_mixer(const char* id, const graft_layer_info* layer,
                                   const graft_config* config, graft_mixer** out,
                                   graft_error* error) noexcept {
    return guarded(
        error, [&] { *out = &instance->mixers_.create(id, LayerInfo(layer), Config(config))->c; });
  }
  static graft_status create_initializer(const char* id, const graft_config* config,
                                         graft_initializer** out, graft_error* error) noexcept {
    return guarded(error, [&] { *out = &instance->initializers_.create(id, Config(config))->c; });
  }
  static graft_status create_objective(const char* id, const graft_config* config,
                                       graft_objective** out, graft_error* error) noexcept {
    return guarded(error, [&] { *out = &instance->objectives_.create(id, Config(config))->c; });
  }

  LibraryInfo info_;
  Components<Mixer, LayerInfo, Config> mixers_;
  Components<Initializer, Config> initializers_;
  Components<Objective, Config> objectives_;
  graft_mixer_factory mixer_factory_{};
  graft_initializer_factory initializer_factory_{};
  graft_objective_factory objective_factory_{};
  graft_plugin plugin_{};
};

// The body of graft_plugin_negotiate: `make` builds the Library the first time.
template <class Make>
graft_status negotiate(const graft_negotiate_in* given, graft_negotiate_out* out,
                       graft_error* error, Make&& make) noexcept {
  return guarded(error, [&] {
    const auto in = widened(given);
    if (in.min_abi > GRAFT_ABI_CURRENT || in.max_abi < GRAFT_ABI_CURRENT) {
      const auto text = [](uint32_t abi) {
        return cat(GRAFT_ABI_MAJOR(abi), ".", GRAFT_ABI_MINOR(abi));
      };
      throw Status(GRAFT_ABI_MISMATCH, "abi",
                   cat("this plugin speaks graft ABI ", text(GRAFT_ABI_CURRENT),
                       "; the host offers ", text(in.min_abi), " to ", text(in.max_abi)));
    }
    if (in.dlpack_major != DLPACK_MAJOR_VERSION) {
      throw Status(GRAFT_ABI_MISMATCH, "dlpack_major",
                   cat("this plugin speaks DLPack ", DLPACK_MAJOR_VERSION, ", the host DLPack ",
                       in.dlpack_major));
    }
    static std::once_flag once;
    std::call_once(once, [&] { Library::instance = make(); });
    write_narrowed(graft_negotiate_out{sizeof(graft_negotiate_out), GRAFT_ABI_CURRENT,
                                       &Library::instance->c()},
                   out);
  });
}

}  // namespace detail

inline Mixer& Mixer::from(graft_mixer* handle) {
  return *detail::Handle<Mixer>::from(handle).object;
}

// The components of a library, for GRAFT_DEFINE_PLUGIN.
template <class T>
detail::MixerComponent mixer() {
  return {T::describe(),
          [](const LayerInfo& layer, const Config& config) -> std::unique_ptr<Mixer> {
            return std::make_unique<T>(layer, config);
          }};
}
template <class T>
detail::InitializerComponent initializer() {
  return {T::describe(), [](const Config& config) -> std::unique_ptr<Initializer> {
            return std::make_unique<T>(config);
          }};
}
template <class T>
detail::ObjectiveComponent objective() {
  return {T::describe(), [](const Config& config) -> std::unique_ptr<Objective> {
            return std::make_unique<T>(config);
          }};
}

}  // namespace graft::sdk

// The library's one exported symbol; once per library, outside any namespace.
// Arguments: a LibraryInfo in parentheses, then mixer<T>(), initializer<T>(), objective<T>() in any
// number.
#define GRAFT_DEFINE_PLUGIN(library_info, ...)                                      \
  extern "C" GRAFT_EXPORT graft_status GRAFT_CALL graft_plugin_negotiate(           \
      const graft_negotiate_in* in, graft_negotiate_out* out, graft_error* error) { \
    return ::graft::sdk::detail::negotiate(in, out, error, [] {                     \
      return new ::graft::sdk::detail::Library(library_info, __VA_ARGS__);          \
    });                                                                             \
  }
