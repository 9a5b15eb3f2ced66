// A built mixer plugin as a host sees it: opened from its file, called through the C ABI only.
#pragma once

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "graft/graft.h"
#include "test_host.h"

namespace graft::mixers {

using OptionValue = std::variant<bool, int64_t, double, std::string>;
using OptionMap = std::map<std::string, OptionValue>;

// A status other than OK, as an exception the tests can look into.
struct AbiError : std::runtime_error {
  AbiError(graft_status code_, const graft_error& error)
      : std::runtime_error(std::string(error.where) + ": " + error.message), code(code_) {}
  graft_status code;
};

inline graft_error fresh_error() {
  graft_error error{};
  error.struct_size = sizeof error;
  return error;
}
inline void require_ok(graft_status status, const graft_error& error) {
  if (status != GRAFT_OK) throw AbiError(status, error);
}

inline const graft_plugin& open_plugin(const std::string& file) {
  static std::map<std::string, const graft_plugin*> opened;
  const auto found = opened.find(file);
  if (found != opened.end()) return *found->second;
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  const auto negotiate =
      reinterpret_cast<graft_plugin_negotiate_fn>(dlsym(library, GRAFT_ENTRY_SYMBOL));
  if (negotiate == nullptr) throw std::runtime_error(dlerror());
  graft_negotiate_in in{
      sizeof in, DLPACK_MAJOR_VERSION, GRAFT_ABI_CURRENT, GRAFT_ABI_CURRENT, "test", "0"};
  graft_negotiate_out out{};
  out.struct_size = sizeof out;
  graft_error error = fresh_error();
  require_ok(negotiate(&in, &out, &error), error);
  if (out.plugin->init != nullptr)
    require_ok(out.plugin->init(&test_host(), file.c_str(), &error), error);
  return *(opened[file] = out.plugin);
}

inline const graft_mixer_factory& mixer_factory(const std::string& file) {
  return *static_cast<const graft_mixer_factory*>(
      open_plugin(file).get_extension(GRAFT_EXT_MIXER_FACTORY));
}

// The schema's defaults, with `given` over them.
class CompleteConfig {
 public:
  CompleteConfig(const graft_desc& desc, const OptionMap& given) {
    std::size_t used = 0;
    for (uint32_t i = 0; i < desc.n_options; ++i) {
      const graft_option& option = *desc.options[i];
      graft_value value = option.def;
      if (const auto found = given.find(option.key); found != given.end()) {
        value = convert(found->second);
        ++used;
      }
      keys_.push_back(option.key);
      values_.push_back(value);
    }
    if (used != given.size())
      throw std::logic_error("the test sets an option that the plugin does not declare");
    c_ = {sizeof c_, static_cast<uint32_t>(keys_.size()), keys_.data(), values_.data()};
  }
  CompleteConfig(const CompleteConfig&) = delete;
  const graft_config* c() const { return &c_; }

 private:
  graft_value convert(const OptionValue& given) {
    graft_value value{0, 1, {0}};
    if (const auto* b = std::get_if<bool>(&given)) {
      value.type = GRAFT_BOOL;
      value.u.i = *b ? 1 : 0;
    } else if (const auto* i = std::get_if<int64_t>(&given)) {
      value.type = GRAFT_INT;
      value.u.i = *i;
    } else if (const auto* f = std::get_if<double>(&given)) {
      value.type = GRAFT_FLOAT;
      value.u.f = *f;
    } else {
      strings_.push_back(std::get<std::string>(given));
      value.type = GRAFT_STRING;
      value.u.s = strings_.back().c_str();
    }
    return value;
  }
  std::vector<const char*> keys_;
  std::vector<graft_value> values_;
  std::deque<std::string> strings_;
  graft_config c_{};
};

inline DLDataType dl_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return {kDLFloat, 64, 1};
    case at::kBFloat16:
      return {kDLBfloat, 16, 1};
    case at::kLong:
      return {kDLInt, 64, 1};
    case at::kByte:
      return {kDLUInt, 8, 1};
    default:
      return {kDLFloat, 32, 1};
  }
}
inline at::ScalarType torch_type(DLDataType type) {
  if (type.code == kDLInt) return at::kLong;
  if (type.code == kDLBfloat) return at::kBFloat16;
  return type.bits == 64 ? at::kDouble : at::kFloat;
}

// DLTensors that borrow LibTorch's, for one call.
class Borrow {
 public:
  DLTensor* one(const at::Tensor& x) {
    if (!x.defined()) return nullptr;
    Entry& e = entries_.emplace_back();
    e.tensor = x;
    e.shape = x.sizes().vec();
    e.strides = x.strides().vec();
    e.dl = {x.data_ptr(),
            {kDLCPU, 0},
            static_cast<int32_t>(x.dim()),
            dl_type(x.scalar_type()),
            e.shape.data(),
            e.strides.data(),
            0};
    return &e.dl;
  }
  // NULL for an empty list; undefined tensors become NULL entries.
  DLTensor* const* many(const std::vector<at::Tensor>& tensors) {
    if (tensors.empty()) return nullptr;
    std::vector<DLTensor*>& list = lists_.emplace_back();
    for (const at::Tensor& x : tensors) list.push_back(one(x));
    return list.data();
  }

