// The host's side of an initializer's run, from tensors a test makes up.
#pragma once

#include <graft/plugin.hpp>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "plugins/testing/plugin_under_test.h"

namespace graft::testing {

// A float32 tensor with a name, as the ABI passes it. What c() and tensor() give points into it.
struct FakeTensor {
  std::string name, role, domain, axes;
  std::vector<int64_t> shape;
  std::vector<float> values;
  int32_t heads = 0, head_dim = 0;

  static FakeTensor filled(std::string name, std::string role, std::vector<int64_t> shape,
                           const std::function<float(std::size_t)>& value, int32_t heads = 0,
                           int32_t head_dim = 0, std::string domain = {}) {
    const auto n = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    FakeTensor t;
    t.name = std::move(name);
    t.role = std::move(role);
    t.shape = std::move(shape);
    t.heads = heads;
    t.head_dim = head_dim;
    t.domain = std::move(domain);
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) t.values.push_back(value(i));
    return t;
  }

  DLTensor* tensor() {
    strides_.assign(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 1;) strides_[i - 1] = strides_[i] * shape[i];
    dl_ = {values.data(),
           {kDLCPU, 0},
           static_cast<int32_t>(shape.size()),
           sdk::float32,
           shape.data(),
           strides_.data(),
           0};
    return &dl_;
  }
  const graft_named_tensor* c() {
    named_ = {sizeof named_,  0,     name.c_str(), role.c_str(), axes.c_str(),
              domain.c_str(), heads, head_dim,     tensor()};
    return &named_;
  }

 private:
  std::vector<int64_t> strides_;
  DLTensor dl_{};
  graft_named_tensor named_{};
};

using FakeTensors = std::deque<FakeTensor>;

inline FakeTensor& find(FakeTensors& tensors, const std::string& role) {
  return *std::ranges::find(tensors, role, &FakeTensor::role);
}

class FakeInitHost {
 public:
  FakeTensors teacher, student;
  std::vector<FakeTensors> batches;  // signals of each batch, by name
  graft_layer_info layer = default_layer();
  graft_mixer* mixer = nullptr;
  // A tap of the mixer on the batch of that number, with `student` as it stands.
  std::function<FakeTensor(std::size_t batch, const std::string& tap)> run_mixer;
  std::vector<uint8_t> written;
  int rewinds = 0, probes = 0;
  std::size_t batches_read = 0;

  static graft_layer_info default_layer() {
    graft_layer_info info{};
    info.struct_size = sizeof info;
    info.n_layers = 30;
    info.norm_eps = 1e-5;
    info.rope_scaling = "";
    info.family = "test";
    info.param_dtype = sdk::float32;
    return info;
  }

  Outcome run(graft_initializer& initializer) {
    written.assign(student.size(), 0);
    rewinds = probes = 0;
    batches_read = 0;
    next_ = 0;
    std::vector<const graft_named_tensor*> given, wanted;
    for (FakeTensor& t : teacher) given.push_back(t.c());
    for (FakeTensor& t : student) wanted.push_back(t.c());
    graft_init_args args{};
    args.struct_size = sizeof args;
    args.n_teacher = static_cast<uint32_t>(given.size());
    args.n_student = static_cast<uint32_t>(wanted.size());
    args.n_batches = static_cast<uint32_t>(batches.size());
    args.layer = &layer;
    args.teacher = given.data();
    args.student = wanted.data();
    args.student_written = written.data();
    args.mixer = mixer;
    args.ctx = this;
    args.next_batch = &next_batch;
    args.rewind = &rewind;
    args.probe = &probe;
    graft_exec exec{};
    exec.struct_size = sizeof exec;
    exec.device_type = kDLCPU;
    return outcome_of(
        [&](graft_error* error) { return initializer.v->run(&initializer, &exec, &args, error); });
  }

  std::vector<std::string> written_names() const {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < student.size(); ++i) {
      if (written[i] != 0) names.push_back(student[i].name);
    }
    return names;
  }

 private:
  static graft_status next_batch(void* ctx, const graft_named_tensor* const** signals, uint32_t* n,
                                 graft_error*) {
    auto& self = *static_cast<FakeInitHost*>(ctx);
    if (self.next_ >= self.batches.size()) return GRAFT_NOT_FOUND;
    self.signals_.clear();
    for (FakeTensor& t : self.batches[self.next_]) self.signals_.push_back(t.c());
    *signals = self.signals_.data();
    *n = static_cast<uint32_t>(self.signals_.size());
    ++self.next_;
    ++self.batches_read;
    return GRAFT_OK;
  }
  static graft_status rewind(void* ctx, graft_error*) {
    auto& self = *static_cast<FakeInitHost*>(ctx);
    self.next_ = 0;
    ++self.rewinds;
    return GRAFT_OK;
  }
  static graft_status probe(void* ctx, uint32_t n, const char* const* taps, const DLTensor** out,
                            graft_error* error) {
    auto& self = *static_cast<FakeInitHost*>(ctx);
    return sdk::detail::guarded(error, [&] {
      self.taps_.clear();
      for (uint32_t i = 0; i < n; ++i) {
        self.taps_.push_back(self.run_mixer(self.next_ - 1, taps[i]));
        out[i] = self.taps_.back().tensor();
      }
      ++self.probes;
    });
  }

  std::size_t next_ = 0;
  std::vector<const graft_named_tensor*> signals_;
  FakeTensors taps_;
};

}  // namespace graft::testing