 private:
  struct Entry {
    at::Tensor tensor;
    std::vector<int64_t> shape, strides;
    DLTensor dl;
  };
  std::deque<Entry> entries_;
  std::deque<std::vector<DLTensor*>> lists_;
};

// Exactly the planned bytes, all NaN, with a guard behind them.
class Workspace {
 public:
  explicit Workspace(uint64_t bytes) : bytes_(bytes), memory_(bytes + kAlign + kGuard, 0xff) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    begin_ = memory_.data() + (kAlign - address % kAlign) % kAlign;
  }
  Workspace(const Workspace&) = delete;
  void* data() const { return bytes_ == 0 ? nullptr : begin_; }
  uint64_t bytes() const { return bytes_; }
  bool intact() const {
    return std::all_of(begin_ + bytes_, begin_ + bytes_ + kGuard,
                       [](uint8_t byte) { return byte == 0xff; });
  }

 private:
  static constexpr uint64_t kAlign = 256, kGuard = 64;
  uint64_t bytes_;
  std::vector<uint8_t> memory_;
  uint8_t* begin_;
};

struct ForwardArgs {
  at::Tensor x;
  std::vector<at::Tensor> params, state;
  at::Tensor positions, pad_mask;
  bool training = false;
  bool want_state = true, want_taps = true;
};
struct ForwardResults {
  at::Tensor y;
  std::vector<at::Tensor> state, taps, saved;
};
struct BackwardArgs {
  at::Tensor dy;
  std::vector<at::Tensor> dstate, dtaps;    // empty = none
  std::vector<bool> frozen;                 // per parameter; empty = none is
  std::vector<at::Tensor> accumulate_onto;  // dparams before the call; empty = write
  bool want_dx = true;
};
struct BackwardResults {
  at::Tensor dx;
  std::vector<at::Tensor> dparams, dstate;
};

class AbiMixer {
 public:
  AbiMixer(const std::string& file, const graft_layer_info& layer, const OptionMap& options = {}) {
    const graft_mixer_factory& factory = mixer_factory(file);
    const CompleteConfig config(*factory.descs[0], options);
    graft_error error = fresh_error();
    require_ok(factory.create(factory.descs[0]->id, &layer, config.c(), &mixer_, &error), error);
    const graft_param_spec* const* specs = nullptr;
    uint32_t n = 0;
    require_ok(mixer_->v->param_specs(mixer_, &specs, &n, &error), error);
    specs_.assign(specs, specs + n);
  }
  AbiMixer(const AbiMixer&) = delete;
  ~AbiMixer() {
    if (mixer_ != nullptr) mixer_->v->destroy(mixer_);
  }

  const std::vector<const graft_param_spec*>& specs() const { return specs_; }
  const graft_param_spec* spec(const std::string& name) const {
    for (const graft_param_spec* s : specs_) {
      if (name == s->name) return s;
    }
    return nullptr;
  }
  graft_mixer* handle() const { return mixer_; }

  graft_plan_out plan(int64_t batch, int64_t tokens, at::ScalarType type, bool training) {
    graft_plan_in in{};
    in.struct_size = sizeof in;
    in.device_type = kDLCPU;
    in.dtype = dl_type(type);
    in.flags = training ? GRAFT_X_TRAINING : 0;
    in.batch = batch;
    in.tokens = tokens;
    graft_plan_out out{};
    out.struct_size = sizeof out;
    graft_error error = fresh_error();
    require_ok(mixer_->v->plan(mixer_, &in, &out, &error), error);
    return out;
  }

  // Outputs are filled with NaN before the call.
  ForwardResults forward(const ForwardArgs& args, bool step = false) {
    const graft_plan_out sizes =
        plan(args.x.size(0), args.x.size(1), args.x.scalar_type(), args.training);
    ForwardResults out;
    out.y = at::full_like(args.x, NAN, at::MemoryFormat::Contiguous);
    if (args.want_state) out.state = allocate(sizes.state, sizes.n_state);
    if (args.want_taps) out.taps = allocate(sizes.taps, sizes.n_taps);
    if (args.training) out.saved = allocate(sizes.saved, sizes.n_saved);
    Borrow borrow;
    const graft_mixer_forward call = make_call(args, out, sizes, borrow);
    const Workspace workspace(step ? sizes.workspace_step : sizes.workspace_forward);
    const graft_exec exec = make_exec(args.training ? GRAFT_X_TRAINING : 0, workspace);
    graft_error error = fresh_error();
    const auto run = step ? mixer_->v->step : mixer_->v->forward;
    require_ok(run(mixer_, &exec, &call, &error), error);
    EXPECT_TRUE(workspace.intact()) << "written behind the workspace";
    return out;
  }

  BackwardResults backward(const ForwardArgs& args, const ForwardResults& kept,
                           const BackwardArgs& from) {
    const graft_plan_out sizes = plan(args.x.size(0), args.x.size(1), args.x.scalar_type(), true);
    BackwardResults out;
    if (from.want_dx) out.dx = at::full_like(args.x, NAN, at::MemoryFormat::Contiguous);
    for (std::size_t i = 0; i < args.params.size(); ++i) {
      const bool frozen = !from.frozen.empty() && from.frozen[i];
      out.dparams.push_back(frozen                         ? at::Tensor()
                            : from.accumulate_onto.empty() ? at::full_like(args.params[i], NAN)
                                                           : from.accumulate_onto[i].clone());
    }
    for (const at::Tensor& s : args.state) {
      out.dstate.push_back(at::isFloatingType(s.scalar_type()) ? at::full_like(s, NAN)
                                                               : at::Tensor());
    }
    Borrow borrow;
    ForwardResults outputs;
    outputs.saved = kept.saved;
    const graft_mixer_forward fwd = make_call(args, outputs, sizes, borrow);
    graft_mixer_backward call{};
    call.struct_size = sizeof call;
    call.fwd = &fwd;
    call.dy = borrow.one(from.dy);
    call.dstate_out = borrow.many(from.dstate);
    call.dtaps = borrow.many(from.dtaps);
    call.dx = borrow.one(out.dx);
    call.dparams = borrow.many(out.dparams);
    call.dstate_in = borrow.many(out.dstate);
    const Workspace workspace(sizes.workspace_backward);
    const graft_exec exec = make_exec(
        GRAFT_X_TRAINING | (from.accumulate_onto.empty() ? 0 : GRAFT_X_ACCUMULATE), workspace);
    graft_error error = fresh_error();
    require_ok(mixer_->v->backward(mixer_, &exec, &call, &error), error);
    EXPECT_TRUE(workspace.intact()) << "written behind the workspace";
    return out;
  }

  // graft.mixer-domain/1; returns which parameters were written.
  std::vector<uint8_t> set_natural(const std::string& what, const std::vector<double>& values,
                                   const std::vector<at::Tensor>& params) {
    const auto* const domain = static_cast<const graft_mixer_domain*>(
        mixer_->v->get_extension(mixer_, GRAFT_EXT_MIXER_DOMAIN));
    Borrow borrow;
    std::vector<uint8_t> written(params.size());
    graft_error error = fresh_error();
    require_ok(domain->set(mixer_, what.c_str(), static_cast<uint32_t>(values.size()),
                           values.data(), borrow.many(params), written.data(), &error),
               error);
    return written;
  }

 private:
  static std::vector<at::Tensor> allocate(const graft_tensor_spec* const* specs, uint32_t n) {
    std::vector<at::Tensor> out;
    for (uint32_t i = 0; i < n; ++i) {
      const at::ScalarType type = torch_type(specs[i]->dtype);
      const at::IntArrayRef shape(specs[i]->shape, static_cast<std::size_t>(specs[i]->ndim));
      out.push_back(at::isFloatingType(type) ? at::full(shape, NAN, type)
                                             : at::full(shape, -1, type));
    }
    return out;
  }

  static graft_exec make_exec(uint64_t flags, const Workspace& workspace) {
    graft_exec exec{};
    exec.struct_size = sizeof exec;
    exec.device_type = kDLCPU;
    exec.flags = flags;
    exec.workspace = workspace.data();
    exec.workspace_bytes = workspace.bytes();
    return exec;
  }

  static graft_mixer_forward make_call(const ForwardArgs& args, const ForwardResults& out,
                                       const graft_plan_out& sizes, Borrow& borrow) {
    graft_mixer_forward call{};
    call.struct_size = sizeof call;
    call.n_params = static_cast<uint32_t>(args.params.size());
    call.n_state = sizes.n_state;
    call.n_saved = sizes.n_saved;
    call.n_taps = sizes.n_taps;
    call.x = borrow.one(args.x);
    call.y = borrow.one(out.y);
    call.positions = borrow.one(args.positions);
    call.pad_mask = borrow.one(args.pad_mask);
    call.params = borrow.many(args.params);
    call.state_in = borrow.many(args.state);
    call.state_out = borrow.many(out.state);
    call.saved = borrow.many(out.saved);
    call.taps = borrow.many(out.taps);
    return call;
  }

  graft_mixer* mixer_ = nullptr;
  std::vector<const graft_param_spec*> specs_;
};

}  // namespace graft::mixers
